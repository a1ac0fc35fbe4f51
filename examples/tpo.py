"""TPO: a pair, and a gold answer that is imitated. Here the gold answer is the chosen one, written out."""

from pathlib import Path

from datasets import load_dataset

from posttrain import TPOConfig, TPOTrainer

pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")


def with_gold(row: dict) -> dict:
    text = f"{row['chosen'][0]['content']} That is the answer."
    return {"reference": [{"role": "assistant", "content": text}]}


trainer = TPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=TPOConfig(
        output_dir="runs/tpo",
        loss_type="tpo-l",
        beta=2.0,
        num_train_epochs=2,
        per_device_train_batch_size=6,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=pairs.map(with_gold),
)
trainer.train()
print("nll of a gold token:", trainer.state.log_history[-2]["nll_loss"])
trainer.save_model()
