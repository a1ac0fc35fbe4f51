"""What a reward function may return, and what is made of it. Needs the standard library only: it runs in the workers.

The answer to a call about n samples:

| returned                                         | ruling                                                      |
|--------------------------------------------------|-------------------------------------------------------------|
| list, tuple, deque, range of n entries           | accepted                                                    |
| numpy array, tensor, pandas Series of n entries  | accepted                                                    |
| array or tensor with two or more dimensions      | refused, the shape is named                                 |
| generator, map or other iterator of n entries    | accepted; read up to n + 1 entries, so an endless one ends  |
| any of these with another number of entries      | refused for every sample of the call, both numbers named    |
| one number, also in a call about one sample      | refused: write [number]                                     |
| None for the whole call                          | refused: a `return` is missing (or write [None] * n)        |
| string, bytes, dict, set, async generator, other | refused                                                     |
| awaitable                                        | awaited, then ruled on as above                             |

Each entry:

| entry                                            | ruling                                          |
|--------------------------------------------------|-------------------------------------------------|
| float, int, Fraction, Decimal                    | the number                                      |
| bool, numpy bool                                 | 1.0 or 0.0                                      |
| numpy scalar, array or tensor with one entry     | its number                                      |
| None                                             | no opinion: the reward does not apply           |
| NaN, inf, -inf, an integer beyond float          | refused ("invalid") for that sample alone       |
| string (also "1.0"), list, dict, complex, other  | refused ("invalid") for that sample alone       |

A refused entry is a failure of its sample, which the policy `on_error` decides about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any


class InvalidAnswer(Exception):
    """The whole answer of a call cannot be used; the message says why."""


class InvalidValue(Exception):
    """One entry of an answer cannot be used; the message says why."""


def entries_of(returned: Any, count: int) -> list[Any]:
    """The `count` entries of what a function returned, or InvalidAnswer."""
    if returned is None:
        raise InvalidAnswer(
            f"it returned None for {count} samples: is a `return` missing? No opinion is written [None]."
        )
    if isinstance(returned, str | bytes | bytearray | Mapping | Set):
        raise InvalidAnswer(f"it returned a {type(returned).__name__}, not a list of {count} numbers.")
    if hasattr(returned, "tolist"):  # numpy, torch, pandas
        _refuse_dimensions(returned, count)
        entries = returned.tolist()
    elif isinstance(returned, Sequence):
        entries = list(returned)
    elif isinstance(returned, Iterator):
        entries = list(itertools.islice(returned, count + 1))
        if len(entries) > count:
            raise InvalidAnswer(f"it yielded more than the {count} values that {count} samples need.")
    elif hasattr(returned, "__iter__") and not hasattr(returned, "__aiter__"):
        return entries_of(iter(returned), count)
    else:
        raise InvalidAnswer(_not_a_list(returned, count))
    if len(entries) != count:
        raise InvalidAnswer(f"it returned {len(entries)} values for {count} samples.")
    return entries


def _refuse_dimensions(array: Any, count: int) -> None:
    shape = tuple(getattr(array, "shape", ()))
    if not shape:
        raise InvalidAnswer(_not_a_list(array, count))
    if len(shape) > 1:
        raise InvalidAnswer(f"it returned an array of shape {shape} for {count} samples; wanted is ({count},).")


def _not_a_list(returned: Any, count: int) -> str:
    single = hasattr(returned, "__float__")
    advice = " Write [value]: one entry for each sample of the call." if single else ""
    return f"it returned one {type(returned).__name__}, not a list of {count} numbers.{advice}"


def number_of(entry: Any) -> float | None:
    """The finite number that an entry stands for, None for "no opinion", or InvalidValue."""
    if entry is None:
        return None
    number = _float_of(entry)
    if not math.isfinite(number):
        raise InvalidValue(f"it returned {number}, which is not a finite number.")
    return number


def _float_of(entry: Any) -> float:
    if isinstance(entry, str | bytes | bytearray):
        raise InvalidValue(f"it returned the text {_short(entry)}, not a number.")
    try:
        # One-element arrays and tensors hand their number over by `item`; `float` of them is on its way out in numpy.
        return float(entry.item() if hasattr(entry, "item") else entry)
    except OverflowError:
        raise InvalidValue("it returned an integer that is too large for a float.") from None
    except Exception as error:  # foreign types fail in ways of their own; the sentence carries it
        raise InvalidValue(
            f"it returned a {type(entry).__name__} ({_short(entry)}), not a number ({type(error).__name__}: {error})."
        ) from None


def _short(value: Any, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a broken __repr__ must not hide what was wrong with the value
        text = f"<no repr: {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
