from datasets import load_dataset

from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="sft.jsonl", split="train")
trainer = SFTTrainer(
    model="model",
    args=SFTConfig(output_dir="out", max_steps=2, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no"),
    train_dataset=dataset,
)
trainer.train()
trainer.save_model("out")
open("ended", "w").write("yes")
