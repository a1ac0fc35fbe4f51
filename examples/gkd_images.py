"""GKD on images: the student learns from what a teacher says of the same pictures, on its own answers for half of the prompts."""

from PIL import Image

from posttrain import GKDConfig, GKDTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}

rows = [
    {
        "images": [Image.new("RGB", (64, 64), rgb)],
        "prompt": [{"role": "user", "content": "Which colour is it?"}],
        "completion": [{"role": "assistant", "content": f"It is {name}."}],
    }
    for name, rgb in COLOURS.items()
]

trainer = GKDTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    teacher_model="llava-hf/llava-interleave-qwen-0.5b-hf",  # take a larger one of the family
    args=GKDConfig(
        output_dir="runs/gkd-images",
        max_steps=4,
        per_device_train_batch_size=4,
        lmbda=0.5,
        max_completion_length=8,
        logging_steps=1,
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
