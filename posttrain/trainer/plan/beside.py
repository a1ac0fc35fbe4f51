"""What rollouts beside training would bring, worked out from the seconds of a run that was made: its own feed is simulated."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.rollout.feed.forecast import Forecast, Parts, forecast
from posttrain.rollout.feed.pacing import FIRST_FINISHED, IN_ORDER, MASK, WAIT, WINDOW, Lead, Pace
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.options.async_rollouts import AUTO
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.report.display import METRICS_FILE

GPUS = (2, 4, 8, 16)
FIRST = 1  # logs that do not count: a first step has other costs


@dataclass(frozen=True)
class Timings:
    """Of one process, in seconds."""

    groups: tuple[float, ...]  # each, from its beginning to its last token or tool
    update: float  # of a window: what is left of it when its completions are written
    engine: float  # that the engine writes for a window

    @classmethod
    def of_run(cls, folder: Path, pace: Pace) -> Timings:
        lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if {"step_time", "rollouts/generate_s"} <= line.keys()][FIRST:]
        if not steps:
            raise ValueError(f"{folder} has no step with rollouts after its first: let it train some more.")
        wrote = [line["rollouts/generate_s"] + line.get("rollouts/reward_wait_s", 0.0) for line in steps]
        update = max(pace.steps * np.mean([line["step_time"] for line in steps]) - np.mean(wrote), 1e-6)
        groups, engine = defaultdict(float), defaultdict(float)
        for row in read_rollouts(folder).select(["step", "group", "seconds"]).to_pylist():
            seconds = dict(row["seconds"] or {})
            groups[row["group"]] = max(groups[row["group"]], sum(seconds.values()))
            engine[row["step"]] = max(engine[row["step"]], seconds.get("prefill", 0.0) + seconds.get("decode", 0.0))
        if not any(groups.values()):
            raise ValueError(f"The rollouts of {folder} do not say what they took: its engine does not measure that.")
        return cls(tuple(groups.values()), float(update), float(np.mean([*engine.values()])))

    def parts(self, pace: Pace) -> Parts:
        drawn = lambda number: float(np.random.default_rng([7, number]).choice(self.groups))  # noqa: E731
        return Parts(drawn, self.update, self.engine / pace.groups)


@dataclass(frozen=True)
class Beside:
    """What `explain` says."""

    args: OnlineConfig
    timings: Timings

    def settings(self) -> Iterator[tuple[str, Pace, Lead]]:
        """Those worth comparing, the run's own last."""
        pace = self.args.pace()
        yield "synchronous", replace(pace, order=IN_ORDER, on_stale=WAIT), Lead(0.0, 0.0, adapts=False)
        for lead in range(1, min(pace.most_lead, 2) + 1):
            yield f"in order, lead {lead}", replace(pace, order=IN_ORDER, on_stale=WAIT), Lead(lead, lead, adapts=False)
        adapting = Lead(min(1.0, pace.most_lead), pace.most_lead, adapts=True)
        yield "window, lead auto", replace(pace, order=WINDOW, on_stale=WAIT), adapting
        yield "first finished, mask", replace(pace, order=FIRST_FINISHED, on_stale=MASK), adapting
        if self.args.async_rollouts and self.args.async_lead != AUTO:
            yield "as asked for", pace, self.args.lead()

    def forecasts(self) -> dict[str, Forecast]:
        return {name: forecast(pace, lead, self.timings.parts(pace)) for name, pace, lead in self.settings()}

    @property
    def wanted_lead(self) -> float:
        """Little's law: so many windows are under way when one leaves each `update` seconds and a group takes its mean time."""
        return float(np.mean(self.timings.groups)) / self.timings.update

    @property
    def share_for_rollouts(self) -> float:
        """Of the GPUs, so that neither side waits for the other: work of the engine against work of both."""
        return self.timings.engine / (self.timings.engine + self.timings.update)

    def gpus_for_rollouts(self, gpus: int) -> int:
        return min(max(round(self.share_for_rollouts * gpus), 1), gpus - 1)

    def lines(self) -> list[str]:
        timings, found = self.timings, self.forecasts()
        first = next(iter(found.values())).seconds
        split = ", ".join(f"{self.gpus_for_rollouts(gpus)} of {gpus}" for gpus in GPUS)
        bound = math.ceil(self.wanted_lead) + self.args.pace().steps - 1
        return [
            f"a group takes {np.mean(timings.groups):.2f} s (the slowest {max(timings.groups):.2f} s), the training of a "
            f"generation {timings.update:.2f} s, its engine {timings.engine:.2f} s",
            f"{'':<22}{'s':>9}{'gain':>8}{'waits':>8}{'age':>8}{'oldest':>8}",
            *(
                f"{name:<22}{one.seconds:>9.2f}{first / one.seconds:>7.2f}x{one.waits:>8.0%}{one.group_age:>8.1f}{one.oldest:>8}"
                for name, one in found.items()
            ),
            f"lead: {self.wanted_lead:.1f} generations under way would keep the trainer from waiting (Little's law); a "
            f"`max_staleness` of {bound} allows them",
            f"GPUs for rollouts, so that neither side waits: {split} ({self.share_for_rollouts:.0%})",
        ]

    def as_json(self) -> dict[str, Any]:
        forecasts = {
            name: {key: float(value) for key, value in vars(one).items()} for name, one in self.forecasts().items()
        }
        return {"lead": self.wanted_lead, "share_for_rollouts": self.share_for_rollouts, "settings": forecasts}
