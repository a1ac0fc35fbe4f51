"""Scenes of one to four shapes, questions about them, and combinations of colour and shape that are never trained."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from benchmarks.real_runs.small_llava import Row, row

COLOURS = {
    "red": "#d62020",
    "green": "#20a030",
    "blue": "#2040d0",
    "yellow": "#e8d020",
    "purple": "#9020b0",
    "black": "#101010",
}
SHAPES = ("circle", "square", "triangle", "star")
NUMBERS = ("one", "two", "three", "four")
CELLS, CELL = 3, 16  # a grid of 3 x 3 cells of 16 x 16 pixels
SIDE = CELLS * CELL
GROUND = 0.92  # brightness of the grounds, on average
FINE = 4  # drawn larger by this, and reduced: smooth edges

Combination = tuple[str, str]  # colour, shape
HELD_OUT: tuple[Combination, ...] = (("red", "star"), ("blue", "circle"), ("green", "square"), ("yellow", "triangle"))
ALL = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
TRAINED = tuple(combination for combination in ALL if combination not in HELD_OUT)


@dataclass(frozen=True)
class Pool:
    """What scenes are made of: each shows one of `must`, about which questions are, and others of `may`."""

    must: tuple[Combination, ...]
    may: tuple[Combination, ...]


TRAINING, HELD_OUT_SCENES = Pool(TRAINED, TRAINED), Pool(HELD_OUT, ALL)


# ---- drawing ---------------------------------------------------------------------------------------------------------------


def corners(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Of a polygon around (x, y), the first at the top."""
    count, inner = {"square": (4, 1), "triangle": (3, 1), "star": (10, 0.4)}[shape]
    turn = math.pi / 4 if shape == "square" else 0
    lengths = [radius * (inner if index % 2 else 1) for index in range(count)]
    angles = [turn + 2 * math.pi * index / count for index in range(count)]
    return [(x + length * math.sin(a), y - length * math.cos(a)) for length, a in zip(lengths, angles)]


@dataclass(frozen=True)
class Scene:
    pieces: tuple[tuple[int, Combination], ...]  # cell, what lies there

    def drawn(self, draw: random.Random) -> Image.Image:
        """Every piece lies somewhere in its cell, a little larger or smaller, on a ground that is never the same grey."""
        picture = Image.new("RGB", (SIDE * FINE, SIDE * FINE), (draw.randint(215, 255),) * 3)
        pen = ImageDraw.Draw(picture)
        for cell, (colour, shape) in self.pieces:
            row_of_cell, column = divmod(cell, CELLS)
            x, y = (FINE * (CELL * (at + 0.5) + draw.uniform(-1, 1)) for at in (column, row_of_cell))
            radius = FINE * draw.uniform(5.5, 7)
            if shape == "circle":
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
            else:
                pen.polygon(corners(shape, x, y, radius), fill=COLOURS[colour])
        return picture.reduce(FINE)

    def has_left_of(self, first: Combination, second: Combination) -> bool:
        columns = [[cell % CELLS for cell, what in self.pieces if what == wanted] for wanted in (first, second)]
        return any(a < b for a in columns[0] for b in columns[1])


def scene(draw: random.Random, pieces: Sequence[Combination]) -> Scene:
    return Scene(tuple(zip(draw.sample(range(CELLS * CELLS), len(pieces)), pieces)))


# ---- questions -------------------------------------------------------------------------------------------------------------


def counted(draw: random.Random, pool: Pool) -> tuple[int, Scene]:
    number = draw.choices((1, 2, 3, 4))[0]
    return number, scene(draw, [draw.choice(pool.must), *draw.choices(pool.may, k=number - 1)])


def count(draw: random.Random, pool: Pool) -> Row:
    number, made = counted(draw, pool)
    return row([made.drawn(draw)], "how many shapes are there?", NUMBERS[number - 1], kind="count", number=number)


def colour_of(draw: random.Random, pool: Pool) -> Row:
    asked = draw.choice(pool.must)
    others = [what for what in pool.may if what[1] != asked[1]]
    made = scene(draw, [asked, *draw.choices(others, k=draw.randint(0, 3))])
    return row([made.drawn(draw)], f"which colour is the {asked[1]}?", asked[0], kind="colour", number=0)


def relation(draw: random.Random, pool: Pool) -> Row:
    """Half are true. Of the others, half show both in another order, and half only one of them."""
    asked = draw.choice(pool.must)
    other = draw.choice([what for what in pool.may if what != asked])
    first, second = draw.sample((asked, other), 2)
    is_true, both = draw.random() < 0.5, draw.random() < 0.5
    while True:
        shown = [asked, *([other] if is_true or both else []), *draw.choices(pool.may, k=draw.randint(0, 2))]
        made = scene(draw, shown[:4])
        if made.has_left_of(first, second) == is_true:
            break
    question = f"is there a {' '.join(first)} left of a {' '.join(second)}?"
    return row([made.drawn(draw)], question, "yes" if is_true else "no", kind="relation", number=0)


def comparison(draw: random.Random, pool: Pool) -> Row:
    (left, first), (right, second) = counted(draw, pool), counted(draw, pool)
    answer = "neither" if left == right else "first" if left > right else "second"
    return row(
        [first.drawn(draw), second.drawn(draw)], "which image has more shapes?", answer, kind="comparison", number=0
    )


def description(draw: random.Random, pool: Pool) -> Row:
    """Of everything, in the order of reading: says more about a picture than one word does, and teaches all the words first."""
    _, made = counted(draw, pool)
    said = " ".join(" ".join(what) for _, what in sorted(made.pieces))
    return row([made.drawn(draw)], "what is there?", said, kind="description", number=0)


Kind = Callable[[random.Random, Pool], Row]
QUESTIONS: tuple[Kind, ...] = (count, colour_of, relation, comparison)
LESSONS: tuple[Kind, ...] = (*QUESTIONS, description)


def rows(number: int, pool: Pool, seed: int, kinds: Sequence[Kind] = QUESTIONS) -> list[Row]:
    """As many of each kind."""
    draw = random.Random(seed)
    return [kinds[index % len(kinds)](draw, pool) for index in range(number)]


def texts() -> list[str]:
    """All words that questions and answers may have, several times."""
    asked = ["how many shapes are there?", "which image has more shapes?", "what is there?"] + [
        f"which colour is the {a}?" for a in SHAPES
    ]
    asked += [f"is there a {colour} {shape} left of a {colour} {shape}?" for colour, shape in ALL]
    return 10 * [*asked, *NUMBERS, *COLOURS, "yes", "no", "first", "second", "neither", "user\n", "assistant\n"]
