"""vLLM as the server's engine: `LLMEngine`, stepped by the engine's thread. Known to run with 0.32.0 (CPU)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..errors import EngineFailed
from ..wire.payload import TensorSpec
from .cpu_linear import keep_cpu_weights_loadable
from .model_folder import ModelFiles
from .protocol import ERROR, LENGTH, STOP, AdapterRef, CacheUse, EngineInfo, GenerateJob, Job, Progress, ScoreJob
from .random_weights import keep_buffers
from .tower_names import as_vllm_names
from .worker_weights import EXTENSION, WorkerWeights

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOGPROBS = 1024
IMAGE_CACHES = ("reset_encoder_cache", "reset_mm_cache")
"""Methods of vLLM's engine, by which it forgets what it has made of images."""
ADAPTER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What adapters may change, unless said otherwise. With `lm_head` among them vLLM cannot score prompts (its layer for
the logits of adapters expects one row per sequence: an error that ends the engine, seen with 0.32.0 on the CPU)."""
FINISH = {"stop": STOP, "length": LENGTH}
SAME_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Fields of `Sampling` that vLLM's SamplingParams has, too."""


@dataclass(frozen=True)
class VLLMOptions:
    model: str
    dtype: str = "auto"
    context_length: int | None = None
    memory_share: float = 0.9
    tensor_parallel: int = 1
    logprobs_mode: str = "processed_logprobs"
    adapters: bool = False
    most_rank: int = 64
    adapter_modules: tuple[str, ...] = ADAPTER_MODULES
    sleep: bool = False
    random_weights: bool = False  # the folder has a config only; the first update brings the weights
    eager: bool = False
    seed: int = 0
    images: int = 0  # most in a prompt; 0: it is shown none
    # of the image processor, for all that is measured at the start
    image_options: dict[str, Any] = field(default_factory=dict)
    shared_folder: Path | None = None  # through which weights reach worker processes; None: this user's in /dev/shm
    more: dict[str, Any] = field(default_factory=dict)  # further fields of vLLM's EngineArgs


@dataclass
class _Writing:
    job: Job
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    is_compared: bool = False  # its prompt with vLLM's tokens of it, where it has images


class VLLMEngine:
    cache_use: CacheUse | None = None  # its statistics are off (`disable_log_stats`)

    def __init__(self, options: VLLMOptions) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self._options, self._jobs = options, {}
        self._workers = WorkerWeights(options.shared_folder) if options.tensor_parallel > 1 else None
        self._on_cpu = current_platform.is_cpu()
        notes = [keep_cpu_weights_loadable()] if self._on_cpu else []
        keeps_buffers = not options.random_weights or keep_buffers()
        self._engine = LLMEngine.from_engine_args(EngineArgs(**_engine_args(options, self._on_cpu)))
        self._files = ModelFiles(options.model, options.more.get("revision"), options.more.get("download_dir"))
        if self._files.note and not options.random_weights:
            notes.append(self._files.note)
        config = self._engine.model_config
        quantised = getattr(config, "quantization", None) is not None
        if quantised:
            notes.append("The weights are quantised when they are loaded: only adapters can be updated.")
        if options.adapters:
            notes.append("Adapters are on: vLLM wraps its layers then, and full weights cannot be loaded.")
        repacked = [name for names in self.in_workers(_repacked_experts) for name in names]
        if repacked:
            notes.append(
                f"vLLM has brought the experts of {repacked[0]} into an order of its own, which new weights would not be "
                "in: full weights cannot be loaded."
            )
        can = {
            "weights": not (quantised or repacked or options.adapters),
            "adapters": options.adapters,
            "sleep": options.sleep and not self._on_cpu,
            "score": not options.adapters or "lm_head" not in options.adapter_modules,
            "structured": True,
            "images": options.images > 0 and _is_multimodal(config) and keeps_buffers,
            "new_towers": all(hasattr(self._engine, name) for name in IMAGE_CACHES),
        }
        if options.images and not _is_multimodal(config):
            notes.append(f"{options.model} is no model that sees images, as far as vLLM knows: it is shown none.")
        if options.images and not keeps_buffers:
            notes.append(
                f"vLLM {vllm.__version__} may write random numbers into buffers of a tower, which no update brings."
            )
        if can["images"] and not can["new_towers"]:
            notes.append(f"vLLM {vllm.__version__} cannot forget images that it has encoded.")
        self.info = EngineInfo(
            model=options.model,
            context_length=config.max_model_len,
            vocabulary=config.get_vocab_size(),
            dtype=str(config.dtype).removeprefix("torch."),
            logprobs_mode=options.logprobs_mode,
            device="cpu" if self._on_cpu else current_platform.device_type,
            engine=f"vllm {vllm.__version__}",
            world_size=options.tensor_parallel,
            capabilities=can,
            notes=tuple(notes),
            adapter_modules=options.adapter_modules if options.adapters else (),
            images=options.images if can["images"] else 0,
        )

    # jobs -----------------------------------------------------------------------------------------------------------

    def add(self, job: Job, adapter: AdapterRef | None) -> None:
        params = self._sampling(job) if isinstance(job, GenerateJob) else self._scoring(job)
        lora = _lora_request(adapter) if adapter else None
        self._jobs[job.job_id] = _Writing(job)  # first, so that `abort` knows it if vLLM refuses half way
        shown = job.shown if isinstance(job, GenerateJob) else None
        prompt = {"prompt_token_ids": list(job.ids)} if shown is None else shown.vllm_prompt(job.ids)
        self._engine.add_request(job.job_id, prompt, params, lora_request=lora)

    def _sampling(self, job: GenerateJob) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        asked = job.sampling
        return SamplingParams(
            **{name: getattr(asked, name) for name in SAME_NAMES},
            stop_token_ids=list(asked.stop_ids),
            ignore_eos=True,  # the request alone decides what ends a completion
            stop=list(asked.stop) or None,
            include_stop_str_in_output=True,
            logit_bias=dict(asked.logit_bias) or None,
            structured_outputs=StructuredOutputsParams(regex=asked.regex) if asked.regex else None,
            logprobs=job.top_logprobs,
            detokenize=bool(asked.stop),
            output_kind=RequestOutputKind.DELTA,
        )

    def _scoring(self, job: ScoreJob) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if len(job.ids) >= self.info.context_length:
            raise ValueError(
                f"A sequence of {len(job.ids)} tokens cannot be scored: vLLM needs room for one more in its context of "
                f"{self.info.context_length}."
            )
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=job.top_k,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def step(self) -> list[Progress]:
        moved = []
        for output in self._engine.step():
            writing = self._jobs.get(output.request_id)
            if writing is None:
                continue
            if isinstance(writing.job, ScoreJob):
                progress = self._scores(writing.job, output) if output.finished else None
            else:
                progress = self._refused_prompt(writing, output) or self._written(writing, output)
            if progress is not None and progress.error is not None:
                self.abort([output.request_id])
            elif output.finished:
                del self._jobs[output.request_id]
            if progress is not None:
                moved.append(progress)
        return moved

    def _refused_prompt(self, writing: _Writing, output: Any) -> Progress | None:
        """Where vLLM has made other tokens of a prompt with images than the trainer has."""
        job = writing.job
        if job.shown is None or writing.is_compared:
            return None
        writing.is_compared = True
        difference = job.shown.difference(job.ids, output.prompt_token_ids)
        return None if difference is None else Progress(job.job_id, [], ERROR, error=difference)

    def _written(self, writing: _Writing, output: Any) -> Progress:
        new = output.outputs[0]
        for token, place in zip(new.token_ids, new.logprobs or (), strict=True):
            writing.ids.append(token)
            writing.logps.append(place[token].logprob)
            if writing.job.top_logprobs:
                writing.top.append(_most_likely(place, writing.job.top_logprobs))
        reason = FINISH.get(new.finish_reason, "error") if output.finished else None
        return Progress(writing.job.job_id, writing.ids, reason, writing.logps, writing.top, new.stop_reason)

    def _scores(self, job: ScoreJob, output: Any) -> Progress:
        places = output.prompt_logprobs[job.start :]
        ids = job.ids[job.start :]
        logps = [place[token].logprob for token, place in zip(ids, places, strict=True)]
        top = [_most_likely(place, job.top_k) for place in places] if job.top_k else []
        return Progress(job.job_id, ids, LENGTH, logps, top)

    def abort(self, job_ids: Sequence[str]) -> None:
        known = [job_id for job_id in job_ids if self._jobs.pop(job_id, None)]
        if known:
            self._engine.abort_request(known)

    # weights --------------------------------------------------------------------------------------------------------

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._workers is not None:
            left_out = self._workers.load(lambda method, args: self._engine.collective_rpc(method, args=args), tensors)
        else:
            (left_out,) = self.in_workers(_load_into_worker, tensors)
        if left_out:
            raise EngineFailed(
                f"vLLM has {len(left_out)} parameters that no tensor was loaded into, {left_out[0]} first."
            )

    def in_workers(self, function: Callable[..., T], *args: Any) -> list[T]:
        """`function(worker, *args)` in each of vLLM's workers."""
        return self._engine.collective_rpc(function, args=args)

    def known_tensors(self) -> dict[str, TensorSpec] | None:
        return None if self._options.random_weights else self._files.known_tensors()

    def optional_tensors(self) -> frozenset[str]:
        return self._files.optional_tensors()

    def initial_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        return None if self._options.random_weights else self._files.read_tensors()

    def reset_prefix_cache(self, running: bool, images: bool = True) -> bool:
        """`images`: also what the weights before have made of images, which vLLM finds again by image alone."""
        done = bool(self._engine.reset_prefix_cache(reset_running_requests=running))
        if images and self.info.images:
            self._engine.reset_encoder_cache()
            # Pixels, which no weights have touched: a running request that still waits for some would fail without them.
            if not running:
                self._engine.reset_mm_cache()
        return done

    def add_adapter(self, adapter: AdapterRef) -> None:
        if not self._engine.add_lora(_lora_request(adapter)):
            raise EngineFailed(f"vLLM did not load the adapter {adapter.name}.")

    def remove_adapter(self, adapter: AdapterRef) -> None:
        self._engine.remove_lora(adapter.number)

    def sleep(self, level: int) -> str | None:
        if self._on_cpu:
            return "vLLM cannot sleep on the CPU: no memory was given back."
        if not self._options.sleep:
            return "The server was started without --sleep: no memory was given back."
        self._engine.sleep(level)
        return None

    def wake(self, tags: Sequence[str] | None) -> None:
        self._engine.wake_up(list(tags) if tags else None)

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        if self._workers is not None:
            self._workers.close()


def _engine_args(options: VLLMOptions, on_cpu: bool) -> dict[str, Any]:
    args = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.context_length,
        "gpu_memory_utilization": options.memory_share,
        "tensor_parallel_size": options.tensor_parallel,
        "distributed_executor_backend": "uni" if options.tensor_parallel == 1 else "mp",
        "logprobs_mode": options.logprobs_mode,
        "max_logprobs": MAX_LOGPROBS,
        "enable_sleep_mode": options.sleep and not on_cpu,
        "enforce_eager": options.eager or on_cpu,
        "seed": options.seed,
        "async_scheduling": False,  # a step ends before the next begins: tokens belong to exactly one version
        "disable_log_stats": True,
    }
    if on_cpu:  # after a prompt in pieces vLLM sets a request's generator back, which CPU generators cannot do (0.32.0)
        args["enable_chunked_prefill"] = False
    if options.tensor_parallel > 1:
        args["worker_extension_cls"] = EXTENSION
    if options.random_weights:
        args["load_format"] = "dummy"
    if options.images:
        args["limit_mm_per_prompt"] = {"image": options.images, "video": 0, "audio": 0}
        args["mm_processor_kwargs"] = options.image_options or None
    if options.adapters:
        args |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": options.most_rank}
        args["lora_target_modules"] = list(options.adapter_modules)
    return args | options.more


def _is_multimodal(config: Any) -> bool:
    """By vLLM's own config of the model."""
    return bool(getattr(config, "is_multimodal_model", False))


def _load_into_worker(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """In the worker: new numbers into the parameters that are there; vLLM splits and fuses by its own names.

    Returns the parameters that nothing was loaded into, as far as this family's loader says what it loaded.
    """
    import torch

    model = worker.model_runner.model
    with torch.no_grad():
        loaded = model.load_weights(as_vllm_names(model, tensors))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - set(loaded))


def _repacked_experts(worker: Any) -> list[str]:
    """In the worker: layers of stacked experts that are not as the loader writes them (0.32.0 on the CPU: all of them, and
    `reload_weights` does not help). Only Triton's kernel is known to take them as they are.
    """
    found = []
    for name, layer in worker.model_runner.model.named_modules():
        if "w13_weight" in layer._parameters:
            backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
            if getattr(backend, "name", None) not in ("TRITON", "BATCHED_TRITON"):
                found.append(name)
    return found


def _lora_request(adapter: AdapterRef) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{adapter.name}@{adapter.version}#{adapter.number}", adapter.number, adapter.path)


def _most_likely(place: dict[int, Any], k: int) -> list[tuple[int, float]]:
    ranked = sorted(place.items(), key=lambda item: -item[1].logprob)
    return [(token, entry.logprob) for token, entry in ranked[:k]]
