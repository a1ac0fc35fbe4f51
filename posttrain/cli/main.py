"""Entry point of the `posttrain` command: finds the subcommand and hands over. Nothing heavy is imported before it runs."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "demo": ("posttrain.cli.demo", "post-train a real 135M model on embedded data and show what changed"),
    "env": ("posttrain.cli.env", "versions and devices, for bug reports"),
    "vllm-serve": ("posttrain.cli.serve", "write completions for trainers with vLLM, in an environment of its own"),
}


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        from posttrain import __version__

        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"posttrain: there is no command {words[0]!r}.{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[words[0]][0]).main(words[1:]) or 0


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "usage: posttrain COMMAND [options]\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
