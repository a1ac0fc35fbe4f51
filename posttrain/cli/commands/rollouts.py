"""`posttrain rollouts RUN --to dpo`: what a run has written, as rows for SFT or DPO, on machines without a browser."""

from __future__ import annotations

import sys
from pathlib import Path

from posttrain.cli.errors import UsageError
from posttrain.cli.options.words import Parser
from posttrain.cli.running.output import ready_to_write

LIMITS = ("step", "reward", "advantage", "tokens")
"""Numbers of a rollout that can be bounded; the page can bound more."""
READ_SECONDS = 600


def parser() -> Parser:
    from posttrain.view.export import FORMATS
    from posttrain.view.rollout_query import FLAGS

    made = Parser(
        prog="posttrain rollouts",
        description="Rollouts of a run as training data, in JSON lines: `sft` keeps what was said, `dpo` sets the best "
        "completion of a prompt against the worst. The limits are those of the page of `posttrain view`.",
    )
    made.add_argument("run", metavar="RUN", help="output folder of a run that writes rollouts (GRPO, RLOO)")
    made.add_argument("--to", required=True, choices=tuple(FORMATS), help="for which rows")
    made.add_argument("--output", default="-", metavar="FILE", help="where they go (default: the standard output)")
    for name in LIMITS:
        for side, word in (("min", "least"), ("max", "most")):
            made.add_argument(f"--{name}-{side}", metavar="N", default="", help=f"{name} of at {word} N")
    made.add_argument("--flags", default="", metavar="WORDS", help=f"only rollouts with these, of {', '.join(FLAGS)}")
    made.add_argument(
        "--text", default="", metavar="TEXT", help="only rollouts whose prompt or completion has this text"
    )
    return made


def main(words: list[str]) -> int:
    from posttrain.view.errors import NoRunError, ViewError
    from posttrain.view.export import export, found_by, read_whole
    from posttrain.view.questions import Question
    from posttrain.view.rollout_query import RolloutQuery
    from posttrain.view.run_folder import open_runs

    options = parser().parse_args(words)
    ready_to_write(options.output, "--output")
    limits = {f"{name}_{side}": getattr(options, f"{name}_{side}") for name in LIMITS for side in ("min", "max")}
    try:
        (run, *others) = open_runs([options.run])
        if others:
            raise UsageError(
                f"{options.run} holds {len(others) + 1} runs ({run.name}, {others[0].name} ...); name one."
            )
        read_whole(run.rollouts, READ_SECONDS)
        index, progress = run.rollouts, run.rollouts.progress
        if not len(index) and not progress.unreadable:
            raise UsageError(f"{options.run} has no rollouts; GRPO and RLOO write them, unless `keep_rollouts` is off.")
        words = {**limits, "flags": options.flags, "q": options.text, "sort": "step"}
        made = export(options.to, index, found_by(index, RolloutQuery.of(Question(words), index)))
    except (NoRunError, ViewError) as error:
        raise UsageError(str(error)) from error
    if options.output == "-":
        sys.stdout.write(made.json_lines())
    else:
        Path(options.output).expanduser().write_text(made.json_lines(), encoding="utf-8")
    left_out = "".join(f", {count:,} left out ({reason})" for reason, count in made.skipped.items())
    print(f"{len(made.rows):,} rows for {options.to}{left_out}.", file=sys.stderr)
    for name, reason in progress.unreadable.items():
        print(f"posttrain rollouts: {name} cannot be read, and its rollouts are missing: {reason}", file=sys.stderr)
    return 0 if made.rows and not progress.unreadable else 1
