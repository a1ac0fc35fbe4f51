"""GRPO on images: the model says which colour a picture has, and a function that looks at the picture says whether it is right."""

from PIL import Image

from posttrain import GRPOConfig, GRPOTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}
QUESTION = [{"role": "user", "content": "Which colour is it: red, green, blue or grey? Answer with one word."}]

# No place for the image is named: it stands before the question.
prompts = [{"images": [Image.new("RGB", (64, 64), rgb)], "prompt": QUESTION} for rgb in COLOURS.values()]


def is_right(completions, images, **kwargs):
    """`images` has a list of PIL images for each completion, `completions` a list of messages."""
    names = {rgb: name for name, rgb in COLOURS.items()}
    shown = [names[picture.getpixel((0, 0))] for (picture,) in images]
    return [float(name in completion[0]["content"].lower()) for completion, name in zip(completions, shown)]


trainer = GRPOTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    reward_funcs=is_right,
    args=GRPOConfig(
        output_dir="runs/grpo-images",
        max_steps=4,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-6,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=2,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
