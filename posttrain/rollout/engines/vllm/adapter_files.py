"""Adapters for a vLLM in this process: written to a folder of their version, loaded beside the one before, then that one goes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.load.weight_export import active_adapters, exported_adapter, exported_adapter_specs
from posttrain.rollout.engines.vllm.held_weights import complete
from posttrain.serve.engine.protocol import AdapterRef
from posttrain.serve.engine.vllm_engine import VLLMEngine
from posttrain.serve.weights.adapters import CONFIG, WEIGHTS

RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Those that every version of vLLM has room for."""
NOT_IN_VLLM = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Options of a LoraConfig that vLLM refuses, or that some of its versions read past."""
LEAVES_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that do not write into the base weights; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA do."""


class AdapterFiles:
    """The adapter of a model, as vLLM is given it."""

    def __init__(self, home: Path, model: nn.Module, base_from_memory: bool = True) -> None:
        """`base_from_memory`: vLLM's base weights were written from this model, and not read from a folder of its own."""
        self._home, self._model = home, model
        self._numbers = itertools.count(1)
        self.serving: AdapterRef | None = None
        if why_not := why_not_by_adapter(model, base_from_memory):
            raise ValueError(f"`adapter_sync` cannot be done: {why_not} Leave it out: whole weights are sent then.")
        config = exported_adapter(model)[0]
        # "q_proj", of base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
        names = {spec.name.rpartition(".lora_")[0].rpartition(".")[2] for spec in exported_adapter_specs(model)}
        self.module_names = tuple(sorted(names))
        self.rank = next(rank for rank in RANKS if rank >= config["r"])

    def replace(self, engine: VLLMEngine, tensors: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Let vLLM write with this adapter from now on (None: that of the trainer's model). Where it fails nothing changed."""
        config, own = exported_adapter(self._model)
        if tensors is None:
            tensors = own
        else:
            # Nothing is gathered here: where the weights are sharded, a process that fails on its way would be waited for.
            specs = exported_adapter_specs(self._model)
            tensors = complete(tensors, {spec.name: (spec.shape, getattr(torch, spec.dtype)) for spec in specs})
        number = next(self._numbers)
        adapter = AdapterRef(number, "policy", version, str(self._home / f"adapter-{version}-{number}"))
        try:
            self._write(Path(adapter.path), config, tensors)
            engine.add_adapter(adapter)
        except BaseException:
            shutil.rmtree(adapter.path, ignore_errors=True)
            raise
        before, self.serving = self.serving, adapter
        if before is not None:
            engine.remove_adapter(before)
            shutil.rmtree(before.path, ignore_errors=True)

    def _write(self, folder: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, folder / WEIGHTS)
        # Initialisations that changed the base (PiSSA) did so in memory, which is where vLLM's base came from.
        (folder / CONFIG).write_text(json.dumps(config | {"init_lora_weights": True}))

    def differing(self, at_most: int, tensors: Iterable[tuple[str, Tensor]] | None = None) -> list[str]:
        """Names of the adapter's tensors (None: as the trainer's model has them) that are not, to the bit, in the file that
        vLLM serves from."""
        from safetensors.torch import load_file

        held = load_file(Path(self.serving.path) / WEIGHTS) if self.serving else {}
        own = exported_adapter(self._model)[1] if tensors is None else tensors
        found = [name for name, tensor in own if name not in held or not torch.equal(held[name], tensor.cpu())]
        return found[:at_most]


def why_not_by_adapter(model: nn.Module, base_from_memory: bool = True) -> str | None:
    """Why vLLM cannot be given this model's adapter alone; None: it can.

    `base_from_memory`: its base weights are this model's; False: it has read them from the base model's folder.
    """
    active = active_adapters(model)
    if len(active) != 1:
        return f"{len(active)} adapters are active ({', '.join(active) or 'none'}), and vLLM is sent one."
    config = exported_adapter(model)[0]
    if config["peft_type"] != "LORA":
        return f"the adapter is a {config['peft_type']}, and vLLM takes LoRA adapters."
    if named := [name for name in NOT_IN_VLLM if config.get(name)]:
        return f"the adapter has `{named[0]}`, which vLLM does not know."
    if (bias := config.get("bias", "none")) != "none":
        return f"the adapter has `bias='{bias}'`: it trains biases of the base, which vLLM does not take."
    if any(f"lora_embedding_A.{active[0]}" in name for name, _ in model.named_parameters()):
        return "the adapter changes the embeddings, which vLLM does not take from an adapter."
    if not base_from_memory and (init := config.get("init_lora_weights", True)) not in LEAVES_BASE:
        return f"`init_lora_weights='{init}'` has changed the base weights, and the server has those of the model's folder."
    if config["r"] > RANKS[-1]:
        return f"the adapter has rank {config['r']}, and vLLM takes at most {RANKS[-1]}."
    return None
