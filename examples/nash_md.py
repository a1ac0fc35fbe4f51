"""Nash-MD: the policy learns to be preferred to a mixture of itself and the model that it started from."""

from datasets import Dataset

from posttrain import NashMDConfig, NashMDTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)


def brevity(completion_ids, **kwargs):
    """Fewer tokens are better; a difference of 8 tokens is preferred with a probability of 0.88."""
    return [-len(ids) / 4 for ids in completion_ids]


trainer = NashMDTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=brevity,
    args=NashMDConfig(
        output_dir="runs/nash_md",
        max_steps=4,
        per_device_train_batch_size=4,
        max_new_tokens=32,
        mixture_coef=0.5,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
