"""DPO on images: of two answers about a picture the right one is preferred. CPO, ORPO and TPO read the same rows.

The picture and the question are the same on both sides, so both are computed once."""

from peft import LoraConfig
from PIL import Image

from posttrain import DPOConfig, DPOTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}


def pair(right, wrong):
    return {
        "images": [Image.new("RGB", (64, 64), COLOURS[right])],
        "prompt": [{"role": "user", "content": "Which colour is it?"}],  # the image stands before the question
        "chosen": [{"role": "assistant", "content": f"It is {right}."}],
        "rejected": [{"role": "assistant", "content": f"It is {wrong}."}],
    }


trainer = DPOTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    args=DPOConfig(
        output_dir="runs/dpo-images",
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        logging_steps=1,
    ),
    train_dataset=[pair(right, wrong) for right in COLOURS for wrong in COLOURS if right != wrong],
    peft_config=LoraConfig(
        r=16, target_modules="all-linear"
    ),  # of the language model alone; `lora_vision=True`: of both
)
trainer.train()
trainer.save_model()
