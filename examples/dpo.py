"""Direct preference optimisation. The reference is a frozen copy of the model as it was before the first step."""

from pathlib import Path

from datasets import load_dataset

from posttrain import DPOConfig, DPOTrainer

pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")
parts = pairs.train_test_split(test_size=6, seed=0)

trainer = DPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=DPOConfig(
        output_dir="runs/dpo",
        loss_type=["sigmoid", "sft"],  # a mix: DPO, and a pull towards the chosen answers
        loss_weights=[1.0, 0.1],
        beta=0.1,
        num_train_epochs=2,
        per_device_train_batch_size=6,
        learning_rate=5e-6,
        eval_strategy="epoch",
        logging_steps=1,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
)
trainer.train()
trainer.save_model()

measured = trainer.evaluate()
print(f"held-out pairs ranked rightly: {measured['eval_rewards/accuracies']:.0%}")
