"""Tables and pictures for the trackers of `report_to` that can show them. Numbers go there by transformers' own callbacks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from transformers.integrations import TensorBoardCallback

WITH_TABLES: dict[str, Callable[[Any], bool]] = {
    "wandb": lambda wandb: wandb.run is not None,
    "trackio": lambda trackio: trackio.context_vars.current_run.get() is not None,
}
"""Package with `Table`, `Image` and `log` -> whether it has a run to log to."""
MOST_ON_TENSORBOARD = 16


def table_to_trackers(report_to: Iterable[str], name: str, columns: Sequence[str], rows: list[list[Any]]) -> None:
    """A cell is a number, a text, or a list of pictures."""
    for package, is_running in WITH_TABLES.items():
        tracker = importlib.import_module(package) if package in report_to else None
        if tracker is not None and is_running(tracker):
            shown = [[_shown(tracker, cell) for cell in row] for row in rows]
            tracker.log({name: tracker.Table(columns=list(columns), data=shown)})


def _shown(tracker: Any, cell: Any) -> Any:
    return [tracker.Image(picture) for picture in cell] if isinstance(cell, list) else cell


def pictures_to_tensorboard(
    callbacks: Iterable[Any], name: str, rows: Iterable[tuple[str, list[Image.Image]]], step: int
) -> None:
    """(text, pictures) of some rows; tensorboard has no tables, so that a text stands beside its pictures under their number."""
    writers = [one.tb_writer for one in callbacks if isinstance(one, TensorBoardCallback) and one.tb_writer is not None]
    shown = [(text, pictures) for text, pictures in rows if pictures][:MOST_ON_TENSORBOARD]
    for writer in writers:
        for number, (text, pictures) in enumerate(shown):
            writer.add_text(f"{name}/{number}", text, step)
            for place, picture in enumerate(pictures):
                writer.add_image(f"{name}/{number}/{place}", np.asarray(picture), step, dataformats="HWC")
