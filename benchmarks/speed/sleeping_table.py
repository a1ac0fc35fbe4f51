"""The lines of sleeping_tools as a table: each setting beside the synchronous run of its load."""

from __future__ import annotations

import json
from typing import Any

HEAD = (
    f"{'setting':<20} {'limit':>5} {'s/step':>7} {'eps/s':>7} {'at end':>7} {'tok/s':>8} {'gain':>6} {'unlim.':>6} "
    f"{'kernel':>7} {'driver':>7} {'full b.':>7} {'waits':>6} {'age max':>7} "
    f"{'masked':>7} {'cut':>6} {'held ms':>13} {'GiB':>6}"
)
EPISODES, AT_END = "episodes_a_second", "episodes_a_second_at_end"


def table(lines: list[dict[str, Any]]) -> str:
    """The newest run of each setting and load. Gains: over `sync` of the same load, and over that without a limit."""
    runs: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in lines:  # the one about kernels comes after the other, of the same run
        key = (_load(line), _limit(line), line["setting"])
        runs[key] = line if EPISODES in line else runs.get(key, {}) | line
    shown, title = [], ""
    for (load, limit, setting), run in sorted(runs.items(), key=lambda item: item[0][0]):
        if load != title:
            title = load
            shown += [load, HEAD]
        if EPISODES in run:
            known = {
                name: runs.get((load, of, setting_of), {}).get(EPISODES) for name, of, setting_of in _beside(limit)
            }
            awake = next((one.get(EPISODES) for (a, _, b), one in runs.items() if (a, b) == (load, "awake")), None)
            shown.append(_row(setting, limit, run, known | {"awake": awake}))
    return "\n".join(shown)


def _beside(limit: str) -> list[tuple[str, str, str]]:
    return [("sync", limit, "sync"), ("unlimited", "-", "sync")]


def _load(line: dict[str, Any]) -> str:
    return json.dumps({"shape": line["shape"]} | {name: of for name, of in line["load"].items() if name != "limit"})


def _limit(line: dict[str, Any]) -> str:
    return "-" if line["load"]["limit"] is None else f"{line['load']['limit']:g}"


def _row(setting: str, limit: str, run: dict[str, Any], known: dict[str, float | None]) -> str:
    held = [max(run.get(f"held_{kind}_ms{part}", 0.0) for kind in ("thread", "stream")) for part in ("", "_max")]
    return (
        f"{setting:<20} {limit:>5} {run['seconds_a_step']:>7.2f} {run[EPISODES]:>7.1f} {run[AT_END]:>7.1f} "
        f"{run['tokens_a_second']:>8.0f} {_times(run, known['sync']):>6} {_times(run, known['unlimited']):>6} "
        f"{_share(run.get('any_kernel')):>7} {_share(run.get('utilisation')):>7} "
        f"{_share(known['awake'] and run[EPISODES] / known['awake']):>7} "
        f"{run['waits']:>6.0%} {run['token_age_max']:>7.0f} "
        f"{run['masked_share']:>7.1%} {run['cut_share']:>6.1%} {held[0]:>6.1f} {held[1]:>6.1f} {run['peak_gib']:>6.1f}"
    )


def _times(run: dict[str, Any], other: float | None) -> str:
    return "" if other is None else f"{run[EPISODES] / other:.2f}x"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
