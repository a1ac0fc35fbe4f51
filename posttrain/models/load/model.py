"""Path, hub id, GGUF file or module -> a model that is ready to be asked about tokens.

Every quirk of dtype, quantisation, PEFT and attention is handled here, once, so that no method has to know it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.models.auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.vision import VisionFamily
from posttrain.models.attention.mixers import are_carried, carry_segments, has_mixers
from posttrain.models.attention.ragged import how_rows_attend, install_ragged_attention
from posttrain.models.layers import fp8
from posttrain.models.layers.fused_lora import fuse_lora, lora_layers
from posttrain.models.layers.kernels import (
    APPLY,
    COMPILED,
    EXPERT_AUTOTUNING,
    KERNELS_IN_WORDS,
    LIGER,
    PLAIN,
    fastest_kernels,
)
from posttrain.models.load.adapters import (
    add_adapter,
    is_peft_model,
    is_prompt_learning,
    is_quantized,
    keep_trainable,
    with_targets,
)
from posttrain.models.load.image_models import (
    WithHead,
    has_classifier,
    load_processor,
    prepare_to_see,
    refuse_by_name,
    sees_images,
    settle_parts,
)
from posttrain.models.scoring.heads import (
    CAUSAL_LM,
    HEAD_NAMES,
    NUM_LABELS,
    SEQUENCE_REWARD,
    TOKEN_LABELS,
    sequence_head,
)
from posttrain.models.scoring.probe import (
    ImageProbe,
    why_images_fail,
    why_no_router_loss,
    why_not_in_parts,
    why_not_its_own_labels,
    why_not_its_own_logits,
    why_not_ragged,
    why_not_shared,
)
from posttrain.models.scoring.token_scores import install_scores
from posttrain.models.sharding import loading_whole
from posttrain.models.vision.parts import adapter_on_language_model, without_vision

PADDED_NOTE = "Batches are padded, not ragged"
ROUTER_LOSS = "router_aux_loss_coef"  # of the configuration of a mixture of experts
AUTO_CLASSES = {
    CAUSAL_LM: AutoModelForCausalLM,
    SEQUENCE_REWARD: AutoModelForSequenceClassification,
    TOKEN_LABELS: AutoModelForTokenClassification,
}
CLASSIFIERS = {
    SEQUENCE_REWARD: ("A reward model has one output", "SEQ_CLS"),
    TOKEN_LABELS: ("A process reward model has two outputs", "TOKEN_CLS"),
}
"""Task -> (what its head is, PEFT's name of the task)."""


@dataclass
class LoadOptions:
    """What `load_model` needs to know; the trainer fills it from the config."""

    dtype: torch.dtype = torch.float32
    task: str = CAUSAL_LM
    model_init_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    disable_dropout: bool = True
    layer_kernels: tuple[str, ...] = (PLAIN,)  # candidates; of several the fastest
    peft_config: Any = None
    fp8: bool = False  # products of the decoder's linear layers in 8 bits
    fuse_lora: bool = True
    quantization_config: Any = None
    layout: str | None = None  # None: ragged when the probe agrees
    share_prefixes: bool = False  # samples of a unit that begin alike are computed once up to where they part
    router_aux_loss_coef: float | None = None
    device: torch.device | None = None  # None: the model stays where it is
    sharded: bool = False  # FSDP or DeepSpeed will place the weights
    row_part: tuple[int, int] | None = None  # (rank, size) where processes share the tokens of a row; None: whole rows
    vision: VisionFamily | None = None  # None: the model reads texts only, whatever it could see
    image_probe: ImageProbe | None = None  # for data with images: is the model asked about them in the right way?
    lora_vision: bool = False  # adapters on tower and projector too, where their pattern matches there
    frozen_parts: tuple[str, ...] = ()  # of `models.vision.parts.PARTS`


@dataclass
class LoadedModel:
    """A model, the layout its batches should have, and sentences about what was decided."""

    model: nn.Module
    layout: str
    name: str
    notes: list[str]
    router_loss_weight: float = 0.0
    kernels: str = PLAIN
    image_probe: ImageProbe | None = None  # what it was asked about images


def load_model(model: str | Path | nn.Module, options: LoadOptions) -> LoadedModel:
    """Load (or take) a model, adapt it, choose its layout, and teach it to answer about tokens."""
    install_ragged_attention()
    notes: list[str] = []
    given = isinstance(model, nn.Module)
    if given:
        _refuse_arguments_for_a_module(options)
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    else:
        name, model = str(model), load_pretrained(model, options)
    innermost = innermost_model(model)
    wanted = NUM_LABELS.get(options.task)
    if given and wanted is not None and not any(hasattr(innermost, head) for head in HEAD_NAMES):
        raise ValueError(
            f"{CLASSIFIERS[options.task][0]}; the model that was given, a {type(innermost).__name__}, has no head for them. Give "
            "its name or the path of its folder instead of the loaded model: the head is added when it is loaded."
        )
    if wanted is not None and innermost.config.num_labels != wanted:
        raise ValueError(
            f"{CLASSIFIERS[options.task][0]}; {name} has num_labels={innermost.config.num_labels}. "
            f"Load it with num_labels={wanted}."
        )
    if options.device is not None and not options.sharded and not is_quantized(innermost):
        model.to(options.device)  # the probe below, and Liger's kernels in it, run where training will
    if is_quantized(innermost):
        keep_trainable(innermost)
    if options.disable_dropout:
        disable_dropout(model)
    if options.vision is not None:
        prepare_to_see(innermost, options.vision)
    if options.sharded:
        _name_blocks_that_are_there(innermost)
    # Before layers are compiled: transformers records what routers say by hooks, which it installs when it is first asked, and code
    # that was compiled without them would not look for them.
    router_loss_weight = _router_loss_weight(innermost, options, name, notes)
    # Weights that will be sharded wait on the CPU, where Liger's kernels do not run: they come after the probe then.
    kernels = PLAIN if options.sharded else _choose_kernels(model, innermost, options, notes)
    if options.fp8:
        notes.append(_use_fp8(model, innermost, options))
    if options.peft_config is not None:
        config = _adapter_config(innermost, options)
        model = add_adapter(model, config, _adapter_dtype(innermost, options, given))
    if options.fuse_lora and is_peft_model(model):
        _fuse_adapters(model, notes)
    if options.task in CLASSIFIERS:
        sequence_head(innermost)  # an error where it has none
    install_scores(innermost)
    if options.vision is not None:
        parts = (options.vision, options.image_probe, options.frozen_parts)
        with _tried(options.vision, name):
            notes += settle_parts(innermost, *parts, has_adapter=is_peft_model(model), sharded=options.sharded)
            reason = _why_wrong_images(model, innermost, options)
        if reason is not None:
            raise ValueError(f"{name} cannot be trained on images: {reason}. Check its files, or take another model.")
    elif sees_images(innermost.config.to_dict()):
        notes.append(f"{type(innermost).__name__} could see images; it is loaded for texts only.")
    if options.task == CAUSAL_LM and not sees_images(innermost.config.to_dict()):  # others are asked about images
        reason = _of_the_first_process(why_not_its_own_logits(innermost), options)
        if reason is not None:
            raise ValueError(f"{name} cannot be trained here: {reason}. Take another architecture.")
    if options.task == TOKEN_LABELS and innermost.get_output_embeddings() is None:  # else it has `WithHead`
        reason = _of_the_first_process(why_not_its_own_labels(innermost), options)
        if reason is not None:
            raise ValueError(f"{name} cannot be a process reward model here: {reason}. Take another architecture.")
    layout = _choose_layout(model, innermost, options, notes)
    if options.share_prefixes and layout == RAGGED:
        layout = _shared_if_possible(model, innermost, options, notes)
    if options.row_part is not None:
        _refuse_shared_rows(model, innermost, options, layout, router_loss_weight, name, notes)
    if options.sharded:
        kernels = _choose_kernels(model, innermost, options, notes)
    if layout != PADDED and options.device is not None and options.device.type == "cuda":
        notes += how_rows_attend(innermost, options.device)
    return LoadedModel(model, layout, name, notes, router_loss_weight, kernels, options.image_probe)


@contextmanager
def _tried(family: VisionFamily, name: str) -> Iterator[None]:
    """A model of a family that is in no table may fail in any way of its own when it is first shown an image."""
    try:
        yield
    except Exception as error:
        if not family.is_found:
            raise
        raise ValueError(
            f"{name} cannot be trained on images: shown one, it ends with {type(error).__name__}: {error} Models of type "
            f"{family.model_type!r} are in no table of families. Train it on texts, or take another model."
        ) from error


def _why_wrong_images(model: nn.Module, innermost: nn.Module, options: LoadOptions) -> str | None:
    if options.image_probe is None:
        return None
    return _of_the_first_process(why_images_fail(model, innermost, options.task, options.image_probe), options)


def _adapter_config(innermost: nn.Module, options: LoadOptions) -> Any:
    """A classifier's head is new: PEFT trains and saves it with the adapter when the task is named."""
    config = options.peft_config
    if options.vision is not None:
        config = adapter_on_language_model(with_targets(config), innermost, options.vision, options.lora_vision)
    if options.task in CLASSIFIERS and getattr(config, "task_type", "") is None:
        config = copy.deepcopy(config)
        config.task_type = CLASSIFIERS[options.task][1]
    return config


def _adapter_dtype(innermost: nn.Module, options: LoadOptions, given: bool) -> torch.dtype:
    """Adapters compute in the dtype of the model around them; a quantised base says nothing about it."""
    if not given or is_quantized(innermost):
        return options.dtype
    return next(p.dtype for p in innermost.parameters() if p.is_floating_point())


def _refuse_arguments_for_a_module(options: LoadOptions) -> None:
    for name in ("model_init_kwargs", "quantization_config"):
        if getattr(options, name):
            raise ValueError(
                f"`{name}` is for models given by name or path; this model is loaded already. Leave it out."
            )


def load_pretrained(model: str | Path, options: LoadOptions) -> nn.Module:
    """`from_pretrained` with our dtype policy; the class is the one the checkpoint names where the task is plain language."""
    path, kwargs = locate(model, options.model_init_kwargs)
    kwargs.setdefault("trust_remote_code", options.trust_remote_code)
    kwargs.setdefault("dtype", options.dtype)
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
    if options.quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ValueError(
                "`quantization_config` is given twice: as an argument and in `model_init_kwargs`. Give it once."
            )
        kwargs["quantization_config"] = options.quantization_config
    on_cuda = options.device is not None and options.device.type == "cuda" and not options.sharded
    if kwargs.get("quantization_config") is not None and on_cuda:
        kwargs.setdefault("device_map", {"": options.device.index or 0})
    if options.task in NUM_LABELS:
        kwargs.setdefault("num_labels", NUM_LABELS[options.task])
        if hasattr(kwargs.get("quantization_config"), "llm_int8_skip_modules"):
            kwargs["quantization_config"] = _without_head(kwargs["quantization_config"])
    if options.vision is not None and kwargs.get("quantization_config") is not None:
        kwargs["quantization_config"] = without_vision(kwargs["quantization_config"], options.vision)
    auto_class = _auto_class(model, options)
    with errors_named("model", path), nullcontext() if options.sharded else loading_whole():
        loaded = auto_class.from_pretrained(path, **kwargs)
    return _as_plain_weights(loaded) if "gguf_file" in kwargs else loaded


def _auto_class(model: str | Path, options: LoadOptions) -> Any:
    # a GGUF file is a text model, and slow to look into
    if Path(model).suffix == ".gguf" or "gguf_file" in (options.model_init_kwargs or ()):
        return AUTO_CLASSES[options.task]
    config = config_of_model(model, options.model_init_kwargs)
    if not sees_images(config):
        return AUTO_CLASSES[options.task]
    refuse_by_name(config)
    if options.task == CAUSAL_LM:
        return AutoModelForImageTextToText
    is_classifier = options.task == SEQUENCE_REWARD and has_classifier(config)
    return AUTO_CLASSES[options.task] if is_classifier else WithHead


def _without_head(quantization_config: Any) -> Any:
    """A config of bitsandbytes that leaves the head as it is, since it is trained whole. By itself transformers spares the last
    module, but does not recognise it where it has a bias, as the head of a token classifier does."""
    changed = copy.deepcopy(quantization_config)
    changed.llm_int8_skip_modules = [*(changed.llm_int8_skip_modules or ()), *HEAD_NAMES]
    return changed


def model_without_weights(model: str | Path, options: LoadOptions) -> nn.Module:
    """What `load_model` would load, adapter included, on the meta device: of its files only the config is read."""
    path, kwargs = locate(_base_of(model), options.model_init_kwargs)
    config = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code, **_of_files(kwargs))
    if options.task in NUM_LABELS:
        config.num_labels = NUM_LABELS[options.task]
    with torch.device("meta"):
        made = _auto_class(model, options).from_config(
            config, dtype=options.dtype, trust_remote_code=options.trust_remote_code
        )
        made.tie_weights()
        return made if options.peft_config is None else add_adapter(made, _adapter_config(made, options), options.dtype)


def _base_of(model: str | Path) -> str | Path:
    """The model under an adapter that is trained further."""
    adapter = Path(model) / "adapter_config.json"
    if not adapter.is_file() or (Path(model) / "config.json").is_file():
        return model
    return json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]


class CannotLoad(OSError, ValueError):
    """A model or tokenizer that is not there, or whose files are damaged."""


@contextmanager
def errors_named(what: str, source: str) -> Iterator[None]:
    """Whatever a library says about a file becomes one sentence that names the model."""
    try:
        yield
    except (OSError, ValueError, SafetensorError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, LookupError):  # of a loader that trusts what a file should hold
            reason = f"it lacks {reason}"
        raise CannotLoad(f"The {what} of {source} cannot be loaded: {reason}") from error


def _as_plain_weights(model: nn.Module) -> nn.Module:
    """transformers unpacks a GGUF file into ordinary weights but may still call the model quantised, and refuse to save it."""
    if any(type(module).__name__.lower().startswith("gguf") for module in model.modules()):
        raise ValueError("This GGUF file was loaded in its packed form, which cannot be trained. Uninstall `kernels`.")
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    return model


def locate(model: str | Path, init_kwargs: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """(what `from_pretrained` is called with, its keyword arguments); a .gguf file is named by its folder and its name."""
    kwargs = dict(init_kwargs or {})
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file at {path}.")
        if importlib.util.find_spec("gguf") is None:
            raise ImportError("GGUF files are read with the `gguf` package: pip install posttrain[gguf].")
        from posttrain.models.load.gguf_check import check_gguf_file

        check_gguf_file(path)
        kwargs["gguf_file"] = path.name
        return str(path.parent), kwargs
    return str(model), kwargs


def load_tokenizer(model: str | Path | nn.Module, init_kwargs: dict[str, Any] | None, trust_remote_code: bool) -> Any:
    """The tokenizer that belongs to a model."""
    if isinstance(model, nn.Module):
        source, kwargs = innermost_model(model).config._name_or_path, {}
        if not source:
            raise ValueError("This model does not know where it came from: pass its tokenizer as `processing_class`.")
    else:
        source, kwargs = locate(model, init_kwargs)
    with errors_named("tokenizer", source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **_of_files(kwargs))


def load_processing_class(
    model: str | Path | nn.Module, init_kwargs: dict[str, Any] | None, trust_remote_code: bool
) -> Any:
    """The processor of a model of images and text, the tokenizer of any other."""
    if isinstance(model, nn.Module):
        config = innermost_model(model).config
        source, kwargs, found = config._name_or_path, {}, config.to_dict()
    else:
        (source, kwargs), found = locate(model, init_kwargs), config_of_model(model, init_kwargs)
    if not source or not sees_images(found):
        return load_tokenizer(model, init_kwargs, trust_remote_code)
    refuse_by_name(found)
    with errors_named("processor", source):
        return load_processor(source, trust_remote_code, **_of_files(kwargs))


def _of_files(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained` that say where files are."""
    return {name: kwargs[name] for name in ("revision", "gguf_file", "subfolder", "cache_dir") if name in kwargs}


def model_type_of(model: str | Path | nn.Module, init_kwargs: dict[str, Any] | None) -> str | None:
    """`model_type` of a model's config, whether it is loaded or not; None where no config says."""
    return config_of_model(model, init_kwargs).get("model_type")


def config_of_model(model: str | Path | nn.Module, init_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config of a model, whether it is loaded or not; empty where none is there."""
    if isinstance(model, nn.Module):
        return innermost_model(model).config.to_dict()
    source, kwargs = locate(_base_of(model), init_kwargs)
    try:
        return PretrainedConfig.get_config_dict(source, **_of_files(kwargs))[0]
    except OSError:  # loading the model will say so in its own words
        return {}


def innermost_model(model: nn.Module) -> nn.Module:
    """The transformers model inside DDP, torch.compile and PEFT wrappers."""
    model = getattr(model, "module", model) if not hasattr(model, "config") else model
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def disable_dropout(model: nn.Module) -> None:
    """Set p = 0 in every dropout of a model, those that are no modules included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # of families that call the function: `dropout`, `attn_dropout`, `layerdrop`
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                vars(module)[name] = 0.0


def _choose_layout(model: nn.Module, innermost: nn.Module, options: LoadOptions, notes: list[str]) -> str:
    """Ragged where a probe of two short segments gives the padded answer; padded, with a sentence, elsewhere."""
    if options.layout == PADDED:
        return PADDED
    if is_prompt_learning(model):
        reason = "its adapter puts virtual tokens in front of every row"
    else:
        on_gpu = options.device is not None and options.device.type == "cuda"
        reason = why_not_ragged(model, innermost, options.task, options.image_probe, on_gpu)
        reason = _of_the_first_process(reason, options)
        if _of_the_first_process(are_carried(innermost), options):
            carry_segments(innermost)
    if reason is None:
        return RAGGED
    if options.layout == RAGGED:
        raise ValueError(f"`padding_free=True` cannot be honoured: {reason}. Set it to False or leave it out.")
    notes.append(f"{PADDED_NOTE}: {reason}.")
    return PADDED


def _shared_if_possible(model: nn.Module, innermost: nn.Module, options: LoadOptions, notes: list[str]) -> str:
    """SHARED where a probe of two samples that begin alike gives the ragged answer."""
    reason = _of_the_first_process(why_not_shared(model, innermost, options.task, options.image_probe), options)
    if reason is None:
        return SHARED
    notes.append(f"A prompt is computed once for each of its answers: {reason}.")
    return RAGGED


def _refuse_shared_rows(
    model: nn.Module,
    innermost: nn.Module,
    options: LoadOptions,
    layout: str,
    router_loss_weight: float,
    name: str,
    notes: list[str],
) -> None:
    """Where rows cannot be cut into parts, each on a process of its own."""
    if layout == PADDED:
        reason = next((note for note in notes if note.startswith(PADDED_NOTE)), PADDED_NOTE).rstrip(".")
    elif options.image_probe is not None:
        reason = "features of images are handed over to whole rows"
    elif router_loss_weight:
        reason = "the routers' loss is about all tokens of a row; `router_aux_loss_coef=0` switches it off"
    elif has_mixers(innermost):
        reason = "it has recurrences or convolutions, which read whole rows"
    else:
        reason = why_not_in_parts(model, innermost, options.row_part, options.sharded)
    if reason is not None:
        raise ValueError(f"`sequence_parallel_size` cannot be honoured for {name}: {reason}. Leave it at 1.")


def _of_the_first_process(found: Any, options: LoadOptions) -> Any:
    """What a probe found. Where weights will be sharded, the first process alone may have read them (accelerate's
    `cpu_ram_efficient_loading`): the others found out nothing.
    """
    if not options.sharded or not torch.distributed.is_initialized():
        return found
    said = [found]
    torch.distributed.broadcast_object_list(said, src=0)
    return said[0]


def _name_blocks_that_are_there(innermost: nn.Module) -> None:
    """FSDP wraps blocks of the classes in `_no_split_modules`, and ends with an error where one of them does not occur. LLaVA takes
    over the names of its tower's whole family, CLIP, of which it has the half that sees."""
    there = {type(module).__name__ for module in innermost.modules()}
    innermost._no_split_modules = [name for name in innermost._no_split_modules or () if name in there]


def _choose_kernels(model: nn.Module, innermost: nn.Module, options: LoadOptions, notes: list[str]) -> str:
    """Apply the one candidate, or the one that runs a layer fastest."""
    candidates = options.layer_kernels
    if options.peft_config is not None or is_peft_model(model) or is_quantized(innermost):
        if candidates == (COMPILED,):
            raise ValueError(
                "`compile_layers` is for models that are trained whole: adapters come and go inside of a layer, and a quantised "
                "one unpacks its weights there. Leave it out."
            )
        candidates = tuple(name for name in candidates if name != COMPILED)
    chosen, times = candidates[0], {}
    if len(candidates) > 1:
        chosen, times = fastest_kernels(innermost, candidates)
    APPLY[chosen](innermost)
    if chosen != PLAIN or times:
        measured = ", ".join(f"{name} {value:.2f} ms" for name, value in times.items())
        notes.append(KERNELS_IN_WORDS[chosen] + (f" (one layer, forward and backward: {measured})." if times else "."))
    has_experts = hasattr(innermost.config.get_text_config(), ROUTER_LOSS)
    if chosen == LIGER and has_experts and os.environ[EXPERT_AUTOTUNING] == "0":
        notes.append(
            f"Liger's kernels for experts run with one configuration each. {EXPERT_AUTOTUNING}=1 in the environment tries all of "
            "them in the first step, which takes minutes and may pay off in a long run."
        )
    return chosen


def _use_fp8(model: nn.Module, innermost: nn.Module, options: LoadOptions) -> str:
    device = options.device or next(innermost.parameters()).device
    reason = fp8.why_not(device)
    if options.peft_config is not None or is_peft_model(model) or is_quantized(innermost):
        reason = "weights that are not trained themselves gain nothing by it: it has an adapter, or is quantised"
    if reason is None and not (layers := fp8.use_fp8(innermost)):
        reason = f"{type(innermost).__name__} has no linear layers whose sizes are multiples of {fp8.MULTIPLE}"
    if reason is not None:
        raise ValueError(f"`fp8` cannot be honoured: {reason}. Leave it out.")
    return f"The products of {layers} linear layers are computed in 8 bits, forward and backward."


def _fuse_adapters(model: nn.Module, notes: list[str]) -> None:
    fused, layers = fuse_lora(model), lora_layers(model)
    if fused:
        notes.append(f"{fused} LoRA linears are fused; `fuse_lora=False` leaves them to PEFT.")
    if fused < layers:
        notes.append(
            f"{layers - fused} LoRA layers run PEFT's own, slower forward: for dropout, DoRA, a bias, an embedding, a quantised "
            "base, or an adapter whose dtype is not its base's."
        )


def _router_loss_weight(innermost: nn.Module, options: LoadOptions, name: str, notes: list[str]) -> float:
    """Of the load-balancing loss, which a mixture of experts needs wherever it is trained: by default its own. Heads of scores are
    trained without, unless the model's config or the user asks for it."""
    config, wanted = innermost.config.get_text_config(), options.router_aux_loss_coef
    if not hasattr(config, "output_router_logits"):
        if wanted:
            raise ValueError(f"`{ROUTER_LOSS}` is {wanted}, but {name} is not a mixture of experts.")
        return 0.0
    is_usual = options.task == CAUSAL_LM or config.output_router_logits
    own = (getattr(config, ROUTER_LOSS, None) or 0.0) if is_usual else 0.0
    weight = own if wanted is None else wanted
    if not weight:
        return 0.0
    reason = _of_the_first_process(why_no_router_loss(innermost, options.task), options)
    if reason is None:
        notes.append(f"The load-balancing loss of its experts counts with {weight:g} (`{ROUTER_LOSS}`).")
        return weight
    if wanted:
        raise ValueError(f"`{ROUTER_LOSS}` is {wanted}, but there is no load-balancing loss: {reason}. Leave it out.")
    notes.append(f"Its experts are trained without a load-balancing loss: {reason}.")
    return 0.0
