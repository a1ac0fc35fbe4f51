"""MiniLLM: the student writes, and a larger model and a reward say what it was worth."""

from datasets import Dataset

from posttrain import MiniLLMConfig, MiniLLMTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)


def brief(completions, **columns):
    """Shorter is better, up to 60 characters."""
    return [-max(len(completion[-1]["content"]) - 60, 0) / 60 for completion in completions]


trainer = MiniLLMTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    teacher_model="HuggingFaceTB/SmolLM2-360M-Instruct",
    reward_funcs=brief,  # leave it out, and the teacher is all that is learnt from
    args=MiniLLMConfig(
        output_dir="runs/minillm",
        max_steps=4,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=32,
        gamma=0.9,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
