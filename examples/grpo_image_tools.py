"""GRPO with a tool that returns an image: the model may look at a part of the picture in full size before it answers."""

from pathlib import Path
from typing import Any

from PIL import Image

from posttrain import GRPOConfig, GRPOTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220)}
TEMPLATE = str(Path(__file__).parent / "data" / "chatml_images.jinja")  # the model's own knows no tools
QUESTION = "Somewhere in this picture is a small square. Which colour is it: red, green or blue? You may zoom in."


def picture(colour: str, left: int, top: int) -> Image.Image:
    made = Image.new("RGB", (512, 512), "white")
    made.paste(COLOURS[colour], (left, top, left + 6, top + 6))
    return made


class Magnifier:
    """`reset` gets the columns of the row; the methods are tools, and the annotation says that one of them returns an image."""

    def reset(self, images: list[Image.Image], **row: Any) -> None:
        (self.picture,) = images

    def zoom(self, left: int, top: int) -> Image.Image:
        """
        Look at a square of 64 x 64 pixels of the picture.

        Args:
            left: Its left edge, from 0 to 448.
            top: Its upper edge, from 0 to 448.
        """
        return self.picture.crop((left, top, left + 64, top + 64))  # beyond the edges it is black


def is_right(completions: list, colour: list, **columns: Any) -> list[float]:
    """What tools returned stands in the completions, too, as parts {"type": "image", "image": PIL image}."""
    return [float(name in said[-1]["content"].lower()) for said, name in zip(completions, colour)]


places = [(colour, 83 * i % 500, 191 * i % 500) for i in range(1, 5) for colour in COLOURS]
rows = [{"images": [picture(*p)], "prompt": [{"role": "user", "content": QUESTION}], "colour": p[0]} for p in places]
trainer = GRPOTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    reward_funcs=is_right,
    args=GRPOConfig(
        output_dir="runs/grpo-image-tools",
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=128,  # of all turns, results and their images together
        max_tool_calling_iterations=2,
        chat_template_path=TEMPLATE,
    ),
    train_dataset=rows,
    environment_factory=Magnifier,
)
trainer.train()
