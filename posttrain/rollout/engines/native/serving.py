"""Our engine behind the server: `python -m posttrain.rollout.engines.native.serving --model FOLDER`, without vLLM.

It lives here and not in `serve`, whose folder imports nothing of posttrain. A session draws in one way: jobs that ask for another
(an evaluation, say) wait until those before them are written, and those behind them wait for them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.core.batch import PADDED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention.ragged import install_ragged_attention
from posttrain.models.inference import evaluating, inference
from posttrain.models.load.model import LoadOptions, innermost_model, load_pretrained, load_tokenizer, locate
from posttrain.models.load.weight_export import exported_weights, weights_in_place
from posttrain.models.scoring.token_scores import Measure, install_scores, likeliest_tokens, score_tokens
from posttrain.rollout.engines.native.engine import NativeEngine, NativeSession
from posttrain.rollout.engines.noise import noise_base
from posttrain.rollout.engines.protocol import ERROR as ENDED_BY_ERROR
from posttrain.rollout.engines.protocol import Completion, Decode, Prompt, SamplingParams
from posttrain.rollout.engines.request import EndOfText, Request
from posttrain.rollout.engines.sampling import DrawRule
from posttrain.rollout.engines.structured import Grammar
from posttrain.serve.engine.protocol import (
    LENGTH,
    AdapterRef,
    CacheUse,
    EngineInfo,
    GenerateJob,
    Job,
    Progress,
    ScoreJob,
)
from posttrain.serve.errors import EngineFailed
from posttrain.serve.launch import StartError
from posttrain.serve.launch import main as serve
from posttrain.serve.wire.payload import TensorSpec

PROCESSED = "processed_logprobs"
ENGINE_ARGS = ("max_slots", "prefill_tokens", "steps_per_look", "kv_memory", "kv_dtype", "weight_dtype", "drafts")
"""What --engine-args may say."""
Load = Callable[[], nn.Module]


class ServedNative:
    """An `Engine` of the server. `load` reads the model of the folder, once more where its weights must be put back."""

    def __init__(
        self, name: str, model: nn.Module, decode: Decode | None, load: Load | None, seed: int = 0, **engine: Any
    ) -> None:
        install_ragged_attention()
        install_scores(innermost_model(model))
        self.model = model.requires_grad_(False).eval()
        self.engine = NativeEngine(self.model, decode, **engine)
        if reason := self.engine.why_not():
            raise StartError(f"{name} is not served by the native engine: {reason}. Use vLLM (leave --engine out).")
        self._load, self._seeds = load, (noise_base(seed, number, 0) for number in itertools.count())
        self._own = weights_in_place(self.model)  # by the names that travel
        homeless = [name for name, tensor in self._own.items() if tensor is None]
        self._waiting: deque[tuple[SamplingParams, GenerateJob]] = deque()
        self._scores: deque[ScoreJob] = deque()
        self._jobs: dict[int, GenerateJob] = {}  # of the open session, by ticket
        self._open: tuple[SamplingParams, NativeSession] | None = None
        self._stack = ExitStack()
        self.cache_use, self._preempted = CacheUse(0.0, 0), 0  # those of sessions that were closed
        self._checked: SamplingParams | None = None  # the latest way to draw that was asked for
        self._optional = frozenset(getattr(self.engine.innermost, "all_tied_weights_keys", None) or ()) - set(self._own)
        note = f"{homeless[0]} is made of others when it is sent: full weights cannot be loaded." if homeless else None
        has_grammars = decode is not None and importlib.util.find_spec("outlines_core") is not None
        can = {"weights": not homeless, "adapters": False, "sleep": False, "score": True, "images": False}
        self.info = EngineInfo(
            model=name,
            context_length=self.engine.context,
            vocabulary=self.engine.vocabulary,
            dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
            logprobs_mode=PROCESSED,
            device=self.engine.device.type,
            engine=f"posttrain (torch {torch.__version__})",
            capabilities=can | {"structured": has_grammars, "counted_noise": True},
            notes=(note,) if note else (),
        )

    # jobs -----------------------------------------------------------------------------------------------------------

    def add(self, job: Job, adapter: AdapterRef | None) -> None:
        if isinstance(job, ScoreJob):
            self._scores.append(job)
            return
        if job.top_logprobs:
            raise ValueError("the native engine returns the log-prob of the drawn token alone; ask /score for others")
        asked = vars(job.sampling) | {"logit_bias": dict(job.sampling.logit_bias), "seed": 0, "max_tokens": 1}
        params = SamplingParams(**asked)  # how many tokens, and which noise, each prompt says by itself
        if params != self._checked:
            self._refuse_if_unknown(params)
            self._checked = params
        if why_not := self.engine.why_no_room(len(job.ids), job.sampling.max_tokens):
            raise ValueError(why_not)
        self._waiting.append((params, job))

    def _refuse_if_unknown(self, params: SamplingParams) -> None:
        """ValueError where a session could not draw so."""
        EndOfText(params, self.engine.decode)
        DrawRule.of(params).bias(self.engine.vocabulary, torch.device("cpu"))
        if params.regex is not None:
            Grammar(params, self.engine.decode, self.engine.vocabulary)

    def step(self) -> list[Progress]:
        moved = self._scored()
        session = self._session()
        if session is None:
            return moved
        for ticket, completion in session.advance():
            moved.append(self._finished(self._jobs.pop(ticket), completion))
        for request in session.scheduler.requests():
            moved.append(self._running(self._jobs[request.ticket], request))
        self.cache_use = CacheUse(session.used_share, self._preempted + session.scheduler.preempted)
        if not self._jobs:
            self._close_session()
        return moved

    def _session(self) -> NativeSession | None:
        """The open one, with all that may join it; None where there is nothing to write."""
        if self._open is None and self._waiting:
            params = self._waiting[0][0]
            self._open = params, self._stack.enter_context(self.engine.session(params))
        if self._open is None:
            return None
        params, session = self._open
        while self._waiting and self._waiting[0][0] == params:
            job = self._waiting.popleft()[1]
            self._jobs[session.add(self._prompt(job))] = job
        return session

    def _prompt(self, job: GenerateJob) -> Prompt:
        if job.noise is not None:
            base, first = job.noise
        elif job.sampling.seed is not None:
            base, first = noise_base(job.sampling.seed, 0, 0), 0
        else:
            base, first = next(self._seeds), 0
        return Prompt(job.ids, base=base, first_token=first, max_tokens=job.sampling.max_tokens)

    def _close_session(self) -> None:
        if self._open is not None:
            self._preempted += self._open[1].scheduler.preempted
        self.cache_use = CacheUse(0.0, self._preempted)
        self._open = None
        self._stack.close()

    def _running(self, job: GenerateJob, request: Request) -> Progress:
        """The lists of the request itself: what it writes next is in them, too."""
        greedy = job.sampling.temperature == 0
        return Progress(job.job_id, request.ids, None, request.policy_logps if greedy else request.sampling_logps)

    def _finished(self, job: GenerateJob, completion: Completion) -> Progress:
        ids, policy = completion.ids.tolist(), completion.policy_logps.tolist()
        if not ids:
            return Progress(job.job_id, [], ENDED_BY_ERROR, error=completion.error)
        # Where logits are no numbers the log-probs say so, as vLLM's do.
        reason = LENGTH if completion.finish_reason == ENDED_BY_ERROR else completion.finish_reason
        logps = policy if job.sampling.temperature == 0 else completion.sampling_logps.tolist()
        stopped = ids[-1] if ids and ids[-1] in job.sampling.stop_ids else None
        rule = DrawRule(**{name: getattr(job.sampling, name) for name in DrawRule.__dataclass_fields__})
        return Progress(job.job_id, ids, reason, logps, (), stopped, None, () if rule.is_plain else policy)

    def _scored(self) -> list[Progress]:
        """The first of those that wait, as many as fit into one pass."""
        if not self._scores:
            return []
        jobs, longest = [], 0
        while self._scores:
            longest = max(longest, len(self._scores[0].ids))
            if jobs and (len(jobs) + 1) * longest > self.engine.prefill_tokens:
                break
            jobs.append(self._scores.popleft())
        samples = [Sample(np.array(job.ids), np.arange(len(job.ids)) >= job.start) for job in jobs]
        batch = collate([(one,) for one in samples], ("text",), PADDED).to(self.engine.device)
        count = min(max(job.top_k for job in jobs), self.engine.vocabulary)
        likeliest = Measure(functools.partial(likeliest_tokens, count=count), (batch.targets,))
        with inference(self.engine.device), evaluating(self.model):
            found = score_tokens(self.model, batch, measures={"top": likeliest} if count else None)
        counts = batch.counts.tolist()
        logps = found.logps.split(counts)
        tops = found.stats["top"].split(counts) if count else [None] * len(jobs)
        return [
            Progress(job.job_id, job.ids[job.start :], LENGTH, own.tolist(), _likeliest(top, job.top_k))
            for job, own, top in zip(jobs, logps, tops)
        ]

    def abort(self, job_ids: Sequence[str]) -> None:
        gone = set(job_ids)
        self._waiting = deque(one for one in self._waiting if one[1].job_id not in gone)
        self._scores = deque(job for job in self._scores if job.job_id not in gone)
        tickets = [ticket for ticket, job in self._jobs.items() if job.job_id in gone]
        if self._open is not None and tickets:
            self._open[1].cancel(tickets)
            for ticket in tickets:
                del self._jobs[ticket]
            if not self._jobs:
                self._close_session()

    # weights --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        missing = set(self._own)
        for name, tensor in tensors:
            if name in self._optional:
                continue
            if name not in self._own or self._own[name].shape != tensor.shape:
                raise EngineFailed(f"The model has no tensor {name} of the shape {list(tensor.shape)}.")
            self._own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise EngineFailed(f"{len(missing)} tensors were not sent, {min(missing)} first.")
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)  # the memory of what came may be another's next

    def known_tensors(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._own.items()
            if tensor is not None
        }

    def optional_tensors(self) -> frozenset[str]:
        """Second names of tied tensors."""
        return self._optional

    def initial_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        return None if self._load is None else exported_weights(self._load())

    def reset_prefix_cache(self, running: bool) -> bool:
        """Everything was computed by weights that are gone; who runs is prefilled again, with the tokens that he has."""
        version = self.engine.version + 1
        if self._open is not None:
            self._open[1].change_weights(lambda: version)
        else:
            self.engine.load_weights(None, version)
        return True

    def add_adapter(self, adapter: AdapterRef) -> None:
        raise EngineFailed("The native engine takes merged weights, and no adapters.")

    def remove_adapter(self, adapter: AdapterRef) -> None:
        """There are none."""

    def sleep(self, level: int) -> str | None:
        return "The native engine gives its keys and values back whenever nothing is written, and keeps the weights."

    def wake(self, tags: Sequence[str] | None) -> None:
        """It never sleeps."""

    def close(self) -> None:
        self._close_session()


def _likeliest(found: Tensor | None, count: int) -> list[list[tuple[int, float]]]:
    """The first `count` of each place, of what `likeliest_tokens` has found."""
    if not count or found is None:
        return []
    ids, logps = found.chunk(2, -1)
    return [[*zip(*place)] for place in zip(ids[:, :count].long().tolist(), logps[:, :count].tolist())]


# ---- the program -----------------------------------------------------------------------------------------------------


def make_engine(args: argparse.Namespace) -> ServedNative:
    _refuse_options(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype, None)
    if dtype is None:
        raise StartError(f"--dtype {args.dtype} is no dtype of torch.")

    def load() -> nn.Module:
        return load_pretrained(args.model, LoadOptions(dtype=dtype)).to(device)

    model = _random_model(args.model, dtype).to(device) if args.random_weights else load()
    more = {"use_graphs": not args.eager, "max_context": args.context_length} | args.engine_args
    if device.type == "cuda":
        more.setdefault("kv_memory", _room(device, args.memory_share))
    again = None if args.random_weights else load
    return ServedNative(args.model, model, _decode(args.model), again, args.seed, **more)


def _refuse_options(args: argparse.Namespace) -> None:
    for name, is_asked, why in (
        (
            "--adapter-folder",
            args.adapter_folder is not None,
            "it takes merged weights, which trainers send by themselves",
        ),
        ("--images", args.images > 0, "prompts with images need vLLM, or the trainer's own process"),
        ("--tensor-parallel", args.tensor_parallel != 1, "it runs on one device; start one server for each"),
        ("--sleep", args.sleep, "it keeps its weights"),
        ("--logprobs-mode", args.logprobs_mode != PROCESSED, "it returns processed_logprobs"),
    ):
        if is_asked:
            raise StartError(f"The native engine does not take {name}: {why}.")
    if unknown := sorted(set(args.engine_args) - set(ENGINE_ARGS)):
        raise StartError(f"--engine-args has {unknown[0]}; the native engine knows {', '.join(ENGINE_ARGS)}.")


def _random_model(model: str, dtype: Any) -> nn.Module:
    path, kwargs = locate(model, {})
    config = AutoConfig.from_pretrained(path, **kwargs)
    return AutoModelForCausalLM.from_config(config, dtype=config.dtype if dtype == "auto" else dtype)


def _room(device: torch.device, share: float) -> int:
    """Bytes for keys and values, beside the weights that are there."""
    free, total = torch.cuda.mem_get_info(device)
    room = int(free - (1 - share) * total)
    if room <= 0:
        raise StartError(
            f"--memory-share {share:g} leaves no memory for keys and values: {free / 2**30:.1f} GiB are free."
        )
    return room


def _decode(model: str) -> Decode | None:
    """None where the folder has no tokenizer: only ids end a completion then."""
    try:
        tokenizer = load_tokenizer(model, None, False)
    except (OSError, ValueError):
        return None
    return functools.partial(tokenizer.decode, skip_special_tokens=False)


def main(words: Sequence[str] | None = None) -> int:
    return serve(words, make_engine)


if __name__ == "__main__":
    sys.exit(main())
