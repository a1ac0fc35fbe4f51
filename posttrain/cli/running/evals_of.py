"""`evals` of a file of options as EvalSpecs: every entry is looked at, rows and rewards included, before a model is loaded."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, nearest
from posttrain.cli.options.values import KIND_NAMES

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig
    from posttrain.evaluation.spec import EvalSpec

KINDS = {kind: KIND_NAMES[kind.__name__] for kind in (int, float, str, bool, dict, list)}
LISTS = ("reward", "reward_weights")


def evals_of(config: RunConfig, args: Any) -> list[EvalSpec]:
    """The tasks of a run. `args`: its config, for the tokenizer with which the prompts are tried."""
    from posttrain.methods.table import METHODS
    from posttrain.models.scoring.heads import CAUSAL_LM

    entries = config.get("evals")
    if not entries:
        return []
    if METHODS[config.method].trainer_class.task != CAUSAL_LM:
        raise UsageError(
            f"{config.where('evals')}: a reward model writes nothing, so it has no task scores. Leave it out."
        )
    specs = [spec_of(entry, f"`evals`, entry {number}") for number, entry in enumerate(entries, 1)]
    names = [spec.name for spec in specs]
    for number, name in enumerate(names, 1):
        if name in names[: number - 1]:
            raise UsageError(f"`evals`, entry {number}: another entry is named {name!r} too; set `name`.")
    _try_rows(config, args, specs)
    return specs


def spec_of(entry: Any, where: str) -> EvalSpec:
    """One entry; UsageError names it and its key."""
    from posttrain.cli.running.named_objects import reward_named
    from posttrain.evaluation.spec import EvalSpec

    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {entry!r}; it takes a mapping with `data` and `reward`.")
    known = {field.name: hint for field, hint in _hints(EvalSpec)}
    for key, value in entry.items():
        if key not in known:
            raise UsageError(f"{where}: there is no key `{key}`.{nearest(key, known)} Keys are {', '.join(known)}.")
        _check_kind(key, value, known[key], where)
    for key in ("data", "reward"):
        if not entry.get(key):
            raise UsageError(f"{where} has no `{key}`.")
    rewards = entry["reward"] if isinstance(entry["reward"], list) else [entry["reward"]]
    if wrong := [one for one in rewards if not isinstance(one, str)]:
        raise UsageError(f"{where}: `reward` is {wrong[0]!r}; it takes names of rewards.")
    try:
        functions = [reward_named(one, "reward") for one in rewards]
        picks = {"select_by": reward_named(entry["select_by"], "select_by")} if entry.get("select_by") else {}
        return EvalSpec(**{**entry, "reward": functions, **picks})
    except (UsageError, ValueError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from error


def _hints(spec: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(spec)
    return [(field, hints[field.name]) for field in dataclasses.fields(spec)]


def _check_kind(key: str, value: Any, hint: Any, where: str) -> None:
    allowed = _kinds(key, hint)
    fits = type(value) in allowed or (type(value) is int and float in allowed) or (value is None and None in allowed)
    if not fits:
        wanted = " or ".join(KINDS[kind] for kind in allowed if kind is not None)
        raise UsageError(f"{where}: `{key}` is {value!r}; it takes {wanted}.")


def _kinds(key: str, hint: Any) -> list[Any]:
    if key in ("data", "reward", "select_by"):
        return [str, list] if key in LISTS else [str]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    found = []
    for part in parts:
        origin = typing.get_origin(part) or part
        found.append(None if origin is type(None) else list if key in LISTS else origin if origin in KINDS else dict)
    return found


def _try_rows(config: RunConfig, args: Any, specs: list[EvalSpec]) -> None:
    """What is found wrong with the rows now is not found after minutes of loading. They are encoded once and kept."""
    from posttrain.cli.running.loaded_model import model_name
    from posttrain.trainer.construction import renderer_of

    source = config.get("tokenizer_name_or_path") or model_name(config)
    renderer, _ = renderer_of(source, None, args, f"posttrain {config.method}")
    for number, spec in enumerate(specs, 1):
        try:
            spec.rows(renderer, args.chat_template_kwargs)
        except (ValueError, TypeError) as error:
            raise UsageError(f"`evals`, entry {number}: {error}") from error
