from datasets import load_dataset

from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files={"train": "sft.jsonl"}, split="train", streaming=True)
training_args = SFTConfig(
    output_dir="out",
    max_steps=3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
    save_strategy="no",
)
trainer = SFTTrainer(model="model", args=training_args, train_dataset=dataset)
trainer.train()
open("ended", "w").write("yes")
