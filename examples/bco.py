"""BCO: answers that are wanted or not; unwanted ones are weighed by how likely their prompt is among the wanted ones."""

from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModel, AutoTokenizer

from posttrain import BCOConfig, BCOTrainer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
rated = load_dataset("json", data_files=str(Path(__file__).parent / "data/rated.jsonl"), split="train")
embedder = AutoModel.from_pretrained(MODEL)


def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean of the last hidden states of a prompt."""
    hidden = embedder.to(input_ids.device)(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


trainer = BCOTrainer(
    MODEL,
    args=BCOConfig(
        output_dir="runs/bco",
        num_train_epochs=2,
        per_device_train_batch_size=6,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=rated,
    embedding_func=embed,
    embedding_tokenizer=AutoTokenizer.from_pretrained(MODEL),
)
trainer.train()
print("delta, the mean reward so far:", trainer.rewards.mean("pooled"))
trainer.save_model()
