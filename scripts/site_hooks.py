"""For mkdocs: the methods in the menu, and links to files of the repository, which are not part of the site, as their names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")

ROOT = str(Path(__file__).resolve().parents[1])


def on_config(config: Any, **_: Any) -> Any:
    """`Methods` of the menu begins with every method of METHODS."""
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)  # mkdocs runs this file by its path
    from scripts.method_pages import menu

    (methods,) = (section["Methods"] for section in config["nav"] if "Methods" in section)
    methods[:0] = menu()
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return OUTSIDE.sub(
        lambda match: f"{match[1]} (`{match[2]}`)" if match[1] not in match[2] else f"`{match[2]}`", markdown
    )
