"""Progress bars of the libraries underneath: switched off where a command shows progress, or results, of its own."""

from __future__ import annotations


def no_bars() -> None:
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
