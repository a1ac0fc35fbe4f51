"""FlashAttention 3 and 4, where they are installed: faster than torch's varlen kernel on the GPUs that they are made for.

Both have the arguments and results of torch's kernel, ragged and with the log-sum-exp of each query's scores. They are operators
here, so that selective checkpointing keeps the result of the forward and compiled layers contain it. `flash_choice` says where they
are used.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True, eq=False)
class Package:
    name: str
    forward: OpOverload
    """(q, k, v, *how) -> output, log-sum-exps."""
    backward: OpOverload
    """(grad_out, q, k, v, output, log-sum-exps, *how) -> the gradients of q, k and v."""
    is_installed: Callable[[], bool]


# ---- as operators ------------------------------------------------------------------------------------------------------

_HOW = (
    "Tensor bounds, Tensor key_bounds, SymInt longest, SymInt longest_keys, "
    "float scale, bool causal, int left, int right, float softcap"
)
_library = torch.library.Library("posttrain", "FRAGMENT")


def _operators(
    name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> tuple[OpOverload, OpOverload]:
    of_gradients = f"{name}_backward"
    _library.define(f"{name}(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)")
    _library.define(
        f"{of_gradients}(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, {_HOW}) "
        "-> (Tensor, Tensor, Tensor)"
    )
    _library.impl(name, forward, "CompositeExplicitAutograd")
    _library.impl(of_gradients, backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"posttrain::{name}", _shapes, lib=_library)
    torch.library.register_fake(f"posttrain::{of_gradients}", _shapes_of_gradients, lib=_library)
    forward_op, backward_op = (getattr(torch.ops.posttrain, each).default for each in (name, of_gradients))

    def gradients(ctx: Any, grad_out: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_op(grad_out, *ctx.saved_tensors, *ctx.how), *(None,) * 9

    torch.library.register_autograd(f"posttrain::{name}", gradients, setup_context=_keep, lib=_library)
    return forward_op, backward_op


def _shapes(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), sums


def _shapes_of_gradients(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, key_bounds, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, key_bounds)


def _arguments(
    bounds: Tensor, key_bounds: Tensor, longest: int, longest_keys: int,
    scale: float, causal: bool, left: int, right: int, softcap: float,
) -> dict[str, Any]:  # fmt: skip
    """But for `causal`, which the two call otherwise."""
    return {
        "cu_seqlens_q": bounds, "cu_seqlens_k": key_bounds, "max_seqlen_q": longest, "max_seqlen_k": longest_keys,
        "softmax_scale": scale, "softcap": softcap, "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


# ---- FlashAttention 3 --------------------------------------------------------------------------------------------------


def _library_of_flash3() -> Path | None:
    """Its file: of its own package, or of xformers, which has a copy. Neither is imported: the operators are in the file alone."""
    for package, inside in (("flash_attn_3", ""), ("xformers", "flash_attn_3")):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for found in Path(folder, inside).glob("_C*.so"):
                return found
    return None


def _flash3() -> Any:
    if not hasattr(torch.ops.flash_attn_3, "fwd"):  # another library of this process may have loaded it
        torch.ops.load_library(str(_library_of_flash3()))
    return torch.ops.flash_attn_3


def _flash3_forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (_with_dense_rows(x) for x in (q, k, v))
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    _, sums, *_ = _flash3().fwd(q, k, v, out=out, **_arguments(*how), is_causal=how[5], num_splits=1)
    return out, sums


def _flash3_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    given = (_with_dense_rows(x) for x in (grad_out, q, k, v, out))
    gradients = tuple(x.new_empty(x.shape) for x in (q, k, v))
    _flash3().bwd(*given, sums.contiguous(), *gradients, **_arguments(*how), is_causal=how[5])
    return gradients


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- FlashAttention 4 --------------------------------------------------------------------------------------------------

MODULE = "flash_attn.cute.interface"


def _flash4_is_installed() -> bool:
    try:  # not by an import: it takes seconds, and what it imports may be absent on a CPU
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _flash4() -> Any:
    """Its module, which keeps what it compiles (5 to 15 s a variant) for later processes, in a folder that only the user writes to:
    by itself it would compile in each process, and its own folder is in /tmp, where code of others could lie."""
    folder = Path.home() / ".cache" / "posttrain" / "flash4"
    with contextlib.suppress(OSError):  # a home that cannot be written to: each process compiles
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    return importlib.import_module(MODULE)


def _flash4_arguments(*how: Any) -> dict[str, Any]:
    windows = {f"window_size_{side}": None if size < 0 else size for side, size in zip(("left", "right"), how[6:8])}
    return _arguments(*how) | windows | {"causal": how[5]}


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    # As they mostly are. It copies some other layouts and keeps the rest, and its results are laid out like what it made of them.
    q, k, v = (x.contiguous() for x in (q, k, v))
    return _flash4()._flash_attn_fwd(q, k, v, **_flash4_arguments(*how), return_lse=True)[:2]


def _flash4_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    given = (x.contiguous() for x in (q, k, v, out, grad_out, sums))
    return tuple(_flash4()._flash_attn_bwd(*given, **_flash4_arguments(*how))[:3])


FLASH3 = Package(
    "FlashAttention 3",
    *_operators("flash3", _flash3_forward, _flash3_backward),
    is_installed=lambda: _library_of_flash3() is not None,
)
FLASH4 = Package("FlashAttention 4", *_operators("flash4", _flash4_forward, _flash4_backward), _flash4_is_installed)
PACKAGES = (FLASH3, FLASH4)
