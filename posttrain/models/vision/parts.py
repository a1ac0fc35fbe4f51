"""The parts of a model that sees (tower, projector, language model): freezing them, adapters on them, what of them can learn.

Parts are found by the paths of the family's table. Substrings of names would be wrong: "visual" misses `vision_tower`, "projector"
misses `connector` and Qwen's `merger`, which lies inside of the tower.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from posttrain.core.batch import BatchImages
from posttrain.core.vision import LANGUAGE_MODEL, PROJECTOR, TOWER, VisionFamily
from posttrain.models.vision.features import image_features

PARTS = (TOWER, PROJECTOR, LANGUAGE_MODEL)


def part_of(innermost: nn.Module, family: VisionFamily, name: str) -> str:
    """Part of a parameter or module by its name in the innermost model; heads beside the body belong to the language model."""
    return family.part_of(name) if name.startswith(innermost.base_model_prefix + ".") else LANGUAGE_MODEL


def parameters_of(innermost: nn.Module, family: VisionFamily, *parts: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in innermost.named_parameters():
        if part_of(innermost, family, name) in parts:
            yield name, parameter


# ---- freezing ------------------------------------------------------------------------------------------------------------


def freeze_parts(
    innermost: nn.Module, family: VisionFamily, parts: Iterable[str], heads: tuple[str, ...] = ()
) -> dict[str, int]:
    """Freeze these of PARTS, adapters on them included, but none of our own `heads`, which are new. Part -> weights of it that are
    still trained."""
    parts = tuple(parts)
    for name, parameter in parameters_of(innermost, family, *parts):
        if name.split(".")[0] not in heads:
            parameter.requires_grad_(False)
    left = {
        part: sum(p.numel() for _, p in parameters_of(innermost, family, part) if p.requires_grad) for part in PARTS
    }
    if not any(left.values()):
        raise ValueError(
            f"Nothing of this {type(innermost).__name__} is left to train: frozen are {', '.join(parts)}. Freeze fewer parts, or "
            "put adapters on another one."
        )
    return left


def keep_frozen_vision_in_eval(innermost: nn.Module, family: VisionFamily) -> None:
    """Modules of tower and projector without a trained weight stay in eval mode, whatever `model.train()` says: their dropout, drop
    path and batch statistics are part of what was frozen. To be called once it is decided what is trained."""
    for path in (family.tower, *family.projectors):
        module = innermost.get_parameter(path) if _is_parameter(innermost, path) else innermost.get_submodule(path)
        if isinstance(module, nn.Module):
            _keep_in_eval(module)


def _keep_in_eval(module: nn.Module) -> None:
    if any(parameter.requires_grad for parameter in module.parameters()):
        for child in module.children():
            _keep_in_eval(child)
        return
    module.eval()
    module.train = types.MethodType(_stay_in_eval, module)  # a bound method: a deep copy keeps itself in eval mode


def _stay_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    return self


def _is_parameter(innermost: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in innermost.get_submodule(owner)._parameters


# ---- gradients -----------------------------------------------------------------------------------------------------------


def require_gradients_of_text_only(innermost: nn.Module) -> None:
    """Let `enable_input_require_grads`, which checkpointing with adapters calls, hook the text's embedding alone. transformers
    hooks that of the tower as well, and so builds a graph through a frozen tower: half of the memory for nothing."""

    def enable(self: nn.Module) -> None:
        self.disable_input_require_grads()  # it is called more than once, and a hook that is forgotten stays for ever
        hook = self.get_input_embeddings().register_forward_hook(_output_requires_grad)
        self._require_grads_hooks, self._require_grads_hook = [hook], hook

    innermost.enable_input_require_grads = types.MethodType(enable, innermost)


def _output_requires_grad(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def unreachable_parameters(innermost: nn.Module, family: VisionFamily, images: BatchImages) -> list[str]:
    """Trained parameters of tower and projector that no feature depends on, such as LLaVA's last tower layers: they never get a
    gradient, so the optimizer must not have them, and DDP must not wait for them. Found in the graph of one encoding, without a
    backward."""
    output = image_features(innermost, images)
    features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    tensors = [one for item in features for one in ([item] if isinstance(item, Tensor) else item)]
    reached = {id(leaf) for leaf in _leaves(tensor.grad_fn for tensor in tensors)}
    vision = parameters_of(innermost, family, TOWER, PROJECTOR)
    return [name for name, parameter in vision if parameter.requires_grad and id(parameter) not in reached]


def _leaves(functions: Iterable[Any]) -> Iterator[Tensor]:
    seen, left = set(), [function for function in functions if function is not None]
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            yield function.variable
        left += [earlier for earlier, _ in function.next_functions if earlier is not None]


# ---- adapters ------------------------------------------------------------------------------------------------------------


def adapter_on_language_model(peft_config: Any, innermost: nn.Module, family: VisionFamily, lora_vision: bool) -> Any:
    """The config with tower and projector excluded, unless `lora_vision`, or but for what its pattern means of them.

    "all-linear" puts adapters on the tower of every family, ["q_proj", "v_proj"] on that of most, and few users mean that. A
    pattern means them where it contains the name of a module of their paths ("visual", "vision_tower", "merger"); of several, that
    one alone. All mean them where they match nothing else.
    """
    targets = getattr(peft_config, "target_modules", None)
    if lora_vision or not targets or _match_vision_alone(targets, innermost, family):
        return peft_config
    meant = _meaning_vision(targets, innermost, family)
    if isinstance(targets, str) and meant:
        return peft_config
    changed, own = copy.copy(peft_config), getattr(peft_config, "exclude_modules", None)
    others = rf"(?!(?:.*\.)?(?:{'|'.join(map(re.escape, meant))})$)" if meant else ""
    patterns = [others + re.escape(path) + r"(\..*)?" for path in (family.tower, *family.projectors)]
    if isinstance(own, str):
        patterns.append(own)
    elif own:
        patterns += [rf"(.*\.)?{re.escape(name)}" for name in sorted(own)]
    changed.exclude_modules = "|".join(f"(?:{pattern})" for pattern in patterns)
    return changed


def _meaning_vision(targets: str | Iterable[str], innermost: nn.Module, family: VisionFamily) -> list[str]:
    """Those that contain the name of a module of the paths of tower or projector."""
    body = innermost.base_model_prefix
    named = {word for path in (family.tower, *family.projectors) for word in path.split(".") if word != body}
    texts = [targets] if isinstance(targets, str) else sorted(targets)
    return [text for text in texts if not named.isdisjoint(re.split(r"\W+", text))]


def _match_vision_alone(targets: str | Iterable[str], innermost: nn.Module, family: VisionFamily) -> bool:
    matched = {
        part_of(innermost, family, name)
        for name, module in innermost.named_modules()
        if not any(module.children()) and _is_target(name, targets)
    }
    return bool(matched) and LANGUAGE_MODEL not in matched


def _is_target(name: str, targets: str | Iterable[str]) -> bool:
    """As PEFT reads `target_modules`: a regular expression of the whole name, or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def adapters_by_part(innermost: nn.Module, family: VisionFamily) -> dict[str, int]:
    """Part -> modules of it that have an adapter, for printing: the sum alone looks right where half of it lies on the tower."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = Counter(
        part_of(innermost, family, name)
        for name, module in innermost.named_modules()
        if isinstance(module, BaseTunerLayer)
    )
    return {part: found[part] for part in PARTS}


# ---- quantisation --------------------------------------------------------------------------------------------------------


def without_vision(quantization_config: Any, family: VisionFamily) -> Any:
    """A config of bitsandbytes that leaves tower and projector in 16 bits, and the head, which it spares by itself only where it is
    given no list. Configs of other kinds are returned as they are."""
    if not hasattr(quantization_config, "llm_int8_skip_modules"):
        return quantization_config
    changed = copy.deepcopy(quantization_config)
    own = changed.llm_int8_skip_modules or ["lm_head"]
    changed.llm_int8_skip_modules = [*dict.fromkeys([*own, family.tower, *family.projectors])]
    return changed


# ---- of a family that is not known here: where transformers' conventions put the parts ------------------------------------


def image_parts(innermost: nn.Module) -> tuple[dict[str, Any], frozenset[str]]:
    """Paths of VisionFamily (tower, projectors, language_models), and the arguments that the image encoder takes.

    The model may be on the meta device. ValueError: it does not follow the conventions, and why.
    """
    prefix = innermost.base_model_prefix
    body = getattr(innermost, prefix, None)
    if not isinstance(body, nn.Module) or not hasattr(body, "get_image_features"):
        raise ValueError(f"{type(innermost).__name__} has no body that makes features of images (`get_image_features`)")
    if "mm_encoder_outputs" not in inspect.signature(type(body).forward).parameters:
        raise ValueError(f"{type(body).__name__} takes no features in the place of pixels (`mm_encoder_outputs`)")
    if hasattr(body, "get_rope_index"):
        raise ValueError(f"positions of {type(body).__name__} have several axes (`get_rope_index`)")
    tower, text = body.get_encoder(modality="image"), body.get_decoder()
    names = [name for name, _ in (*body.named_children(), *body.named_parameters(recurse=False))]
    found = {part: name for name, child in body.named_children() for part in (tower, text) if child is part}
    if tower is text or set(found) != {tower, text}:
        raise ValueError(f"tower and language model of {type(body).__name__} do not lie side by side in it")
    others = [name for name in names if name not in found.values()]
    heads = [name for name, _ in innermost.named_children() if name != prefix]
    paths = {
        "tower": f"{prefix}.{found[tower]}",
        "projectors": tuple(f"{prefix}.{name}" for name in others),
        "language_models": (f"{prefix}.{found[text]}", *heads),
    }
    return paths, frozenset(inspect.signature(body.get_image_features).parameters)
