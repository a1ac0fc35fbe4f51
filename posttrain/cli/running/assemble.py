"""From the options of a run to a trainer: everything that can be wrong is looked at before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.running.loaded_model import model_name

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig

CONFIG_GROUPS = ("method", "shared", "training", "refused")
TASKS = {"sequence_reward": "SEQ_CLS", "token_labels": "TOKEN_CLS"}
"""Task of a method -> PEFT's name of it, where it is not CAUSAL_LM."""


def trainer_of(config: RunConfig, **more: Any) -> Any:
    """The trainer that the options describe. `more`: further arguments of it, such as callbacks."""
    return as_usage_error(lambda: _trainer_of(config, more))


def _trainer_of(config: RunConfig, more: dict[str, Any]) -> Any:
    from posttrain.cli.running.datasets_of import datasets_of
    from posttrain.cli.running.evals_of import evals_of
    from posttrain.methods.table import METHODS
    from posttrain.models.load.model import load_tokenizer

    args, model, rewards, parts = described(config)
    train, evaluation = datasets_of(config)
    evals = evals_of(config, args)
    given = {"model": model, "args": args, "train_dataset": train, "eval_dataset": evaluation}
    given |= {**rewards, **parts, **more}
    if named := config.get("tokenizer_name_or_path"):
        given["processing_class"] = load_tokenizer(named, None, config.get("trust_remote_code"))
    trainer = METHODS[config.method].trainer_class(**given)
    if evals:
        from posttrain.trainer.online.task_evals import TaskEvals

        TaskEvals(trainer, evals)
    if config.get("ignore_bias_buffers"):
        import torch

        flags = [name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool]
        trainer.model._ddp_params_and_buffers_to_ignore = flags
    return trainer


def described(config: RunConfig) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """What the options describe, before data are read: (config, model, arguments of `rewards_of`, those of `parts_of`)."""
    args, model = config_of(config), model_name(config)
    return args, model, rewards_of(config), parts_of(config)


def side_of(config: RunConfig, args: Any) -> Any:
    """A trainer without a model, for commands that look at the data of a run."""
    from posttrain.methods.table import METHODS

    named = config.get("tokenizer_name_or_path") or model_name(config)
    return METHODS[config.method].trainer_class.without_model(named, args)


def config_of(config: RunConfig) -> Any:
    """The method's config, with its own checks done."""
    from posttrain.cli.running.datasets_of import image_root
    from posttrain.methods.table import METHODS
    from posttrain.trainer.options.images import ImageConfig

    options = config.group(*CONFIG_GROUPS)
    options["model_init_kwargs"] = _model_arguments(config, options.get("model_init_kwargs"))
    if options["model_init_kwargs"] is None:
        del options["model_init_kwargs"]
    if "output_dir" not in options:
        options["output_dir"] = f"runs/{Path(model_name(config)).name}-{config.method}"
    args = METHODS[config.method].config_class(**options)
    METHODS[config.method].trainer_class.check_options(args)
    if isinstance(args, ImageConfig) and args.image_root is None:
        args.image_root = image_root(config)
    return args


def _model_arguments(config: RunConfig, given: Any) -> dict[str, Any] | str | None:
    wanted = {"revision": "model_revision", "attn_implementation": "attn_implementation", "dtype": "dtype"}
    options = {name: config.get(option) for name, option in wanted.items() if config.get(option) is not None}
    from posttrain.models.load.options import DTYPES

    if options.get("dtype") not in (None, *DTYPES):
        raise UsageError(f"{config.where('dtype')} is {options['dtype']!r}; it takes one of {', '.join(DTYPES)}.")
    if not options:
        return given
    if isinstance(given, str):
        given = json.loads(given)
    if twice := [name for name in options if name in (given or {})]:
        raise UsageError(f"`{wanted[twice[0]]}` and `model_init_kwargs` both set {twice[0]}; leave one of them out.")
    return {**(given or {}), **options}


def parts_of(config: RunConfig) -> dict[str, Any]:
    """`peft_config` and `quantization_config` of the trainer, where the options ask for them."""
    from posttrain.methods.table import METHODS
    from posttrain.models.load.options import ADAPTER_OPTIONS, ModelOptions, get_peft_config, get_quantization_config

    given = config.group("model")
    options = ModelOptions(**{name: config.get(name) for name in ModelOptions.__dataclass_fields__})
    options.lora_task_type = options.lora_task_type or TASKS.get(METHODS[config.method].trainer_class.task)
    if not options.use_peft:
        if lone := [name for name in given if name.startswith(ADAPTER_OPTIONS)]:
            raise UsageError(f"{config.where(lone[0])} is set, and no adapter is trained: add --use_peft.")
        if bits := [name for name in ("load_in_4bit", "load_in_8bit") if getattr(options, name)]:
            raise UsageError(f"{config.where(bits[0])}: quantised weights are not trained; add --use_peft.")
    made = {"quantization_config": get_quantization_config(options), "peft_config": get_peft_config(options)}
    return {name: part for name, part in made.items() if part is not None}


def rewards_of(config: RunConfig) -> dict[str, Any]:
    """`reward_funcs`, `tools`, `environment_factory`, `group_filter_func` and `rollout_func` of the trainer, imported."""
    from posttrain.cli.running.named_objects import callable_named, reward_named
    from posttrain.methods.table import METHODS
    from posttrain.rewards.reward_set import refuse_beside_judge

    options = config.table.options
    needs_rewards = getattr(METHODS[config.method].trainer_class, "needs_rewards", False)
    found: dict[str, Any] = {}
    given = [
        config.get(name) or () if name in options else () for name in ("reward_funcs", "reward_model_name_or_path")
    ]
    functions, models = [reward_named(name) for name in given[0]], list(given[1])
    if functions or models:
        refuse_beside_judge([*functions, *models])
        found["reward_funcs"] = [*functions, *models]
    if "tools" in options and config.get("tools"):
        found["tools"] = [callable_named(name, "tools") for name in config.get("tools")]
    for name in ("environment_factory", "group_filter_func", "rollout_func"):
        if name in options and config.get(name):
            found[name] = callable_named(config.get(name), name)
    if "group_filter_func" in options and ("group_filter_func" in found) != (
        config.get("num_remains_in_group") is not None
    ):
        raise UsageError("--group_filter_func and --num_remains_in_group need each other: give both, or neither.")
    if needs_rewards and "reward_funcs" not in found and "environment_factory" not in found:
        raise UsageError(
            f"posttrain {config.method} needs a reward: --reward_funcs with a built-in name, my_module.function or "
            "file.py:function, or --reward_model_name_or_path."
        )
    if "reward_funcs" not in options:
        return found
    weights, count = config.get("reward_weights"), len(found.get("reward_funcs", ()))
    if weights is not None and "environment_factory" not in found and len(weights) != count:
        raise UsageError(
            f"{config.where('reward_weights')} has {len(weights)} weights for {count} rewards; give one for each."
        )
    return found
