"""SimPO: pairs without a reference model. CPOConfig has CPO, SimPO and AlphaPO."""

from pathlib import Path

from datasets import load_dataset

from posttrain import CPOConfig, CPOTrainer

pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")
parts = pairs.train_test_split(test_size=6, seed=0)

trainer = CPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=CPOConfig(
        output_dir="runs/simpo",
        loss_type="simpo",
        cpo_alpha=0.0,  # 1, the default, would add the nll of the chosen answers: CPO-SimPO
        beta=2.0,
        simpo_gamma=1.0,
        num_train_epochs=2,
        per_device_train_batch_size=6,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
)
trainer.train()
print("held-out pairs that are ranked right:", trainer.evaluate()["eval_rewards/accuracies"])
trainer.save_model()
