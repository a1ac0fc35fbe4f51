"""Does an engine with weights of its own see what the trainer sees? Asked after every update, beside the probe with texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from posttrain.core.sample import Sample
from posttrain.rollout.engines.protocol import Prompt, RolloutEngine, SamplingParams, generate
from posttrain.rollout.rollout import POLICY_LOGPS

TOKENS = 8
BEGUN = (0, 1, 2, 3)
"""Tokens of the answer that are there already: a small model may write a placeholder at once, which ends a completion."""
OWN = "own_logps"


class ImageSync:
    """Prompts about one picture, the same in every run: the engine writes a few tokens after them, and the trainer scores them.

    Weights that arrived say nothing of what an engine makes of pixels: how it resizes and normalises them, what it has cached.
    """

    def __init__(self, shown: Sample, score: Callable[[Sequence[Sample]], None]) -> None:
        """`shown`: a prompt and an answer. `score` writes the trainer's log-probs, at temperature 1, on samples, as OWN."""
        start, self._score = int(shown.trained.argmax()), score
        shown = replace(shown, trained=np.zeros(len(shown), dtype=bool))
        self.prompts = [shown.slice(0, start + begun) for begun in BEGUN if start + begun <= len(shown)]

    @property
    def tokens(self) -> int:
        """That the engine must have room for."""
        return len(self.prompts[-1]) + TOKENS

    def gap(self, engine: RolloutEngine) -> float:
        """Mean difference of log-probs; NaN where the engine wrote nothing but placeholders, before which it ends."""
        asked = [Prompt(one.input_ids, images=one.images, positions=one.positions) for one in self.prompts]
        written = generate(engine, asked, SamplingParams(max_tokens=TOKENS, temperature=0))
        samples = [
            prompt.append(done.ids, trained=True, **{POLICY_LOGPS: done.policy_logps})
            for prompt, done in zip(self.prompts, written)
        ]
        self._score(samples)  # also of nothing: the passes of sharded models are collective
        apart = [np.abs(one.per_token[OWN] - one.per_token[POLICY_LOGPS])[one.trained] for one in samples]
        found = np.concatenate(apart)
        return float(found.mean()) if len(found) else float("nan")
