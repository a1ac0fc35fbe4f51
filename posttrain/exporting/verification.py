"""Is an export the model that was trained? It is loaded afresh and asked the same questions.

Two questions. What does it say: log-probs of a fixed batch (or scores, of a reward model), which must differ by no more than a
bound on average. And layer by layer: every layer of the export is given the inputs that the trained model's own layer had, so that
a difference is found where it is, before other layers have blurred it, and the tensor can be named.

A model that sees is also asked what it says after a picture, of which its processor must make the same ids and pixels.

Both sides compute in float32, so that what is left is the rounding of the weights that were written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from posttrain.models.inference import evaluating, inference
from posttrain.models.load.merged_layers import sources_of
from posttrain.models.load.model import innermost_model
from posttrain.models.load.saved_model import SavedModel
from posttrain.models.scoring.heads import CAUSAL_LM
from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, scored_by

BOUNDS = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1, "q8_0": 0.3}
"""Mean difference of log-probs that is still rounding, by how the weights were written. The batch is random tokens, after which
models are unsure: of a real 135M model rounding makes 1.3e-5, 0.004, 0.02 and 0.09 there.
"""
LAYER_BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3, "q8_0": 3e-2}
"""Of a layer's outputs, ||export - trained|| / ||trained||; of that model 1e-6, 3e-4, 0.0023 and 0.013 in the worst layer."""
SHARE_BOUND, PROBES = 0.25, 128
LENGTH = 48
PICTURE_SIZE = (480, 640)  # height, width: enough to be shrunk or cut by most processors
PICTURE_TEXT = "What is in this picture? There are 3 + 45 = 48 red squares in it, and one that is blue."
LAST = 16
"""Tokens of that text of which log-probs are compared: no placeholder is among them, which a model never expects."""


class ExportRefused(RuntimeError):
    """The export is not the model that was trained. `tensor`: the first one that differs, where it is known."""

    def __init__(self, sentence: str, tensor: str | None = None) -> None:
        super().__init__(sentence)
        self.tensor = tensor


@dataclass(frozen=True)
class LayerCall:
    """What a layer was given and what it made of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@dataclass(frozen=True)
class AdapterCall:
    """What a layer makes of random inputs, and what it would make of them without its adapter."""

    inputs: tuple[int, int, torch.dtype]  # seed, width and dtype: they are drawn again when they are wanted
    output: Tensor
    without: Tensor

    def draw(self) -> Tensor:
        return drawn_inputs(*self.inputs).to(self.output.device)


@dataclass
class Recorded:
    """The trained model's answers."""

    task: str
    sequences: list[np.ndarray]
    answers: np.ndarray
    shown: dict[str, Tensor] = field(default_factory=dict)  # what the model is given of a picture, where it sees
    picture_answers: np.ndarray | None = None
    layers: dict[str, LayerCall] = field(default_factory=dict)  # in the order in which they were called
    adapters: dict[str, AdapterCall] = field(default_factory=dict)


@dataclass(frozen=True)
class Verified:
    """How far an export is from what was trained."""

    mean: float
    largest: float
    bound: float
    layers: int
    worst_layer: float
    picture: float | None = None  # mean difference of log-probs after a picture, where the model sees
    llama_cpp: float | None = None  # mean difference of llama.cpp's own answers, where it was asked


def record(model: nn.Module, task: str, processor: Any | None = None) -> Recorded:
    """Ask the trained model, adapters beside their base as in training. `processor`: of one that sees."""
    innermost = innermost_model(model)
    vocabulary = innermost.config.get_text_config().vocab_size
    sequences = SyncProbe(vocabulary, length=LENGTH).sequences
    found = Recorded(task, sequences, answers_of(model, task, sequences))
    if processor is not None:
        found.shown = shown_picture(processor)
    if found.shown:
        found.picture_answers = answers_after(model, task, found.shown)
    names = {name.rpartition(".")[0] for name, _ in sources_of(innermost)}
    with _recording(innermost, names, found.layers):
        answers_of(model, task, sequences[:1])
    with evaluating(model), inference(next(model.parameters()).device):
        found.layers |= _unreached(innermost, sorted(names - found.layers.keys()))
        for seed, (name, call) in enumerate(found.layers.items()):
            if (asked := _adapter_call(innermost.get_submodule(name), call, seed)) is not None:
                found.adapters[name] = asked
    return found


def _unreached(innermost: nn.Module, names: list[str]) -> dict[str, LayerCall]:
    """Linear layers that a text does not come to, those of a vision tower or the head of a classifier, on random inputs: a picture
    would leave gigabytes of a tower's own."""
    calls = {}
    for seed, name in enumerate(names):
        module = innermost.get_submodule(name)
        linear = getattr(module, "base_layer", module)
        if isinstance(linear, nn.Linear):
            drawn = drawn_inputs(seed, linear.in_features, torch.float32).to(linear.weight.device)
            calls[name] = LayerCall((drawn,), {}, module(drawn))
    return calls


def _adapter_call(module: nn.Module, call: LayerCall, seed: int) -> AdapterCall | None:
    """None of a layer without an adapter, and of one that is more than a linear map (embeddings, experts)."""
    base, given = getattr(module, "base_layer", None), call.args[0] if call.args else None
    if not isinstance(base, nn.Linear) or not isinstance(given, Tensor):
        return None
    inputs = (seed, given.shape[-1], given.dtype)
    drawn = drawn_inputs(*inputs).to(given.device)
    return AdapterCall(inputs, module(drawn), base(drawn))


def drawn_inputs(seed: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(PROBES, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def answers_of(model: nn.Module, task: str, sequences: list[np.ndarray]) -> np.ndarray:
    """Log-probs of the tokens after the first, or the score of each sequence."""
    if task == CAUSAL_LM:
        return np.concatenate(scored_by(model)(sequences)).astype(np.float64)
    device = next(model.parameters()).device
    with evaluating(model), inference(device):
        rows = [torch.from_numpy(ids.astype(np.int64))[None].to(device) for ids in sequences]
        return np.concatenate([model(input_ids=row).logits[0].double().cpu().numpy() for row in rows])


def shown_picture(processor: Any) -> dict[str, Tensor]:
    """What a model is given of a drawn picture and a text behind it, by its processor; nothing where that has no mark of images."""
    if getattr(processor, "image_token", None) is None:
        return {}
    pixels = np.random.default_rng(0).integers(0, 256, (*PICTURE_SIZE, 3), dtype=np.uint8)
    text = f"{processor.image_token}{PICTURE_TEXT}"
    made = processor(text=[text], images=[[Image.fromarray(pixels)]], return_tensors="pt")
    return {name: tensor for name, tensor in made.items() if name != "labels"}


def answers_after(model: nn.Module, task: str, shown: dict[str, Tensor]) -> np.ndarray:
    """Log-probs of the last tokens behind a picture, or the score."""
    device = next(model.parameters()).device
    given = {name: tensor.to(device) for name, tensor in shown.items()}
    with evaluating(model), inference(device):
        logits = model(**given).logits[0].double()
    if task == CAUSAL_LM:
        wanted = given["input_ids"][0, -LAST:, None]
        logits = logits[-LAST - 1 : -1].log_softmax(-1).gather(1, wanted)[:, 0]
    return logits[-LAST:].cpu().numpy()


def check_processor(trained: Any, exported: SavedModel, trust_remote_code: bool) -> Any:
    """The processor that is loaded from an export; ExportRefused unless it makes of a picture what the one that was saved does."""
    what = f"The processor that is loaded from the export is not that of the run, a {type(trained).__name__}"
    wanted = shown_picture(trained)
    try:
        fresh = exported.processor(trust_remote_code)
        made = {} if fresh is None else shown_picture(fresh)
    except Exception as error:  # what a processor says of a damaged file differs by family
        raise ExportRefused(f"{what}: it fails with {type(error).__name__}: {error}") from error
    if fresh is None:
        raise ExportRefused(f"{what}: its folder has none.")
    for name in sorted({*made, *wanted}):
        if name not in made or name not in wanted or not torch.equal(made[name], wanted[name]):
            raise ExportRefused(f"{what}: it makes other `{name}` of a picture with a text.")
    return fresh


@contextmanager
def _recording(innermost: nn.Module, names: set[str], calls: dict[str, LayerCall]) -> Iterator[None]:
    def hook_of(name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if name not in calls and isinstance(first, Tensor):
                calls[name] = LayerCall(args, kwargs, first.clone())

        return keep

    modules = {name: innermost.get_submodule(name) for name in sorted(names)}
    handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def verify(recorded: Recorded, fresh: nn.Module, written_as: str, bound: float | None = None) -> Verified:
    """ExportRefused unless the export, loaded afresh in float32, is the model that was recorded."""
    bound = BOUNDS[written_as] if bound is None else bound
    answers = answers_of(fresh, recorded.task, recorded.sequences)
    apart = np.abs(answers - recorded.answers)
    mean, largest = float(apart.mean()), float(apart.max())
    allowed = LAYER_BOUNDS[written_as]
    worst, first = _layers_apart(recorded, fresh, allowed)
    what = "log-probs" if recorded.task == CAUSAL_LM else "scores"
    by = f"{what} differ by {mean:.3g} on average and {largest:.3g} at most; the bound on the average is {bound:g}"
    if first is not None:
        raise ExportRefused(
            f"The export is not the model that was trained: {first[0]} is the first layer whose outputs differ, {first[1]} "
            f"({by}).",
            first[0],
        )
    if not mean <= bound:  # NaN is past every bound
        raise ExportRefused(
            f"The export is not the model that was trained: {by}. Layer by layer nothing is past {allowed:g}: what differs is "
            "how they are put together, or the rounding is too coarse for this model."
        )
    return Verified(mean, largest, bound, len(recorded.layers), worst, _picture_apart(recorded, fresh, bound))


def _picture_apart(recorded: Recorded, fresh: nn.Module, bound: float) -> float | None:
    """None: the model was shown no picture."""
    if not recorded.shown:
        return None
    answers = answers_after(fresh, recorded.task, recorded.shown)
    return check_answers(recorded.picture_answers, answers, bound, "The export, shown a picture,")


def check_answers(wanted: np.ndarray, answers: np.ndarray, bound: float, who: str) -> float:
    """Mean difference of answers from those that were recorded; ExportRefused where it is past the bound."""
    mean = float(np.abs(answers - wanted).mean())
    if not mean <= bound:
        raise ExportRefused(
            f"{who} does not compute what was trained: log-probs differ by {mean:.3g} on average; the bound is {bound:g}."
        )
    return mean


def _layers_apart(recorded: Recorded, fresh: nn.Module, allowed: float) -> tuple[float, tuple[str, str] | None]:
    """(largest difference of a layer, (name, what is wrong) of the first that is wrong)."""
    worst, innermost = 0.0, innermost_model(fresh)
    with evaluating(fresh), inference(next(fresh.parameters()).device):
        for name, call in recorded.layers.items():
            module = innermost.get_submodule(name)
            output = module(*call.args, **call.kwargs)
            output = output[0] if isinstance(output, tuple) else output
            wanted = call.output.double()
            apart = float((output.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
            if not apart <= allowed:
                return apart, (name, f"by {apart:.3g} of their length where {allowed:g} would be rounding")
            share = None if name not in recorded.adapters else _missing_share(module, recorded.adapters[name])
            if share is not None:
                return apart, (name, f"its adapter is in them to {share:.0%}")
            worst = max(worst, apart)
    return worst, None


def _missing_share(module: nn.Module, asked: AdapterCall) -> float | None:
    """How much of what the adapter adds is in the outputs; None: all of it, as far as rounding lets one see.

        share = <output - without, trained - without> / ||trained - without||^2

    An adapter may move a layer by less than rounding to 8 bits does. Rounding has no direction, though: in n independent outputs
    it changes this share by about ||output - trained|| / ||trained - without|| / sqrt(n), while a forgotten adapter makes it 0.
    """
    trained, without = asked.output.double(), asked.without.double()
    output = module(asked.draw()).double()
    effect = trained - without
    size = float(effect.norm())
    if size == 0:
        return None
    share = float(((output - without) * effect).sum()) / size**2
    independent = trained.shape[-1] * min(PROBES, asked.inputs[1])
    noise = float((output - trained).norm()) / size / math.sqrt(independent)
    return None if abs(share - 1) <= max(SHARE_BOUND, 5 * noise) else share
