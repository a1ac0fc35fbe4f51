"""Online DPO: of four answers that the model writes, the best is trained against the worst."""

from datasets import Dataset

from posttrain import OnlineDPOConfig, OnlineDPOTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)


def brevity(completion_ids, **kwargs):
    """Fewer tokens are better."""
    return [-len(ids) / 32 for ids in completion_ids]


trainer = OnlineDPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=brevity,
    args=OnlineDPOConfig(
        output_dir="runs/online-dpo",
        max_steps=4,
        per_device_train_batch_size=2,
        num_generations=4,
        max_completion_length=32,
        beta=0.1,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
