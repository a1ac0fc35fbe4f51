"""GKD: a small model learns from a larger one, on its own answers for half of the prompts and on given ones for the others."""

from datasets import Dataset

from posttrain import GKDConfig, GKDTrainer

answers = {
    "the sea": "Salt water, and a lot of it.",
    "a clock": "It says what time it is.",
    "bread": "Flour, water, salt and patience.",
    "the moon": "A stone that lights the night.",
    "a bridge": "A road above a river.",
    "rain": "Water on its way down.",
    "a map": "A picture of where things are.",
    "winter": "Short days and cold air.",
}
rows = Dataset.from_list(
    [
        {
            "prompt": [{"role": "user", "content": f"Describe {topic} briefly."}],
            "completion": [{"role": "assistant", "content": said}],
        }
        for topic, said in answers.items()
    ]
)

trainer = GKDTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    teacher_model="HuggingFaceTB/SmolLM2-360M-Instruct",
    args=GKDConfig(
        output_dir="runs/gkd",
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        lmbda=0.5,
        beta=0.5,
        logging_steps=1,
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
