"""SDPO: sums that came out right are shown to the model as the teacher of those that did not."""

from datasets import Dataset

from posttrain import SDPOConfig, SDPOTrainer

rows = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with a number."}], "answer": str(a + b)}
        for a, b in ((3, 4), (12, 9), (25, 17), (8, 8), (31, 6), (14, 27), (5, 19), (40, 2))
    ]
)


def is_right(completions, answer, **columns):
    return [float(right in said[0]["content"]) for said, right in zip(completions, answer)]


trainer = SDPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=is_right,
    args=SDPOConfig(
        output_dir="runs/sdpo",
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        distillation_weight=0.5,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
