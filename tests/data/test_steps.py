"""Steps of free text: nothing is lost, and what belongs together is not cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.steps import STEP_RULES, StepRule, split_steps

BLOCKS = {
    "code": "```python\nfor i in x:\n\n    print(i). Then\n1. go\n```",
    "tildes": "~~~\na = 1.\n\nB = 2.\n~~~",
    "empty code": "```\n```",
    "display": "$$\na = b. C\n\n= d\n$$",
    "brackets": "\\[\nx = 1. Y\n\n= 2\n\\]",
    "environment": "\\begin{align}\na &= 1. B\n\n2. c\n\\end{align}",
    "inline": "$f(x). G(y)$",
    "table": "| a. B | b |\n|---|---|\n| 1. One | 2 |",
    "think": "<think>\nFirst. Second.\n\n1. third\n</think>",
}
PROSE = [
    "It is 4.",
    "So we add them! Then",
    "Step 2: do it",
    "3. also",
    "e.g. this",
    "costs $5. And $6 more",
    "",
    "  ",
    "…",
]
WHOLE = st.sampled_from([*BLOCKS.values()])
TEXTS = st.lists(
    st.tuples(st.one_of(WHOLE, st.sampled_from(PROSE)), st.sampled_from(["\n", "\n\n", "\n \n"])), max_size=8
)
RULES = st.builds(
    StepRule,
    st.sampled_from([*STEP_RULES]),
    st.sampled_from(["\n", "\n\n", " ки", "<step>"]),
    st.one_of(st.none(), st.integers(1, 4)),
)


def pieces(text: str, rule: str | StepRule = "separator", **options) -> list[str]:
    rule = rule if isinstance(rule, StepRule) else StepRule(rule, **options)
    return [text[start:stop] for start, stop in split_steps(text, rule)]


@given(st.text(st.sampled_from("ab1.!?\n $|`\\[]()<>~ ки。"), max_size=60), RULES)
@settings(max_examples=300, deadline=None)
def test_the_pieces_of_any_text_are_the_text(text, rule):
    found = pieces(text, rule)
    assert "".join(found) == (text if text.strip() else "")
    assert all(piece.strip() for piece in found)
    assert len(found) <= (rule.max_steps or len(text))


@given(TEXTS, RULES)
@settings(max_examples=300, deadline=None)
def test_what_belongs_together_lies_in_one_step(parts, rule):
    text, at, blocks = "", 0, []
    for part, end in parts:
        if part in BLOCKS.values():
            blocks.append((at, at + len(part)))
        text += part + end
        at = len(text)
    starts = [start for start, _ in split_steps(text, rule)]
    assert not [(block, cut) for block in blocks for cut in starts if block[0] < cut < block[1]]
    assert "".join(pieces(text, rule)) == (text if text.strip() else "")


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("separator", "a\nb\n\nc", ["a\n", "b\n\n", "c"]),
        ("lines", "\na\n  b", ["\na\n", "  b"]),
        ("blank_line", "a\nb\n \n\nc\n", ["a\nb\n \n\n", "c\n"]),
        ("numbered", "Let us see.\nStep 1: a\nmore\n**Step 2:** b\n3. c\n4) d\n5.5 e", [
            "Let us see.\n", "Step 1: a\nmore\n", "**Step 2:** b\n", "3. c\n", "4) d\n5.5 e",
        ]),
        ("sentences", "It is 4.5, e.g. so. Right? “Yes.” He said 好。 Done", [
            "It is 4.5, e.g. so. ", "Right? ", "“Yes.” ", "He said 好。 Done",
        ]),
        ("sentences", "一。二！三", ["一。", "二！", "三"]),
        ("sentences", "Costs $5. And $6. Now $a. B$ holds.", ["Costs $5. ", "And $6. ", "Now $a. B$ holds."]),
        ("lines", "a\n```\nx\n\ny\n", ["a\n", "```\nx\n\ny\n"]),
    ],
)  # fmt: skip
def test_each_rule(rule, text, expected):
    assert pieces(text, rule) == expected


def test_the_last_of_max_steps_has_what_is_left():
    assert pieces("a\nb\nc\nd", max_steps=2) == ["a\n", "b\nc\nd"]


def test_blank_text_has_no_step():
    assert split_steps(" \n\n") == []


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"Unknown step rule 'paragraph'; known: separator, blank_line"):
        StepRule("paragraph")
    with pytest.raises(ValueError, match=r"`max_steps` is 0"):
        StepRule(max_steps=0)
