"""The vLLM engine that a trainer's options ask for."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from posttrain.models.load.adapters import is_peft_model
from posttrain.models.load.model import LoadedModel, innermost_model
from posttrain.models.load.weight_export import untied_weights
from posttrain.rollout.engines.joint_export import JointExport
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.engines.vllm.params import completion_logps
from posttrain.serve.auth import TOKEN_VARIABLE, is_loopback, read_local_token, read_token_file, token_file_of
from posttrain.serve.wire.cuda_ipc import gpu_ids
from posttrain.trainer.options.base import DEEPSPEED
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.options.vllm import ADAPTER, AUTO, COLOCATE, SERVER, WEIGHTS

UNAUTHORISED, FORBIDDEN, NOT_FOUND = 401, 403, 404
ASK_SECONDS = 0.5


class EngineOwner(Protocol):
    """What an engine is made for; an online trainer has all of it."""

    args: OnlineConfig
    model: nn.Module
    loaded: LoadedModel
    processing_class: Any
    engine: RolloutEngine
    joint_export: JointExport | None
    is_fully_sharded: bool
    stop_ids: tuple[int, ...]
    decode_exactly: Callable[[Any], str]


def vllm_engine(owner: EngineOwner) -> RolloutEngine:
    """Started or connected; it has no weights of the trainer's yet, see `weight_sync`."""
    if owner.args.sharding == DEEPSPEED:
        raise ValueError(
            "Weights that DeepSpeed holds in pieces are not sent to vLLM. Use FSDP (`fsdp=True`), or train without sharding."
        )
    return {COLOCATE: _colocated, SERVER: _served}[owner.args.vllm_mode](owner)


def refuse_correction_without_logps(owner: EngineOwner) -> None:
    """Importance weights need the log-probs of the distribution that was drawn from; vLLM may not return them.

    For a trainer that has its engine, whichever that is: one without a `logprobs_mode` returns them always.
    """
    logprobs_mode = getattr(owner.engine, "logprobs_mode", None)
    # Asked of the class: an AttributeError inside of the property must not read as "does not correct".
    if logprobs_mode is None or not hasattr(type(owner), "corrects_sampler") or not owner.corrects_sampler:
        return
    params = owner.args.sampling(owner.stop_ids)
    sampling_logps, _ = completion_logps(params, logprobs_mode, [0.0])
    if np.isnan(sampling_logps).any():
        raise ValueError(
            f"vLLM returns `{logprobs_mode}`, which at temperature {params.temperature} with these sampling options are not "
            "the log-probs that tokens were drawn with, so that the sampler cannot be corrected for. Start the server with "
            "--logprobs-mode processed_logprobs (and say so for a plain `vllm serve`: `vllm_server_logprobs_mode`), or set "
            "`vllm_importance_sampling_correction=False`."
        )


# ---- in this process ---------------------------------------------------------------------------------------------------


def _colocated(owner: EngineOwner) -> RolloutEngine:
    args = owner.args
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "`use_vllm` with `vllm_mode='colocate'` needs vLLM in this environment (pip install vllm). Without it: the native "
            "engine (`use_vllm=False`), or a server in an environment of its own (`vllm_mode='server'`)."
        )
    from posttrain.rollout.engines.vllm.colocate import ColocatedVLLM, ColocateOptions

    by_adapter = _sends_adapter(owner, can=True, base_from_memory=True)
    level = (1 if by_adapter else 2) if args.vllm_enable_sleep_mode else 0
    dtype = None
    if owner.is_fully_sharded:  # the shards are float32 masters
        dtype = str(args.compute_dtype).removeprefix("torch.")
        owner.joint_export = JointExport(owner.model, args.compute_dtype, by_adapter)
    options = ColocateOptions(
        dtype=dtype,
        context_length=args.vllm_max_model_length,
        memory_share=args.vllm_gpu_memory_utilization,
        tensor_parallel=args.vllm_tensor_parallel_size,
        adapter_sync=by_adapter,
        sleep_level=level,
        seed=args.seed,
        more={"model_impl": args.vllm_model_impl, **(args.vllm_engine_args or {})},
    )
    return ColocatedVLLM(owner.model, owner.decode_exactly, owner.processing_class, options)


# ---- as servers --------------------------------------------------------------------------------------------------------


def _served(owner: EngineOwner) -> RolloutEngine:
    from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
    from posttrain.rollout.engines.vllm.transport import Deadlines

    args = owner.args
    wait = args.vllm_server_timeout
    deadlines = Deadlines(completion=args.vllm_completion_timeout, start=wait, back=wait)
    token = _token(args.vllm_server_token_file)
    folder = Path(args.vllm_server_adapter_folder) if args.vllm_server_adapter_folder else None
    clients = [
        client_of(address, token, deadlines, folder, args.vllm_server_logprobs_mode, args.vllm_weight_transport)
        for address in args.vllm_addresses()
    ]
    vocabulary = innermost_model(owner.model).config.get_text_config().vocab_size
    engine = ServedVLLM(clients, vocabulary=vocabulary, options=ServedOptions(deadlines=deadlines))
    try:
        _prepare_to_send(owner, engine)
        own = [] if args.device.type != "cuda" else gpu_ids()[args.device.index or 0 :][:1]
        owner.loaded.notes += shared_gpu_notes({member.name: member.info for member in engine.fleet.members}, own)
    except BaseException:
        engine.close()  # its watch would continue
        raise
    return engine


def shared_gpu_notes(servers: dict[str, Any], own: list[str]) -> list[str]:
    """A sentence for each server (name -> what it says of itself) that works on the trainer's GPU, whose id is in `own`."""
    return [
        f"The server {name} works on this trainer's GPU: each counts on memory that the other takes. Give it a GPU of its own "
        "(CUDA_VISIBLE_DEVICES where it is started), a smaller --memory-share, or use `vllm_mode='colocate'`."
        for name, about in servers.items()
        if set(about.gpus) & set(own)
    ]


def _prepare_to_send(owner: EngineOwner, engine: Any) -> None:
    """Tell the engine what it sends, which depends on what its servers take."""
    model, about = owner.model, [member.info for member in engine.fleet.members]
    can = all(one.capabilities.get("adapters") for one in about)
    by_adapter = _sends_adapter(owner, can, base_from_memory=False)
    if not by_adapter and (untied := untied_weights(model)):
        raise ValueError(
            f"The adapter has made {untied[0]} a tensor of its own, and a server goes by the model's config, which ties it to "
            "another. Leave that module out of the adapter, or use `vllm_mode='colocate'`."
        )
    export = JointExport(model, _wire_dtype(about), by_adapter)
    sent = {"adapter_export": export.adapter} if by_adapter else {"export": export.weights}
    engine.send(**sent, is_repeatable=not owner.is_fully_sharded)
    if owner.is_fully_sharded:
        owner.joint_export = export


def client_of(
    address: str,
    token: str | None,
    deadlines: Any,
    adapter_folder: Path | None,
    logprobs_mode: str,
    weight_transport: str = AUTO,
) -> Any:
    """A client of whichever kind of server answers there, once one does. Without a token, that which a server of this user on
    this machine has left."""
    from posttrain.rollout.engines.vllm.client import ServerClient
    from posttrain.rollout.engines.vllm.transport import Address, ServerGone, ServerRefused, ServerSlow
    from posttrain.rollout.engines.vllm.upstream import UpstreamClient
    from posttrain.rollout.engines.vllm.weight_senders import HTTP

    if token is None and is_loopback((at := Address.of(address)).host):
        read_local_token(at.port)  # a file that others can read is an error before anything is sent
        token = partial(read_local_token, at.port)
    ours = ServerClient(address, token, deadlines, weight_transport)
    end = time.monotonic() + deadlines.start
    while True:
        try:
            ours.info()
            return ours
        except ServerRefused as refusal:
            if refusal.status == NOT_FOUND:  # no /info: not our server
                if weight_transport not in (AUTO, HTTP):
                    raise ValueError(
                        f"{address} is a plain `vllm serve`, to which no weights can go by {weight_transport!r}: leave "
                        "`vllm_weight_transport` out, or start the server with `posttrain vllm-serve`."
                    ) from refusal
                return UpstreamClient(address, token, deadlines, adapter_folder, logprobs_mode)
            if refusal.status == UNAUTHORISED and not isinstance(token, str):
                raise ServerRefused(
                    f"{refusal} No token was given (`vllm_server_token_file`, or the variable {TOKEN_VARIABLE}), and a server "
                    f"of yours on this machine would have left it in {token_file_of(Address.of(address).port)}.",
                    refusal.status,
                ) from refusal
            if refusal.status in (UNAUTHORISED, FORBIDDEN):
                raise
            late = refusal
        except (ServerGone, ServerSlow) as absence:
            late = absence
        if time.monotonic() > end:
            raise ServerSlow(
                f"No server answered at {address} within `vllm_server_timeout`={deadlines.start:g} s ({late}). Start one with "
                "`posttrain vllm-serve`, or use the native engine (`use_vllm=False`)."
            ) from late
        time.sleep(ASK_SECONDS)


def _wire_dtype(about: list[Any]) -> torch.dtype | None:
    """That in which the servers compute: no byte travels that they would round away."""
    named = {one.dtype for one in about}
    return getattr(torch, named.pop()) if len(named) == 1 and None not in named else None


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    return read_token_file(Path(token_file).expanduser())


# ---- what travels ------------------------------------------------------------------------------------------------------


def _sends_adapter(owner: EngineOwner, can: bool, base_from_memory: bool) -> bool:
    """Whether vLLM is sent the LoRA adapter alone. `can`: the other side takes adapters; `base_from_memory`: over the trainer's
    own base weights, and not those of the model's folder."""
    wanted = owner.args.vllm_sync
    if wanted == WEIGHTS:
        return False
    why_not = _why_no_adapter(owner.model, can, base_from_memory)
    if wanted == ADAPTER and why_not is not None:
        raise ValueError(f"`vllm_sync='adapter'` cannot be done: {why_not}")
    if wanted == AUTO and why_not is not None and is_peft_model(owner.model):
        owner.loaded.notes.append(f"vLLM is sent merged weights instead of the adapter: {why_not}")
    return why_not is None


def _why_no_adapter(model: Any, can: bool, base_from_memory: bool) -> str | None:
    from posttrain.rollout.engines.vllm.adapter_files import why_not_by_adapter

    if not is_peft_model(model):
        return "the model has no adapter."
    return why_not_by_adapter(model, base_from_memory) if can else "a server was started without --adapter-folder."
