"""The vLLM engine that a trainer's options ask for."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.core.vision import VisionFamily
from posttrain.models.load.adapters import is_peft_model
from posttrain.models.load.model import innermost_model
from posttrain.models.load.weight_export import untied_weights
from posttrain.models.vision.features import has_vision_adapter
from posttrain.rollout.engines.joint_export import JointExport
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams
from posttrain.rollout.engines.vllm.params import completion_logps
from posttrain.rollout.engines.vllm.pictures import Pictures
from posttrain.serve.auth import TOKEN_VARIABLE, is_loopback, read_local_token, read_token_file, token_file_of
from posttrain.serve.wire.cuda_ipc import gpu_ids
from posttrain.trainer.online.image_sync import ImageSync
from posttrain.trainer.options.base import DEEPSPEED
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.options.vllm import ADAPTER, AUTO, SERVER, WEIGHTS
from posttrain.trainer.vision import Vision

UNAUTHORISED, FORBIDDEN, NOT_FOUND = 401, 403, 404
ASK_SECONDS = 0.5
SERVERS_FILE = "rollout_servers"
"""In the output folder: addresses of servers that join while the run lasts, one on each line."""
LEAST_CONTEXT = 512
"""For the tokens by which the weights are probed, too."""
MANY_IMAGES = 999
"""In a prompt, where it is not known: vLLM's own default."""


@dataclass(frozen=True)
class PromptImages:
    """What vLLM must know of a run whose prompts have images."""

    vision: Vision
    longest: int | None  # tokens of prompt and completion; None: not known
    trains_vision: bool  # tower or projector change
    sync: ImageSync

    @property
    def most(self) -> int:
        """In a prompt."""
        return MANY_IMAGES if self.vision.most_images is None else max(self.vision.most_images, 1)

    def pictures(self) -> Pictures:
        return Pictures(self.vision.pixels, self.vision.layouts.options)

    def context_length(self) -> int | None:
        """As long as the data ask for: vLLM measures, before it starts, with as many images as fit."""
        if self.longest is None:
            return None
        wanted = max(self.longest, self.sync.tokens, LEAST_CONTEXT)
        return min(wanted, self.vision.context or wanted)


def refuse_images_in_vllm(family: VisionFamily, args: OnlineConfig, name: str) -> None:
    """Before a model is loaded. `name`: of the dataset."""
    if family.images_see_themselves_whole or family.prefix_sees_itself_whole:
        raise ValueError(
            f"The dataset {name} has images, which vLLM is not shown for {family.model_type!r} models: their attention looks in "
            "both directions, and no version of vLLM has been compared there. Take a model of another family, or an offline method."
        )
    if family.written_id < 0:
        raise ValueError(
            f"The dataset {name} has images, and it is not known which token stands for one in the templates of "
            f"{family.model_type!r} models, which vLLM needs to know: leave `use_vllm` out."
        )
    if args.vllm_model_impl != "vllm":
        raise ValueError(
            f"The dataset {name} has images, which are shown to vLLM's own model code alone: leave `vllm_model_impl` out."
        )


def vllm_engine(
    args: OnlineConfig,
    model: nn.Module,
    tokenizer: Any,
    decode: Callable[[Any], str],
    is_fully_sharded: bool,
    notes: list[str],
    images: PromptImages | None = None,
) -> tuple[RolloutEngine, JointExport | None]:
    """(the engine, started or connected; the export by which all processes together send it a sharded model). It has no weights
    of the trainer's yet, see `weight_sync`. `notes`: what the user is to know is added there."""
    if args.sharding == DEEPSPEED and args.vllm_mode != SERVER:
        raise ValueError(
            "Weights that DeepSpeed holds in pieces are sent to servers (`vllm_mode='server'`), and to no vLLM in the training "
            "processes. Use a server, or FSDP (`fsdp=True`)."
        )
    if args.vllm_mode == SERVER:
        return _served(args, model, is_fully_sharded, notes, images)
    return _colocated(args, model, tokenizer, decode, is_fully_sharded, notes, images)


def refuse_correction_without_logps(engine: RolloutEngine, params: SamplingParams) -> None:
    """Importance weights need the log-probs of the distribution that was drawn from; vLLM may not return them.

    For any engine: one without a `logprobs_mode` returns them always.
    """
    logprobs_mode = getattr(engine, "logprobs_mode", None)
    if logprobs_mode is None:
        return
    sampling_logps, _ = completion_logps(params, logprobs_mode, [0.0])
    if np.isnan(sampling_logps).any():
        raise ValueError(
            f"vLLM returns `{logprobs_mode}`, which at temperature {params.temperature} with these sampling options are not "
            "the log-probs that tokens were drawn with, so that the sampler cannot be corrected for. Start the server with "
            "--logprobs-mode processed_logprobs (and say so for a plain `vllm serve`: `vllm_server_logprobs_mode`), or set "
            "`vllm_importance_sampling_correction=False`."
        )


# ---- in this process ---------------------------------------------------------------------------------------------------


def _colocated(
    args: OnlineConfig,
    model: nn.Module,
    tokenizer: Any,
    decode: Callable[[Any], str],
    is_fully_sharded: bool,
    notes: list[str],
    images: PromptImages | None,
) -> tuple[RolloutEngine, JointExport | None]:
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "`use_vllm` with `vllm_mode='colocate'` needs vLLM in this environment (pip install vllm). Without it: the native "
            "engine (`use_vllm=False`), or a server in an environment of its own (`vllm_mode='server'`)."
        )
    from posttrain.rollout.engines.vllm.colocate import ColocatedVLLM, ColocateOptions

    by_adapter = _sends_adapter(args.vllm_sync, model, notes, can=True, base_from_memory=True, images=images)
    level = (1 if by_adapter else 2) if args.vllm_enable_sleep_mode else 0
    options = ColocateOptions(
        dtype=str(args.compute_dtype).removeprefix("torch.")
        if is_fully_sharded
        else None,  # shards are float32 masters
        context_length=args.vllm_max_model_length,
        memory_share=args.vllm_gpu_memory_utilization,
        tensor_parallel=args.vllm_tensor_parallel_size,
        adapter_sync=by_adapter,
        sleep_level=level,
        seed=args.seed,
        more={"model_impl": args.vllm_model_impl, **(args.vllm_engine_args or {})},
    )
    pictures = None
    if images is not None:
        tokenizer, pictures = images.vision.processor, images.pictures()
        context = options.context_length or images.context_length()
        options = replace(options, context_length=context, images=images.most, keeps_images=not images.trains_vision)
    engine = ColocatedVLLM(model, decode, tokenizer, options, pictures)
    return engine, JointExport(model, args.compute_dtype, by_adapter) if is_fully_sharded else None


# ---- as servers --------------------------------------------------------------------------------------------------------


def _served(
    args: OnlineConfig, model: nn.Module, is_fully_sharded: bool, notes: list[str], images: PromptImages | None
) -> tuple[RolloutEngine, JointExport | None]:
    from posttrain.rollout.engines.vllm.client import ServerClient
    from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
    from posttrain.rollout.engines.vllm.transport import Deadlines

    wait = args.vllm_server_timeout
    commit = args.vllm_commit_timeout
    deadlines = Deadlines(completion=args.vllm_completion_timeout, commit=commit, start=wait, back=wait)
    token = _token(args.vllm_server_token_file)
    folder = Path(args.vllm_server_adapter_folder) if args.vllm_server_adapter_folder else None
    clients = [
        client_of(address, token, deadlines, folder, args.vllm_server_logprobs_mode, args.vllm_weight_transport)
        for address in args.vllm_addresses()
    ]
    vocabulary = innermost_model(model).config.get_text_config().vocab_size
    pictures = None if images is None else images.pictures()
    served = ServedOptions(deadlines=deadlines, servers_file=Path(args.output_dir) / SERVERS_FILE)

    def connect(address: str) -> ServerClient:
        return ServerClient(address, _token_for(address, token), deadlines, args.vllm_weight_transport)

    engine = ServedVLLM(clients, vocabulary=vocabulary, options=served, pictures=pictures, connect=connect)
    try:
        if images is not None:
            refuse_servers_without_images(engine.fleet.members, images)
        export = _prepare_to_send(engine, args.vllm_sync, model, is_fully_sharded, notes, images)
        own = [] if args.device.type != "cuda" else gpu_ids()[args.device.index or 0 :][:1]
        notes += shared_gpu_notes({member.name: member.info for member in engine.fleet.members}, own)
    except BaseException:
        engine.close()  # its watch would continue
        raise
    return engine, export if is_fully_sharded else None


def refuse_given_engine(engine: Any, args: OnlineConfig) -> None:
    """What it could not do, or would not know of.

    Of a sharded model all processes gather each tensor together. A server that the user made reads its export in process 0
    alone, which would wait for the others indefinitely; an engine that reads weights in place would find pieces.
    """
    for name in ("kv_dtype", "weight_dtype"):
        if engine is not None and getattr(args, f"rollout_{name}", None) is not None:
            raise ValueError(
                f"`rollout_{name}` is for the engine that the trainer makes, and this run was given one ({type(engine).__name__}). "
                f"Leave it out, and make the engine with it (`NativeEngine(model, {name}='fp8')`)."
            )
    if args.sharding is None:
        return
    if isinstance(getattr(engine, "model", None), nn.Module):
        raise ValueError(
            f"The engine that this run was given ({type(engine).__name__}) reads the model's weights in place, and here each "
            "process has pieces of them. Leave `engine` out (`rollout_engine` chooses a kind): the trainer's gathers them first."
        )
    if hasattr(engine, "follow"):
        raise ValueError(
            f"The engine that this run was given ({type(engine).__name__}) sends the weights from one process, and here they lie "
            "in pieces on all of them. Leave `engine` out, start servers beforehand, and set `use_vllm=True, vllm_mode='server'` "
            "and `vllm_server_base_url`: then all processes gather the weights together."
        )


def show_images(engine: Any, images: PromptImages) -> None:
    """To an engine that the user made: ours have been handed what makes pixels or pictures, others say that they read them
    (`reads_images`)."""
    if any(getattr(engine, name, None) for name in ("pixels", "pictures", "reads_images")):
        return
    if not hasattr(engine, "show"):
        raise ValueError(
            f"The prompts of this run have images, and the engine that it was given ({type(engine).__name__}) is shown none. Leave "
            "`engine` out, or take ServedVLLM."
        )
    engine.show(images.pictures())
    refuse_servers_without_images(engine.fleet.members, images)


def refuse_servers_without_images(members: Iterable[Any], images: PromptImages) -> None:
    for member in members:
        most = 1 if images.vision.most_images is None else images.most
        if why := member.client.why_no_images(member.info, most):
            raise ValueError(f"The prompts of this run have images, and {why}")
        if images.trains_vision and not member.info.capabilities.get("new_towers"):
            raise ValueError(
                f"This run trains the vision tower or its projector, and {member.name} would show images as weights of before have "
                f"encoded them. {' '.join(member.info.notes)} Start it with a newer vLLM, or freeze both (`freeze_vision_tower`, "
                "`freeze_multi_modal_projector`)."
            )


def shared_gpu_notes(servers: dict[str, Any], own: list[str]) -> list[str]:
    """A sentence for each server (name -> its info) that works on the trainer's GPU, whose id is in `own`."""
    return [
        f"The server {name} works on this trainer's GPU: each counts on memory that the other takes. Give it a GPU of its own "
        "(CUDA_VISIBLE_DEVICES where it is started), a smaller --memory-share, or use `vllm_mode='colocate'`."
        for name, info in servers.items()
        if set(info.gpus) & set(own)
    ]


def _prepare_to_send(
    engine: Any, sync: str, model: nn.Module, is_fully_sharded: bool, notes: list[str], images: PromptImages | None
) -> JointExport:
    """Give the engine the export that it sends, which depends on what its servers take."""
    infos = [member.info for member in engine.fleet.members]
    can = all(info.capabilities.get("adapters") for info in infos)
    by_adapter = _sends_adapter(sync, model, notes, can, base_from_memory=False, images=images)
    if not by_adapter and (untied := untied_weights(model)):
        raise ValueError(
            f"The adapter has made {untied[0]} a tensor of its own, and a server goes by the model's config, which ties it to "
            "another. Leave that module out of the adapter, or use `vllm_mode='colocate'`."
        )
    export = JointExport(model, _wire_dtype(infos), by_adapter)
    sent = {"adapter_export": export.adapter} if by_adapter else {"export": export.weights}
    engine.send(**sent, is_repeatable=not is_fully_sharded)
    return export


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
    from posttrain.core.transport import Address, ServerGone, ServerRefused, ServerSlow
    from posttrain.rollout.engines.vllm.client import ServerClient
    from posttrain.rollout.engines.vllm.upstream import UpstreamClient
    from posttrain.rollout.engines.vllm.weight_senders import HTTP

    token = _token_for(address, token)
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


def _token_for(address: str, token: str | None) -> Any:
    from posttrain.core.transport import Address

    if token is not None or not is_loopback((at := Address.of(address)).host):
        return token
    read_local_token(at.port)  # a file that others can read is an error before anything is sent
    return partial(read_local_token, at.port)


def _wire_dtype(infos: list[Any]) -> torch.dtype | None:
    """That in which the servers compute: no byte travels that they would round away."""
    named = {info.dtype for info in infos}
    return getattr(torch, named.pop()) if len(named) == 1 and None not in named else None


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    return read_token_file(Path(token_file).expanduser())


# ---- what travels ------------------------------------------------------------------------------------------------------


def _sends_adapter(
    sync: str, model: nn.Module, notes: list[str], can: bool, base_from_memory: bool, images: PromptImages | None = None
) -> bool:
    """Whether vLLM is sent the LoRA adapter alone. `sync`: the option `vllm_sync`; `can`: the other side takes adapters;
    `base_from_memory`: over the trainer's own base weights, and not those of the model's folder."""
    if sync == WEIGHTS:
        return False
    why_not = _why_no_adapter(model, can, base_from_memory, images)
    if sync == ADAPTER and why_not is not None:
        raise ValueError(f"`vllm_sync='adapter'` cannot be done: {why_not}")
    if sync == AUTO and why_not is not None and is_peft_model(model):
        notes.append(f"vLLM is sent merged weights instead of the adapter: {why_not}")
    return why_not is None


def _why_no_adapter(model: Any, can: bool, base_from_memory: bool, images: PromptImages | None) -> str | None:
    from posttrain.rollout.engines.vllm.adapter_files import why_not_by_adapter

    if not is_peft_model(model):
        return "the model has no adapter."
    if images is not None and has_vision_adapter(innermost_model(model), images.vision.family):
        return "the adapter changes the vision tower or its projector, which vLLM does not take from an adapter."
    return why_not_by_adapter(model, base_from_memory) if can else "a server was started without --adapter-folder."
