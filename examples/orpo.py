"""ORPO: imitation and preference in one pass, from a base model, without a reference."""

from pathlib import Path

from datasets import load_dataset

from posttrain import ORPOConfig, ORPOTrainer

pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")
parts = pairs.train_test_split(test_size=6, seed=0)

trainer = ORPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=ORPOConfig(
        output_dir="runs/orpo",
        beta=0.1,
        prompt_nll=False,  # imitate answers only
        num_train_epochs=2,
        per_device_train_batch_size=6,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
)
trainer.train()
found = trainer.evaluate()
print(f"nll of a chosen token {found['eval_nll_loss']:.3f}, log-odds of the pair {found['eval_log_odds_chosen']:+.3f}")
trainer.save_model()
