"""Runs a recipe in this process with a stand-in for trackio, whose Spaces are on the Hub; what it logged goes to a file."""

from __future__ import annotations

import json
import runpy
import sys

import torch
from transformers.integrations import integration_utils

from tests.trainer.test_hub import FakeTrackio


def main(recipe: str, logged: str) -> None:
    torch.set_num_threads(1)
    fake = FakeTrackio()
    sys.modules["trackio"] = fake
    integration_utils.is_trackio_available = lambda: True
    runpy.run_path(recipe, run_name="__main__")
    given = {name: fake.given[name] for name in ("project", "space_id")}
    with open(logged, "w", encoding="utf-8") as file:
        json.dump({"given": given, "logged": fake.logged}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
