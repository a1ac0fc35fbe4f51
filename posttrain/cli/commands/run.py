"""`posttrain run SCRIPT.py [its arguments]`: a script written for TRL, with its `trl` imports answered by posttrain."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

from posttrain.cli.errors import UsageError

USAGE = """usage: posttrain run SCRIPT.py [arguments of the script]

Runs a script that imports trl, with every name answered by posttrain. What posttrain does not have is named."""


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(f"there is no script {words[0]}.")
    from posttrain.migration import trl_parser
    from posttrain.migration.trl_names import UnsupportedByPosttrain, install, uninstall

    install()
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *words[1:]]
    sys.path.insert(0, os.fspath(script.resolve().parent))  # as `python SCRIPT.py` does
    try:
        runpy.run_path(str(script), run_name="__main__")
    except UnsupportedByPosttrain as error:
        raise UsageError(str(error)) from error
    except ValueError as error:
        # of the arguments, not of the script: TrlParser has no way to end a script that it belongs to
        if all(frame.filename != trl_parser.__file__ for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise UsageError(f"the arguments of {script} cannot be read. {error}") from error
    finally:
        sys.argv, sys.path[:] = before
        uninstall()
    return 0
