"""On-policy distillation: the student writes, and a larger model says at each token what it would have said."""

from datasets import Dataset

from posttrain import DistillationConfig, DistillationTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)

trainer = DistillationTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    teacher_model="HuggingFaceTB/SmolLM2-360M-Instruct",
    args=DistillationConfig(
        output_dir="runs/distillation",
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
