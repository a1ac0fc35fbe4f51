"""A reward model: one number for an answer. The saved folder loads as an ordinary sequence classifier."""

from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain import RewardConfig, RewardTrainer

pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")

trainer = RewardTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=RewardConfig(
        output_dir="runs/reward",
        center_rewards_coefficient=0.01,
        num_train_epochs=2,
        per_device_train_batch_size=6,
        learning_rate=1e-4,
        logging_steps=1,
    ),
    train_dataset=pairs,
)
trainer.train()
trainer.save_model()

model = AutoModelForSequenceClassification.from_pretrained("runs/reward")
tokenizer = AutoTokenizer.from_pretrained("runs/reward")
question = {"role": "user", "content": "How many minutes are in 3 hours?"}
for text in ("3 hours are 180 minutes.", "About 300 minutes, I think."):
    chat = [question, {"role": "assistant", "content": text}]
    inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        print(f"{model(**inputs).logits.item():+.3f}  {text}")
