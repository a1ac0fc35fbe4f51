"""What a trainer is made of before anything is trained: its options, tokenizer, loading of the model, data and their loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments, enable_full_determinism, set_seed

from posttrain.core.console import say, set_verbosity
from posttrain.core.vision import VisionFamily
from posttrain.data.collate import Collator, Pixels
from posttrain.data.loader import EpochBatches, StreamBatches, UnitLoader, first_of
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.template_checks import trained_stop_token
from posttrain.data.render.templates import BUILT_IN_FORMATS, use_chat_format
from posttrain.data.rows.formats import RowFormat
from posttrain.data.store.prepare import has_images, prepare_dataset
from posttrain.data.unpaired import PartneredBatches, PartneredRows, Partners
from posttrain.data.vision.augmentation import DrawnBatches, DrawnRows, DrawnStream
from posttrain.data.vision.families import FAMILIES
from posttrain.data.vision.found_family import found_family
from posttrain.models.load.image_models import sees_images
from posttrain.models.load.model import (
    LoadOptions,
    config_of_model,
    innermost_model,
    load_processing_class,
    load_tokenizer,
    model_type_of,
    model_without_weights,
)
from posttrain.models.load.vocabulary import copy_chat_template, fit_embeddings
from posttrain.models.vision.parts import image_parts
from posttrain.trainer.options.base import BaseConfig, SharedPromptsConfig
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.vision import Vision, refuse_other_ids

logger = logging.getLogger(__name__)


def config_of(args: Any, config_class: type[BaseConfig], model: Any, trainer: str, method: str) -> BaseConfig:
    """The options that were given, as `config_class`; `trainer` names who asks."""
    if args is None:
        name = type(model).__name__ if isinstance(model, nn.Module) else str(model).rstrip("/").split("/")[-1]
        return config_class(output_dir=f"{name}-{method.upper()}")
    if isinstance(args, config_class):
        return args
    if type(args) is TrainingArguments:
        known = args.to_dict() | {"hub_token": args.hub_token}
        names = [name for name, field in config_class.__dataclass_fields__.items() if field.init]
        return config_class(**{name: known[name] for name in names if name in known})
    raise TypeError(f"`args` is a {type(args).__name__}; {trainer} takes a {config_class.__name__}.")


REFUSED_ARGUMENTS = {
    "model_init": "{trainer} trains the model it is given: pass it, or its name, as `model`, and leave `model_init` out. "
    "`posttrain sweep` tries several settings, each from a fresh model.",
    "preprocess_logits_for_metrics": "{trainer} keeps no logits that `preprocess_logits_for_metrics` could read: leave it out. "
    "`compute_metrics` is given the rewards of the answers and their labels.",
    "data_collator": "{trainer} lays out batches of what is written itself: leave `data_collator` out.",
    "compute_metrics": "{trainer} is evaluated on what it writes: leave `compute_metrics` out. A reward function of weight 0 "
    "(`reward_weights`) is logged and changes nothing.",
    "formatting_func": "{trainer} has to tell prompts from completions: give rows of a prompt and a completion, or of messages, "
    "and leave `formatting_func` out.",
    "model_adapter_name": "{trainer} trains the active adapter of a PeftModel: leave `model_adapter_name` out and call "
    "`model.set_adapter(...)` before.",
    "ref_adapter_name": "{trainer} compares a PeftModel with a frozen copy of its active adapter: leave `ref_adapter_name` out. "
    "Pass another reference as `ref_model`.",
}
"""Arguments of TRL's constructors that cannot be honoured, with the reason. They keep their position, for positional calls."""


def refuse_arguments(trainer: str, model: Any, **given: Any) -> None:
    """Raise for the first of REFUSED_ARGUMENTS that is given; a missing `model` counts as a `model_init`."""
    if model is None:
        given = {"model_init": "in the place of `model`"}
    for name, value in given.items():
        if value is not None:
            raise ValueError(REFUSED_ARGUMENTS[name].format(trainer=trainer))


def prepare_process(args: BaseConfig) -> None:
    """What holds for the whole process, before anything is loaded."""
    if args.n_gpu > 1:
        raise ValueError("nn.DataParallel is not supported: start one process per GPU (accelerate launch or torchrun).")
    set_verbosity(args.verbosity)
    if args.full_determinism:  # before the first kernel: cuBLAS reads its part of it once
        enable_full_determinism(args.seed)
    set_seed(args.seed)


# ---- the tokenizer -------------------------------------------------------------------------------------------------------


def renderer_of(
    model: str | Path | nn.Module, processing_class: Any, args: BaseConfig, trainer: str
) -> tuple[Renderer, Vision | None]:
    """What renders a run's rows, with its tokenizer, and what shows it images. Where it has to find a chat format itself, it knows
    the type of the model."""
    if processing_class is None:
        load = load_processing_class if isinstance(args, ImageConfig) else load_tokenizer
        processing_class = load(model, args.model_init_kwargs, args.trust_remote_code)
    is_processor = hasattr(processing_class, "image_processor") and hasattr(processing_class, "tokenizer")
    tokenizer = processing_class.tokenizer if is_processor else processing_class
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        raise TypeError(
            f"`processing_class` is a {type(tokenizer).__name__}; {trainer} needs the tokenizer of the model, or its processor."
        )
    prepare_tokenizer(tokenizer, args)
    if (
        is_processor and args.chat_template_path is not None
    ):  # it has a template of its own, which is the one that is saved
        processing_class.chat_template = tokenizer.chat_template
    config = config_of_model(model, args.model_init_kwargs) if is_processor and isinstance(args, ImageConfig) else {}
    if config.get("model_type") in FAMILIES:
        return _shown_images(config, processing_class, args)
    if isinstance(model, nn.Module) and config:  # one that came from no file names no class
        config = {**config, "architectures": config.get("architectures") or [type(innermost_model(model)).__name__]}
    if config and sees_images(config):
        try:
            return _by_conventions(model, config, processing_class, args)
        except Exception as error:  # then it is trained on texts, and rows with images are refused
            logger.warning(
                f"Models of type {config['model_type']!r} are in no table of families, and are shown no images: "
                f"{str(error).rstrip('.')}."
            )
    _refuse_image_options(args, trainer)
    renderer = Renderer(processing_class if is_processor else tokenizer)
    if not renderer.has_template:
        renderer.model_type = model_type_of(model, args.model_init_kwargs)
    return renderer, None


def _shown_images(
    config: dict[str, Any], processor: Any, args: ImageConfig, family: VisionFamily | None = None
) -> tuple[Renderer, Vision]:
    vision = Vision.of(config, processor, args, family)
    return Renderer(processor, layouts=vision.layouts, train_images=args.loss_on_image_tokens), vision


def _by_conventions(model: Any, config: dict[str, Any], processor: Any, args: ImageConfig) -> tuple[Renderer, Vision]:
    """Of a model of a family that is in no table. What it is shown is tried when it is loaded."""
    if not isinstance(model, nn.Module):
        options = {"model_init_kwargs": args.model_init_kwargs or {}, "trust_remote_code": args.trust_remote_code}
        model = model_without_weights(model, LoadOptions(**options))
    family = found_family(config, processor, *image_parts(innermost_model(model)))
    renderer, vision = _shown_images(config, processor, args, family)
    refuse_other_ids(vision, renderer)
    return renderer, vision


def _refuse_image_options(args: BaseConfig, trainer: str) -> None:
    """Options of images have no effect where none can be seen."""
    of_images = {field.name for field in fields(ImageConfig)} - {field.name for field in fields(BaseConfig)}
    set_ones = sorted(args.set_by_user() & of_images) if isinstance(args, ImageConfig) else []
    if set_ones:
        raise ValueError(
            f"`{set_ones[0]}` is set, and this model reads texts only: leave it out, or give {trainer} a model that sees images "
            "and its processor."
        )


def prepare_tokenizer(tokenizer: Any, args: BaseConfig) -> None:
    """Apply `chat_template_path`, `eos_token` and `pad_token`; a tokenizer without padding uses its end token."""
    if args.chat_template_path is not None:
        _set_template(tokenizer, args.chat_template_path)
    for name in ("eos_token", "pad_token"):
        wanted = getattr(args, name)
        if wanted is not None:
            is_unknown = tokenizer.convert_tokens_to_ids(wanted) in (None, tokenizer.unk_token_id)
            if is_unknown and wanted != tokenizer.unk_token:
                raise ValueError(
                    f"`{name}` is {wanted!r}, which is not in the vocabulary of {type(tokenizer).__name__}."
                )
            setattr(tokenizer, name, wanted)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("The tokenizer has neither a padding nor an end token: set `pad_token` or `eos_token`.")
        tokenizer.pad_token = tokenizer.eos_token


def _set_template(tokenizer: Any, source: str) -> None:
    path = Path(source)
    if path.suffix in (".jinja", ".j2"):
        if not path.is_file():
            raise FileNotFoundError(f"`chat_template_path` is {source}, but there is no such file.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    elif source in BUILT_IN_FORMATS:
        for note in use_chat_format(tokenizer, source).notes:
            logger.warning(note)
    else:
        copy_chat_template(tokenizer, source)


def adopt_vocabulary(model: nn.Module, renderer: Renderer, args: BaseConfig) -> None:
    """Give the model rows for tokens that a cloned template added, and its configs the padding and end tokens."""
    innermost, tokenizer = innermost_model(model), renderer.tokenizer
    fit_embeddings(innermost, tokenizer)
    innermost.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    innermost.config.pad_token_id = tokenizer.pad_token_id
    if args.eos_token is not None:
        innermost.config.eos_token_id = tokenizer.eos_token_id
    generation = getattr(innermost, "generation_config", None)
    if generation is None:
        return
    generation.pad_token_id = tokenizer.pad_token_id
    known = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    known = [token for token in known if token is not None]
    closing = trained_stop_token(renderer) if renderer.has_template else None
    if closing is not None and closing not in known:
        logger.warning(
            f"Turns of this chat template end with {tokenizer.convert_ids_to_tokens(closing)!r} (token {closing}), which the "
            f"model's generation config does not stop at ({known or 'nothing'}): it is added there and to the stops of rollouts."
        )
    ends = [tokenizer.eos_token_id if args.eos_token is not None else None, closing, *known]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    if ends != known:
        generation.eos_token_id = ends


# ---- the model -----------------------------------------------------------------------------------------------------------


def load_options(
    args: BaseConfig, task: str, peft_config: Any, quantization_config: Any, train_dataset: Any, **seen: Any
) -> LoadOptions:
    """`seen`: arguments about images."""
    return LoadOptions(
        # A frozen base needs no masters: its shards are kept in the dtype that it computes in.
        dtype=args.load_dtype if peft_config is None else args.compute_dtype,
        task=task,
        model_init_kwargs=dict(args.model_init_kwargs or {}),
        trust_remote_code=args.trust_remote_code,
        disable_dropout=args.disable_dropout,
        layer_kernels=args.layer_kernels(_steps_ahead(args, train_dataset)),
        peft_config=peft_config,
        fp8=args.fp8,
        fuse_lora=args.fuse_lora,
        quantization_config=quantization_config,
        layout=args.layout,
        share_prefixes=isinstance(args, SharedPromptsConfig) and args.share_prompts,
        router_aux_loss_coef=args.router_aux_loss_coef,
        device=args.device,
        sharded=args.sharding is not None,
        row_part=args.row_part,
        **seen,
    )


def _steps_ahead(args: BaseConfig, train_dataset: Any) -> int:
    """Optimizer steps of the run, as far as they can be known before the model is there."""
    if args.max_steps > 0 or not hasattr(train_dataset, "__len__"):
        return max(args.max_steps, 0)
    rows_a_step = args.train_batch_size * args.gradient_accumulation_steps * args.readers
    return int(args.num_train_epochs * len(train_dataset) / rows_a_step)


# ---- the data ------------------------------------------------------------------------------------------------------------


def prepared_rows(
    dataset: Any,
    name: str,
    args: BaseConfig,
    formats: tuple[RowFormat, ...],
    renderer: Renderer,
    formatting_func: Callable | None,
    vision: Vision | None = None,
    **of_method: Any,
) -> Any:
    """Check and encode one dataset; what is prepared already passes. `of_method`: arguments of PrepareOptions."""
    if dataset is None or hasattr(dataset, "report"):
        return dataset
    shared = {
        "max_length": args.max_length,
        "truncation_mode": args.truncation_mode,
        "on_bad_rows": args.on_bad_rows,
        "chat_template_kwargs": args.chat_template_kwargs,
        "formatting_func": formatting_func,
        "cache_dir": args.dataset_cache_dir,
        "bad_rows_file": str(Path(args.output_dir) / f"bad_rows_{name}.jsonl"),
        "shuffle_seed": args.seed if args.shuffle_dataset and name == "train" else None,
    }
    if vision is not None:
        shared |= {"image_limits": vision.limits, "max_length": _longest(args, dataset, vision)}
    options = PrepareOptions(**{**shared, **of_method})
    with args.main_process_first(desc=f"preparing the {name} dataset"):
        prepared = prepare_dataset(dataset, formats, renderer, options, name, args.dataset_num_proc)
    if args.should_log:
        say(prepared.report.summary())
    if vision is not None:
        vision.add(dataset, prepared, name)
    return prepared


def refuse_nothing(rows: Any, name: str) -> None:
    """Of a run: `check` says what is wrong with such a dataset. A stream has no length."""
    if hasattr(rows, "__len__") and not len(rows):
        raise ValueError(f"No row of the {name} dataset is left.\n{rows.report.summary()}")


def _longest(args: BaseConfig, dataset: Any, vision: Vision) -> int | None:
    """`max_length`; left at its default, which is less than one photograph in many families, the context for rows with images."""
    is_set = {"max_length", "max_prompt_length"} & args.set_by_user()  # two names of one option, where both exist
    if is_set or getattr(args, "packing", False) or not has_images(dataset):
        return args.max_length
    if args.should_log:
        say("Rows have images, and `max_length` is not set: they are cut at the model's context, if at all.")
    return vision.context


def collator_of(
    given: Any,
    roles: tuple[str, ...],
    pad_token_id: int,
    layout: str,
    args: BaseConfig,
    pixels: Pixels | None = None,
    graphs: int = 1,
) -> Collator:
    if given is None:
        return Collator(roles, pad_token_id, layout, args.pad_multiple, pixels=pixels, graphs=graphs)
    if not isinstance(given, Collator):
        raise TypeError(
            f"`data_collator` is a {type(given).__name__}; batches are made from Samples by posttrain.data.collate.Collator. "
            "Change what goes into a Sample with `formatting_func`, or derive from Collator."
        )
    return given


def unit_loader(
    dataset: Any,
    args: BaseConfig,
    collator: Collator,
    batch_size: int,
    order: str,
    drop_last: bool = False,
    partners: Partners | None = None,
    is_augmented: bool = False,
) -> UnitLoader:
    """Batches of this process; with `partners`, of rows that were given theirs. `is_augmented`: their images get draws."""
    workers = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
    if isinstance(dataset, IterableDataset):
        step = {} if partners is None else {"arrange": partners.given_all}
        step |= {"accumulation": args.gradient_accumulation_steps} if partners is not None else {}
        if is_augmented:  # a thread of its own would take the generators away from under the training step
            dataset, step["reads_ahead"] = DrawnStream(dataset, seed_of_rows(args)), False
        stream = StreamBatches(dataset, batch_size, args.reader, args.readers, collator, **step)
        return UnitLoader(stream, batch_size=1, collate_fn=first_of, **workers)
    batches = epoch_batches(dataset, args, batch_size, order, drop_last, partners)
    dataset = dataset if partners is None else PartneredRows(dataset, partners)
    if is_augmented:
        dataset, batches = DrawnRows(dataset, seed_of_rows(args)), DrawnBatches(batches)
    return UnitLoader(dataset, batch_sampler=batches, collate_fn=collator, **workers)


def seed_of_rows(args: BaseConfig) -> int:
    return args.seed if args.data_seed is None else args.data_seed


def epoch_batches(
    dataset: Any, args: BaseConfig, batch_size: int, order: str, drop_last: bool, partners: Partners | None = None
) -> EpochBatches:
    """Which rows this process reads together."""
    whole = partners is not None and not partners.within_step
    return (EpochBatches if partners is None else PartneredBatches)(
        len(dataset),
        batch_size,
        rank=args.reader,
        world_size=args.readers,
        accumulation=len(dataset) if whole else args.gradient_accumulation_steps,
        seed=seed_of_rows(args),
        order=order,
        drop_last=drop_last,
        lengths=getattr(dataset, "unit_lengths", None),
    )
