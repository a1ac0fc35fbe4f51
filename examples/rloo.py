"""RLOO: each answer is compared with the mean of the others to the same prompt; a reference keeps the model near where it was."""

from datasets import Dataset

from posttrain import RLOOConfig, RLOOTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)


def brevity(completion_ids, **kwargs):
    """Fewer tokens are better."""
    return [-len(ids) / 32 for ids in completion_ids]


trainer = RLOOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=brevity,
    args=RLOOConfig(
        output_dir="runs/rloo",
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        beta=0.05,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
