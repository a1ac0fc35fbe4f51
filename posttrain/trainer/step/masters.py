"""MasterWeights: float32 masters and accumulators of low-precision parameters.

A bfloat16 weight has 8 bits of mantissa: an AdamW step at a learning rate of 1e-6 is smaller than half of its last bit and
vanishes. So the optimizer works on float32 *masters*; gradients of micro-batches are added up in float32 as they appear; after the
step the masters are rounded back into the bfloat16 parameters that the forward pass reads. Float32 parameters are left alone.

For an optimizer that is there to save memory (AdamW8bit) a master is not a tensor of its own: its upper half is the bfloat16
parameter, rounded to the nearest, and its lower half is kept beside it (`SplitMaster`). The two are the same 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.trainer.step import master_adamw
from posttrain.trainer.step.adam8bit import AdamW8bit

LOW_PRECISION = (torch.bfloat16, torch.float16)
REDUCE_BUCKET_ELEMENTS = 2**25
SPLIT_AT_ONCE = 2**24


class SplitMaster:
    """A float32 number in two parts of 16 bits: master = 2^16 bits(low) + rest, both parts signed.

    `low` is the master rounded to the nearest bfloat16 (halves away from zero), so the rest is between -2^15 and 2^15 - 1.
    """

    def __init__(self, low: nn.Parameter) -> None:
        self.low = low
        self.rest = torch.zeros_like(low, dtype=torch.int16, requires_grad=False)
        self.grad: Tensor | None = None  # float32, added up

    @torch.no_grad()
    def joined(self) -> Tensor:
        """A new float32 tensor."""
        return (self.low.detach().view(torch.int16).int() << 16).add_(self.rest).view(torch.float32)

    @torch.no_grad()
    def take(self, master: Tensor) -> None:
        parts = (master.view(torch.int32), self.low.detach().view(torch.int16), self.rest)
        for bits, low, rest in zip(*(part.view(-1).split(SPLIT_AT_ONCE) for part in parts)):
            upper = (bits + 2**15) >> 16
            low.copy_(upper)
            rest.copy_(bits - (upper << 16))


class MasterWeights:
    """Puts float32 masters in the place of an optimizer's low-precision parameters.

    Use it on an optimizer that has not stepped yet. `parameter.grad` is folded into `master.grad` by a hook as soon as autograd
    has written it, so a low-precision gradient never outlives its micro-batch. Where a step is one micro-batch on one process
    (`accumulates=False`) there is nothing to add up: if the optimizer can read it as it is, the gradient stays where it is.

    An AdamW8bit keeps its parameters and asks for their masters one at a time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulates: bool = True) -> None:
        self.optimizer = optimizer
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (parameter, master)
        self.split: dict[int, SplitMaster] = {}  # by the id of the parameter
        self._low_of: dict[int, nn.Parameter] = {}
        self._hooks = []
        in_one_pass, splits = master_adamw.can_run(optimizer), isinstance(optimizer, AdamW8bit)
        self.folds = accumulates or not (in_one_pass or splits)
        if splits:
            optimizer.masters = self
        for group in optimizer.param_groups:
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]
        if in_one_pass:
            master_adamw.MasterAdamW.take_over(optimizer, self)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_step(copies=not in_one_pass)))

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        if isinstance(self.optimizer, AdamW8bit) and parameter.dtype == torch.bfloat16:
            master = self.split[id(parameter)] = SplitMaster(parameter)
        else:
            master = nn.Parameter(parameter.detach().float())
            self.pairs.append((parameter, master))
            self._low_of[id(master)] = parameter
        if self.folds:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(_fold, master)))
        return parameter if isinstance(master, SplitMaster) else master

    def low_of(self, master: Tensor) -> nn.Parameter | None:
        """The parameter that `master` is the accurate copy of; None for a parameter that needs no master."""
        return self._low_of.get(id(master))

    def gradient_of(self, master: Tensor) -> Tensor | None:
        """Its accumulated gradient, or the one that autograd wrote for the low-precision parameter."""
        if (split := self.split.get(id(master))) is not None:
            return master.grad if split.grad is None else split.grad
        low = self.low_of(master)
        return low.grad if master.grad is None and low is not None else master.grad

    def _after_step(self, copies: bool) -> None:
        if copies:
            self.publish()
        self.drop_gradients()

    @property
    def all(self) -> list[tuple[nn.Parameter, nn.Parameter | SplitMaster]]:
        return [*self.pairs, *((split.low, split) for split in self.split.values())]

    def drop_gradients(self) -> None:
        for low, master in self.all:
            low.grad = master.grad = None

    def saved(self) -> list[Tensor]:
        """The masters in float32; those that have to be put together, on the host."""
        whole = [master.data for _, master in self.pairs]
        for split in self.split.values():
            on_host = SplitMaster(split.low.detach().cpu())
            on_host.rest = split.rest.cpu()
            whole.append(on_host.joined())
        return whole

    @torch.no_grad()
    def load(self, saved: list[Tensor]) -> None:
        """Masters as `saved` has given them, and the parameters that follow from them."""
        for (low, master), tensor in zip(self.all, saved, strict=True):
            tensor = tensor.to(low.device)
            if isinstance(master, SplitMaster):
                master.take(tensor)
            else:
                master.copy_(tensor)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters."""
        if self.pairs:
            torch._foreach_copy_([low for low, _ in self.pairs], [master for _, master in self.pairs])

    @torch.no_grad()
    def reload(self) -> None:
        """Take the parameters as they are now, e.g. after weights were loaded into the model."""
        for low, master in self.pairs:
            master.copy_(low)
        for split in self.split.values():
            split.rest.zero_()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def all_reduce(self) -> None:
        """Average the accumulated float32 gradients over the processes, in buckets.

        DDP does not reduce (it would see the last micro-batch only); the sums of whole steps are averaged here.
        """
        bucket: list[Tensor] = []
        size = 0
        for low, master in self.all:
            if master.grad is None:  # a process whose rows trained nothing
                master.grad = torch.zeros_like(low, dtype=torch.float32)
            bucket.append(master.grad)
            size += master.grad.numel()
            if size >= REDUCE_BUCKET_ELEMENTS:
                _average(bucket)
                bucket, size = [], 0
        if bucket:
            _average(bucket)


def _fold(master: nn.Parameter | SplitMaster, low: Tensor) -> None:
    if master.grad is None:
        master.grad = low.grad.float()
    else:
        master.grad.add_(low.grad)
    low.grad = None


def _average(tensors: list[Tensor]) -> None:
    flat = torch._utils._flatten_dense_tensors(tensors)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
        tensor.copy_(part)


def has_low_precision(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.requires_grad and parameter.dtype in LOW_PRECISION for parameter in parameters)
