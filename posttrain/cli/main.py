"""Entry point of the `posttrain` command: finds the subcommand and hands over. Nothing heavy is imported before it runs."""

from __future__ import annotations

import importlib
import sys

from posttrain.cli.errors import EXIT_CODE, UsageError, nearest, planned
from posttrain.core.secrets import hidden_text

TRAIN = "posttrain.cli.commands.train"
INTERRUPTED = 130
"""What shells expect of a command that Control-C has ended."""

COMMANDS = {
    "check": (
        "posttrain.cli.commands.check",
        "look at the data of a run before it costs anything: token by token, and what is wrong",
    ),
    "completion": (
        "posttrain.cli.commands.completion",
        "a script with which bash, zsh or fish complete commands and options",
    ),
    "demo": ("posttrain.cli.commands.demo", "post-train a real 135M model on embedded data and show what changed"),
    "doctor": ("posttrain.cli.commands.doctor", "what works on this machine, and what to type next"),
    "env": ("posttrain.cli.commands.env", "versions and devices, for bug reports"),
    "explain": (
        "posttrain.cli.commands.explain",
        "the arithmetic of a run before it begins: steps, tokens, loss, work and memory",
    ),
    "schema": ("posttrain.cli.commands.schema", "a JSON Schema of a method's file of options, for editors"),
    "sweep": (
        "posttrain.cli.commands.sweep",
        "one run after another over values of any options; a table and a plot at the end",
    ),
    "view": (
        "posttrain.cli.commands.view",
        "curves and rollouts of runs: a page on this machine, a terminal summary or a report",
    ),
    "eval": ("posttrain.cli.commands.eval", "answer prompts with a model and judge the answers: pass@k with intervals"),
    "export": (
        "posttrain.cli.commands.export",
        "a trained model as merged weights, an adapter or GGUF, checked against what was trained",
    ),
    "chat": ("posttrain.cli.commands.chat", "talk to a model in the terminal"),
    "launch": ("posttrain.cli.commands.jobs", "write, and submit, the job of a run for Slurm, SkyPilot or Kubernetes"),
    "rollouts": ("posttrain.cli.commands.rollouts", "what a run of GRPO or RLOO has written, as rows for SFT or DPO"),
    "run": ("posttrain.cli.commands.run", "run a script written for TRL, its imports answered by posttrain"),
    "vllm-serve": (
        "posttrain.cli.commands.serve",
        "write completions for trainers with vLLM, in an environment of its own",
    ),
}


def commands() -> dict[str, tuple[str, str]]:
    """Name -> (module, what it does): a command for every method of METHODS, and the others."""
    from posttrain.cli.options.table import method_names

    return {name: (TRAIN, f"train: {summary}") for name, summary in method_names().items()} | COMMANDS


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        from posttrain import __version__

        print(__version__)
        return 0
    known = commands()
    if told := planned(words[0]):
        print(f"posttrain {words[0]}: {told}", file=sys.stderr)
        return EXIT_CODE
    if words[0] not in known:
        hint = nearest(words[0], known)
        print(f"posttrain: there is no command {words[0]!r}.{hint}\n\n{usage()}", file=sys.stderr)
        return EXIT_CODE
    try:
        module = importlib.import_module(known[words[0]][0])
        return (module.main(words[0], words[1:]) if known[words[0]][0] == TRAIN else module.main(words[1:])) or 0
    except UsageError as error:
        print(hidden_text(f"posttrain {words[0]}: {error}"), file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt as error:
        print(f"\nposttrain {words[0]}: {str(error) or 'stopped by Control-C'}.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `posttrain ... | head`: nobody reads on
        sys.stderr.close()
        return 1


def usage() -> str:
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in known.items()]
    return "usage: posttrain COMMAND [options]\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
