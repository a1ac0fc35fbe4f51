"""Merging of models: one out of the weights of two, tensor by tensor, written and verified like an export.

    linear     (w_p P + w_t T) / (w_p + w_t)
    slerp      sin((1 - t) a) / sin a P + sin(t a) / sin a T, a the angle between the flattened tensors    (Shoemake, 1985)
    ties       B + mean over the models that agree about its sign of the largest entries of their differences from B
                                                                                            (Yadav et al., arXiv:2306.01708)
    dare_ties  the same with entries chosen at random and scaled up instead of the largest  (Yu et al., arXiv:2311.03099)

P is the policy, T the target, B the base, which is the policy where no other is named. Numbers are computed in float32 or better
and rounded once, to the dtype of the policy. Adapters are added to their bases first; a tied tensor is merged once.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.exporting.export import check_weights, checksum, write_model
from posttrain.exporting.verification import ExportRefused, check_processor
from posttrain.models.load.model import innermost_model
from posttrain.models.load.saved_model import find_saved
from posttrain.models.load.weight_export import exported_specs, exported_weights

PARALLEL = 0.9995
"""Above this cosine of their angle two tensors are interpolated along the straight line: the sine in the divisor is near 0."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
FIRST_TENSORS = ("embed", "wte", "wpe")

Numbers = float | list[float]
"""One number, or numbers from the first layer to the last, between which is interpolated."""


@dataclass
class MergeConfig:
    """How a policy is merged with a target. Of the numbers, each method reads its own."""

    method: str = "linear"
    policy_model_path: str | None = None  # of `merge_models`; the callback has the policy
    target_model_path: str | None = None  # None, of the callback: what the policy was loaded from
    base_model_path: str | None = None  # ties, dare_ties: what differences are taken from. None: the policy
    policy_model_weight: float | None = None  # linear: 0.5; ties, dare_ties: 1
    target_model_weight: float | None = None
    # ties, dare_ties: share that is kept
    policy_model_density: Numbers = field(default_factory=lambda: [1.0, 0.7, 0.1])
    target_model_density: Numbers = field(default_factory=lambda: [1.0])
    normalize: float = 1.0  # ties, dare_ties: divide by the weights of those that agree. 0: do not
    t_values: Numbers = 0.5  # slerp: 0 is the policy, 1 the target
    dtype: str | None = None  # None: the policy's
    seed: int = 0  # dare_ties

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """ValueError for numbers without meaning; asked again before a merge, since scripts set attributes later."""
        if self.method not in MERGES:
            raise ValueError(f"The merge method {self.method!r} is unknown; take one of {', '.join(MERGES)}.")
        for name in ("policy_model_density", "target_model_density", "t_values"):
            if not all(0 <= number <= 1 for number in _listed(getattr(self, name))):
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must lie between 0 and 1.")
        if self.method == "linear" and self.weights[0] + self.weights[1] == 0:
            raise ValueError("The weights of policy and target add up to 0: there is no mean of them.")

    @property
    def weights(self) -> tuple[float, float]:
        own = 0.5 if self.method == "linear" else 1.0
        given = (self.policy_model_weight, self.target_model_weight)
        return tuple(own if weight is None else weight for weight in given)

    def create(self) -> MergeConfig:
        """Itself: TRL's scripts hand the result to `merge_models`."""
        return self


def merge_models(config: MergeConfig, out_path: str | Path, trust_remote_code: bool = False) -> Path:
    """Merge `config.policy_model_path` with the target, folders or Hub ids of models or adapters, into a new folder."""
    if config.policy_model_path is None:
        raise ValueError("`policy_model_path` is None: merge_models needs the folder or the Hub id of the policy.")
    saved = find_saved(config.policy_model_path)
    policy = saved.load(trust_remote_code=trust_remote_code)
    return write_merge(config, policy, saved.processing_class(trust_remote_code), Path(out_path), trust_remote_code)


def write_merge(
    config: MergeConfig, policy: nn.Module, processing_class: Any, output: Path, trust_remote_code: bool = False
) -> Path:
    """Write the merge of a model in memory with its tokenizer or processor; the folder appears when verified, or not at all."""
    config.check()
    if output.exists():
        raise ValueError(f"{output} exists already; a merge is written into a new folder.")
    if config.target_model_path is None:
        raise ValueError("`target_model_path` is None: a merge needs the folder or the Hub id of a second model.")
    target = saved_tensors(config.target_model_path, trust_remote_code)
    is_of_ties = config.method in ("ties", "dare_ties") and config.base_model_path is not None
    base = saved_tensors(config.base_model_path, trust_remote_code) if is_of_ties else None
    staged = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    staged.mkdir(parents=True)
    try:
        dtype = None if config.dtype is None else getattr(torch, config.dtype)
        sums = write_model(staged, policy, merged_weights(config, policy, target, base), processing_class, dtype)
        check_weights(staged, sums)
        _check_loads(staged, sums, trust_remote_code)
        if hasattr(processing_class, "image_processor"):
            check_processor(processing_class, find_saved(staged), trust_remote_code)
        staged.rename(output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return output


def saved_tensors(path: str, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """Name -> tensor of a model or an adapter on its base, as `exported_weights` names them."""
    model = find_saved(path).load(trust_remote_code=trust_remote_code)
    return dict(exported_weights(model))


def _check_loads(folder: Path, sums: dict[str, str], trust_remote_code: bool) -> None:
    """What a loader makes of the folder are the tensors that were written, to the bit."""
    try:
        fresh = find_saved(folder).load("auto", trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ExportRefused(f"The merge cannot be loaded: {type(error).__name__}: {error}") from error
    found = {name: checksum(tensor) for name, tensor in exported_weights(fresh)}
    if wrong := [name for name in sums if sums[name] != found.get(name)]:
        raise ExportRefused(f"{wrong[0]} of the merge is not loaded as it was written.", wrong[0])


def merged_weights(
    config: MergeConfig, policy: nn.Module, target: dict[str, Tensor], base: dict[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the merge, in the policy's dtype unless the config names another."""
    check_alike(policy, target, "target")
    if base is not None:
        check_alike(policy, base, "base")
    innermost = innermost_model(policy)
    layers = innermost.config.get_text_config().num_hidden_layers
    dtype = innermost.dtype if config.dtype is None else getattr(torch, config.dtype)
    for name, own in exported_weights(policy):
        if not own.is_floating_point():
            yield name, own
            continue
        high = torch.promote_types(torch.promote_types(own.dtype, target[name].dtype), torch.float32)
        parts = [one[name].to(own.device, high) for one in (target, base) if one is not None]
        place = Place(name, _depth(name, layers))
        yield name, MERGES[config.method](config, place, own.to(high), *parts).to(dtype)


def check_alike(policy: nn.Module, other: dict[str, Tensor], whose: str) -> None:
    """ValueError unless both have the same tensors, and the policy's are its own numbers."""
    if getattr(innermost_model(policy).config, "quantization_config", None) is not None:
        raise ValueError(
            "The policy is quantised: its adapter was trained beside other numbers than those it would be added to."
        )
    ours = {spec.name: tuple(spec.shape) for spec in exported_specs(policy)}
    theirs = {name: tuple(tensor.shape) for name, tensor in other.items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{name} is {ours.get(name, 'missing')} in the policy and {theirs.get(name, 'missing')} in the {whose}: only "
                "models of one architecture, with one vocabulary and the same tied weights, can be merged."
            )


# ---- the methods: (config, where, policy, target, base or none) -> tensor -------------------------------------------


@dataclass(frozen=True)
class Place:
    """Which tensor it is."""

    name: str
    depth: float  # 0: embeddings and the first layer; 1: the last layer and what follows it


def linear(config: MergeConfig, place: Place, policy: Tensor, target: Tensor) -> Tensor:
    ours, theirs = config.weights
    return (ours * policy + theirs * target) / (ours + theirs)


def slerp(config: MergeConfig, place: Place, policy: Tensor, target: Tensor) -> Tensor:
    t = _at(config.t_values, place.depth)
    lengths = policy.double().norm() * target.double().norm()
    cosine = float((policy.double() * target.double()).sum() / lengths) if lengths > 0 else 1.0
    if abs(cosine) > PARALLEL:
        return (1 - t) * policy + t * target
    angle = float(np.arccos(cosine))
    return float(np.sin((1 - t) * angle) / np.sin(angle)) * policy + float(np.sin(t * angle) / np.sin(angle)) * target


def agreed(
    thin: Callable[..., Tensor],
    config: MergeConfig,
    place: Place,
    policy: Tensor,
    target: Tensor,
    base: Tensor | None = None,
) -> Tensor:
    """base + sum of w tau over the models whose tau has the sign of the weighted sum, divided by their weights."""
    base = policy if base is None else base
    total, divisor = torch.zeros_like(base), torch.zeros_like(base)
    densities = (config.policy_model_density, config.target_model_density)
    seeds = [zlib.crc32(f"{config.seed} {which} {place.name}".encode()) for which in ("policy", "target")]
    differences = [
        weight * thin(model - base, _at(density, place.depth), seed)
        for model, weight, density, seed in zip((policy, target), config.weights, densities, seeds)
    ]
    sign = sum(differences).sign()
    for difference, weight in zip(differences, config.weights):
        agrees = (difference.sign() == sign) & (sign != 0)
        total += difference.where(agrees, 0)
        divisor += weight * agrees
    if config.normalize:
        total = total / divisor.where(divisor.abs() > 1e-8, 1)
    return base + total


def largest(difference: Tensor, density: float, seed: int) -> Tensor:
    """The share `density` of the entries that are largest by magnitude; 0 elsewhere."""
    if density >= 1:
        return difference
    flat = difference.flatten()
    kept = flat.abs().topk(round(density * flat.numel())).indices
    return torch.zeros_like(flat).index_copy(0, kept, flat[kept]).view_as(difference)


def at_random(difference: Tensor, density: float, seed: int) -> Tensor:
    """Each entry kept with probability `density` and divided by it: the mean stays. A function of the seed."""
    if density >= 1:
        return difference
    if density <= 0:
        return torch.zeros_like(difference)
    drawn = torch.rand(difference.shape, generator=torch.Generator().manual_seed(seed)).to(difference.device)
    return (difference / density).where(drawn < density, 0)


MERGES: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "slerp": slerp, "ties": partial(agreed, largest), "dare_ties": partial(agreed, at_random),
}  # fmt: skip


def _depth(name: str, layers: int) -> float:
    if match := LAYER.search(name):
        return int(match[1]) / max(layers - 1, 1)
    return 0.0 if any(part in name for part in FIRST_TENSORS) else 1.0


def _listed(numbers: Numbers) -> list[float]:
    return list(numbers) if isinstance(numbers, list | tuple) else [numbers]


def _at(numbers: Numbers, depth: float) -> float:
    """The number at a depth between 0 and 1."""
    listed = _listed(numbers)
    return float(np.interp(depth, np.linspace(0, 1, len(listed)), listed)) if len(listed) > 1 else float(listed[0])
