"""AsyncGRPO: a script of TRL's with its import changed. Completions are written while earlier ones are trained on.

No server is needed. Where one has been started at vllm_server_base_url (`posttrain vllm-serve --model ... --port 8000`), it writes.
"""

from datasets import Dataset

from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer

prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"What is {a} plus 3?"}], "solution": str(a + 3)} for a in range(16)]
)


def is_right(completions, solution, **kwargs):
    return [float(answer in completion[0]["content"]) for completion, answer in zip(completions, solution)]


trainer = AsyncGRPOTrainer(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=is_right,
    args=AsyncGRPOConfig(
        output_dir="runs/async-grpo",
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_staleness=4,
        weight_sync_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
