"""posttrain/cli/options.json: the options of every method as plain data, read from the configs."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.cli.options.run import GROUPS
from posttrain.core.options import default_of, is_ours, is_refused
from posttrain.methods.table import METHODS, Method
from posttrain.trainer.options.base import BaseConfig

FILE = Path(__file__).resolve().parents[1] / "posttrain" / "cli" / "options.json"
PLAIN = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", type(None): "none"}
ARGUMENTS = {"reward_model_name_or_path": "reward_funcs"}
"""Option of the group `rewards` -> the trainer's argument that it becomes a part of, where that has another name."""

TWICE = {"dtype"}
"""Options of TRL's asynchronous configs that the command line has for every method, with the same effect."""


def written() -> str:
    """The text of the file."""
    pool: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    methods = {}
    for name, method in METHODS.items():
        numbers = []
        for spec in specs_of(method):
            key = json.dumps(spec, sort_keys=True)
            if key not in places:
                places[key] = len(pool)
                pool.append(spec)
            numbers.append(places[key])
        methods[name] = {"summary": method.summary, "options": numbers}
    lines = ",\n".join(json.dumps(spec) for spec in pool)
    return f'{{"methods": {json.dumps(methods)},\n"options": [\n{lines}\n]}}\n'


def specs_of(method: Method) -> Iterator[dict[str, Any]]:
    """All options of a method, its own first."""
    config, arguments = method.config_class, arguments_of(method.trainer_class)
    shared = {field.name for field in dataclasses.fields(BaseConfig) if is_ours(field)}
    hints = typing.get_type_hints(config)
    found: dict[str, list[dict[str, Any]]] = {"method": [], "model": [], "data": [], "rewards": [], "launch": []}
    found |= {"shared": [], "training": [], "refused": []}
    for group, options in GROUPS.items():
        kinds = typing.get_type_hints(options)
        for field in dataclasses.fields(options):
            if group != "rewards" or ARGUMENTS.get(field.name, field.name) in arguments:
                found[group].append(spec_of(field, kinds[field.name], group))
    for field in dataclasses.fields(config):
        if not field.init or field.name.startswith("_") or field.name in TWICE:
            continue
        if is_refused(field):
            group = "refused"
        elif is_ours(field):
            group = "shared" if field.name in shared else "method"
        else:
            group = "training"
        found[group].append(spec_of(field, hints[field.name], group))
    names = [spec["name"] for specs in found.values() for spec in specs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{config.__name__} and the options of a run both have {', '.join(sorted(twice))}.")
    for specs in found.values():
        yield from specs


def arguments_of(trainer: type) -> set[str]:
    """Names of a trainer's arguments, those of its bases included as long as it hands unknown ones on to them."""
    found: set[str] = set()
    for base in trainer.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        found |= parameters.keys()
        if "__init__" in vars(base) and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            break
    return found


def spec_of(field: dataclasses.Field, hint: Any, group: str) -> dict[str, Any]:
    kinds, choices, items = set(), [], set()
    for member in members(hint):
        kinds.add(kind_of(member))
        choices += choices_of(member)
        if typing.get_origin(member) is list:
            items |= {kind_of(item) for item in members((typing.get_args(member) or (str,))[0])}
    default = default_of(field)
    default = default.value if isinstance(default, enum.Enum) else default
    if default is None:
        kinds.add("none")
    given = field.metadata.get("help", "")
    spec = {
        "name": field.name,
        "group": group,
        "kinds": sorted(kinds),
        "default": default,
        "help": " ".join(given.split()),
    }
    if choices:
        spec["choices"] = choices
    if items:
        spec["items"] = sorted(items)
    return spec


def members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(hint) for part in members(member)]
    return [hint]


def kind_of(member: Any) -> str:
    origin = typing.get_origin(member) or member
    if origin is list or origin in (tuple, set):
        return "list"
    if origin is typing.Literal or (isinstance(origin, type) and issubclass(origin, enum.Enum)):
        return "str"
    return PLAIN.get(origin, "str")  # what is left is written as text, such as a path


def choices_of(member: Any) -> list[str]:
    if typing.get_origin(member) is typing.Literal:
        return [str(value) for value in typing.get_args(member)]
    if isinstance(member, type) and issubclass(member, enum.Enum):
        return [str(value.value) for value in member]
    return []
