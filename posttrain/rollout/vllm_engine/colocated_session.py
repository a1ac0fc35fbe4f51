"""A running batch in a colocated vLLM, of one rank or of the ranks that share one model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from posttrain.rollout.engine import ERROR, LENGTH, STOP, Completion, Prompt, SamplingParams
from posttrain.rollout.request import EndOfText, Request, request_or_error
from posttrain.rollout.vllm_engine.params import (
    completion_logps,
    refuse_unknown_to_vllm,
    request_seed,
    vllm_sampling,
)
from posttrain.rollout.vllm_engine.process_state import torch_random_kept
from posttrain.serve.engine import Accepted, GenerateJob, Progress

if TYPE_CHECKING:
    from posttrain.rollout.vllm_engine.colocate import ColocatedVLLM

FINISH = {"stop": STOP, "length": LENGTH}
Finished = list[tuple[str, int, Completion]]
"""Name of the job, ticket, completion."""


class Stall:
    """How long vLLM has been stepped without a new token."""

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds, self._last_token = most_seconds, time.monotonic()

    def refuse_to_wait_longer(self, moved: bool, in_flight: int) -> None:
        now = time.monotonic()
        self._last_token = now if moved else self._last_token
        silent_seconds = now - self._last_token
        if silent_seconds > self._most_seconds:
            raise RuntimeError(
                f"vLLM has written no token for {silent_seconds:.0f} s with {in_flight} prompts in flight."
            )


class ColocatedSession:
    """Prompts go to vLLM as they are added; each `advance` steps it until one of them has finished."""

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
        self._fail_if_said(ticket, self._start(f"{self._number}-{ticket}", ticket, prompt))
        return ticket

    def _fail_if_said(self, ticket: int, sentence: str | None) -> None:
        if sentence is not None:
            self._failed.append((ticket, Completion.failed(sentence, self._owner.version)))

    def _start(self, name: str, ticket: int, prompt: Prompt) -> str | None:
        """Hand a prompt to vLLM; a sentence where it cannot be run."""
        owner = self._owner
        request = request_or_error(ticket, prompt, self._params, owner.context, owner.vocabulary)
        if isinstance(request, str):
            return request
        if prompt.media:
            return f"Prompt {prompt.key} has images or other media; this engine writes text after text only."
        sampling = vllm_sampling(self._params, request.limit, request_seed(self._params, prompt))
        job = GenerateJob(name, tuple(prompt.ids.tolist()), sampling, Accepted(owner.version, owner.version))
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
        with torch_random_kept():
            while self._running and not finished:
                moved = self._owner.engine.step()
                for progress in moved:
                    finished += self._take(progress)
                stall.refuse_to_wait_longer(bool(moved), len(self._running))
        return finished

    def _take(self, progress: Progress) -> Finished:
        """Give new tokens to their request; its completion where that is over."""
        request = self._running.get(progress.job_id)
        if request is None:
            return []
        if request.started is None and progress.ids:
            # vLLM does not say when it took a request up: waiting counts as prefill.
            request.started = request.added
            request.prefill_seconds = time.perf_counter() - request.added
        have = len(request.ids)
        logps = progress.logps[have:]
        reason = self._end.take(request, progress.ids[have:], logps, logps)
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

    Each rank has prompts of its own, and vLLM must be given those of all of them, in the same order, on each: ranks tell each
    other what is new, then step until something of anyone has finished, which they all see alike. A rank that has left its
    session goes on stepping for the others until they have left theirs too.
    """

    def __init__(self, owner: ColocatedVLLM, params: SamplingParams, number: int, group: Any) -> None:
        super().__init__(owner, params, number)
        self._group, self._rank = group, dist.get_rank(group)
        if any(other != params for other in self._told(params)):
            raise ValueError(
                "The ranks that hold one model together (tensor parallel) were given different sampling parameters."
            )
        self._new: list[tuple[int, Prompt]] = []
        self._mine: set[int] = set()
        self._arrived: list[tuple[int, Completion]] = []

    def _told(self, mine: Any) -> list[Any]:
        """What each rank of the group has to say."""
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, mine, group=self._group)
        return told

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
        told = self._told((leaving, self._new))
        self._new = []
        for rank, (left, new) in enumerate(told):
            if left:
                self._give_up([name for name in self._running if name.startswith(f"{self._number}-{rank}-")])
            for ticket, prompt in new:
                sentence = self._start(f"{self._number}-{rank}-{ticket}", ticket, prompt)
                if rank == self._rank:
                    self._fail_if_said(ticket, sentence)
        self._arrived += self._failed
        self._failed = []
        if all(left for left, _ in told):
            return True
        for name, ticket, done in self._step_until_one_finishes():
            if name.startswith(f"{self._number}-{self._rank}-"):
                self._arrived.append((ticket, done))
        return False
