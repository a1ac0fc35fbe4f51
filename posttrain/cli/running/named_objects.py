"""Functions and classes by name: my_package.rewards.exact, or rewards.py:exact, or the name of a built-in reward or a judge."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.cli.errors import UsageError, nearest
from posttrain.rewards import BUILT_IN_REWARDS
from posttrain.rewards.judges import NAMED, named_judge
from posttrain.rewards.judging import BaseJudge


def reward_named(name: str, option: str = "reward_funcs") -> Any:
    """A reward function or a judge by built-in name, dotted path or file.py:name; judge:MODEL@URL is a chat judge; a reward model's
    folder or Hub id stays a name, and so does judge: with one of them."""
    if name in BUILT_IN_REWARDS:
        module, arguments = BUILT_IN_REWARDS[name]
        found = getattr(_guarded(partial(importlib.import_module, module), name, option), name)
        return found if arguments is None else found(*arguments)
    if name.startswith(NAMED):
        return _checked_judge(name, option)
    if is_model(name):
        return _checked_model(name, option)
    if "." not in name and ":" not in name:
        hint = (
            nearest(name, BUILT_IN_REWARDS)
            or " A function of yours is named as my_module.function or file.py:function."
        )
        raise UsageError(f"`{option}`: there is no built-in reward {name!r}.{hint}")
    found = object_named(name, option)
    if isinstance(found, type) and issubclass(found, BaseJudge):
        return _guarded(found, name, option)
    return found if isinstance(found, BaseJudge) else _checked_callable(found, name, option)


def is_model(name: str) -> bool:
    """A folder that is there, or a Hub id: neither my_module.function nor file.py:function."""
    path = name.partition("?")[0]
    return not name.startswith(NAMED) and (Path(path).expanduser().is_dir() or ("/" in path and ".py" not in path))


def judging_model(name: str) -> str | None:
    """The reward model that a reward is, or by which it compares; None: another reward."""
    path = name.removeprefix(NAMED)
    return path.partition("?")[0] if is_model(path) and "@" not in path else None


def _checked_judge(name: str, option: str) -> Any:
    try:
        judge = named_judge(name)
    except ValueError as error:
        raise UsageError(f"`{option}`: {error}") from error
    return f"{NAMED}{_checked_model(judge, option)}" if isinstance(judge, str) else judge


def _checked_model(name: str, option: str) -> str:
    """The name as RewardSet reads it, with options that it knows after a question mark."""
    from posttrain.models.load.saved_model import find_saved
    from posttrain.rewards.process_reward import named_reward

    path, _, query = name.partition("?")
    local = Path(path).expanduser()
    try:
        find_saved(path)
        named_reward(name)
    except ValueError as error:
        raise UsageError(f"`{option}`: {error}") from error
    return name if not local.exists() else f"{local}?{query}" if query else str(local)


def callable_named(name: str, option: str) -> Any:
    return _checked_callable(object_named(name, option), name, option)


def _checked_callable(found: Any, name: str, option: str) -> Any:
    if not callable(found):
        raise UsageError(f"`{option}`: {name} is a {type(found).__name__}, which cannot be called.")
    return found


def object_named(name: str, option: str) -> Any:
    """What a dotted path or file.py:name names; the working directory is searched first."""
    file, colon, attribute = name.rpartition(":")
    if colon:
        module, where = _from_file(file, option), file
    else:
        where, _, attribute = name.rpartition(".")
        if not where:
            raise UsageError(f"`{option}` is {name!r}; it takes my_module.name or file.py:name.")
        module = _imported(where, name, option)
    if not hasattr(module, attribute):
        names = [each for each in vars(module) if not each.startswith("_")]
        raise UsageError(f"`{option}`: {where} has no {attribute!r}.{nearest(attribute, names)}")
    return getattr(module, attribute)


def _from_file(file: str, option: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"`{option}`: there is no file {file}.")
    if path.suffix != ".py":
        raise UsageError(f"`{option}`: {file} cannot be loaded: Python files end in .py.")
    name = path.stem
    while (known := sys.modules.get(name)) is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"{name}_"  # a module of that name is there already; functions of files travel by value, whatever it is called
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _guarded(partial(spec.loader.exec_module, module), file, option)
    return module


def _imported(module: str, name: str, option: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return _guarded(partial(importlib.import_module, module), name, option)


def _guarded(load: Any, name: str, option: str) -> Any:
    try:
        return load()
    except Exception as error:  # the user's code runs here: whatever it raises is reported with its name
        place = _line_of(error)
        raise UsageError(f"`{option}`: {name} cannot be imported: {type(error).__name__}: {error}{place}.") from error


def _line_of(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename if trace is not None else ""
    return f" ({file}, line {trace.tb_lineno})" if file and not file.startswith("<") and "importlib" not in file else ""
