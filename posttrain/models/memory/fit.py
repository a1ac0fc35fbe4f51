"""Will it fit? What a step needs is measured and added up before training, and the mildest measure that makes room is taken.

A micro-batch may be run in several passes, which costs nothing as long as a pass fills the device. So the question to each rung of
the ladder is whether it leaves room for a pass of that size, or of the longest row. The rungs, each slower than the one before it:
keep all activations; recompute the cheap ones (selective checkpointing);
recompute whole layers from their inputs (full checkpointing); park those inputs in host memory; keep the optimizer's moments in 8
bits. What the user has set is left as it is: the ladder then has fewer rungs. For the smallest peak (`least`) the rung that needs
least is taken, with the longest row as a pass.

Activations are not guessed: a probe of a few hundred tokens runs through the model and everything that autograd keeps is counted,
storage by storage. What is kept grows with the tokens of a micro-batch, so two probes give the bytes of one token.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from posttrain.models.attention.ragged import is_ragged, segment_kwargs
from posttrain.models.inference import body_of
from posttrain.models.layers.checkpointing import KEPT
from posttrain.models.scoring.token_scores import CHUNK_BYTES

NONE, SELECTIVE, FULL = "none", "selective", "full"
HEAD_ROOM = 0.9  # share of free memory that may be claimed: the allocator's gaps and kernels' workspaces need the rest
PROBE_TOKENS = (128, 256)
ENOUGH_TOKENS, ENOUGH_TO_GATHER = 4096, 16384
"""Of one pass, where it has the weights, and where it gathers them from other processes. Larger passes of the next level, which
computes up to a third more, would be slower."""
TOKENS_WITHOUT_GRADIENT = {"cuda": 32768, "cpu": 4096}  # of a pass: it keeps little, and is to fill the device
CHUNKS_IN_THE_HEAD = 2  # a chunk of logits and its gradient
OFFLOAD_WINDOW = 3  # layer inputs on the device at once: the one in use, the next, and one on its way
MOMENT_BYTES = {"adamw_8bit": 2 + 8 / 256, "sgd": 0, "lion_32bit": 4, "adafactor": 0.01, "adagrad": 4, "rmsprop": 4}
"""Optimizer state of one trained weight, gradients and masters not counted; Adam's two float32 moments for any other name."""
EIGHT_BIT = "adamw_8bit"


# ---- what a token keeps -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationCost:
    """Bytes that one token keeps on the device until the backward, by level of checkpointing, and in one layer."""

    kept: dict[str, float]
    layer_input: float
    layer: float
    is_measured: bool = True

    def waiting(self, level: str, offload: bool) -> float:
        """Kept over the whole model from the forward to the backward."""
        if offload:
            return OFFLOAD_WINDOW * (self.layer_input if level == FULL else self.layer)
        return self.kept[level]

    def in_backward(self, level: str) -> float:
        """What the backward of a single layer holds besides: its gradients, and what it recomputes."""
        return self.layer * (1 if level == NONE else 2)

    def of(self, level: str, offload: bool) -> float:
        return self.waiting(level, offload) + self.in_backward(level)

    def times(self, share: float) -> ActivationCost:
        """Of so many patches, where this is the cost of one."""
        kept = {level: share * size for level, size in self.kept.items()}
        return ActivationCost(kept, share * self.layer_input, share * self.layer, self.is_measured)

    def __add__(self, other: ActivationCost) -> ActivationCost:
        """Of two bodies that one pass runs through. Their layers run backward one after the other."""
        kept = {level: mine + other.kept[level] for level, mine in self.kept.items()}
        layer_input, layer = max(self.layer_input, other.layer_input), max(self.layer, other.layer)
        return ActivationCost(kept, layer_input, layer, self.is_measured and other.is_measured)


NOTHING = ActivationCost(dict.fromkeys((NONE, SELECTIVE, FULL), 0.0), 0.0, 0.0)


def activation_cost(model: nn.Module) -> ActivationCost:
    """What the body of a model (and of a critic beside it) keeps for a token.

    `Shape.activations` estimates it where nothing can be run.
    """
    own = _body_cost(body_of(model), model.config)
    return functools.reduce(operator.add, (activation_cost(other) for other in models_beside(model)), own)


def models_beside(model: nn.Module) -> list[nn.Module]:
    """Models with a body of their own that a model holds and that run in its forward: PPO's value model."""
    body = body_of(model)
    return [child for child in model.children() if isinstance(child, PreTrainedModel) and child is not body]


def _body_cost(body: nn.Module, config: Any) -> ActivationCost:
    text, device = config.get_text_config(), next(body.parameters()).device
    runs = [
        (tokens, functools.partial(body, **_probe_inputs(config, tokens, device), use_cache=False))
        for tokens in PROBE_TOKENS
    ]
    return layers_cost(body, text.num_hidden_layers, text.hidden_size, runs)


def layers_cost(
    body: nn.Module, layers: int, width: int, runs: Sequence[tuple[int, Callable[[], Any]]]
) -> ActivationCost:
    """Of one token or patch, from two forward passes of different size: (tokens or patches, the pass)."""
    item = next(p.element_size() for p in body.parameters() if p.is_floating_point())
    inputs = layers * width * item
    (few_saved, few_selected), (saved, selected) = (_kept_by(body, run) for _, run in runs)
    units = runs[1][0] - runs[0][0]
    everything = (saved - few_saved) / units
    kept = {NONE: everything, SELECTIVE: min((selected - few_selected) / units + inputs, everything), FULL: inputs}
    return ActivationCost(kept, width * item, everything / layers)


class _Results(TorchDispatchMode):
    """Bytes of the results of the operations that selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation in KEPT:
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, Tensor):
                    self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return result


def _kept_by(body: nn.Module, run: Callable[[], Any]) -> tuple[int, int]:
    """(bytes that autograd keeps, bytes that selective checkpointing would keep beside layer inputs) of a forward pass of `body`.

    Storages are held until the end, so that none is counted twice and no address is used again.
    """
    own = {t.untyped_storage().data_ptr() for t in (*body.parameters(), *body.buffers())}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> None:
        """Nothing is handed back: an operation that keeps its own result would own itself, and a graph without a backward stay."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage

    device = next(body.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        with saved_tensors_hooks(pack, lambda nothing: nothing):
            output = run()
        del output
        # A compiled layer has no single operations to look at, and selective checkpointing runs without it.
        with torch.compiler.set_stance("force_eager"), _Results() as results:
            run()
    return sum(s.nbytes() for s in saved.values()), sum(s.nbytes() for s in results.storages.values())


def _probe_inputs(config: Any, tokens: int, device: torch.device) -> dict[str, Any]:
    """One row of `tokens` tokens, in the layout that the model runs, as keyword arguments."""
    places = torch.arange(tokens, device=device)[None]
    inputs = {"input_ids": places % config.get_text_config().vocab_size, "position_ids": places}
    if not is_ragged(config._attn_implementation):
        return inputs | {"attention_mask": torch.ones_like(places)}
    return inputs | segment_kwargs(torch.tensor([0, tokens], dtype=torch.int32, device=device), tokens)


# ---- what does not grow with the tokens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateCost:
    """Bytes of everything else that training adds to the loaded weights."""

    trained: int  # weights
    masters: int  # float32 copies of low-precision weights
    sums: int  # float32 gradients, added up from pass to pass
    passing: int = 0  # gradients on their way into the sums
    buckets: int = 0  # DDP's, one of each gradient
    written: int = 0  # all gradients as autograd writes them: where a step is one pass, they may be all that there is
    head_gradient: int = 0  # float32, while the head is asked
    head_chunks: int = 0  # of logits, at most

    @property
    def gradients(self) -> int:
        return self.sums + self.passing + self.buckets

    @property
    def head(self) -> int:
        return self.head_chunks + self.head_gradient

    def moments(self, optim: str) -> float:
        """Of an optimizer by its name, or its entry in transformers' table."""
        return self.trained * MOMENT_BYTES.get(getattr(optim, "value", optim), 8)

    def masters_of(self, optim: str) -> int:
        """With 8-bit moments a master is the bfloat16 weight and the 16 bits that this lacks."""
        return self.masters // 2 if getattr(optim, "value", optim) == EIGHT_BIT else self.masters

    def total(self, optim: str) -> float:
        """A bound, since not all of it is there at the same time."""
        return self.masters_of(optim) + self.gradients + self.head + self.moments(optim)


def state_cost(parameters: Iterable[nn.Parameter], head: nn.Module | None, world_size: int = 1) -> StateCost:
    """float32 masters and accumulators for low-precision weights, float32 gradients elsewhere; only trained weights count."""
    trained = [p for p in parameters if p.requires_grad]
    low = [p for p in trained if p.element_size() < 4]
    written = sum(p.nbytes for p in trained)
    return StateCost(
        trained=sum(p.numel() for p in trained),
        masters=sum(4 * p.numel() for p in low),
        sums=sum(p.numel() * max(p.element_size(), 4) for p in trained),
        passing=max((p.nbytes for p in low), default=0),  # it lives until it is added to its accumulator
        buckets=written if world_size > 1 else 0,
        written=written,
        **_of_head(head, trained[0].device.type if trained else "cpu"),
    )


def sharded_state_cost(
    model: nn.Module, layers: Iterable[nn.Module], head: nn.Module | None, shards: int, dtype: torch.dtype, device: str
) -> StateCost:
    """A process's part under FSDP. The weights are counted too ("masters"): they are not on the device yet.

    Gathered at once, with gradients of their own: two layers, and everything outside of the layers.
    """
    everything = {id(p): p for p in model.parameters()}
    within = [{id(p): p for p in layer.parameters()} for layer in layers]
    outside = [p for key, p in everything.items() if not any(key in layer for layer in within)]
    largest = max(within, key=lambda layer: sum(p.numel() for p in layer.values()), default={})
    gathered = sum(
        times * p.numel() * (dtype.itemsize + (4 if p.requires_grad else 0))
        for times, part in ((1, outside), (2, largest.values()))
        for p in part
    )
    trained = sum(p.numel() for p in everything.values() if p.requires_grad) // shards
    weights = sum(p.numel() * (4 if p.requires_grad else p.element_size()) for p in everything.values()) // shards
    return StateCost(trained, weights, sums=4 * trained, passing=gathered, **_of_head(head, device))


def _of_head(head: nn.Module | None, device: str) -> dict[str, int]:
    """Chunks of logits, and the head's own float32 gradient where it is trained."""
    weight = getattr(head, "weight", None)
    own = 4 * weight.numel() if weight is not None and weight.requires_grad else 0
    return {"head_gradient": own, "head_chunks": CHUNKS_IN_THE_HEAD * CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"])}


# ---- the decision -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryOverrides:
    """What the user has set; None: decided here."""

    checkpointing: str | None = None  # NONE, SELECTIVE or FULL
    offload: bool | None = None
    optim: str | None = None  # a name: stays. None: AdamW, in 8 bits if it must be
    tokens_per_pass: int | None = None
    keep_logits: bool | None = None


@dataclass(frozen=True)
class BatchTokens:
    """How many tokens come together: in the largest micro-batch, and in the longest unit, which cannot be split."""

    largest: int
    longest: int
    can_split: bool = True
    enough: int = ENOUGH_TOKENS

    @property
    def wanted(self) -> int:
        """Tokens of a pass that is large enough."""
        return min(self.largest, max(self.longest, self.enough)) if self.can_split else self.largest


@dataclass(frozen=True)
class MemoryPlan:
    """What is done about memory, and the sentence that says why."""

    checkpointing: str
    offload: bool
    eight_bit: bool
    sentence: str
    tokens_per_pass: int | None = None  # None: every micro-batch is one pass
    keep_logits: bool = False


IN_WORDS = {
    (NONE, False): "kept",
    (SELECTIVE, False): "kept where recomputing them is expensive (selective checkpointing)",
    (FULL, False): "recomputed in the backward",
    (FULL, True): "recomputed in the backward from layer inputs that wait in host memory",
    (NONE, True): "kept in host memory",
    (SELECTIVE, True): "kept in host memory where recomputing them is expensive (selective checkpointing)",
}
DECIDING = ("memory", "gradient_checkpointing", "activation_offloading", "max_tokens_per_pass", "keep_logits", "optim")
"""Options that decide what is planned, or overrule it."""
LEAST = "least"
"""Value of `memory` that asks for the smallest peak."""
LADDER = ((NONE, False), (SELECTIVE, False), (FULL, False), (FULL, True))


Rung = tuple[str, bool, bool]
"""(level of checkpointing, offload, 8-bit moments)"""


def rungs(overrides: MemoryOverrides, can_recompute: bool = True) -> list[Rung]:
    """Mildest first, of what the user has left open."""
    chosen = overrides.checkpointing or (None if can_recompute else NONE)
    may_offload = can_recompute if overrides.offload is None else overrides.offload
    ladder = [(chosen or FULL, True)] if overrides.offload else LADDER
    pairs = [pair for pair in ladder if chosen in (None, pair[0]) and (may_offload or not pair[1])]
    eight_bit = (False, True) if overrides.optim is None else (overrides.optim == EIGHT_BIT,)
    return [(*pair, bits) for bits in eight_bit for pair in pairs]


def _chosen(
    ladder: Sequence[Rung],
    room: float,
    batch: BatchTokens,
    fixed: Callable[[Rung], float],
    a_token: Callable[[Rung], float],
    least: bool,
) -> tuple[Rung, int]:
    """The mildest rung whose passes are large enough (else the last), or the one that needs least; the tokens of a pass."""
    if least:
        return min(ladder, key=lambda rung: fixed(rung) + batch.wanted * a_token(rung)), batch.wanted
    for rung in ladder:
        fitting = int((room - fixed(rung)) // a_token(rung))
        if fitting >= batch.wanted:
            break
    return rung, fitting


def memory_plan(
    free: float,
    batch: BatchTokens,
    activations: ActivationCost,
    state: StateCost,
    overrides: MemoryOverrides,
    can_recompute: bool = True,
    logit_bytes: float = 0.0,
    least: bool = False,
) -> MemoryPlan:
    """The mildest rung whose passes fit into `free` bytes and are large enough; the last one if none is.

    `logit_bytes`: of one token, where the loss would profit from keeping them. They are, if passes are still large enough then.
    `least`: the smallest peak, whatever fits.
    """
    room = HEAD_ROOM * free
    optim = overrides.optim or "adamw"
    if overrides.tokens_per_pass is not None:
        batch = replace(batch, largest=min(batch.largest, max(overrides.tokens_per_pass, batch.longest)))
    asked_for = logit_bytes if overrides.keep_logits else 0.0
    if least and batch.can_split:
        batch = replace(batch, enough=0)

    def fixed(rung: Rung) -> float:
        return state.total(EIGHT_BIT if rung[2] else optim)

    def a_token(rung: Rung) -> float:
        return activations.of(*rung[:2]) + asked_for

    rung, fitting = _chosen(rungs(overrides, can_recompute), room, batch, fixed, a_token, least)
    level, offload, eight_bit = rung
    optim = EIGHT_BIT if eight_bit else optim
    keep_logits = bool(overrides.keep_logits)
    if overrides.keep_logits is None and logit_bytes and level == NONE and not least:
        beside_them = int((room - state.total(optim)) // (activations.of(level, offload) + logit_bytes))
        # A micro-batch that is one pass stays one: adding gradients up would cost more than the logits save.
        keep_logits = beside_them >= (batch.wanted if fitting < batch.largest else batch.largest)
        fitting = beside_them if keep_logits else fitting
    tokens = max(min(fitting, batch.largest), batch.wanted)
    terms = {
        "the optimizer's moments": state.moments(optim),
        "masters": state.masters_of(optim),
        "gradients": state.gradients,
        "the head": state.head,
        "activations": tokens * activations.of(level, offload),
        "logits": tokens * logit_bytes if keep_logits else 0.0,
    }
    is_split = tokens < batch.largest
    passes = f", run in passes of up to {tokens}," if is_split else ""
    needed = ", ".join(f"{name} {_gib(size)}" for name, size in terms.items() if size >= 2**20)
    sentence = (
        f"Activations are {IN_WORDS[level, offload]}{', and the moments have 8 bits' if eight_bit else ''}: "
        f"micro-batches of up to {batch.largest} tokens{passes} would keep {_gib(tokens * activations.of(NONE, False))} "
        f"({activations.of(NONE, False) / 2**10:.0f} KiB a token, "
        f"{'measured' if activations.is_measured else 'estimated'}). "
        f"Needed now: {needed}{f'; {_gib(room)} of {_gib(free)} free may be used' if math.isfinite(free) else ''}. "
        f"The largest term is {max(terms, key=terms.get)}."
    )
    missing = sum(terms.values()) - room
    if missing > 0:
        sentence += f" That is {_gib(missing)} too much: lower `per_device_train_batch_size` or `max_length` if memory runs out."
    sentence += f" {', '.join(f'`{name}`' for name in DECIDING[:-1])} and `{DECIDING[-1]}` decide otherwise."
    return MemoryPlan(
        level, offload, eight_bit, sentence, tokens if is_split else overrides.tokens_per_pass, keep_logits
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def tokens_without_gradient(device: torch.device) -> int:
    """Of a pass that no backward follows."""
    return TOKENS_WITHOUT_GRADIENT.get(device.type, TOKENS_WITHOUT_GRADIENT["cuda"])


def free_memory(device: torch.device) -> int:
    """Bytes that the device has free, those included that torch holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
