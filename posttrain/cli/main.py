"""Entry point of the `posttrain` command: finds the subcommand and hands over. Nothing heavy is imported before it runs."""

from __future__ import annotations

import importlib
import sys

from posttrain.cli.commands import TRAIN, commands
from posttrain.cli.errors import EXIT_CODE, UsageError, nearest
from posttrain.core.secrets import hidden_text

INTERRUPTED = 130
"""What shells expect of a command that Control-C has ended."""


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
    if words[0] not in known and words[0].replace("-", "_") in known:
        words = [words[0].replace("-", "_"), *words[1:]]  # online-dpo
    if words[0] not in known:
        hint = nearest(words[0], known)
        print(f"posttrain: there is no command {words[0]!r}.{hint}\n\n{usage()}", file=sys.stderr)
        return EXIT_CODE
    try:
        module = importlib.import_module(f"posttrain.cli.commands.{known[words[0]][0]}")
        return (module.main(words[0], words[1:]) if known[words[0]][0] == TRAIN else module.main(words[1:])) or 0
    except UsageError as error:
        print(hidden_text(f"posttrain {words[0]}: {error}"), file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt as error:
        print(f"\nposttrain {words[0]}: {str(error) or 'stopped by Control-C'}.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `posttrain ... | head`: the reader is gone
        sys.stderr.close()
        return 1


def usage() -> str:
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in known.items()]
    return "usage: posttrain COMMAND [options]\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
