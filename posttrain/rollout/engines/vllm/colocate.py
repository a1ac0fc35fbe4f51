"""vLLM in the trainer's own process, on its device: thin over the server's `VLLMEngine`, without the server.

Weights arrive as they are exported from the trainer's model (`load_weights(None, version)`), tensor by tensor into the memory
that vLLM has; with `adapter_sync` only the LoRA adapter does, as a file, and replaces the one before. A load that fails leaves
the engine silent: it generates again when a whole load has succeeded, never from a mixture.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.models.load.model import innermost_model
from posttrain.models.load.weight_export import exported_specs, exported_weights
from posttrain.rollout.engines.protocol import ERROR, LENGTH, STOP, Completion, Decode, Prompt, SamplingParams
from posttrain.rollout.engines.request import EndOfText, Request, request_or_error
from posttrain.rollout.engines.vllm.adapter_files import AdapterFiles
from posttrain.rollout.engines.vllm.held_weights import complete, differing_tensors
from posttrain.rollout.engines.vllm.model_folder import write_base_weights, write_config
from posttrain.rollout.engines.vllm.params import (
    PROCESSED,
    completion_logps,
    refuse_unknown_to_vllm,
    request_seed,
    vllm_sampling,
)
from posttrain.rollout.engines.vllm.pictures import Pictures, placeholder_in, placeholder_sentence
from posttrain.rollout.engines.vllm.process_state import (
    distributed_engine_args,
    preserved_process_state,
    preserved_torch_rng,
    tensor_parallel_group,
)
from posttrain.serve.engine.protocol import Accepted, AdapterRef, GenerateJob, Progress, ScoreJob
from posttrain.serve.engine.vllm_engine import VLLMEngine, VLLMOptions
from posttrain.serve.errors import PromptDiffers

log = logging.getLogger(__name__)

ANY_VERSION = Accepted(0, 0)  # versions are kept here, not by vLLM
CPU_CACHE_BYTES = 1 << 30
SAME_NAMES = ("context_length", "memory_share", "logprobs_mode", "eager", "seed", "images")
"""Fields of ColocateOptions that VLLMOptions has, too."""


class NoWholeWeights(RuntimeError):
    """The engine holds no whole version: nothing was loaded yet, or the last load failed, or sleep dropped them."""


@dataclass(frozen=True)
class ColocateOptions:
    dtype: str | None = None  # of vLLM's weights and of what is sent; None: the model's own
    context_length: int | None = None  # tokens of prompt and completion; None: the model's own
    memory_share: float = 0.3  # of the device, for vLLM's weights and cache together
    tensor_parallel: int = 1  # ranks that hold one model together; each group of so many in a row
    logprobs_mode: str = PROCESSED
    images: int = 0  # most in a prompt; 0: it is shown none
    keeps_images: bool = False  # tower and projector never change: images that were encoded before an update stay valid
    adapter_sync: bool = False  # send the LoRA adapter alone; the base goes over once, at the start
    base_folder: str | None = None  # with adapter_sync: the base's own folder; None: written from the model in memory
    sleep_level: int = 0  # 0: stays awake; 1: weights go to host memory; 2: weights are dropped and sent again
    eager: bool = False
    seed: int = 0
    stall_seconds: float = 600.0  # without one new token, before generation is given up
    more: dict[str, Any] = field(default_factory=dict)  # further fields of vLLM's EngineArgs

    def __post_init__(self) -> None:
        if self.sleep_level not in (0, 1, 2):
            raise ValueError(f"vLLM's sleep level is {self.sleep_level}; it is 0 (stays awake), 1 or 2.")
        if self.sleep_level == 2 and self.adapter_sync:
            raise ValueError(
                "Sleep level 2 drops the base weights, and `adapter_sync` does not send them again. Use level 1."
            )


class ColocatedVLLM:
    """A RolloutEngine over vLLM in this process, of which there can be one at a time."""

    is_foreign: ClassVar[bool] = True  # another program than the trainer: its log-probs are not quite the trainer's
    _open: ClassVar[weakref.ref[ColocatedVLLM] | None] = None

    def __init__(
        self,
        model: nn.Module,
        decode: Decode | None = None,
        tokenizer: Any = None,
        options: ColocateOptions | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """`tokenizer`: the processor, where prompts have images, which `pictures` opens."""
        if ColocatedVLLM._open is not None and ColocatedVLLM._open() is not None:
            raise RuntimeError(
                "There is a colocated vLLM in this process already, and vLLM's groups belong to the process: close() it first."
            )
        self.version = 0
        self.model, self.decode, self.options = model, decode, options or ColocateOptions()
        self.pictures = pictures
        self.forbidden = frozenset() if pictures is None else frozenset(pictures.family.forbidden_ids)
        innermost = innermost_model(model)
        self.vocabulary: int = innermost.config.get_text_config().vocab_size
        self.dtype = getattr(torch, self.options.dtype) if self.options.dtype else innermost.dtype
        self._home = tempfile.TemporaryDirectory(prefix="posttrain-vllm-")
        self._adapters: AdapterFiles | None = None
        if self.options.adapter_sync:
            self._adapters = AdapterFiles(Path(self._home.name), model, self.options.base_folder is None)
        self._no_weights: str | None = "no version has been loaded yet."
        self._asleep: set[str] = set()
        self._numbers = itertools.count()
        self.sessions_open = 0
        self.has_tokenizer = tokenizer is not None
        folder = self._model_folder(tokenizer)
        with preserved_process_state():
            self.engine = VLLMEngine(self._vllm_options(folder))
        ColocatedVLLM._open = weakref.ref(self)
        self._refuse_without_updates()
        self.context: int = self.engine.info.context_length
        self.logprobs_mode = self.options.logprobs_mode
        for note in self.engine.info.notes:
            log.info("vLLM: %s", note)

    def _refuse_without_updates(self) -> None:
        wanted = "adapters" if self._adapters is not None else "weights"
        if not self.engine.info.capabilities[wanted]:
            self.close()
            raise ValueError(f"This vLLM cannot take new {wanted}. {' '.join(self.engine.info.notes)}")
        lacks = [] if self.pictures is None else [self._lacks("images")]
        if self.pictures is not None and not self.options.keeps_images:
            lacks.append(self._lacks("new_towers"))
        if any(lacks):
            self.close()
            raise ValueError(
                f"This vLLM cannot write after images that a model in training sees. {' '.join(self.engine.info.notes)} Take a "
                "newer vLLM, the native engine (`use_vllm=False`), or freeze tower and projector (`freeze_vision_tower`, "
                "`freeze_multi_modal_projector`)."
            )

    def _lacks(self, capability: str) -> bool:
        return not self.engine.info.capabilities[capability]

    def _model_folder(self, tokenizer: Any) -> str:
        if self._adapters is not None and self.options.base_folder:
            return self.options.base_folder
        folder = Path(self._home.name) / "model"
        folder.mkdir()
        write_config(folder, self.model, self.dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if self._adapters is not None:
            write_base_weights(folder, self.model, self.dtype)
        return str(folder)

    def _vllm_options(self, folder: str) -> VLLMOptions:
        given, adapters = self.options, self._adapters
        ranks = distributed_engine_args(given.tensor_parallel)
        more = {"skip_tokenizer_init": not self.has_tokenizer, **ranks, **given.more}
        if not torch.cuda.is_available():
            # Otherwise vLLM takes its share of all the host's memory.
            more.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
        options = VLLMOptions(
            model=folder,
            dtype=str(self.dtype).removeprefix("torch."),
            sleep=given.sleep_level > 0,
            random_weights=adapters is None,
            image_options={} if self.pictures is None else self.pictures.options,
            more=more,
            **{name: getattr(given, name) for name in SAME_NAMES},
        )
        if adapters is None:
            return options
        return dataclasses.replace(
            options, adapters=True, most_rank=adapters.rank, adapter_modules=adapters.module_names
        )

    # generation -----------------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[ColocatedSession]:
        self.refuse_unless_whole()
        if self._asleep:
            raise RuntimeError("vLLM sleeps: call wake() before a session.")
        number = next(self._numbers)
        if self.options.tensor_parallel > 1:
            session = GroupSession(self, params, number, tensor_parallel_group())
        else:
            session = ColocatedSession(self, params, number)
        self.sessions_open += 1
        try:
            yield session
        finally:
            self.sessions_open -= 1
            session.close()

    @property
    def holds_weights(self) -> bool:
        """Whether a whole version is there to generate from; sleep level 2 drops it."""
        return self._no_weights is None

    def refuse_unless_whole(self) -> None:
        if self._no_weights is not None:
            raise NoWholeWeights(f"vLLM holds no whole version of the weights: {self._no_weights}")

    @property
    def adapter(self) -> AdapterRef | None:
        """With which completions are written."""
        return self._adapters.serving if self._adapters else None

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs, under softmax(logits), of every token after the first."""
        self.refuse_unless_whole()
        names = {f"score-{next(self._numbers)}": place for place in range(len(sequences))}
        for name, place in names.items():
            ids = tuple(int(token) for token in sequences[place])
            self.engine.add(ScoreJob(name, ids, 1, 0, ANY_VERSION), self.adapter)
        found: dict[int, np.ndarray] = {}
        stall = Stall(self.options.stall_seconds)
        try:
            while len(found) < len(sequences):
                moved = self.engine.step()
                for progress in moved:
                    if progress.job_id in names and progress.finish_reason is not None:
                        found[names[progress.job_id]] = np.asarray(progress.logps, np.float32)
                stall.raise_if_stalled(bool(moved), len(sequences) - len(found))
        except BaseException:
            self.engine.abort([name for name, place in names.items() if place not in found])
            raise
        return [found[place] for place in range(len(sequences))]

    # weights --------------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """All weights of `version` (None: those of the trainer's model), or with `adapter_sync` all tensors of the adapter."""
        if self.sessions_open:
            raise RuntimeError("Weights are loaded between sessions: completions of this one would be of two versions.")
        if "weights" in self._asleep:
            self._wake("weights")
        before, self._no_weights = self._no_weights, f"the load of version {version} did not end."
        try:
            if self._adapters is not None:
                self._adapters.replace(self.engine, weights, version)
            else:
                given = exported_weights(self.model, self.dtype) if weights is None else weights
                self.engine.load_weights(complete(given, self._wanted()))
                if not self.engine.reset_prefix_cache(running=False, images=not self.options.keeps_images):
                    raise RuntimeError("vLLM kept cached keys and values of the weights before.")
        except BaseException as error:
            # An adapter is loaded beside the one before, which is untouched and keeps serving.
            failed = f"the load of version {version} failed ({type(error).__name__}: {error})"
            self._no_weights = before if self._adapters is not None and before is None else failed
            raise
        self._no_weights, self.version = None, version

    def _wanted(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {spec.name: (spec.shape, getattr(torch, spec.dtype)) for spec in exported_specs(self.model, self.dtype)}

    def differing_tensors(self, at_most: int = 1, weights: Iterable[tuple[str, Tensor]] | None = None) -> list[str]:
        """Names of tensors of the trainer's model that vLLM does not hold as they are now, to the bit.

        `weights`: what is compared, as for `load_weights` (None: exported from the trainer's model here).
        """
        if self._adapters is not None:
            return self._adapters.differing(at_most, weights)
        if weights is None:
            weights = exported_weights(self.model, self.dtype)
        return self.engine.in_workers(differing_tensors, weights, at_most, self._may_be_left_out)[0]

    def _may_be_left_out(self, name: str) -> bool:
        """Layers of a tower that no feature depends on are not in vLLM's model; all that is there was loaded."""
        return self.pictures is not None and f"{self.pictures.family.tower.rpartition('.')[2]}." in name

    def probed(self, sequences: Sequence[np.ndarray]) -> list[tuple[list[np.ndarray], Callable[[int], list[str]]]]:
        """For a sync probe: (scores, a function that compares all tensors)."""
        return [(self.score(sequences), self.differing_tensors)]

    # memory ---------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the device's memory back, as far as `sleep_level` says; refused inside of a session."""
        if self.sessions_open:
            raise RuntimeError("vLLM cannot sleep while a session is open.")
        if self._asleep or not self.options.sleep_level:
            return
        why_not = self.engine.sleep(self.options.sleep_level)
        if why_not is not None:
            log.warning("%s", why_not)
            return
        self._asleep = {"weights", "kv_cache"}
        if self.options.sleep_level == 2:
            self._no_weights = "sleep level 2 dropped them; load a version."

    def wake(self) -> None:
        for part in sorted(self._asleep, reverse=True):  # weights first: the cache takes what is left
            self._wake(part)

    def _wake(self, part: str) -> None:
        with preserved_process_state():
            self.engine.wake((part,))
        self._asleep.discard(part)

    def close(self) -> None:
        """End vLLM; nothing can be asked afterwards."""
        self._no_weights = "the engine is closed."
        ColocatedVLLM._open = None
        self.engine.close()
        self._home.cleanup()


FINISH = {"stop": STOP, "length": LENGTH}
Finished = list[tuple[str, int, Completion]]
"""Name of the job, ticket, completion."""


class Stall:
    """How long vLLM has been stepped without a new token."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds, self._last_token = most_seconds, time.monotonic()

    def raise_if_stalled(self, moved: bool, in_flight: int) -> None:
        now = time.monotonic()
        self._last_token = now if moved else self._last_token
        silent_seconds = now - self._last_token
        if silent_seconds > self._most_seconds:
            raise RuntimeError(
                f"vLLM has written no token for {silent_seconds:.0f} s with {in_flight} prompts in flight."
            )


class ColocatedSession:
    """Prompts go to vLLM as they are added; each `advance` steps it until one of them has finished."""

    room = None

    def __init__(self, owner: ColocatedVLLM, params: SamplingParams, number: int) -> None:
        refuse_unknown_to_vllm(params)
        if params.regex is not None and not owner.has_tokenizer:
            raise ValueError("Sampling: `regex` needs a vLLM with a tokenizer. Give the engine one (`tokenizer=...`).")
        self._owner, self._params, self._number = owner, params, number
        self._end = EndOfText(params, owner.decode)
        self._running: dict[str, Request] = {}
        self._failed: list[tuple[int, Completion]] = []
        self._tickets = 0

    def add(self, prompt: Prompt) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._fail_if_error(ticket, self._start(f"{self._number}-{ticket}", ticket, prompt))
        return ticket

    def _fail_if_error(self, ticket: int, sentence: str | None) -> None:
        if sentence is not None:
            self._failed.append((ticket, Completion.failed(sentence, self._owner.version)))

    def _start(self, name: str, ticket: int, prompt: Prompt) -> str | None:
        """Hand a prompt to vLLM; a sentence where it cannot be run."""
        owner = self._owner
        request = request_or_error(ticket, prompt, self._params, owner.context, owner.vocabulary)
        if isinstance(request, str):
            return request
        if prompt.images and owner.pictures is None:
            return f"Prompt {prompt.key} has images, and this engine was made without `pictures`: it reads texts only."
        sampling = vllm_sampling(self._params, request.limit, request_seed(self._params, prompt))
        shown = owner.pictures.shown(prompt) if prompt.images else None
        accepted = Accepted(owner.version, owner.version)
        job = GenerateJob(name, tuple(prompt.ids.tolist()), sampling, accepted, shown=shown)
        try:
            owner.engine.add(job, owner.adapter)
        except Exception as error:  # vLLM refuses with errors of many kinds; this prompt fails, and no other
            owner.engine.abort([name])
            return f"vLLM refused prompt {prompt.key} ({type(error).__name__}: {error})."
        self._running[name] = request
        return None

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._failed)

    def advance(self) -> list[tuple[int, Completion]]:
        finished, self._failed = self._failed, []
        return finished or [(ticket, done) for _, ticket, done in self._step_until_one_finishes()]

    def _step_until_one_finishes(self) -> Finished:
        finished: Finished = []
        stall = Stall(self._owner.options.stall_seconds)
        with preserved_torch_rng():
            while self._running and not finished:
                moved = self._owner.engine.step()
                for progress in moved:
                    finished += self._take(progress)
                stall.raise_if_stalled(bool(moved), len(self._running))
        return finished

    def _take(self, progress: Progress) -> Finished:
        """Give new tokens to their request; its completion where that is over."""
        request = self._running.get(progress.job_id)
        if request is None:
            return []
        if progress.error is not None:
            raise PromptDiffers(f"Prompt {request.prompt.key}: {progress.error}")
        if request.started is None and progress.ids:
            # vLLM does not say when it took a request up: waiting counts as prefill.
            request.started = request.added
            request.prefill_seconds = time.perf_counter() - request.added
        have = len(request.ids)
        new, logps = progress.ids[have:], progress.logps[have:]
        cut = placeholder_in(new, self._owner.forbidden)
        reason = self._end.take(request, new[:cut], logps[:cut], logps[:cut])
        if reason is None and cut is not None:
            reason, request.error = ERROR, placeholder_sentence(request.prompt, new[cut])
        if reason is None and progress.finish_reason is None:
            return []
        del self._running[progress.job_id]
        if progress.finish_reason is None:
            self._owner.engine.abort([progress.job_id])
        if reason is None:
            reason = FINISH.get(progress.finish_reason, ERROR)
            if reason == ERROR:
                request.error = f"vLLM ended prompt {request.prompt.key} with '{progress.finish_reason}'."
        return [(progress.job_id, request.ticket, self._completion(request, reason))]

    def _completion(self, request: Request, reason: str) -> Completion:
        done = request.completion(reason, self._owner.version)
        mode = self._owner.options.logprobs_mode
        done.sampling_logps, done.policy_logps = completion_logps(self._params, mode, done.sampling_logps)
        return done

    def close(self) -> None:
        """What has not finished is given up."""
        self._give_up(list(self._running))

    def _give_up(self, names: list[str]) -> None:
        self._owner.engine.abort(names)
        for name in names:
            del self._running[name]


class GroupSession(ColocatedSession):
    """The same where the ranks of a group hold one model together (tensor parallel).

    Each rank has prompts of its own, and vLLM must be given those of all of them, in the same order, on each: ranks exchange
    what is new, then step until something of anyone has finished, which they all see alike. A rank that has left its
    session keeps stepping for the others until they have left theirs too.
    """

    def __init__(self, owner: ColocatedVLLM, params: SamplingParams, number: int, group: Any) -> None:
        super().__init__(owner, params, number)
        self._group, self._rank = group, dist.get_rank(group)
        if any(other != params for other in self._exchanged(params)):
            raise ValueError(
                "The ranks that hold one model together (tensor parallel) were given different sampling parameters."
            )
        self._new: list[tuple[int, Prompt]] = []
        self._mine: set[int] = set()
        self._arrived: list[tuple[int, Completion]] = []

    def _exchanged(self, mine: Any) -> list[Any]:
        """What each rank of the group has."""
        every: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        return every

    def add(self, prompt: Prompt) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._new.append((ticket, prompt))
        self._mine.add(ticket)
        return ticket

    @property
    def in_flight(self) -> int:
        return len(self._mine)

    def advance(self) -> list[tuple[int, Completion]]:
        while self._mine and not self._arrived:
            self._step_together(leaving=False)
        arrived, self._arrived = self._arrived, []
        self._mine -= {ticket for ticket, _ in arrived}
        return arrived

    def close(self) -> None:
        self._new.clear()
        while not self._step_together(leaving=True):
            pass

    def _step_together(self, leaving: bool) -> bool:
        """One exchange and the steps after it; True when every rank is leaving."""
        every = self._exchanged((leaving, self._new))
        self._new = []
        for rank, (left, new) in enumerate(every):
            if left:
                self._give_up([name for name in self._running if name.startswith(f"{self._number}-{rank}-")])
            for ticket, prompt in new:
                sentence = self._start(f"{self._number}-{rank}-{ticket}", ticket, prompt)
                if rank == self._rank:
                    self._fail_if_error(ticket, sentence)
        self._arrived += self._failed
        self._failed = []
        if all(left for left, _ in every):
            return True
        for name, ticket, done in self._step_until_one_finishes():
            if name.startswith(f"{self._number}-{self._rank}-"):
                self._arrived.append((ticket, done))
        return False
