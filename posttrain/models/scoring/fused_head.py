"""The language head and what is asked about its logits as one autograd function, a chunk of rows at a time.

`summed_nll`: a loss that is a plain sum of -log p needs no second pass over the head: d nll / d logits = softmax(logits) - onehot
is known while the chunk of logits exists. Three products with the vocabulary instead of four (6VH instead of 8VH a token).

`token_logps`: a loss that is any function of log-probs learns its slopes only later; the logits are computed again in the backward
from the hidden states and log Z. Where there is memory for them they are kept instead (`keep_logits`), and on a CPU, where a chunk
is small and a product expensive, where they are one chunk. Both ways give the same bits.

Both write slopes over the logits (`head_kernels`) and add the weight's gradient up in float32 inside the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from posttrain.models.scoring.float32_head import head_operands
from posttrain.models.scoring.head_kernels import STATISTICS, Rows, read_rows, slopes_of_rows
from posttrain.models.sharding import is_sharded_module, plain_class

Statistic = Callable[[Tensor, Tensor, Tensor], Tensor]


class Head(Protocol):
    module: nn.Module
    scale: float
    softcap: float | None
    words: int | None


def can_fuse(head: Head) -> bool:
    """Only a plain linear head whose weight is here, whole: an adapter on it or a soft-cap needs autograd's own backward.

    FSDP2 has gathered it when this is asked (`call_inside`), and its hooks have been called.
    """
    module = head.module
    is_watched = bool(module._forward_hooks or module._forward_pre_hooks) and not is_sharded_module(module)
    return (
        plain_class(module) is nn.Linear
        and head.softcap is None
        and not hasattr(module.weight, "placements")  # DTensor: tensor parallel
        and not hasattr(module.weight, "ds_id")  # ZeRO-3
        and not is_watched
    )


def summed_nll(
    hidden: Tensor, head: Head, targets: Tensor, chunk_tokens: int, stats: dict[str, Statistic], label_smoothing: float
) -> dict[str, Tensor]:
    """{"nll_sum": differentiable, "logps": detached, and the detached statistics}."""
    asked = Asked(targets, head.scale, chunk_tokens, stats)
    nll_sum, logps, *values = _SummedNLL.apply(*operands(hidden, head), asked, label_smoothing)
    return {"nll_sum": nll_sum, "logps": logps, **dict(zip(stats, values))}


def token_logps(
    hidden: Tensor, head: Head, targets: Tensor, chunk_tokens: int, stats: dict[str, Statistic], keep_logits: bool
) -> dict[str, Tensor]:
    """{"logps": differentiable, and the detached statistics}."""
    asked = Asked(targets, head.scale, chunk_tokens, stats)
    logps, *values = _TokenLogps.apply(*operands(hidden, head), asked, keep_logits)
    return {"logps": logps, **dict(zip(stats, values))}


def operands(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias of a plain linear head, of its first words only where it is cut."""
    hidden, weight, bias = head_operands(hidden, head.module)
    if head.words is None or head.words == len(weight):
        return hidden, weight, bias
    return hidden, weight[: head.words], None if bias is None else bias[: head.words]


class Asked(NamedTuple):
    """What is asked about each row of hidden states, and how many rows are looked at together."""

    targets: Tensor
    scale: float
    chunk_tokens: int
    stats: dict[str, Statistic]


class Reader:
    """Walks over chunks of logits and keeps what is asked about their rows."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.targets, self.scale, self.chunk_tokens, self.stats = asked
        self.accurate = torch.promote_types(hidden.dtype, torch.float32)

    def parts(self) -> Iterator[slice]:
        """Rows of one chunk after the other."""
        for start in range(0, len(self.hidden), self.chunk_tokens):
            yield slice(start, start + self.chunk_tokens)

    def logits(self, part: slice) -> Tensor:
        """Of a chunk. Hand it on without a name: a loop's variable would hold one chunk while the next is computed."""
        return nn.functional.linear(self.hidden[part], self.weight, self.bias)

    def make_room(self) -> None:
        """For the answers. What the pass over a row does not say needs the chunk once more, in float32."""
        self.rows = Rows(len(self.hidden), self.hidden.device, self.accurate, self.stats)
        self.other = {name: fn for name, fn in self.stats.items() if name not in STATISTICS}
        self.values = {name: torch.empty_like(self.rows.logps) for name in self.other}

    def read(
        self, part: slice, logits: Tensor, smoothing: float = 0.0, slopes: bool = False, keep: bool = False
    ) -> Tensor | None:
        """Answer the questions about a chunk. Returns its slopes, or the logits themselves where they are kept."""
        targets = self.targets[part]
        exact = logits.to(self.accurate, copy=True).mul_(self.scale) if self.other else None  # `logits` are overwritten
        answer = read_rows(logits, targets, self.rows, part, scale=self.scale, smoothing=smoothing, slopes=slopes)
        for name, statistic in self.other.items():
            self.values[name][part] = statistic(exact, self.rows.log_z[part], targets)
        return logits if keep else answer

    def answers(self) -> list[Tensor]:
        known = self.rows.answers() | self.values
        return [known[name] for name in self.stats]


class Gradients:
    """Gradients of hidden states, weight and bias, added up over chunks."""

    def __init__(self, reader: Reader, wanted: tuple[bool, ...]) -> None:
        self.reader = reader
        wants_hidden, wants_weight, wants_bias = wanted
        self.hidden = torch.empty_like(reader.hidden) if wants_hidden else None
        self.weight = torch.zeros_like(reader.weight, dtype=reader.accurate) if wants_weight else None
        self.bias = torch.zeros_like(reader.bias, dtype=reader.accurate) if wants_bias else None

    def add(self, part: slice, slopes: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(slopes, self.reader.weight, out=self.hidden[part])
        if self.weight is not None:
            _add_product(self.weight, slopes.T, self.reader.hidden[part])
        if self.bias is not None:
            self.bias += slopes.sum(0, dtype=self.bias.dtype)

    def rounded(self) -> tuple[Tensor | None, ...]:
        """In the dtypes of what they are gradients of."""
        weight, bias = self.reader.weight, self.reader.bias
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None else self.bias.to(bias.dtype),
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # the product is never rounded to bfloat16
    else:
        total += left @ right


def scaled(gradients: Sequence[Tensor | None], factor: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Gradients of hidden states, weight and bias of a loss that is `factor` times as large; the last two rounded to `dtype`."""
    hidden, *others = gradients
    # In one pass, and not in place: there may be another backward.
    products = [
        None if one is None else torch.mul(one, factor, out=torch.empty_like(one, dtype=dtype)) for one in others
    ]
    return None if hidden is None else hidden * factor.to(hidden.dtype), *products


class _SummedNLL(torch.autograd.Function):
    """(1 - e) * sum_t -log p(y_t) + e * sum_t mean_v -log p(v), with gradients for hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked, smoothing: float
    ) -> tuple[Tensor, ...]:
        reader = Reader(hidden, weight, bias, asked)
        reader.make_room()
        gradients = Gradients(reader, ctx.needs_input_grad[:3])
        for part in reader.parts():
            gradients.add(part, reader.read(part, reader.logits(part), smoothing, slopes=True))
        total = -(1 - smoothing) * reader.rows.logps.sum()
        if smoothing:
            total = total - smoothing * reader.rows.mean_logps.sum()
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.weight_dtype = weight.dtype
        answers = reader.answers()
        ctx.mark_non_differentiable(reader.rows.logps, *answers)
        return total, reader.rows.logps, *answers

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*scaled(ctx.saved_tensors, grad_sum, ctx.weight_dtype), None, None)


class _TokenLogps(torch.autograd.Function):
    """log p(y_t) of each row; the backward computes the logits once more, or has them still."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked, keep_logits: bool
    ) -> tuple[Tensor, ...]:
        reader = Reader(hidden, weight, bias, asked)
        reader.make_room()
        is_one_on_cpu = hidden.device.type == "cpu" and len(hidden) <= asked.chunk_tokens
        keeps = keep_logits or is_one_on_cpu
        kept = [reader.read(part, reader.logits(part), keep=keeps) for part in reader.parts()]
        ctx.save_for_backward(hidden, weight, bias, reader.rows.log_z, *(kept if keeps else ()))
        ctx.asked, ctx.has_kept = asked, keeps
        answers = reader.answers()
        ctx.mark_non_differentiable(*answers)
        return reader.rows.logps, *answers

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, log_z, *kept = ctx.saved_tensors
        reader = Reader(hidden, weight, bias, ctx.asked)
        gradients = Gradients(reader, ctx.needs_input_grad[:3])
        for number, part in enumerate(reader.parts()):
            factors = -grad_logps[part].contiguous()
            logits = kept[number] if ctx.has_kept else reader.logits(part)
            slopes = slopes_of_rows(logits, reader.targets[part], log_z[part], factors, reader.scale)
            gradients.add(part, slopes)
            del logits, slopes  # before the next chunk is computed
        ctx.has_kept = False  # slopes lie over them now: another backward of this graph computes them
        return (*gradients.rounded(), None, None)
