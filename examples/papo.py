"""PAPO: GRPO on pictures, whose completions must change when parts of the picture are hidden."""

from PIL import Image

from posttrain import PAPOConfig, PAPOTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}
QUESTION = [{"role": "user", "content": "Which colour is it: red, green, blue or grey? Answer with one word."}]
prompts = [
    {"images": [Image.new("RGB", (64, 64), rgb)], "prompt": QUESTION, "colour": name} for name, rgb in COLOURS.items()
]


def is_right(completions, colour, **kwargs):
    return [float(name in completion[0]["content"].lower()) for completion, name in zip(completions, colour)]


trainer = PAPOTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    reward_funcs=is_right,
    args=PAPOConfig(
        output_dir="runs/papo",
        max_steps=4,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        mask_type="patch",
        mask_ratio=0.6,
        learning_rate=2e-6,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
