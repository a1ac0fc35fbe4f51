"""Does an engine with weights of its own see what the trainer sees? Asked after every update, beside the probe with texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from posttrain.core.sample import Sample
from posttrain.rollout.engines.protocol import Prompt, RolloutEngine, SamplingParams, generate
from posttrain.rollout.rollout import POLICY_LOGPS

TOKENS = 8
OWN = "own_logps"


class ImageSync:
    """A prompt about one picture, the same in every run: the engine writes a few tokens after it, and the trainer scores them.

    Weights that arrived say nothing of what an engine makes of pixels: how it resizes and normalises them, what it has cached.
    """

    def __init__(self, shown: Sample, score: Callable[[Sequence[Sample]], None]) -> None:
        """`shown`: a prompt and an answer. `score` writes the trainer's log-probs, at temperature 1, on samples, as OWN."""
        self.prompt, self._score = shown.slice(0, int(shown.trained.argmax())), score

    @property
    def tokens(self) -> int:
        """That the engine must have room for."""
        return len(self.prompt) + TOKENS

    def gap(self, engine: RolloutEngine) -> float:
        """Mean difference of log-probs; NaN where the engine wrote nothing, as after a placeholder."""
        prompt = Prompt(self.prompt.input_ids, images=self.prompt.images, positions=self.prompt.positions)
        (written,) = generate(engine, [prompt], SamplingParams(max_tokens=TOKENS, temperature=0))
        sample = self.prompt.append(written.ids, trained=True, **{POLICY_LOGPS: written.policy_logps})
        self._score([sample])  # also of nothing: the passes of sharded models are collective
        apart = np.abs(sample.per_token[OWN] - sample.per_token[POLICY_LOGPS])[len(self.prompt) :]
        return float(apart.mean()) if len(apart) else float("nan")
