"""FSDP2 as accelerate sets it up, with what it would round or keep too long put right; and states that are in pieces.

    masters     the shards are float32 and what the optimizer works on
    compute     parameters are gathered in bfloat16 (`bf16`), gradients reduced and added up in float32
    memory      gradients are reduced after every micro-batch: kept until the step's end they would be whole on every process

accelerate on its own rounds what the model returns to bfloat16 as well, log-probs included, and reduces gradients in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from posttrain.core.batch import Passes, TokenBatch, passes_of
from posttrain.data.collate import Collator
from posttrain.models.load.adapters import is_peft_model
from posttrain.models.load.model import innermost_model
from posttrain.models.sharding import local_part, part_of, reshard, whole
from posttrain.trainer.options.base import FSDP, BaseConfig
from posttrain.trainer.step.gathering import over_processes

SYNC_EACH_BATCH = "sync_each_batch"


def set_up_fsdp(args: BaseConfig, accelerator: Accelerator, is_enabled: bool) -> None:
    """`is_enabled`: whether accelerate shards here at all."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not is_enabled:
        raise ValueError(
            f"FSDP is asked for, and accelerate does not shard here ({args.world_size} processes on {args.device.type}): it needs "
            "processes with a GPU each, started by torchrun or accelerate launch."
        )
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP version {plugin.fsdp_version} is asked for; posttrain runs version 2. Set `fsdp_config={{'version': 2}}`, or "
            "`fsdp_version: 2` in the config of accelerate."
        )
    low = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    if low is not None:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    if plugin.activation_checkpointing:
        # The same by transformers: accelerate's wrappers stand in the names of parameters, and PEFT saves nothing then.
        args.gradient_checkpointing, plugin.activation_checkpointing = True, False
        args.activation_offloading = plugin.activation_checkpointing_offload or args.activation_offloading
    if SYNC_EACH_BATCH not in (args.accelerator_config.gradient_accumulation_kwargs or {}):
        accelerator.gradient_state.plugin_kwargs[SYNC_EACH_BATCH] = True


def most_of_any_process(count: int, args: BaseConfig) -> int:
    """Collective when there are several processes."""
    return int(over_processes(count, args, torch.distributed.ReduceOp.MAX))


def even_out(batches: list[TokenBatch | Passes], collator: Collator, args: BaseConfig) -> None:
    """Give micro-batches that `max_tokens_per_pass` may have split as many passes as on the process with the most."""
    if args.sharding != FSDP or not args.max_tokens_per_pass:
        return
    for place, batch in enumerate(batches):
        passes = passes_of(batch)
        missing = most_of_any_process(len(passes), args) - len(passes)
        if missing:
            batches[place] = Passes([*passes, *[replace(collator, max_tokens=None).one_pass([])] * missing])


def whole_state(model: nn.Module, is_kept: bool) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` reads, gathered one at a time into the memory of the process where they are kept."""
    reshard(model)
    wanted = _is_written(model)
    state: dict[str, Tensor] = {}
    found: dict[int, Tensor | None] = {}  # a tied tensor has two names and is gathered once
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not wanted(name):
            continue
        if id(tensor) not in found:
            gathered = whole(tensor)
            found[id(tensor)] = gathered.cpu() if is_kept else None
        if is_kept:
            state[name] = found[id(tensor)]
    return state


def shard_frozen(accelerator: Any, model: nn.Module) -> nn.Module:
    """A model that is only asked, held in pieces as the policy is: every process must ask it equally often."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    return fsdp2_prepare_model(accelerator, model)


def _is_written(model: nn.Module) -> Callable[[str], bool]:
    """name -> whether `save_pretrained` looks at it: with PEFT only adapters, and embeddings in case they grew."""
    if not is_peft_model(model):
        return lambda name: True
    innermost = innermost_model(model)
    embeddings = [innermost.get_input_embeddings(), innermost.get_output_embeddings()]
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if any(module is one for one in embeddings))
    adapters = {*model.peft_config}
    return lambda name: bool(adapters & {*name.split(".")}) or name.startswith(prefixes)


# ---- the optimizer's shards ------------------------------------------------------------------------------------------------


def shard_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This process's part of an optimizer's state and of the float32 weights that it works on, and how many parts there are."""
    return {
        "optimizer": _mapped(optimizer.state_dict(), local_part),
        "masters": [p.detach() for p in _shards(optimizer)],
        "shards": shards_of_a_copy(optimizer),
    }


def shards_of_a_copy(optimizer: torch.optim.Optimizer) -> int:
    """Processes that have a whole copy of the weights between them: the last dimension of the mesh (HSDP has copies before it)."""
    sizes = {p.device_mesh.shape[-1] for p in _parameters(optimizer) if hasattr(p, "placements")}
    return max(sizes, default=1)


def whole_tree(trees: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """From `shard_tree` of all processes of a copy: the state that one process without shards would have, and masters."""
    shapes = [parameter.shape for parameter in _parameters(optimizer)]
    state = {
        number: {
            name: _joined([tree["optimizer"]["state"][number][name] for tree in trees], shapes[number])
            for name in entries
        }
        for number, entries in trees[0]["optimizer"]["state"].items()
    }
    masters = [
        _joined(list(parts), shape)
        for parts, shape in zip(zip(*(tree["masters"] for tree in trees)), shapes, strict=True)
    ]
    return {"optimizer": {**trees[0]["optimizer"], "state": state}, "masters": masters}


def part_of_tree(tree: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """From the state of one process: what `shard_tree` of this one would have been."""
    parameters = list(_parameters(optimizer))
    state = {
        number: {name: part_of(parameters[number], value) for name, value in entries.items()}
        for number, entries in tree["optimizer"]["state"].items()
    }
    found: dict[str, Any] = {"optimizer": {**tree["optimizer"], "state": state}}
    if "masters" in tree:
        found["masters"] = [part_of(like, master) for like, master in zip(parameters, tree["masters"], strict=True)]
    return found


def _joined(parts: list[Any], shape: torch.Size) -> Any:
    """A tensor of `shape` from its parts: FSDP2 cuts along the first dimension. What every process has whole is taken once."""
    if not isinstance(parts[0], Tensor) or not parts[0].dim():
        return parts[0]
    if sum(len(part) for part in parts) == shape[0] and parts[0].shape[1:] == shape[1:]:
        return torch.cat(parts)
    if parts[0].shape == shape:
        return parts[0]
    sizes = [tuple(part.shape) for part in parts]
    raise ValueError(
        f"A state of the optimizer is in parts of {sizes}, of which no tensor of {tuple(shape)} can be made: resume on as many "
        "processes as the checkpoint was written by."
    )


@torch.no_grad()
def load_shard_tree(model: nn.Module, optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """What `shard_tree` gave on the same mesh, or `part_of_tree` on another."""
    if "masters" in tree:  # else the weights are there already
        load_shards(model, optimizer, tree)
    parameters = list(_parameters(optimizer))
    state = tree["optimizer"]
    for number, entries in state["state"].items():
        like = parameters[number]
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == local_part(like).shape and value.dim():
                entries[name] = _sharded_as(like, value)
    optimizer.load_state_dict(state)


@torch.no_grad()
def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """The weights of `shard_tree` alone."""
    for part, saved in zip(_shards(optimizer), tree["masters"], strict=True):
        part.copy_(saved)
    reshard(model)  # what is gathered now is of the weights before


def _shards(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters are the shards, also while the model's are gathered."""
    return [local_part(parameter.detach()) for parameter in _parameters(optimizer)]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """In the order of its state."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _sharded_as(like: Tensor, part: Tensor) -> Tensor:
    if not hasattr(like, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    part = part.to(local_part(like).device)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, function) for value in tree)
    return function(tree) if isinstance(tree, Tensor) else tree
