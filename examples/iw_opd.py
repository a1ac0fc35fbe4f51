"""IW-OPD: the student writes, and each of its tokens is weighed by how much likelier a larger model finds it."""

from datasets import Dataset

from posttrain import IWOPDConfig, IWOPDTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)

trainer = IWOPDTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    teacher_model="HuggingFaceTB/SmolLM2-360M-Instruct",
    args=IWOPDConfig(
        output_dir="runs/iw_opd",
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
