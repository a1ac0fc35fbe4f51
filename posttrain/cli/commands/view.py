"""`posttrain view RUN`: curves and rollouts of runs on a page, in the terminal or as a report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from posttrain.cli.errors import UsageError
from posttrain.cli.options.words import Parser
from posttrain.cli.running.output import ready_to_write

MAX_PORT = 65535
WINDOWS = ("DISPLAY", "WAYLAND_DISPLAY")


def parser() -> Parser:
    made = Parser(
        prog="posttrain view",
        description="Look at runs, live or finished: curves, rollouts token by token, data. The page is for this "
        "machine only, and loads nothing from elsewhere.",
    )
    made.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, or a folder of such folders")
    made.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: one that is free)")
    made.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    made.add_argument("--data", action="append", default=[], metavar="PATH", help="a dataset to show beside the runs")
    made.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer.json, or its folder, for runs that have saved none yet"
    )
    made.add_argument("--text", action="store_true", help="a summary in the terminal, and no page")
    made.add_argument("--report", metavar="FILE", help="write a report, FILE.html or FILE.png, and serve no page")
    return made


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    if not 0 <= options.port <= MAX_PORT:
        raise UsageError(f"--port is {options.port}; ports go from 1 to {MAX_PORT}, and 0 takes one that is free.")
    if options.report:
        ready_to_write(options.report, "--report")
    from posttrain.view.errors import NoRunError
    from posttrain.view.run_folder import open_runs

    try:
        runs = open_runs(options.runs, options.tokenizer)
        missing = [path for path in options.data if not Path(path).exists()]
        if missing:
            raise NoRunError(f"--data {missing[0]}: there is no such file or folder.")
        if options.report:
            from posttrain.view.report import write_report

            print(f"Written: {write_report(runs, Path(options.report))}")
        if options.text:
            from posttrain.view.summary import print_summary

            print_summary(runs)
        if not options.report and not options.text:
            return serve(runs, options)
    except (NoRunError, OSError) as error:
        print(f"posttrain view: {error}", file=sys.stderr)
        return 2
    return 0


def serve(runs: list, options: argparse.Namespace) -> int:
    from posttrain.view.api import Viewed
    from posttrain.view.server import ViewServer

    for run in runs:
        run.rollouts.refresh(wait=0)  # reading begins while a browser starts
    with ViewServer(Viewed(runs, options.data), options.port) as server:
        print(f"{', '.join(run.name for run in runs)}\n{server.url}\nControl-C ends it.", flush=True)
        if not options.no_browser and has_windows():
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0


def has_windows() -> bool:
    """Without a screen, some systems would open a browser of text in this terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in WINDOWS)
