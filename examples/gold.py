"""GOLD: a student learns from a teacher of another family, whose tokenizer is not its own."""

from datasets import Dataset

from posttrain import GOLDConfig, GOLDTrainer

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

trainer = GOLDTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    teacher_model="Qwen/Qwen2.5-0.5B-Instruct",
    args=GOLDConfig(
        output_dir="runs/gold",
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        use_uld_loss=True,
        uld_use_hybrid_loss=True,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
