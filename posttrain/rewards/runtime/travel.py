"""Can a reward function be sent to another process? Pickled by value, so that the child need not import the user's script."""

from __future__ import annotations

import io
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

LARGEST_FUNCTION = 64 * 2**20  # bytes; more is data or a model, of which every worker would hold a copy

_registering = threading.Lock()  # cloudpickle keeps the modules that go by value in one table


class CannotTravel(Exception):
    """The message says why."""


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "is_cuda", False) is True:
            raise CannotTravel("it refers to a tensor on a GPU")
        return super().reducer_override(obj)


class _Bounded(io.BytesIO):
    """Stops before a table of gigabytes is written out in full."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LARGEST_FUNCTION:
            raise CannotTravel(f"it carries more than {LARGEST_FUNCTION // 2**20} MiB with it")
        return super().write(data)


def packed(function: Callable[..., Any]) -> bytes:
    """The function as bytes, or CannotTravel.

    What is defined in the user's own files goes by value, so that no file of theirs is imported again; where that fails, as
    for functions that refer to a lock or a large table of their module, the module is imported by name in the worker.
    """
    module = _own_module(function)
    reason = None
    for by_value in (module, None) if module else (None,):
        try:
            return _pickled(function, by_value)
        except CannotTravel as error:
            reason = reason or error
    raise reason


def _pickled(function: Callable[..., Any], by_value: Any) -> bytes:
    buffer = _Bounded()
    try:
        with _going_by_value(by_value):
            _Pickler(buffer).dump(function)
    except CannotTravel:
        raise
    except Exception as error:  # every type refuses to be pickled in its own way
        raise CannotTravel(f"it cannot be pickled ({type(error).__name__}: {error})") from error
    return buffer.getvalue()


@contextmanager
def _going_by_value(module: Any) -> Iterator[None]:
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    with _registering:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _own_module(function: Callable[..., Any]) -> Any:
    """The module of the user's that defines this; None for `__main__` (by value anyway) and for what is installed."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    home = function if hasattr(function, "__qualname__") else type(function)
    module = sys.modules.get(getattr(home, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "builtins") or module.__name__.split(".")[0] == "posttrain":
        return None
    file = getattr(module, "__file__", None)
    return module if file and not _is_installed(Path(file)) else None


def _is_installed(file: Path) -> bool:
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(file.is_relative_to(place) for place in places if place)
