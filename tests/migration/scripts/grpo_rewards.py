import re

from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward


def format_reward_func(completions, **kwargs):
    """1 for a completion with a digit in it."""
    return [1.0 if re.search(r"\d", completion) else 0.0 for completion in completions]


def correctness_reward_func(prompts, completions, answer, **kwargs):
    return [
        2.0 if wanted in completion else 0.1 * len(set(completion)) for completion, wanted in zip(completions, answer)
    ]


dataset = load_dataset("json", data_files="grpo.jsonl", split="train")
training_args = GRPOConfig(
    output_dir="out",
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    max_steps=2,
    logging_steps=1,
    report_to="none",
    use_cpu=True,
    save_strategy="no",
    reward_weights=[1.0, 1.0],
)
trainer = GRPOTrainer(
    model="model", reward_funcs=[format_reward_func, correctness_reward_func], args=training_args, train_dataset=dataset
)
trainer.train()
assert callable(think_format_reward)
assert "rewards/correctness_reward_func/mean" in trainer.state.log_history[0]
open("ended", "w").write("yes")
