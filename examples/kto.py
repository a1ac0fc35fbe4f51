"""KTO: answers that are wanted or not, without pairs. The same rows serve BCO: change the two names."""

from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from posttrain import KTOConfig, KTOTrainer

rated = load_dataset("json", data_files=str(Path(__file__).parent / "data/rated.jsonl"), split="train")
parts = rated.train_test_split(test_size=6, seed=0)

trainer = KTOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=KTOConfig(
        output_dir="runs/kto",
        num_train_epochs=2,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,  # the reference point is that of the six rows of a step
        learning_rate=5e-5,
        logging_steps=1,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
print("margin of wanted over unwanted answers:", trainer.evaluate()["eval_rewards/margins"])
trainer.save_model()
