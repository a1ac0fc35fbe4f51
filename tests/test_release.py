"""What is checked before a release, and that nothing imports in circles."""

from pathlib import Path

from posttrain.core import __version__
from scripts.check_release import complaints
from scripts.import_circles import circles

ROOT = Path(__file__).resolve().parents[1]


def test_a_tag_that_is_not_the_version_or_has_no_dated_section_is_not_published():
    source = '__version__ = "1.2.3"\n'
    assert complaints("v1.2.3", source, "# Changelog\n\n## 1.2.3, 2026-11-16\n") == []
    wrong, undated = complaints("v1.2", source, "# Changelog\n\n## 1.2.3, unreleased\n")
    assert wrong == "The tag is v1.2, and posttrain/core/__init__.py has version 1.2.3: tag v1.2.3."
    assert "no section `## 1.2.3, YYYY-MM-DD`" in undated


def test_the_changelog_begins_with_the_version_that_is_here():
    titles = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert titles[0].startswith(f"## {__version__},")


def test_nothing_imports_in_circles_not_even_inside_of_functions_or_for_type_checking():
    assert circles() == []
