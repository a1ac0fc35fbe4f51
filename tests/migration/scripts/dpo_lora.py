from datasets import load_dataset
from peft import LoraConfig

from trl import DPOConfig, DPOTrainer

dataset = load_dataset("json", data_files="dpo.jsonl", split="train")
training_args = DPOConfig(
    output_dir="out",
    beta=0.1,
    loss_type="sigmoid",
    max_steps=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=5e-5,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
    save_strategy="no",
)
trainer = DPOTrainer(
    "model", args=training_args, train_dataset=dataset, peft_config=LoraConfig(r=4, target_modules="all-linear")
)
trainer.train()
assert "rewards/margins" in trainer.state.log_history[0]
open("ended", "w").write("yes")
