"""Chat templates with limits. A template is a program that comes with a tokenizer: it may loop, or make a text of gigabytes.

Jinja has no `while`, so a render ends; but loops nest, and powers and repeated texts grow without bound. What is looped over is
counted (by its length: an iteration costs nothing), and products are looked at before they are made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from transformers.utils import chat_template_utils

MAX_ITERATIONS = 10_000_000
MAX_CHARACTERS = 10_000_000
COUNTED = "posttrain_counted"


class TemplateLimit(ValueError):
    """A template that does more than any chat needs."""


class BoundedTemplate:
    """A compiled template; `render` raises a TemplateLimit where it does too much."""

    def __init__(self, text: str) -> None:
        self._counts = threading.local()
        environment = chat_template_utils._cached_compile_jinja_template("").environment  # its own, not the cached one
        environment.filters[COUNTED] = self._counted
        environment.intercepted_binops = frozenset(OPERATORS)
        environment.call_binop = lambda context, operator, left, right: OPERATORS[operator](left, right)
        tree = environment.parse(text)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, COUNTED, [], [], None, None, lineno=loop.lineno)
        tree.set_environment(environment)
        self._template = environment.template_class.from_code(
            environment, environment.compile(tree), environment.globals
        )

    def render(self, **values: Any) -> str:
        self._counts.iterations = 0
        return self._template.render(**values)

    def _counted(self, items: Any) -> Any:
        """The same items; how many they are is added up over the render."""
        if not isinstance(items, (Sized, jinja2.Undefined)):
            items = list(items)
        self._counts.iterations += len(items)
        if self._counts.iterations > MAX_ITERATIONS:
            raise TemplateLimit(f"it loops more than {MAX_ITERATIONS:,} times")
        return items


def _times(left: Any, right: Any) -> Any:
    for text, count in ((left, right), (right, left)):
        if isinstance(text, (str, list, tuple)) and isinstance(count, int) and len(text) * count > MAX_CHARACTERS:
            raise TemplateLimit(f"it repeats something to more than {MAX_CHARACTERS:,} characters or entries")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_CHARACTERS:
        raise TemplateLimit(f"it computes a power of more than {MAX_CHARACTERS:,} bits")
    return left**right


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"*": _times, "**": _power}


@lru_cache(maxsize=64)
def bounded_template(text: str) -> BoundedTemplate:
    return BoundedTemplate(text)
