"""Our own lines on the terminal, and how many of them: `verbosity` of a config, the same for the whole process."""

from __future__ import annotations

import logging
import sys

QUIET, NORMAL, VERBOSE = VERBOSITIES = ("quiet", "normal", "verbose")
_logger = logging.getLogger("posttrain")
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("%(message)s"))
_chosen = NORMAL


def set_verbosity(name: str) -> None:
    """quiet: warnings, alerts and errors; normal: also the plan, progress and summary of a run; verbose: also details of what was
    decided on the way (log records of level INFO)."""
    global _chosen
    _chosen = name
    if name == VERBOSE:
        _logger.setLevel(logging.INFO)
        if not logging.getLogger().handlers and _handler not in _logger.handlers:  # the program has not set up logging
            _logger.addHandler(_handler)
    else:
        _logger.setLevel(logging.NOTSET)
        _logger.removeHandler(_handler)


def is_quiet() -> bool:
    return _chosen == QUIET


def say(text: str, always: bool = False) -> None:
    """Print, also where the output cannot encode every character; above the live display where there is one. Where the run is
    quiet, only what is to be said `always`."""
    if is_quiet() and not always:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
