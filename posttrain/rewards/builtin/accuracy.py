"""Is the answer right? Mathematics by math-verify, in LaTeX or in prose."""

from __future__ import annotations

import atexit
import logging
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from posttrain.rewards.builtin.format import final_text

VERIFY_SECONDS = 5
HOW_PARSED = {"fallback_mode": "no_fallback", "parsing_timeout": 10}
CALL_SECONDS = 60.0  # of the helper process, which stops what no signal can
THINK_END = ("</think>",)

# What is boxed comes before anything else; then LaTeX and plain numbers, those after "the answer is" first, the last one first.
ANSWER = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
GOLD = (LatexExtractionConfig(), ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about each of thousands of texts that take too long


def accuracy_reward(
    completions: Sequence[Any], solution: Sequence[str], log_extra: Callable[..., None] | None = None, **kwargs: Any
) -> list[float | None]:
    """1 where the completion's final answer equals the solution's, 0 where not, None where the solution cannot be read.

    Completions may be plain texts or conversations (the last message counts), the answer boxed, other LaTeX, or a number in
    prose ("The answer is 42."), in words ("forty-two") or in scientific notation (4.2e1, 4.2 x 10^1).
    """
    return _judged([final_text(completion) for completion in completions], list(solution), log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[..., None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of the text after the last delimiter; 0 for a completion without one: it has not ended its reasoning."""
    delimiters = THINK_END if reasoning_delimiters is None else tuple(reasoning_delimiters)
    answers = [after_reasoning(final_text(completion), delimiters) for completion in completions]
    return _judged(answers, list(solution), log_extra)


def after_reasoning(text: str, delimiters: Sequence[str]) -> str | None:
    """What follows the last delimiter of the text, or None."""
    ends = [text.rfind(delimiter) + len(delimiter) for delimiter in delimiters if delimiter in text]
    return text[max(ends) :] if ends else None


def _judged(
    answers: list[str | None], solution: list[Any], log_extra: Callable[..., None] | None
) -> list[float | None]:
    """Time limits of math-verify are signals, which only the main thread gets: on any other the work is a helper's."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    judged = _judge_here(answers, solution) if on_main_thread else _judge_in_helper(answers, solution)
    if log_extra is not None:
        log_extra("solution", solution)
        log_extra("gold_parsed", [gold for _, gold, _ in judged])
        log_extra("answer_parsed", [answer for _, _, answer in judged])
    return [value for value, _, _ in judged]


Verdict = tuple[float | None, str, str]
"""Reward, what was read of the solution, what was read of the answer."""


def _judge_here(answers: Sequence[str | None], solution: Sequence[Any]) -> list[Verdict]:
    return [_verdict(answer, gold) for answer, gold in zip(answers, solution, strict=True)]


def _verdict(answer: str | None, solution: Any) -> Verdict:
    gold = _read_gold(str(solution))
    if not gold:
        return None, "[]", ""
    if answer is None:
        return 0.0, _shown(gold), ""
    found = parse(in_digits(answer), ANSWER, extraction_mode="first_match", **HOW_PARSED)
    right = bool(found) and verify(list(gold), found, timeout_seconds=VERIFY_SECONDS)
    return float(right), _shown(gold), _shown(found)


def _shown(parsed: Sequence[Any], limit: int = 200) -> str:
    """For the log; Python refuses to write integers of thousands of digits, which a short power may stand for."""
    try:
        return str(list(parsed))[:limit]
    except ValueError:
        return "[a number too long to be written]"


@lru_cache(maxsize=4096)  # a group shares its solution
def _read_gold(solution: str) -> tuple[Any, ...]:
    return tuple(parse(in_digits(solution), GOLD, **HOW_PARSED))


# ------------------------------------------------------------------------------------------- numbers that math-verify cannot read

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
VALUES = {name: value for value, name in enumerate(SMALL)} | {name: 10 * n for n, name in enumerate(TENS, 2)}
_WORD = f"(?:{'|'.join((*VALUES, 'hundred', *SCALES))})"
_PHRASE = rf"(?:(?:minus|negative)\s+)?{_WORD}(?:(?:\s*-\s*|\s+and\s+|\s+){_WORD})*"
_WORDS = re.compile(rf"(?<![\w-]){_PHRASE}(?![\w-])", re.IGNORECASE)
_ANSWERED = re.compile(
    rf"(?P<before>\banswer(?:\s+is|\s*[:=])\s*(?:is\s+)?(?:\*\*|\$)?|=\s*|\\boxed{{\s*(?:\\text{{)?)(?P<number>{_PHRASE})(?![\w-])",
    re.IGNORECASE,
)
_POWER = re.compile(
    r"(?<![\w.])(?P<digits>[+-]?\d+(?:\.\d+)?)"
    r"(?:(?:[eE]|\s*[x×*·]\s*10\s*(?:\^|\*\*)\s*)(?P<power>[+-]?\d{1,3})(?!\w|\.\d)"
    r"|\s*[x×*·]\s*10\s*\^\s*\{(?P<braced>[+-]?\d{1,3})\})"
)


def in_digits(text: str) -> str:
    """The text with scientific notation and the number words of its answer written out.

    Words count where an answer stands: in a box, after "the answer is" or "=", or anywhere in a text without a digit; there a
    lone "one" may be a pronoun, and counts only where it is the whole text.
    """
    text = _POWER.sub(
        lambda found: format(Decimal(f"{found['digits']}e{found['power'] or found['braced']}"), "f"), text
    )
    text = _ANSWERED.sub(lambda found: found["before"] + _number_or_text(found["number"]), text)
    if any(character.isdigit() for character in text):
        return text
    whole = text.strip().strip(".!*").lower()
    return _WORDS.sub(lambda found: found[0] if found[0].lower() == "one" != whole else _number_or_text(found[0]), text)


def _number_or_text(phrase: str) -> str:
    """The number that the words say, or the words, where they are several numbers ("two three")."""
    sign, *words = ["", *re.split(r"[\s-]+", phrase.lower())]
    if words[0] in ("minus", "negative"):
        sign, words = "-", words[1:]
    total, part = 0, 0
    below, scale_below = 1000, 10**15  # the next number, and the next scale, must be smaller
    for word in [word for word in words if word != "and"]:
        if word in SCALES:
            if SCALES[word] >= scale_below:
                return phrase
            total, part, below, scale_below = total + max(part, 1) * SCALES[word], 0, 1000, SCALES[word]
        elif word == "hundred":
            if part >= 100:
                return phrase
            part, below = max(part, 1) * 100, 100
        elif VALUES[word] >= below:
            return phrase
        else:
            part += VALUES[word]
            below = 10 if VALUES[word] >= 20 else 0
    return f"{sign}{total + part}"


# ------------------------------------------------------------------------------------------------------ off the main thread

_helper: Any = None
_helper_lock = threading.Lock()


def _judge_in_helper(answers: Sequence[str | None], solution: Sequence[Any]) -> list[Verdict]:
    """The same on the main thread of a worker process, which can be killed."""
    from posttrain.rewards.reward_set import Judged, RewardOptions, RewardSet

    global _helper
    with _helper_lock:
        if _helper is None:
            options = RewardOptions(
                timeout=CALL_SECONDS, workers=1, stop_above=1.0, on_error="default", isolation="process"
            )
            _helper = RewardSet([judge_texts], options=options)
            atexit.register(_helper.close)
        with _helper.open() as round:
            texts = [{"answer": answer, "solution": str(gold)} for answer, gold in zip(answers, solution, strict=True)]
            round.add([Judged("", "", [], columns) for columns in texts])
            results = round.finish()
    golds, founds = (results.extras.get(name, [""] * len(texts)) for name in ("gold_parsed", "answer_parsed"))
    values = [None if value != value else float(value) for value in results.values[:, 0].tolist()]
    return [(value, gold or "", found or "") for value, gold, found in zip(values, golds, founds)]


def judge_texts(
    answer: list[str | None], solution: list[str], log_extra: Callable[[str, list[str]], None]
) -> list[float | None]:
    """What the helper process runs."""
    judged = _judge_here(answer, solution)
    log_extra("gold_parsed", [gold for _, gold, _ in judged])
    log_extra("answer_parsed", [found for _, _, found in judged])
    return [value for value, _, _ in judged]
