"""For mkdocs: links from a page to files of the repository, which are not part of the site, become their names."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return OUTSIDE.sub(
        lambda match: f"{match[1]} (`{match[2]}`)" if match[1] not in match[2] else f"`{match[2]}`", markdown
    )
