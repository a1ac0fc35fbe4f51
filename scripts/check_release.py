"""May a tag be published? `python scripts/check_release.py v0.1.0` compares it with the version and the changelog."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def complaints(tag: str, source: str, changelog: str) -> list[str]:
    """What is wrong, in sentences; nothing where the tag may be published."""
    found = []
    version = re.search(r'__version__ = "([^"]+)"', source)[1]
    if tag != f"v{version}":
        found.append(f"The tag is {tag}, and posttrain/core/__init__.py has version {version}: tag v{version}.")
    if not re.search(rf"^## {re.escape(version)}, \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        found.append(
            f"CHANGELOG.md has no section `## {version}, YYYY-MM-DD`: say what is in the release, and its date."
        )
    return found


if __name__ == "__main__":
    given = ((ROOT / name).read_text(encoding="utf-8") for name in ("posttrain/core/__init__.py", "CHANGELOG.md"))
    wrong = complaints(sys.argv[1], *given)
    print("\n".join(wrong) or f"{sys.argv[1]} may be published.")
    sys.exit(1 if wrong else 0)
