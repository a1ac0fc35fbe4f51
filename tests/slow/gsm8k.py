"""224 rows of GSM8K (MIT licence, copyright 2021 OpenAI) as questions and answers, for tests with the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gsm8k_extract.jsonl")


def rows(split: str) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        }
        for row in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
        if row["split"] == split
    ]
