"""evaluate: prompts -> answers by an engine -> rewards -> scores. In a run and after it, this is what is called."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.core.processes import of_every_process
from posttrain.data.images.row_image import named_by_key
from posttrain.data.render.byte_decoding import text_decoder
from posttrain.evaluation.result import Answers, EvalResult
from posttrain.evaluation.spec import EvalSpec
from posttrain.losses.advantages import weighted_rewards
from posttrain.rewards.reward_set import RewardSet
from posttrain.rollout.collector import PendingRewards
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.episodes.episode import SingleTurn, run_episodes
from posttrain.rollout.prompt_rows import PromptRows
from posttrain.rollout.rollout import Request, Rollout


def engine_for(name: str, tokenizer: Any) -> Callable[[nn.Module], RolloutEngine]:
    """What makes an engine around a model: the native one where it can run it, else the plain one, as in training."""
    return functools.partial(ENGINES[name], decode=functools.partial(tokenizer.decode, skip_special_tokens=False))


def stop_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """What ends an answer: the tokenizer's end of text, and those that the model's generation config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = named if isinstance(named, list | tuple) else [named]
    return tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *named) if i is not None))


class TaskEvaluation:
    """One task, ready to be run as often as is wanted: its rows are encoded and its rewards' workers stay."""

    def __init__(
        self,
        spec: EvalSpec,
        rows: PromptRows,
        tokenizer: Any,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """`device`: of reward models that are given by name."""
        self.spec, self.rows, self.rank, self.world_size, self.device = spec, rows, rank, world_size, device
        self.decode = text_decoder(tokenizer)

    @functools.cached_property
    def rewards(self) -> RewardSet:
        rewards, weights = [*self.spec.reward], [*(self.spec.reward_weights or [1.0] * len(self.spec.reward))]
        if self.spec.select_by is not None:  # last, and without a weight
            rewards, weights = [*rewards, self.spec.select_by], [*weights, 0.0]
        return RewardSet(rewards, weights, model_options={"device": self.device}, watch=False)

    def __call__(
        self, engine: RolloutEngine, stop_ids: tuple[int, ...], state: Any = None, keep_samples: bool = False
    ) -> EvalResult:
        """With several processes each answers its share of the prompts, and all get all answers."""
        requests = [
            Request(row, row, sample)
            for row in range(self.rank, len(self.rows), self.world_size)
            for sample in range(self.spec.samples)
        ]
        rollouts, values, seconds = self._rollouts(engine, requests, stop_ids, state)
        parts, clocks = zip(*of_every_process((self._answers(rollouts, values), seconds), self.world_size))
        longest = {name: max(clock[name] for clock in clocks) for name in seconds}
        samples = [_as_record(rollout, self.rewards.names) for rollout in rollouts] if keep_samples else []
        return EvalResult(
            self.spec, self.rewards.names, Answers.joined([*parts]), longest, type(engine).__name__, samples
        )

    def close(self) -> None:
        """End the rewards' workers; the next call starts new ones."""
        self.rewards.close()
        del self.rewards

    def _rollouts(
        self, engine: RolloutEngine, requests: list[Request], stop_ids: tuple[int, ...], state: Any
    ) -> tuple[list[Rollout], np.ndarray, dict[str, float]]:
        rows = self.rows.take(request.row for request in requests)
        episodes = [SingleTurn(rows[request.row], request, self.decode) for request in requests]
        pending = PendingRewards(requests)
        began = time.perf_counter()
        with self.rewards.open(state) as judged:
            pending.reward_round = judged
            if episodes:
                run_episodes(engine, episodes, self.spec.sampling(stop_ids), pending.on_finished)
            written = time.perf_counter()
            results = judged.finish()
        seconds = {"generate": written - began, "reward": time.perf_counter() - written}
        return pending.with_rewards(results, self.rewards.names), pending.values(results), seconds

    def _answers(self, rollouts: list[Rollout], values: np.ndarray) -> Answers:
        failed = np.array([rollout.masked for rollout in rollouts], dtype=bool)
        count = len(self.spec.reward)
        weights = torch.tensor(self.rewards.weights[:count], dtype=torch.float64)
        totals = weighted_rewards(torch.from_numpy(values[:, :count]), weights)
        totals = totals.masked_fill(torch.from_numpy(failed), float("nan"))
        return Answers(
            rows=np.array([rollout.request.row for rollout in rollouts], dtype=np.int64),
            rewards=values,
            totals=totals.numpy(),
            lengths=np.array([len(rollout.completion_ids) for rollout in rollouts], dtype=np.int64),
            truncated=np.array([rollout.is_truncated for rollout in rollouts], dtype=bool),
            failed=failed,
        )


def _as_record(rollout: Rollout, names: list[str]) -> dict[str, Any]:
    said = {"extras": rollout.extras} if rollout.extras else {}
    return said | {
        "row": rollout.request.row,
        "sample": rollout.request.sample,
        "prompt": named_by_key(rollout.prompt),
        "completion": named_by_key(rollout.completion),
        "completion_ids": rollout.completion_ids.tolist(),
        "rewards": {name: rollout.rewards.get(name) for name in names},
        "finish_reason": rollout.finish_reason,
        "error": rollout.error or (str(rollout.failures[0]) if rollout.failures else None),
    }
