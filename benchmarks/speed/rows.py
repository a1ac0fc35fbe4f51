"""The rows of the benchmark: what is trained, how long the sequences are, and what is asked of each library.

A row names a workload, never a library: `settings.py` has the options of each side. `tiny` makes any row small enough to be run
on a laptop in seconds, with the same code and, in float32, the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

FIRST_TOKEN = 300  # below it: control tokens of whatever tokenizer
TABLE_STEPS = 40
PAIR_METHODS = ("dpo", "reward")


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model without its weights; `heads` counts query and key-value heads."""

    hidden: int
    layers: int
    intermediate: int
    heads: tuple[int, int]
    vocabulary: int = 151_936
    tied: bool = True


@dataclass(frozen=True)
class Lengths:
    """exp(normal(ln `median`, `spread`)) clipped to `low` .. `high`; pairs have a prompt of `prompt` tokens besides.

    With `spread` 0 the lengths are uniform over the range.
    """

    median: float
    spread: float
    low: int
    high: int
    prompt: int = 0
    seed: int = 1

    def draw(self, count: int) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        if not self.spread:
            return rng.integers(self.low, self.high + 1, count)
        return np.clip(np.exp(rng.normal(np.log(self.median), self.spread, count)), self.low, self.high).astype(int)


@dataclass(frozen=True)
class Steps:
    """Logged steps whose losses are compared (they warm up too), and the steps that are timed after them."""

    losses: int = 10
    timed: int = 10

    @property
    def total(self) -> int:
        """One untimed step on either side of the timed ones: the first loses the log's wait, the last is not special."""
        return self.losses + self.timed + 2


@dataclass(frozen=True)
class Row:
    """One workload. `rows` are sequences (or pairs) of one optimizer step."""

    name: str
    method: str
    shape: Shape
    rows: int
    lengths: Lengths
    learning_rate: float
    tuned: tuple[dict[str, object], ...]  # candidates for TRL tuned: the fastest of those that run is taken
    device: str = "cuda"
    lora: bool = False
    steps: dict[str, Steps] = field(default_factory=dict)
    number: str = ""  # of the row in the project's list of benchmarks
    goal: tuple[float, float] = (0.0, 0.0)  # times TRL as it comes, times TRL tuned

    def steps_of(self, setting: str) -> Steps:
        return self.steps.get(setting, Steps())

    def sequence_lengths(self, steps: int) -> np.ndarray:
        """Of the texts, or of the answers (chosen, rejected, chosen, ...), of the first `steps` optimizer steps."""
        if steps > TABLE_STEPS:
            raise ValueError(f"The length tables hold {TABLE_STEPS} steps; {steps} were asked for.")
        each = 2 if self.is_pairs else 1
        return self.lengths.draw(each * self.rows * TABLE_STEPS)[: each * self.rows * steps]

    @property
    def is_pairs(self) -> bool:
        return self.method in PAIR_METHODS


QWEN_05B = Shape(896, 24, 4864, (14, 2))
QWEN_15B = Shape(1536, 28, 8960, (12, 2))
QWEN_7B = Shape(3584, 28, 18_944, (28, 4), vocabulary=152_064, tied=False)
SMALL_135M = Shape(576, 30, 1536, (9, 3), vocabulary=49_152)

TEXTS = Lengths(403, 0.8, 16, 2048)
ANSWERS = Lengths(200, 0.7, 16, 512, prompt=512, seed=2)
SHORT_DEFAULT = {"default": Steps(3, 4)}
CPU_STEPS = {name: Steps(2, 3) for name in ("default", "tuned", "ours", "matched")}


def micro(*sizes: int, **options: object) -> tuple[dict[str, object], ...]:
    """Candidates that differ in the rows of a micro-batch, without checkpointing."""
    return tuple({"per_device_train_batch_size": size, "gradient_checkpointing": False, **options} for size in sizes)


ROWS = (
    Row("sft-0.5b", "sft", QWEN_05B, 64, TEXTS, 2e-5, micro(16, 32), steps=SHORT_DEFAULT, number="1", goal=(6, 2.5)),
    Row("sft-1.5b", "sft", QWEN_15B, 32, TEXTS, 2e-5, micro(8, 16), steps=SHORT_DEFAULT, number="2", goal=(4, 2)),
    Row(
        "lora-7b",
        "sft",
        QWEN_7B,
        32,
        TEXTS,
        2e-4,
        micro(4, 8),
        lora=True,
        steps={"default": Steps(2, 2), "tuned": Steps(10, 6)},
        number="3",
        goal=(4, 1.6),
    ),
    Row("dpo-1.5b", "dpo", QWEN_15B, 32, ANSWERS, 2e-6, micro(8, 16), steps=SHORT_DEFAULT, number="4", goal=(5, 2.5)),
    Row(
        "reward-0.5b",
        "reward",
        QWEN_05B,
        64,
        ANSWERS,
        1e-5,
        micro(16, 32),
        steps=SHORT_DEFAULT,
        number="5",
        goal=(4, 2.5),
    ),
    Row(
        "sft-135m-cpu",
        "sft",
        SMALL_135M,
        8,
        Lengths(0, 0, 32, 256),
        2e-5,
        micro(4),
        device="cpu",
        steps=CPU_STEPS,
        goal=(4, 1.5),
    ),
    Row(
        "dpo-135m-cpu",
        "dpo",
        SMALL_135M,
        4,
        Lengths(0, 0, 16, 128, prompt=128, seed=2),
        1e-6,
        micro(2),
        device="cpu",
        steps=CPU_STEPS,
        goal=(5, 1.8),
    ),
)


GUARD = Row(
    "sft-guard-cpu",
    "sft",
    Shape(192, 4, 512, (4, 2), vocabulary=4096),
    8,
    Lengths(0, 0, 32, 256),
    2e-5,
    micro(4),
    device="cpu",
    steps={name: Steps(2, 4) for name in ("default", "tuned", "ours", "matched")},
    goal=(4, 1.5),
)
"""The small row of CI (tests/benchmarks): fails below 60 % of its goal."""


def row_named(name: str, layers: int | None = None) -> Row:
    """A row; with `layers`, on a model of fewer: for machines on which a step of the whole one takes minutes."""
    row = next(row for row in (*ROWS, GUARD) if row.name == name)
    return row if layers is None else replace(row, shape=replace(row.shape, layers=layers))


def tiny(row: Row) -> Row:
    """The row in miniature: same method, same number of rows a step, lengths and widths divided by 16 and more."""
    shape = Shape(64, 2, 128, (4, 2), vocabulary=1024, tied=row.shape.tied)
    scale = 16 if row.device == "cuda" else 4
    lengths = replace(
        row.lengths,
        median=row.lengths.median / scale,
        low=max(4, row.lengths.low // scale),
        high=row.lengths.high // scale,
        prompt=row.lengths.prompt // scale,
    )
    steps = {name: Steps(min(s.losses, 10), 3) for name, s in row.steps.items()}
    return replace(row, shape=shape, lengths=lengths, steps={**{n: Steps(10, 3) for n in STEP_SETTINGS}, **steps})


STEP_SETTINGS = ("default", "tuned", "ours", "matched")
