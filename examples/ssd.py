"""SSD: a model learns to answer by itself as it does with a cautious sampler."""

from datasets import Dataset

from posttrain import SSDConfig, SSDTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)

trainer = SSDTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=SSDConfig(
        output_dir="runs/ssd",
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        temperature=0.8,
        top_p=0.9,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
