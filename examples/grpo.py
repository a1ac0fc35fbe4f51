"""GRPO: the model answers sums, a function says which answers are right, and right answers become more likely."""

import re

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer

questions = [(a, b) for a in range(2, 10) for b in range(2, 10)]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}], "answer": a + b} for a, b in questions]
)


def is_right(completions, answer, **kwargs):
    """1 for a completion whose last number is the answer: one value for each completion."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and int(found[-1]) == wanted) for found, wanted in zip(numbers, answer)]


trainer = GRPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=is_right,
    args=GRPOConfig(
        output_dir="runs/grpo",
        max_steps=4,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=24,
        learning_rate=2e-6,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=2,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
