"""AdamW whose two moments take one byte a weight each (block-wise 8-bit optimizers, arXiv:2110.02861).

Moments are cut into blocks of 256 values. A block keeps its largest magnitude in float32 and, of each value, its share of that
on a grid that is fine for large and for small shares alike: seven (eight) decades, each cut evenly, the top one into 64 (128)
parts and every lower one into half as many. The update itself is computed in float32:

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w - lr wd w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

v moves by a thousandth a step, far less than a step of the grid, and rounding to the nearest would leave it where it is. So v is
rounded up or down by chance, with the right expectation, from numbers that are a function of (step, weight): a resumed run draws
the same. A positive v is never rounded to 0, by which its weight would be divided.

Tensors below 4096 values keep float32 moments. Where the weights are bfloat16, `masters` (set by MasterWeights) has the other half
of their bits: the float32 weight is put together, updated and taken apart again, one tensor at a time. On CUDA a Triton kernel
does a tensor in one pass, and `found_inf` (set by FiniteSteps or a gradient scaler) turns a step into nothing on the device, as
torch's fused optimizers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

BLOCK = 256
SMALLEST = 4096
SIGNED_BITS, UNSIGNED_BITS = 7, 8
BLOCKS_AT_ONCE = 4096  # on the CPU: about a million values, so that temporaries stay small


# ---- the grid -----------------------------------------------------------------------------------------------------------


def grid(bits: int) -> Tensor:
    """The 2^bits shares in [0, 1]: code 2^b + j is 10^(b + 1 - bits) (0.1 + 0.9 (j + 1) / 2^b), code 0 is 0, the last is 1."""
    values = [0.0]
    for b in range(bits):
        decade = 10.0 ** (b + 1 - bits)
        values += [decade * (0.1 + 0.9 * (j + 1) / 2**b) for j in range(2**b)]
    return torch.tensor(values, dtype=torch.float32)


def place_on_grid(share: Tensor, bits: int) -> Tensor:
    """The inverse of `grid` for every share in [0, 1], not only for its points: a real number between two codes."""
    edges, offsets, slopes = _decades(bits)
    decade = torch.zeros(share.shape, dtype=torch.int32)
    for edge in edges:  # faster than torch.bucketize for so few
        decade += share > edge
    return _looked_up(slopes, decade).mul_(share).add_(_looked_up(offsets, decade))


def _looked_up(table: Tensor, indices: Tensor) -> Tensor:
    return table.index_select(0, indices.reshape(-1)).view(indices.shape)


@functools.lru_cache
def _decades(bits: int) -> tuple[list[float], Tensor, Tensor]:
    """Where the decades end, and the straight line from share to code in each; the lowest decade reaches down to 0."""
    parts = 2.0 ** torch.arange(bits, dtype=torch.float64)
    scale = 10.0 ** torch.arange(bits - 1, -1, -1, dtype=torch.float64)
    offsets, slopes = parts - 1 - parts / 9, scale * parts / 0.9
    offsets[0], slopes[0] = 0, scale[0]
    return (1 / scale[:-1]).tolist(), offsets.float(), slopes.float()


def quantised(values: Tensor, bits: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(blocks, 256) numbers -> (codes, largest magnitude of each block); with `noise` in [0, 1) rounded by chance."""
    size = values.abs()
    largest = size.amax(dim=1)
    share = size / torch.where(largest > 0, largest, 1)[:, None]
    place = place_on_grid(share, bits)
    codes = (place.round_() if noise is None else place.add_(noise).floor_()).clamp_(0, 2**bits - 1)
    if bits == SIGNED_BITS:
        return codes.copysign_(values).to(torch.int8), largest
    return torch.maximum(codes, (share > 0).to(codes.dtype)).to(torch.uint8), largest


def restored(codes: Tensor, largest: Tensor, points: Tensor) -> Tensor:
    """Codes of (blocks, 256) values -> float32."""
    wide = codes.int()
    shares = _looked_up(points, wide.abs()) * largest[:, None]
    return shares.copysign_(wide) if codes.dtype == torch.int8 else shares


# ---- the optimizer ------------------------------------------------------------------------------------------------------


class SplitWeight(Protocol):
    """What is asked of SplitMaster."""

    def joined(self) -> Tensor: ...

    def take(self, master: Tensor) -> None: ...


class Masters(Protocol):
    """What is asked of MasterWeights."""

    split: dict[int, SplitWeight]

    def gradient_of(self, parameter: Tensor) -> Tensor | None: ...


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and 8-bit moments."""

    _step_supports_amp_scaling = True  # `found_inf` and `grad_scale` are honoured by `step` itself
    masters: Masters | None = None
    clip: Tensor | None = None  # multiplies gradients that are not float32, set by FiniteSteps before every step

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        # `fused` says, as in torch, that no step makes the host wait.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        for group in self.param_groups:
            for parameter in group["params"]:
                _check(parameter)
        self._grids: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        place = 0
        for group in self.param_groups:
            small: list[tuple[Tensor, Tensor, Tensor]] = []  # (parameter, its weights, gradient)
            for parameter in group["params"]:
                place += 1
                gradient = parameter.grad if self.masters is None else self.masters.gradient_of(parameter)
                if gradient is None:
                    continue
                if gradient.dtype != torch.float32 and self.clip is not None:
                    gradient = gradient.float().mul_(self.clip)
                split = None if self.masters is None else self.masters.split.get(id(parameter))
                weights = parameter if split is None else split.joined()
                if parameter.numel() < SMALLEST:
                    small.append((parameter, weights, gradient))
                    continue
                self._step_of_large(parameter, weights, gradient.contiguous(), group, place)
                if split is not None:
                    split.take(weights)
            self._step_of_small(small, group)
        return loss

    def _step_of_small(self, tensors: list[tuple[Tensor, Tensor, Tensor]], group: dict[str, Any]) -> None:
        if not tensors:
            return
        states = [self._small_state(parameter, weights) for parameter, weights, _ in tensors]
        beta1, beta2 = group["betas"]
        adamw(
            [weights for _, weights, _ in tensors], [gradient.to(weights.dtype) for _, weights, gradient in tensors],
            [s["m"] for s in states], [s["v"] for s in states], [], [s["step"] for s in states], fused=True,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
        )  # fmt: skip
        for parameter, weights, _ in tensors:
            if weights is not parameter:
                self.masters.split[id(parameter)].take(weights)

    def _step_of_large(
        self, parameter: Tensor, weights: Tensor, gradient: Tensor, group: dict[str, Any], place: int
    ) -> None:
        state = self._large_state(parameter)
        if getattr(self, "grad_scale", None) is not None:
            gradient = gradient / self.grad_scale
        found_inf = getattr(self, "found_inf", None)
        grids = self._grids_on(parameter.device)
        if parameter.is_cuda:
            from posttrain.trainer.step.adam8bit_triton import step_on_device

            step_on_device(weights, gradient, state, group, grids, found_inf, place)
            return
        if found_inf is not None and bool(found_inf):
            return
        state["step"] += 1
        self._step_on_host(weights.view(-1), gradient.view(-1), state, group, grids, place)

    def _step_on_host(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        grids: tuple[Tensor, Tensor],
        place: int,
    ) -> None:
        steps = int(state["step"])
        beta1, beta2 = group["betas"]
        # The same few thousand numbers for all blocks: each weight is rounded with the right expectation, and that is enough.
        noise = torch.rand(64, BLOCK, generator=torch.Generator().manual_seed(place * 2**32 + steps))
        for first in range(0, len(state["m_largest"]), BLOCKS_AT_ONCE):
            blocks = slice(first, first + BLOCKS_AT_ONCE)
            values = slice(first * BLOCK, min((first + BLOCKS_AT_ONCE) * BLOCK, len(weights)))
            g = _in_blocks(gradient[values].float())
            m = restored(_in_blocks(state["m"][values]), state["m_largest"][blocks], grids[0])
            v = restored(_in_blocks(state["v"][values]), state["v_largest"][blocks], grids[1])
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            slope = (m / (1 - beta1**steps)) / ((v / (1 - beta2**steps)).sqrt_().add_(group["eps"]))
            w = weights[values]
            updated = w.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * slope.view(-1)[: len(w)]
            w.copy_(updated)
            for name, moment, bits, chance in (
                ("m", m, SIGNED_BITS, None),
                ("v", v, UNSIGNED_BITS, noise.repeat(-(-len(v) // len(noise)), 1)[: len(v)]),
            ):
                codes, state[f"{name}_largest"][blocks] = quantised(moment, bits, chance)
                state[name][values] = codes.view(-1)[: len(w)]

    def _small_state(self, parameter: Tensor, weights: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["m"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
            state["v"] = torch.zeros_like(weights, memory_format=torch.preserve_format)
        return state

    def _large_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            like = {"device": parameter.device}
            blocks = -(-parameter.numel() // BLOCK)
            state["step"] = torch.zeros((), dtype=torch.float32, **like)
            state["m"] = torch.zeros(parameter.numel(), dtype=torch.int8, **like)
            state["v"] = torch.zeros(parameter.numel(), dtype=torch.uint8, **like)
            state["m_largest"] = torch.zeros(blocks, dtype=torch.float32, **like)
            state["v_largest"] = torch.zeros(blocks, dtype=torch.float32, **like)
        return state

    def _grids_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._grids:
            self._grids[device] = (grid(SIGNED_BITS).to(device), grid(UNSIGNED_BITS).to(device))
        return self._grids[device]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch would turn every tensor of the state into the weight's dtype; codes stay codes, bit for bit."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number)
            if saved is not None:
                self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in saved.items()}


def adamw_8bit(args: Any) -> tuple[type[AdamW8bit], dict[str, Any]]:
    """The optimizer and its settings, from training arguments."""
    if args.optim_args:
        raise ValueError(
            f'optim="adamw_8bit" has no `optim_args` ({args.optim_args}); bitsandbytes\' optimizer has: optim="adamw_bnb_8bit".'
        )
    betas = (args.adam_beta1, args.adam_beta2)
    return AdamW8bit, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}


def _in_blocks(values: Tensor) -> Tensor:
    """Flat values as (blocks, 256), the last block filled up with 0."""
    missing = -len(values) % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _check(parameter: Tensor) -> None:
    if hasattr(parameter, "placements") or hasattr(parameter, "ds_id"):
        raise ValueError(
            'optim="adamw_8bit" keeps the moments of whole tensors; under FSDP or DeepSpeed use "adamw_bnb_8bit", which needs '
            "bitsandbytes, or the engine's own optimizer."
        )
    if not parameter.is_contiguous():
        raise ValueError(f'optim="adamw_8bit" needs contiguous weights; one of shape {tuple(parameter.shape)} is not.')
