"""Online DPO on images: of four answers to a picture the best is trained against the worst.

RLOO, PPO, XPO and Nash-MD read the same rows."""

from PIL import Image

from posttrain import OnlineDPOConfig, OnlineDPOTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}
QUESTION = [{"role": "user", "content": "Which colour is it: red, green, blue or grey?"}]

prompts = [
    {"image": Image.new("RGB", (64, 64), rgb), "prompt": QUESTION, "colour": name} for name, rgb in COLOURS.items()
]


def is_right(completions, colour, **kwargs):
    return [float(wanted in completion[0]["content"].lower()) for completion, wanted in zip(completions, colour)]


trainer = OnlineDPOTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    reward_funcs=is_right,
    args=OnlineDPOConfig(
        output_dir="runs/online-dpo-images",
        max_steps=4,
        per_device_train_batch_size=2,
        num_generations=4,
        max_completion_length=8,
        learning_rate=2e-6,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
