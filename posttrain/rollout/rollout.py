"""Rollout: one finished episode, and everything that is known about it. What is trained on is its Sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core.sample import Sample

SAMPLING_LOGPS = "sampling_logps"
"""log-prob of each token under the distribution that it was drawn from (0 where no model wrote it, as in results of tools)."""
POLICY_LOGPS = "policy_logps"
"""log-prob of each token under the engine's untruncated policy at the sampling temperature."""
OLD_LOGPS = "old_logps"
"""log-prob of each token under the trainer's weights at the time of generation, computed by the trainer."""
POLICY_VERSIONS = "policy_versions"
"""version of the weights that wrote each token, where those of one completion may differ (0 where no model wrote it)."""
ADVANTAGES = "advantages"
POLICY, REFERENCE, MIXTURE, TEACHER, DATASET = "policy", "reference", "mixture", "teacher", "dataset"
"""Who writes a completion. Its log-probs are those of who wrote it; those of the dataset's own completions are not known."""
TEACHER_LOGPS = "teacher_logps"
"""log-prob of each token under a teacher, asked when it was collected."""
VALUES, RETURNS = "values", "returns"
"""What a critic said about each token at the time of generation, and what it should have said."""


@dataclass(frozen=True)
class Request:
    """One completion that is wanted."""

    row: int  # of the dataset
    number: int  # of the prompt in the run: what its noise depends on, besides `sample`
    sample: int  # which of the completions of this prompt


@dataclass
class ToolCall:
    """What a model asked of a tool, and what came back."""

    name: str
    arguments: str  # JSON
    result: str | list[dict[str, Any]] = ""  # as the model reads it: a text, or parts with images among them
    error: str | None = None
    seconds: float = 0.0


@dataclass
class Rollout:
    """One completion of one prompt with its tokens, its rewards and its history."""

    request: Request
    prompt: str | list[dict[str, Any]]
    completion: str | list[dict[str, Any]]
    sample: Sample  # prompt and completion; `trained` marks what the model wrote
    prompt_length: int  # tokens
    author: str = POLICY
    finish_reason: str = "stop"  # "stop", "length" or "error"
    error: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # of its row, and what a rollout function added
    environment: Any = None
    pictures: dict[bytes, Any] = field(default_factory=dict)  # by key: what image parts of prompt and completion show
    tool_calls: list[ToolCall] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None  # schemas that the prompt was written with
    seconds: dict[str, float] = field(default_factory=dict)

    # ---- filled in by the collector
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = float("nan")  # weighted sum
    advantage: float = 0.0
    masked: bool = False  # takes part in nothing: a reward failed for it, or it could not be generated
    failures: list[Any] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)  # what rewards logged with `log_extra`

    @property
    def group(self) -> int:
        return self.request.number

    @property
    def completion_ids(self) -> np.ndarray:
        return self.sample.input_ids[self.prompt_length :]

    @property
    def is_given(self) -> bool:
        """The dataset's own: no model wrote it."""
        return self.author == DATASET

    @property
    def is_unwritten(self) -> bool:
        return self.finish_reason == "error"

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


def versions_of(rollout: Rollout) -> np.ndarray:
    """(tokens,) version of the weights that wrote each; of tokens that no weights wrote it means nothing."""
    sample = rollout.sample
    return sample.per_token.get(POLICY_VERSIONS, np.full(len(sample), sample.policy_version, np.float32))
