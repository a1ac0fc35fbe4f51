"""Options reach a function by name: it takes `beta`, so it is given the `beta` of the config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def options_taken(function: Callable[..., Any], inputs: int = 1) -> set[str]:
    """Names of the options of `function`: its parameters after the first `inputs` (tensors, batches, pairs)."""
    return {parameter.name for parameter in _option_parameters(function, inputs)}


def call(function: Callable[..., Any], *inputs: Any, options: Any) -> Any:
    """`function(*inputs, ...)`, every further parameter taken by its name from `options` (a mapping or a config).

    A parameter that `options` does not have keeps its default; without a default that is an error.
    """
    is_mapping = isinstance(options, Mapping)
    given: dict[str, Any] = {}
    for parameter in _option_parameters(function, len(inputs)):
        name = parameter.name
        if name in options if is_mapping else hasattr(options, name):
            given[name] = options[name] if is_mapping else getattr(options, name)
        elif parameter.default is inspect.Parameter.empty:
            where = f"the mapping with {sorted(options)}" if is_mapping else type(options).__name__
            raise TypeError(
                f"{function_name(function)} takes an option {name!r}, which {where} does not have. Rename the parameter to an "
                "option that exists, or give it a default."
            )
    return function(*inputs, **given)


def unused_options(
    functions: Iterable[Callable[..., Any]], all_loss_options: Iterable[str], set_by_user: Iterable[str]
) -> list[str]:
    """Loss options that the user set and none of the chosen `functions` takes, sorted; the trainer raises for them."""
    taken = set().union(*(options_taken(function) for function in functions))
    return sorted((set(all_loss_options) & set(set_by_user)) - taken)


def function_name(function: Callable[..., Any]) -> str:
    """How to call a function in an error message; partials and callable objects have no name of their own."""
    return getattr(function, "__name__", repr(function))


def _option_parameters(function: Callable[..., Any], inputs: int) -> list[inspect.Parameter]:
    return [p for p in list(inspect.signature(function).parameters.values())[inputs:] if p.kind in _NAMED]
