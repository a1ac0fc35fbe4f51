"""What looks wrong with the labels of preference data: reported, never refused.

Pairs whose sides are equal are bad rows and are refused by the check. What is counted here can be meant: the same prompt
with the pair turned round, the same pair twice, answers that repeat their prompt, and a label that follows length.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

Row = dict[str, Any]


@dataclass
class LabelReport:
    """Suspicious labels of a preference dataset. For unpaired data `flipped` counts prompt + completion of both labels."""

    kind: str  # "pairs", "labels" or "steps"
    total: int = 0
    duplicates: int = 0  # rows that repeat an earlier row word for word
    flipped: int = 0  # rows whose opposite is in the dataset too
    repeats_prompt: int = 0  # answers that begin with the prompt itself
    chosen_longer: float = 0.0  # share of pairs (ties apart) whose preferred answer is the longer one
    length_difference: float = 0.0  # mean tokens of the preferred answer minus those of the other
    wanted_share: float = 0.0  # unpaired: share of rows with label True; stepwise: of steps
    steps: tuple[int, int, int] = (0, 0, 0)  # stepwise: fewest and most judged steps of a row, and those of all rows

    def sentences(self) -> list[str]:
        """The report in words; only what a person should look at."""
        lines = []
        if self.duplicates:
            lines.append(f"{self.duplicates:,} of {self.total:,} rows repeat an earlier row")
        if self.flipped:
            lines.append(f"{self.flipped:,} rows contradict another row: same prompt and answers, opposite label")
        if self.repeats_prompt:
            lines.append(f"{self.repeats_prompt:,} answers begin with their own prompt")
        gap = abs(self.chosen_longer - 0.5)  # looked at where it exceeds ten points and three standard errors
        if self.kind == "pairs" and self.total and gap > 0.1 and gap > 1.5 / math.sqrt(self.total):
            lines.append(
                f"the preferred answer is the longer one in {self.chosen_longer:.0%} of pairs "
                f"(by {self.length_difference:+.0f} tokens on average): a model can learn length instead of quality"
            )
        if self.kind == "labels" and self.total:
            lines.append(f"{self.wanted_share:.0%} of rows are labelled True")
        if self.kind == "steps":
            fewest, most, steps = self.steps
            span = f"{fewest} to {most}" if fewest < most else str(most)
            lines.append(f"{steps:,} steps, {span} a row; {self.wanted_share:.0%} of steps are labelled True")
            if self.wanted_share in (0, 1):
                lines.append("all steps have the same label: there is nothing to tell apart")
        return lines


def answer_hashes(row: Row) -> tuple[int, int, int, int]:
    """(prompt, preferred, other, repeats the prompt) of a normalised preference row, as numbers to compare by.

    Unpaired rows put their completion on the side that its label names, and 0 on the other.
    """
    prompt = row.get("prompt")
    if "label" in row:
        sides = (row["completion"], None) if row["label"] else (None, row["completion"])
    elif "chosen_ids" in row:
        sides = (row["chosen_ids"].tobytes(), row["rejected_ids"].tobytes())
        prompt = row["prompt_ids"].tobytes() if "prompt_ids" in row else None
    else:
        sides = (row["chosen"], row["rejected"])
    answers = sides
    if row.get("images"):  # of plain texts: equal words about other pictures are another row
        sides = tuple(None if side is None else [side, *row["images"]] for side in sides)
    repeats = isinstance(prompt, str) and any(isinstance(s, str) and s.startswith(prompt) for s in answers)
    return _hash(prompt), _hash(sides[0]), _hash(sides[1]), int(repeats)


def _hash(value: Any) -> int:
    if value is None:
        return 0
    if not isinstance(value, (str, bytes)):
        value = json.dumps(value, sort_keys=True, default=str)
    return xxhash.xxh3_64_intdigest(value.encode() if isinstance(value, str) else value)


def label_report(hashes: np.ndarray, lengths: np.ndarray | None) -> LabelReport:
    """From (rows, 4) hashes and, for pairs, (rows, 2) tokens of the preferred and the other answer."""
    keys = hashes[:, :3]
    unique, counts = np.unique(keys, axis=0, return_counts=True)
    turned = {tuple(key) for key in unique[:, [0, 2, 1]].tolist()}
    contradicted = [count for key, count in zip(unique.tolist(), counts.tolist()) if tuple(key) in turned]
    report = LabelReport(
        kind="labels" if lengths is None else "pairs",
        total=len(hashes),
        duplicates=int((counts - 1).sum()),
        flipped=int(sum(contradicted)),
        repeats_prompt=int(hashes[:, 3].sum()),
    )
    if lengths is None:
        report.wanted_share = float((hashes[:, 1] != 0).mean())
        return report
    difference = lengths[:, 0].astype(np.int64) - lengths[:, 1]
    decided = difference != 0
    report.chosen_longer = float((difference[decided] > 0).mean()) if decided.any() else 0.5
    report.length_difference = float(difference.mean())
    return report


def steps_report(steps: np.ndarray) -> LabelReport:
    """From (rows, 2): judged steps of a row, and how many of them are good."""
    judged, good = steps.T
    share = float(good.sum() / judged.sum())
    return LabelReport(
        "steps", len(steps), wanted_share=share, steps=(*map(int, (judged.min(), judged.max(), judged.sum())),)
    )
