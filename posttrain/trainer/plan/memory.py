"""What a run needs on its device, phase by phase, from the shape of the model alone: no weights are read, nothing is measured.

What is added up is what models/memory adds up for a loaded model; here it is split by phase (load, generation, scoring, update) and
activations, which it measures, are estimated: bytes that one token keeps in one layer, by the kernels that the layer runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.layers.fused_lora import SIBLINGS
from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.load.adapters import add_adapter
from posttrain.models.load.model import AUTO_CLASSES, SEQUENCE_REWARD, innermost_model, locate
from posttrain.models.memory import fit as memory
from posttrain.models.memory.fit import FULL, NONE, SELECTIVE
from posttrain.models.scoring.head_kernels import STATISTICS
from posttrain.models.scoring.token_scores import default_chunk_tokens
from posttrain.rollout.engines.native.engine import MAX_SLOTS
from posttrain.trainer.step.memory_fit import batch_tokens, can_keep_logits, laid_out_share, memory_overrides

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer
    from posttrain.trainer.options.base import BaseConfig
    from posttrain.trainer.plan.arithmetic import RunCounts

CONTEXT_BYTES = int(0.6 * 2**30)
"""CUDA's own, and what libraries take when they are first called."""
QUANTISED_BYTES = {"load_in_4bit": 0.5 + 4 / 64, "load_in_8bit": 1.0}
"""Of one weight of a linear layer, scales included."""
MOST_TOKENS = 2**24
"""Where the search for the largest micro-batch stops."""

# In units of the item size: (hidden, query, key or value, inner) widths that one token keeps in one layer.
KEPT_WIDTHS = {
    (PLAIN, NONE): (9, 2, 2, 4),  # norms keep float32 copies, SiLU and the product keep theirs
    (LIGER, NONE): (4, 2, 2, 3),
    (COMPILED, NONE): (2, 2, 2, 2),  # what can be made again from what is read anyway is not kept
    (PLAIN, SELECTIVE): (3, 2, 2, 2),
    (LIGER, SELECTIVE): (3, 2, 2, 2),
    (COMPILED, SELECTIVE): (3, 2, 2, 2),  # runs uncompiled
}
FROZEN_SAVES = (2, 0, 0, 1)
"""Linears without a gradient of their own do not keep their inputs (two norms, the product of the MLP's halves); adapters may."""
DROPPED_WIDTHS = 1.5
"""Of an input with LoRA dropout: the copy, and its mask of one byte."""


# ---- the shape -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Of a model, with its adapter if it gets one."""

    parameters: int
    trained: int
    head: int  # weights of the language head; 0: a reward model's
    embedding: int  # weights that are looked up, not multiplied with
    active: int  # weights of the layers that a token is multiplied with
    weight_bytes: float
    state: memory.StateCost
    largest_trained: int
    layers: int
    width: int
    queries: int
    keys: int
    inner: int
    vocabulary: int
    item: int
    is_adapter: bool
    adapter_inputs: float  # widths that one token keeps for the adapters of all layers
    head_is_trained: bool
    can_recompute: bool


def meta_model(side: BaseTrainer, name: str, parts: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The model without any weight, with its adapter."""
    path, kwargs = locate(_base_of(name), side.args.model_init_kwargs)
    kept = {key: kwargs[key] for key in ("revision", "gguf_file", "subfolder") if key in kwargs}
    model = _without_weights(path, side.task, dtype, side.args.trust_remote_code, kept)
    with torch.device("meta"):
        return model if parts.get("peft_config") is None else add_adapter(model, parts["peft_config"], dtype)


def reward_model_bytes(side: BaseTrainer, name: str, dtype: torch.dtype) -> float:
    """Of the weights of a reward model, which lies on the device from before the first rollout on."""
    model = _without_weights(_base_of(name), SEQUENCE_REWARD, dtype, side.args.trust_remote_code, {})
    return float(sum(parameter.nbytes for parameter in model.parameters()))


def _without_weights(
    path: str, task: str, dtype: torch.dtype, trust_remote_code: bool, kwargs: dict[str, Any]
) -> nn.Module:
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    if task == SEQUENCE_REWARD:
        config.num_labels = 1
    with torch.device("meta"):
        model = AUTO_CLASSES[task].from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        model.tie_weights()
    return model


def _base_of(name: str) -> str:
    """The model under an adapter that is trained further."""
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file() and not (Path(name) / "config.json").is_file():
        return json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    return name


def shape_of(model: nn.Module, quantised: str | None = None, fuses_lora: bool = True) -> Shape:
    innermost = innermost_model(model)
    text = innermost.config.get_text_config()
    everything = list(model.parameters())
    trained = [p for p in everything if p.requires_grad]
    head, embedding = innermost.get_output_embeddings(), innermost.get_input_embeddings()
    head_weight = getattr(head, "weight", None)
    outside = {id(head_weight), id(embedding.weight)}
    layers = [module for module in innermost.modules() if isinstance(module, GradientCheckpointingLayer)]
    heads = getattr(text, "num_attention_heads", 1)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        parameters=sum(p.numel() for p in everything),
        trained=sum(p.numel() for p in trained),
        head=0 if head_weight is None else head_weight.numel(),
        embedding=embedding.weight.numel(),
        active=sum(_active(name, p, text) for name, p in model.named_parameters() if id(p) not in outside),
        weight_bytes=sum(_bytes(name, p, outside, quantised) for name, p in model.named_parameters()),
        state=memory.state_cost(model.parameters(), head),
        largest_trained=max((p.numel() for p in trained), default=0),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        queries=heads * size,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * size,
        inner=_inner(text),
        vocabulary=text.vocab_size,
        item=next(p.element_size() for p in everything if p.is_floating_point()),
        is_adapter=model is not innermost,
        adapter_inputs=sum(adapter_inputs(module, fuses_lora) for module in model.modules()),
        head_is_trained=head_weight is not None and head_weight.requires_grad,
        can_recompute=bool(layers),
    )


def adapter_inputs(parent: nn.Module, fuses_lora: bool) -> float:
    """Widths that one token keeps for the LoRA linears of one module: what the gradients of their adapters need.

    q, k and v read one tensor, as do gate and up. Attention keeps the input of o itself; a fused MLP computes that of down again.
    """
    adapted = {name: child for name, child in parent.named_children() if getattr(child, "lora_A", None)}
    dropped = [child for child in adapted.values() if any(getattr(d, "p", 0) for d in child.lora_dropout.values())]
    if dropped:
        return DROPPED_WIDTHS * sum(child.in_features for child in dropped)
    elsewhere = ("o_proj", "down_proj") if fuses_lora else ("o_proj",)
    siblings = {name: group for group in SIBLINGS for name in group}
    inputs = {siblings.get(name, name): child.in_features for name, child in adapted.items() if name not in elsewhere}
    return sum(inputs.values())


def _active(name: str, parameter: nn.Parameter, text: Any) -> int:
    """A token passes through some of the experts only."""
    experts, used = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None), text_experts(text)
    return parameter.numel() * used // experts if experts and used and "expert" in name else parameter.numel()


def text_experts(text: Any) -> int | None:
    return getattr(text, "num_experts_per_tok", None)


def _inner(text: Any) -> int:
    used = text_experts(text)
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return used * (getattr(text, "moe_intermediate_size", None) or dense) if used else dense


def _bytes(name: str, parameter: nn.Parameter, outside: set[int], quantised: str | None) -> float:
    is_packed = quantised is not None and parameter.dim() == 2 and id(parameter) not in outside and "lora_" not in name
    return parameter.numel() * (QUANTISED_BYTES[quantised] if is_packed else parameter.element_size())


# ---- what grows with the tokens --------------------------------------------------------------------------------------------


def estimated_activations(shape: Shape, kernels: str) -> memory.ActivationCost:
    """Bytes a token, by level, as `memory.activation_cost` would measure them on the device."""
    sizes = (shape.width, shape.queries, shape.keys, shape.inner)

    def of(level: str) -> float:
        times, adapters = KEPT_WIDTHS[kernels, level], 0.0
        if shape.is_adapter and level == NONE:
            times = tuple(kept - saved for kept, saved in zip(times, FROZEN_SAVES))
            adapters = shape.adapter_inputs
        return shape.item * (adapters + shape.layers * sum(count * size for count, size in zip(times, sizes)))

    inputs = shape.layers * shape.width * shape.item
    kept = {NONE: of(NONE), SELECTIVE: min(of(SELECTIVE), of(NONE)), FULL: inputs}
    return memory.ActivationCost(kept, shape.width * shape.item, of(NONE) / shape.layers, is_measured=False)


def head_bytes(
    shape: Shape, tokens: int, has_gradient: bool, chunk_tokens: int | None = None, exact: bool = False
) -> float:
    """A chunk of logits (slopes are written over it), hidden states that go in and their gradient, and the weight's gradient.

    `exact`: statistics that the kernels do not know are taken from a copy of the chunk in float32.
    """
    if not shape.head:
        return 0.0
    rows = (
        default_chunk_tokens(torch.device("cuda"), shape.vocabulary, shape.item)
        if chunk_tokens is None
        else chunk_tokens
    )
    chunk = min(rows, tokens) * shape.vocabulary * (shape.item + (4 if exact else 0))
    states = tokens * shape.width * shape.item * (2 if has_gradient else 1)
    return chunk + states + (4 * shape.head if has_gradient and shape.head_is_trained else 0)


# ---- phases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """Terms that are on the device at the same time."""

    name: str
    terms: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.terms.values())

    @property
    def binding(self) -> str:
        return max(self.terms, key=self.terms.get)


@dataclass(frozen=True)
class Demands:
    """What a run holds (bytes) or does besides training its policy."""

    reference: float = 0.0
    loaded_reference: float = 0.0  # of one that answers before training and goes
    reward_models: float = 0.0
    scores: bool = False  # a pass without gradient over rollouts, for old or reference log-probs


@dataclass
class MemoryModel:
    """The memory of one process as a function of the tokens of a pass and the level of checkpointing."""

    shape: Shape
    activations: memory.ActivationCost
    demands: Demands
    optim: str
    in_one_pass: bool  # a step is one pass: gradients are never added up
    chunk_tokens: int | None = None
    exact_chunk: bool = False  # see `head_bytes`
    keep_logits: bool = False
    kv_bytes: float = 0.0  # of the keys and values of one generation
    decode_logits: float = 0.0
    generates: bool = False
    vllm: float = 0.0  # bytes that a colocated vLLM takes to generate
    vllm_stays: bool = False  # it does not sleep during the update

    def standing(self) -> dict[str, float]:
        state = self.shape.state
        terms = {
            "weights": self.shape.weight_bytes,
            "reference": self.demands.reference,
            "reward models": self.demands.reward_models,
            "masters": state.masters,
            "moments": state.moments(self.optim),
            "vLLM": self.vllm if self.vllm_stays else 0.0,
        }
        return {name: size for name, size in terms.items() if size}

    def head(self, tokens: int, has_gradient: bool) -> float:
        exact = self.exact_chunk and has_gradient
        chunk_tokens = 0 if self.keep_logits and has_gradient else self.chunk_tokens
        return head_bytes(self.shape, tokens, has_gradient, chunk_tokens, exact)

    def gradients(self) -> float:
        """All of them, after a backward."""
        if self.in_one_pass and self.shape.item < 4 and self.optim.startswith("adamw_torch"):
            return self.shape.trained * self.shape.item
        low = self.shape.largest_trained * self.shape.item if self.shape.item < 4 else 0
        return 4 * self.shape.trained + low

    def update(self, tokens: int, trained: int, level: str, offload: bool) -> Phase:
        """The worst of three moments: the head on top of all that is kept, the last layer's backward, the end of the backward."""
        kept = tokens * self.activations.waiting(level, offload)
        in_backward = tokens * self.activations.in_backward(level)
        before = 0.0 if self.in_one_pass else 4 * self.shape.trained
        head_gradient = 4 * self.shape.head if self.shape.head_is_trained else 0
        moments = (
            {"gradients": before, "head": self.head(trained, has_gradient=True), "activations": kept},
            {"gradients": before, "head": head_gradient, "activations": kept + in_backward},
            {"gradients": self.gradients(), "activations": in_backward},
        )
        logits = {"logits": trained * self.shape.vocabulary * self.shape.item} if self.keep_logits else {}
        terms = [self.standing() | moment | (logits if "head" in moment else {}) for moment in moments]
        phases = [Phase("update", {name: size for name, size in found.items() if size}) for found in terms]
        return max(phases, key=lambda phase: phase.peak)

    def phases(self, tokens: int, trained: int, level: str, offload: bool) -> list[Phase]:
        standing = self.standing()
        loaded = {name: size for name, size in standing.items() if name in ("weights", "reference", "reward models")}
        if self.demands.loaded_reference:
            loaded["reference"] = self.demands.loaded_reference
        found = [Phase("load", loaded)]
        if self.generates:
            cache = {"keys and values": self.kv_bytes, "logits": self.decode_logits, "vLLM": self.vllm}
            found.append(Phase("generation", standing | {name: size for name, size in cache.items() if size}))
        if self.demands.scores:
            work = {"head": self.head(trained, has_gradient=False), "activations": tokens * self.activations.layer}
            found.append(Phase("scoring", standing | work))
        return [*found, self.update(tokens, trained, level, offload)]

    def largest_pass(self, room: float, level: str, offload: bool, share_trained: float) -> int:
        """Tokens of the largest pass whose update fits into `room`."""
        low, high = 0, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.update(middle, int(middle * share_trained), level, offload).peak <= room
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


@dataclass
class MemoryReport:
    """What is printed about memory. Sizes in bytes."""

    dtype: str
    kernels: str
    tokens: int  # of the largest micro-batch
    longest: int  # unit
    level: str
    offload: bool
    phases: list[Phase]
    by_level: dict[str, float]  # update peak
    gpu: int | None = None
    room: float | None = None
    fitting: dict[str, dict[str, Any]] = field(default_factory=dict)
    sentence: str | None = None

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak)

    def as_json(self) -> dict[str, Any]:
        phases = {p.name: {"peak": p.peak, "binding": p.binding, "terms": p.terms} for p in self.phases}
        rest = {name: value for name, value in vars(self).items() if name != "phases"}
        return rest | {"phases": phases, "is_estimate": True}


def planned_kernels(args: BaseConfig) -> str:
    """Of the layers on a GPU. Whether compiled ones are faster, which long runs find out, is not known here: they keep less."""
    if args.compile_layers:
        return COMPILED
    return PLAIN if args.use_liger_kernel is False else LIGER


def memory_model(
    side: BaseTrainer, shape: Shape, counts: RunCounts, demands: Demands, gpu: int | None = None
) -> MemoryModel:
    args = side.args
    made = MemoryModel(
        shape,
        estimated_activations(shape, planned_kernels(args)),
        demands,
        getattr(args.optim, "value", args.optim),
        args.steps_in_one_pass,
        chunk_tokens=args.chunk_tokens,
        keep_logits=bool(args.keep_logits) and side.recomputes_logits(),
        exact_chunk=any(name not in STATISTICS for name in side.token_stats),
    )
    if counts.rollouts is not None and args.use_vllm:
        made.vllm = args.vllm_share * (gpu or 0)
        made.generates, made.vllm_stays = bool(made.vllm), args.vllm_resident_share > 0
    elif counts.rollouts is not None:
        slots = min(
            args.max_rollout_slots or MAX_SLOTS["cuda"], counts.rollouts.completions_per_generation // counts.processes
        )
        prompts = -(-slots // args.num_generations) * counts.rollouts.longest_prompt
        a_token = 2 * shape.layers * shape.keys * shape.item
        made.generates, made.kv_bytes = True, a_token * (slots * args.max_completion_length + prompts)
        made.decode_logits = 2 * slots * shape.vocabulary * 4
    return made


def explain_memory(
    side: BaseTrainer, shape: Shape, counts: RunCounts, demands: Demands, gpu: int | None
) -> MemoryReport:
    """The phases of the run with its own settings, or with those that its trainer would choose on a device of `gpu` bytes."""
    model, overrides = memory_model(side, shape, counts, demands, gpu), memory_overrides(side)
    batch = batch_tokens(side)
    share = _share_trained(side, counts, batch)
    level, offload, sentence = overrides.checkpointing or NONE, bool(overrides.offload), None
    if gpu is not None:
        taken = shape.weight_bytes + demands.reference + demands.reward_models + (model.vllm if model.vllm_stays else 0)
        free = gpu - CONTEXT_BYTES - taken
        logit_bytes = shape.vocabulary * shape.item if shape.head and can_keep_logits(side) else 0.0
        plan = memory.memory_plan(
            free, batch, model.activations, shape.state, overrides, shape.can_recompute, logit_bytes
        )
        model.keep_logits = plan.keep_logits
        level, offload, sentence = plan.checkpointing, plan.offload, plan.sentence
        if plan.tokens_per_pass is not None:
            batch = replace(batch, largest=plan.tokens_per_pass)
        model.optim = memory.EIGHT_BIT if plan.eight_bit else model.optim
    trained = int(batch.largest * share)
    phases = model.phases(batch.largest, trained, level, offload)
    report = MemoryReport(
        dtype={2: "bfloat16", 4: "float32"}[shape.item],
        kernels=planned_kernels(side.args),
        tokens=batch.largest,
        longest=batch.longest,
        level=level,
        offload=offload,
        phases=phases,
        by_level={one: model.update(batch.largest, trained, one, False).peak for one in (NONE, SELECTIVE, FULL)},
        gpu=gpu,
        sentence=sentence,
    )
    if gpu is not None:
        report.room = memory.HEAD_ROOM * (gpu - CONTEXT_BYTES)
        report.fitting = {one: _fitting(model, report, one, share) for one in (NONE, SELECTIVE, FULL)}
    return report


def _fitting(model: MemoryModel, report: MemoryReport, level: str, share: float) -> dict[str, Any]:
    tokens = model.largest_pass(report.room, level, False, share)
    return {"tokens": tokens, "rows": tokens // max(report.longest, 1), "fits": tokens >= report.tokens}


def _share_trained(side: Any, counts: RunCounts, batch: memory.BatchTokens) -> float:
    """Of the tokens of a pass, those that the head is asked about; all completions as long as they may be."""
    if counts.rollouts is not None:
        return min(side.args.per_device_train_batch_size * side.args.max_completion_length / max(batch.largest, 1), 1.0)
    if not counts.steps_counted:
        return 1.0
    return min(counts.per_step["trained"].total / max(counts.per_step["tokens"].total, 1) / laid_out_share(side), 1.0)
