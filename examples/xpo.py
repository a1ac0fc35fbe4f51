"""XPO: an answer of the model against one of its reference, and a bonus for saying something else than the reference."""

from datasets import Dataset

from posttrain import XPOConfig, XPOTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)


def brevity(completion_ids, **kwargs):
    """Fewer tokens are better."""
    return [-len(ids) / 32 for ids in completion_ids]


trainer = XPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=brevity,
    args=XPOConfig(
        output_dir="runs/xpo",
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        beta=0.1,
        alpha=1e-5,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
