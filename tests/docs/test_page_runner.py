"""The runner of pages notices what it should: errors with their line, output that was not printed, blocks of no language."""

from __future__ import annotations

import pytest

from tests.docs.fenced_blocks import after_diff, blocks_of


def written(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_an_error_is_told_with_the_line_of_the_page(tmp_path, runner):
    page = written(tmp_path, "# A page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n")
    assert 'page.md", line 10, in <module>' in runner(page)["failure"]


@pytest.mark.parametrize(("shown", "fails"), [("4", False), ("... 4", False), ("5", True), ("four\n4", True)])
def test_output_is_compared_with_what_was_printed(tmp_path, runner, shown, fails):
    page = written(tmp_path, f"```python\nprint('it is', 2 + 2)\n```\n\n```output\n{shown}\n```\n")
    failure = runner(page)["failure"]
    assert ("did not print" in failure) if fails else failure is None


def test_a_command_that_fails_is_noticed(tmp_path, runner):
    assert "ended with" in runner(written(tmp_path, "```bash\nposttrain nonsense\n```\n"))["failure"]


def test_a_page_leaves_nothing_behind_for_the_next(tmp_path, runner):
    assert runner(written(tmp_path, "```python\nimport torch\ntorch.pi = 3\nleft = 1\n```\n"))["failure"] is None
    page = "```python\nimport torch\nassert torch.pi > 3\nassert 'left' not in globals()\n```\n"
    assert runner(written(tmp_path, page))["failure"] is None


def test_blocks_and_diffs_are_read(tmp_path):
    text = "a\n\n- item\n\n  ```diff\n  -old\n  +new\n   kept\n  ```\n\n````text\n```\nnot a fence\n```\n````\n"
    one, two = blocks_of(written(tmp_path, text))
    assert (one.language, one.line, after_diff(one.code)) == ("diff", 6, "new\nkept")
    assert (two.language, two.code) == ("text", "```\nnot a fence\n```")
    with pytest.raises(ValueError, match="never closed"):
        blocks_of(written(tmp_path, "```python\nx = 1\n"))
