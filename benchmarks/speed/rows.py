"""The rows of the benchmark: what is trained, how long the sequences are, and what is asked of each library.

A row names a workload, never a library: `settings.py` has the options of each side. `tiny` makes any row small enough to be run
on a laptop in seconds, with the same code and, in float32, the same losses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

FIRST_TOKEN = 300  # below it: control tokens of whatever tokenizer
TABLE_STEPS = 40
PAIR_METHODS = ("dpo", "orpo", "reward")
REFERENCED_METHODS = ("dpo", "kto")


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model without its weights; `heads` counts query and key-value heads."""

    hidden: int
    layers: int
    intermediate: int
    heads: tuple[int, int]
    vocabulary: int = 151_936
    tied: bool = True
    experts: tuple[int, int] | None = (
        None  # in each layer, and of each token: a Qwen3-MoE; `intermediate` is that of one
    )


@dataclass(frozen=True)
class Lengths:
    """exp(normal(ln `median`, `spread`)) clipped to `low` .. `high`; answers have a prompt of `prompt` tokens besides.

    With `spread` 0 the lengths are uniform over the range. With `prompt_spread`, `prompt` is the longest, and they are drawn.
    """

    median: float
    spread: float
    low: int
    high: int
    prompt: int = 0
    seed: int = 1
    prompt_median: float = 0.0
    prompt_spread: float = 0.0

    def draw_prompts(self, count: int) -> np.ndarray:
        if not self.prompt_spread:
            return np.full(count, self.prompt)
        return replace(
            self, median=self.prompt_median, spread=self.prompt_spread, low=8, high=self.prompt, seed=self.seed + 100
        ).draw(count)

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
    margin: int = 1  # untimed steps before (the wait of a log is lost there) and after (the last one may be special)

    @property
    def first_timed(self) -> int:
        return self.losses + self.margin

    @property
    def total(self) -> int:
        return self.losses + self.timed + 2 * self.margin


@dataclass(frozen=True)
class Row:
    """One workload. `rows` are sequences (or pairs, or completions) of one optimizer step."""

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
    group: int = 0  # completions of a prompt, where the model is trained on completions
    writes: bool = False  # whether the model writes them itself; otherwise both libraries are given the same ones
    options: dict[str, object] = field(default_factory=dict)  # of the config, the same for both libraries
    seconds: dict[str, float] = field(default_factory=dict)  # setting -> when one candidate of it is given up, on CUDA

    def steps_of(self, setting: str) -> Steps:
        return self.steps.get(setting, Steps())

    def sequence_lengths(self, steps: int) -> np.ndarray:
        """Of the texts, or of the answers (chosen, rejected, chosen, ...), of the first `steps` optimizer steps."""
        if steps > TABLE_STEPS:
            raise ValueError(f"The length tables hold {TABLE_STEPS} steps; {steps} were asked for.")
        each = 2 if self.is_pairs else 1
        return self.lengths.draw(each * self.rows * TABLE_STEPS)[: each * self.rows * steps]

    def prompt_lengths(self, steps: int) -> np.ndarray:
        """Of the different prompts of the first `steps` optimizer steps."""
        return self.lengths.draw_prompts(self.prompts * TABLE_STEPS)[: self.prompts * steps]

    @property
    def is_pairs(self) -> bool:
        return self.method in PAIR_METHODS

    @property
    def has_reference(self) -> bool:
        """Whether log-probs of a reference are part of the loss; both libraries can precompute them."""
        return self.method in REFERENCED_METHODS

    @property
    def is_online(self) -> bool:
        return self.group > 0

    @property
    def prompts(self) -> int:
        """Different prompts of a step."""
        return self.rows // self.group if self.is_online else self.rows


QWEN_05B = Shape(896, 24, 4864, (14, 2))
QWEN_15B = Shape(1536, 28, 8960, (12, 2))
QWEN_7B = Shape(3584, 28, 18_944, (28, 4), vocabulary=152_064, tied=False)
MOE_3B = Shape(1024, 24, 576, (16, 4), experts=(64, 8))
"""2.9B weights, of which a token uses 0.6B."""
SMALL_135M = Shape(576, 30, 1536, (9, 3), vocabulary=49_152)

STEP_SETTINGS = ("default", "tuned", "ours", "matched")
TEXTS = Lengths(403, 0.8, 16, 2048)
ANSWERS = Lengths(200, 0.7, 16, 512, prompt=512, seed=2)
HARMLESS = Lengths(30, 0.95, 3, 512, prompt=1024, seed=5, prompt_median=98, prompt_spread=0.98)
"""As the 2,312 pairs of Anthropic's HH (harmless, test) are distributed in tokens of SmolLM2."""
COMPLETIONS = Lengths(280, 0.7, 16, 1024, prompt=512, seed=3)
SHORT_DEFAULT = {"default": Steps(3, 4)}
CPU_STEPS = {name: Steps(2, 3) for name in ("default", "tuned", "ours", "matched")}


UPDATE_STEPS = {
    "ours": Steps(3, 5),
    "matched": Steps(3, 3, margin=0),
    "tuned": Steps(2, 2, margin=0),
    "default": Steps(1, 1, margin=0),
}
WHOLE_STEPS = {"ours": Steps(2, 5, margin=0), "tuned": Steps(1, 2, margin=0), "default": Steps(1, 1, margin=0)}
"""TRL needs 4 to 25 s for a step of GRPO: few of them, and no step besides those that are logged or timed."""


def micro(*sizes: int, **options: object) -> tuple[dict[str, object], ...]:
    """Candidates that differ in the rows of a micro-batch, without checkpointing."""
    return tuple({"per_device_train_batch_size": size, "gradient_checkpointing": False, **options} for size in sizes)


def update(name: str, shape: Shape, sizes: tuple[int, ...], **more: object) -> Row:
    """One step of GRPO on given completions: scoring and update, without generation."""
    limits = {"ours": 150, "matched": 150, "tuned": 90, "default": 120}
    return Row(
        f"grpo-update-{name}",
        "grpo",
        shape,
        256,
        COMPLETIONS,
        1e-6,
        micro(*sizes),
        steps=UPDATE_STEPS,
        number="6",
        goal=(8, 4),
        group=16,
        seconds=limits,
        **more,
    )


UPDATES = (
    update("0.5b", QWEN_05B, (32, 64)),
    update("1.5b", QWEN_15B, (16, 32)),
    update("kl-0.5b", QWEN_05B, (32, 64), options={"beta": 0.04}),
)
WHOLE = Row(
    "grpo-0.5b",
    "grpo",
    QWEN_05B,
    256,
    Lengths(0, 0, 512, 512, prompt=256, seed=4),
    1e-6,
    (
        *micro(64),
        *micro(
            64,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={"max_memory_percent": 0.3},  # of 0.9 the update needs a part
        ),
        *micro(64, cache_implementation="static"),
    ),
    steps=WHOLE_STEPS,
    number="8",
    goal=(8, 6),
    group=8,
    writes=True,
    seconds={"ours": 150, "tuned": 100, "default": 120},
)
FEW_STEPS = {name: Steps(3, 4) for name in STEP_SETTINGS}
WITH_AND_WITHOUT_CHECKPOINTS = (*micro(1), {"per_device_train_batch_size": 1, "gradient_checkpointing": True})


def long_context(name: str, shape: Shape, tokens: int, steps: dict[str, Steps]) -> Row:
    """One text of so many tokens a step."""
    lengths = Lengths(0, 0, tokens, tokens)
    return Row(name, "sft", shape, 1, lengths, 1e-5, WITH_AND_WITHOUT_CHECKPOINTS, steps=steps, goal=(1.4, 1.4))


CPU_WHOLE_STEPS = {name: Steps(1, 2, margin=0) for name in ("default", "tuned", "ours", "matched")}

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
    long_context("sft-1.5b-32k", QWEN_15B, 32_768, FEW_STEPS),
    long_context("sft-0.5b-128k", QWEN_05B, 131_072, {name: Steps(2, 3, margin=0) for name in STEP_SETTINGS}),
    Row("sft-moe-3b", "sft", MOE_3B, 32, TEXTS, 2e-5, micro(8, 16), steps=FEW_STEPS, goal=(4, 2.5)),
    Row("kto-0.5b", "kto", QWEN_05B, 256, HARMLESS, 1e-6, micro(32, 64), steps=SHORT_DEFAULT, goal=(4, 2.5)),
    Row("orpo-0.5b", "orpo", QWEN_05B, 256, HARMLESS, 1e-6, micro(8, 16), steps=SHORT_DEFAULT, goal=(4, 2.5)),
    *UPDATES,
    WHOLE,
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
    Row(
        "grpo-135m-cpu",
        "grpo",
        SMALL_135M,
        8,
        Lengths(0, 0, 32, 32, prompt=256),
        1e-6,
        micro(8),
        device="cpu",
        steps=CPU_WHOLE_STEPS,
        goal=(4, 2.5),
        group=4,
        writes=True,
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
GRPO_GUARD = Row(
    "grpo-guard-cpu",
    "grpo",
    Shape(192, 4, 512, (4, 2), vocabulary=4096),
    8,
    Lengths(0, 0, 32, 32, prompt=256),
    1e-6,
    micro(8),
    device="cpu",
    steps=CPU_WHOLE_STEPS,
    goal=(4, 2.5),
    group=4,
    writes=True,
)
GUARDS = (GUARD, GRPO_GUARD)
"""The small rows of CI (tests/benchmarks): they fail below 60 % of their goals."""


def row_named(name: str, layers: int | None = None) -> Row:
    """A row; with `layers`, on a model of fewer: for machines on which a step of the whole one takes minutes."""
    row = next(row for row in (*ROWS, *GUARDS) if row.name == name)
    return row if layers is None else replace(row, shape=replace(row.shape, layers=layers))


def tiny(row: Row) -> Row:
    """The row in miniature: same method, lengths and widths divided by 16 and more; of completions an eighth."""
    experts = None if row.shape.experts is None else (4, 2)
    shape = Shape(64, 2, 128, (4, 2), vocabulary=1024, tied=row.shape.tied, experts=experts)
    scale = max(16, row.lengths.high // 512) if row.device == "cuda" else 4
    lengths = replace(
        row.lengths,
        median=row.lengths.median / scale,
        low=max(4, row.lengths.low // scale),
        high=row.lengths.high // scale,
        prompt=row.lengths.prompt // scale,
        prompt_median=row.lengths.prompt_median / scale,
    )
    small = replace(row, shape=shape, lengths=lengths, seconds={})
    if not row.is_online:
        steps = {name: Steps(min(s.losses, 10), 3) for name, s in row.steps.items()}
        return replace(small, steps={**{n: Steps(10, 3) for n in STEP_SETTINGS}, **steps})
    fewer = tuple(
        {**one, "per_device_train_batch_size": max(one["per_device_train_batch_size"] // 8, 4)} for one in row.tuned
    )
    losses = 2 if row.writes else 5
    return replace(
        small,
        rows=max(row.rows // 8, 8),
        group=4,
        tuned=fewer,
        steps={n: Steps(losses, 2, margin=0) for n in STEP_SETTINGS},
    )
