"""ShardingTrainer: FSDP2 as accelerate sets it up, with what it would round or keep too long put right.

    masters     the shards are float32 and what the optimizer works on
    compute     parameters are gathered in bfloat16 (`bf16`), gradients reduced and added up in float32
    memory      gradients are reduced after every micro-batch: kept until the step's end they would be whole on every process

accelerate on its own rounds what the model returns to bfloat16 as well, log-probs included, and reduces gradients in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from posttrain.core.batch import Passes, TokenBatch, passes_of
from posttrain.data.collate import Collator
from posttrain.models.load.adapters import is_peft_model
from posttrain.models.load.model import innermost_model
from posttrain.models.sharding import local_part, reshard, whole
from posttrain.trainer.options.base import DEEPSPEED, FSDP, BaseConfig

SYNC_EACH_BATCH = "sync_each_batch"


class ShardingTrainer(transformers.Trainer):
    """transformers.Trainer that knows whether its weights are in pieces. Methods derive from BaseTrainer, not from this."""

    args: BaseConfig

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.sharding == FSDP:
            self._refuse_other_fsdp()
            self._set_up_fsdp()

    @property
    def is_fully_sharded(self) -> bool:
        """Every process must take part in every forward, and in every look at a whole weight."""
        return self.args.sharding == FSDP

    @property
    def _own_formats(self) -> bool:
        """DeepSpeed writes states of its own."""
        return self.args.sharding != DEEPSPEED

    def _refuse_other_fsdp(self) -> None:
        if not self.is_fsdp_enabled:
            raise ValueError(
                f"FSDP is asked for, and accelerate does not shard here ({self.args.world_size} processes on "
                f"{self.args.device.type}): it needs processes with a GPU each, started by torchrun or accelerate launch."
            )
        version = self.accelerator.state.fsdp_plugin.fsdp_version
        if version != 2:
            raise ValueError(
                f"FSDP version {version} is asked for; posttrain runs version 2. Set `fsdp_config={{'version': 2}}`, or "
                "`fsdp_version: 2` in the config of accelerate."
            )

    def _set_up_fsdp(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        low = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        if low is not None:
            policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.activation_checkpointing:
            # The same by transformers: accelerate's wrappers stand in the names of parameters, and PEFT saves nothing then.
            self.args.gradient_checkpointing, plugin.activation_checkpointing = True, False
            self.args.activation_offloading = plugin.activation_checkpointing_offload or self.args.activation_offloading
        if SYNC_EACH_BATCH not in (self.args.accelerator_config.gradient_accumulation_kwargs or {}):
            self.accelerator.gradient_state.plugin_kwargs[SYNC_EACH_BATCH] = True

    def keeps_masters_in_shards(self) -> bool:
        """Whether FSDP turns weights of low precision into float32 shards, as accelerate does for mixed precision."""
        if self.is_fully_sharded and not (self.args.bf16 or self.args.fp16):
            raise ValueError(
                "The weights to be trained are of low precision, and `bf16` is off: under FSDP the optimizer would work on them as "
                "they are, and lose small steps. Set `bf16=True`, or load the model in float32."
            )
        return self.is_fully_sharded

    # ---- every process as many passes ----------------------------------------------------------------------------------

    def most_of_any_process(self, count: int) -> int:
        """Collective."""
        most = torch.tensor(count, device=self.args.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)

    def even_out(self, batches: list[TokenBatch | Passes], collator: Collator) -> None:
        """Give micro-batches that `max_tokens_per_pass` may have split as many passes as on the process with the most."""
        if not (self.is_fully_sharded and self.args.max_tokens_per_pass):
            return
        for place, batch in enumerate(batches):
            passes = passes_of(batch)
            missing = self.most_of_any_process(len(passes)) - len(passes)
            if missing:
                batches[place] = Passes([*passes, *[replace(collator, max_tokens=None).one_pass([])] * missing])

    # ---- whole weights -------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights as `save_pretrained` writes them, under FSDP and DeepSpeed too. To be called by all processes."""
        if self.args.sharding is None:
            return super().save_model(output_dir, _internal_call)
        state = self._whole_state()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    def _whole_state(self) -> dict[str, Tensor]:
        """The tensors that `save_pretrained` reads, gathered one at a time into the first process's memory."""
        reshard(self.model)
        wanted = _is_written(self.model)
        state: dict[str, Tensor] = {}
        found: dict[int, Tensor | None] = {}  # a tied tensor has two names and is gathered once
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if not wanted(name):
                continue
            if id(tensor) not in found:
                gathered = whole(tensor)
                found[id(tensor)] = gathered.cpu() if self.args.should_save else None
            if self.args.should_save:
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
    """This process's part of an optimizer's state and of the float32 weights that it works on."""
    return {
        "optimizer": _mapped(optimizer.state_dict(), local_part),
        "masters": [p.detach() for p in _shards(optimizer)],
    }


@torch.no_grad()
def load_shard_tree(model: nn.Module, optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """What `shard_tree` gave, on the same number of processes."""
    load_shards(model, optimizer, tree)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
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
    return [local_part(parameter.detach()) for group in optimizer.param_groups for parameter in group["params"]]


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
