"""1,797 handwritten digits of the UCI set, as pictures with their names in words. They lie with the tests, and their licence."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.real_runs.small_llava import Row, row

FILE = Path(__file__).parents[2] / "tests" / "slow" / "digits" / "digits.csv.gz"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDE, HELD_OUT = 28, 297
QUESTION = "Which digit is it? Answer with one word."


def rows(seed: int) -> tuple[list[Row], list[Row]]:
    """(trained, held out)."""
    with gzip.open(FILE, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    random.Random(seed).shuffle(order := list(range(len(table))))
    pictures = [
        Image.fromarray(table[index, :64].reshape(8, 8) * 15).resize((SIDE, SIDE)).convert("RGB") for index in order
    ]
    made = [row([picture], QUESTION, NAMES[table[index, 64]]) for picture, index in zip(pictures, order)]
    return made[HELD_OUT:], made[:HELD_OUT]


def moved(picture: Image.Image) -> Image.Image:
    """Turned, shifted and scaled a little, as hands do: 1,500 pictures are few for a tower that has seen no other."""
    turned = picture.rotate(random.uniform(-12, 12), Image.Resampling.BILINEAR)
    scale, x, y = random.uniform(0.9, 1.1), random.uniform(-2, 2), random.uniform(-2, 2)
    edge = SIDE / 2 * (1 - scale)
    return turned.transform(
        turned.size, Image.Transform.AFFINE, (scale, 0, edge + x, 0, scale, edge + y), Image.Resampling.BILINEAR
    )
