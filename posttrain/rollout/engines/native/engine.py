"""NativeEngine: completions by the trainer's own model, in the trainer's process, without a copy of its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import RAGGED
from posttrain.data.collate import Pixels, collate
from posttrain.models.attention.mixers import why_wrong_with_carried
from posttrain.models.inference import context_length, evaluating, inference
from posttrain.models.load.model import innermost_model
from posttrain.models.memory.fit import free_memory
from posttrain.models.triton_support import runs_triton
from posttrain.models.vision.features import family_of, forbidden_tokens
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native import eight_bit_weights, eight_bits, probe
from posttrain.rollout.engines.native.attention import Segments, ShapeReader
from posttrain.rollout.engines.native.cache import PAGE, KeyValueStore, PagePool, pages_for
from posttrain.rollout.engines.native.drafts import LEAST_ACCEPTED, MAX_LINES, DraftedProgram, Trial
from posttrain.rollout.engines.native.eight_bit_weights import EightBitWeights
from posttrain.rollout.engines.native.graphs import StepGraphs
from posttrain.rollout.engines.native.packed_weights import PackedWeights
from posttrain.rollout.engines.native.rows import Rows
from posttrain.rollout.engines.native.scheduler import Prefix, Running, Scheduler
from posttrain.rollout.engines.native.states import MixerStates
from posttrain.rollout.engines.native.step import DecodeProgram, MixedProgram, Program, Sampler
from posttrain.rollout.engines.protocol import AUTO, FP8, ROLLOUT_DTYPES, Completion, Decode, Prompt, SamplingParams
from posttrain.rollout.engines.request import EndOfText, Request, refuse_unseen, request_or_error
from posttrain.rollout.engines.sampling import DrawRule
from posttrain.rollout.engines.structured import Grammar, GrammarReader

MAX_SLOTS = {"cuda": 1024, "cpu": 64}
STEPS_PER_LOOK = {"cuda": 16, "cpu": 4}
PREFILL_TOKENS = {"cuda": 16384, "cpu": 2048}
CPU_KV_BYTES = 4 * 2**30
SHARE_OF_FREE_MEMORY = 0.6
STATES_SHARE = 0.15
"""Of free memory that the states of recurrences may take; while rows change there are two of each, and prefixes have theirs."""
DENSE_SHARE = 0.5
"""Of the memory for pages, that a CPU may take besides for rows side by side."""
SHAPE_TOKENS = 21
LONGEST_CONTEXT = 131072
"""Where a family sets no bound."""


class NativeEngine:
    """Slots, pages of keys and values, and one decode step over all slots."""

    def __init__(
        self,
        model: nn.Module,
        decode: Decode | None = None,
        *,
        kv_memory: int | None = None,  # bytes; None: a share of what is free when a session needs it
        max_slots: int | None = None,
        max_context: int | None = None,
        prefill_tokens: int | None = None,
        steps_per_look: int | None = None,
        use_graphs: bool = True,
        mixture: Mixture | None = None,  # a second model that takes part in every draw
        pixels: Pixels | None = None,  # who makes the pixels of prompts with images
        kv_dtype: str | None = None,  # of ROLLOUT_DTYPES: keys and values
        weight_dtype: str | None = None,  # of ROLLOUT_DTYPES: products of linear layers
        drafts: int = 0,  # tokens that are drafted for each row, where few run and it pays
    ) -> None:
        if drafts < 0:
            raise ValueError(f"`drafts` is {drafts}; it must be 0 (no drafts) or more.")
        self.version, self.mixture, self.pixels = 0, mixture, pixels
        self.model, self.decode, self.kv_memory = model, decode, kv_memory
        self.innermost = innermost_model(model)
        self.device = next(model.parameters()).device
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.max_slots = max_slots or MAX_SLOTS[kind]
        self.steps_per_look = steps_per_look or STEPS_PER_LOOK[kind]
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS[kind]
        if mixture is not None:
            mixture.check(self.innermost)
        self._models = [self.innermost, *([mixture.innermost] if mixture is not None else [])]
        self.context = min(context_length(model, max_context) or LONGEST_CONTEXT for model in self._models)
        self.vocabulary = self.innermost.config.get_text_config().vocab_size
        self.forbidden = forbidden_tokens(self.innermost, pixels)
        for name, asked in (("kv_dtype", kv_dtype), ("weight_dtype", weight_dtype)):
            if asked not in (None, *ROLLOUT_DTYPES):
                raise ValueError(f"`{name}` is {asked!r}; known are {', '.join(ROLLOUT_DTYPES)}.")
        self.rounds_cache, self.rounds_weights = kv_dtype == FP8, weight_dtype == FP8
        if self.rounds_cache and (reason := eight_bits.why_not(self.device)):
            raise ValueError(f"Keys and values were to be kept in 8 bits, and {reason}. Leave {FP8!r} out.")
        if self.rounds_weights and (reason := eight_bit_weights.why_not(model, self.innermost)):
            raise ValueError(f"Products were to be computed in 8 bits, and {reason}. Leave {FP8!r} out.")
        self.use_graphs = use_graphs and runs_triton(next(model.parameters()))
        self._made: tuple[Program, StepGraphs] | None = None
        self.drafts, self.drafted = drafts, 0  # tokens a step, and those that were drafted so far
        self.accepted = 0  # of those
        self.drafting: tuple[DraftedProgram, StepGraphs] | None = None
        as_products_read_them = EightBitWeights if self.rounds_weights else PackedWeights
        self.packed = [as_products_read_them(model) for model in self._models]
        self._samplers: dict[Any, Sampler] = {}
        self._in_session = False
        self.labels_tokens = False  # whether completions say which version wrote each token: see `change_weights`

    @property
    def rounds(self) -> bool:
        """Whether it computes with less precise numbers than the trainer."""
        return self.rounds_cache or self.rounds_weights

    def why_not(self) -> str | None:
        """None when the native engine gives this model's own answers; else the reason, as the end of a sentence.

        Of a mixture each of the two models is asked by itself.
        """
        small = {"max_context": self.context, "max_slots": len(probe.LENGTHS)}
        if self.mixture is not None:
            small["kv_dtype"] = FP8 if self.rounds_cache else AUTO
            small["weight_dtype"] = FP8 if self.rounds_weights else AUTO
            alone = NativeEngine(self.model, **small).why_not()
            with self.mixture.context():
                return alone or NativeEngine(self.mixture.model, **small).why_not()
        # First without: what 8 bits are allowed would hide smaller errors.
        if self.rounds and (reason := NativeEngine(self.model, pixels=self.pixels, **small).why_not()):
            return reason
        reason = probe.why_not_by_config(self.model, self.innermost) or self._why_not_with_images()
        if reason is not None:
            return reason
        return why_wrong_with_carried(self.innermost, self._why_wrong)

    def _why_wrong(self) -> str | None:
        """None when two short prompts are answered as by a full forward."""
        self._made = None
        try:
            with evaluating(self.model), inference(self.device):
                gap, allowed = probe.difference(self.innermost, self._probe_answers)
                leak = probe.leak(self.innermost, self._probe_answers)
        except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
            return f"the native engine could not run two short prompts ({type(error).__name__}: {error})"
        if self.rounds:
            allowed = max(allowed, probe.OF_EIGHT_BITS)
        if gap > allowed:
            in_eight_bits = "in 8 bits " if self.rounds else ""
            return f"{in_eight_bits}the native engine's answers differ from a full forward's by {gap:.2g}"
        return None if leak is None else f"another prompt beside it changes the native engine's answers by {leak:.2g}"

    def _why_not_with_images(self) -> str | None:
        family = family_of(self.innermost)
        if self.pixels is None:
            return None
        if family.is_found:
            return f"models of type {family.model_type!r} are in no table of families"
        if not (family.images_see_themselves_whole or family.prefix_sees_itself_whole):
            return None
        return f"images of {family.model_type} see themselves whole, which its prefill does not do"

    def _probe_answers(self, sequences: list[np.ndarray]) -> list[Tensor]:
        """Prefill all but the last tokens of each sequence, then feed those one by one."""
        steps = probe.CONTINUED
        params = SamplingParams(max_tokens=steps)
        pool = PagePool()
        with self._memory() as (program, _), self.running():
            session = NativeSession(self, params, program, None, pool)
            session.grow(1 + sum(pages_for(len(tokens)) + 1 for tokens in sequences))
            for ticket, tokens in enumerate(sequences):
                session.scheduler.add(request_or_error(ticket, Prompt(tokens[:-steps]), params, None, self.vocabulary))
            session.prefill(session.scheduler.admit(steps))
            running = session.scheduler.running
            program.seat(running)
            found = []
            for step in range(steps):
                session.scheduler.reserve(1)
                width = program.rows.put(running, len(running))
                program.lay_out(len(running), width, 1, are_others=True)
                found.append(program.logits(program.rows.lines(len(running), width)).clone())
                program.keep()
                for run, tokens in zip(running, sequences):
                    run.request.extend([int(tokens[len(tokens) - steps + step])], [0.0], [0.0])
        return list(torch.stack(found, 1))

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[NativeSession]:
        if self._in_session:
            raise RuntimeError("This engine has an open session already; add to that one, or close it first.")
        self._in_session = True
        try:
            with ExitStack() as stack:
                for model in (self.model, *([self.mixture.model] if self.mixture is not None else [])):
                    stack.enter_context(evaluating(model))
                program, graphs = stack.enter_context(self._memory())
                yield NativeSession(self, params, program, graphs, PagePool())
        finally:
            self._in_session = False

    @contextmanager
    def _memory(self) -> Iterator[tuple[Program, StepGraphs]]:
        if self._made is None:
            self._made = self._make()
        try:
            yield self._made
        finally:
            self._made[0].free()
            for packed in self.packed:
                packed.free()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model as a session runs it; it is unchanged outside of the block."""
        with inference(self.device), ExitStack() as stack:
            for model, packed in zip(self._models, self.packed):  # the same model twice changes nothing the second time
                stack.enter_context(probe.cached_attention(model))
                stack.enter_context(packed.in_use(self.version))
            yield

    def _make(self) -> tuple[Program, StepGraphs]:
        rows = Rows(self.max_slots, pages_for(self.context) + 2, self.steps_per_look, self.device)
        program = self._program(self.innermost, rows)
        models = self.model
        if self.mixture is not None:
            with self.mixture.context():
                second = self._program(self.mixture.innermost, rows)
            models = nn.ModuleList([self.model, self.mixture.model])  # graphs bake in the addresses of both
            program = MixedProgram(program, second, self.mixture)
        self.drafting = None
        if self.drafts and not program.has_states:  # a state cannot go back to before a draft
            lines = MAX_LINES["cuda" if self.device.type == "cuda" else "cpu"]
            drafted = DraftedProgram(program, self.drafts, max_rows=max(lines // (self.drafts + 1), 1))
            self.drafting = drafted, StepGraphs(models, drafted)
        return program, StepGraphs(models, program)

    def _program(self, innermost: nn.Module, rows: Rows) -> DecodeProgram:
        program = DecodeProgram(innermost, KeyValueStore({}, self.device), rows)
        ids = torch.arange(1, 1 + SHAPE_TOKENS, device=self.device)
        bounds = torch.tensor([0, SHAPE_TOKENS], dtype=torch.int32, device=self.device)
        reader = ShapeReader(Segments(bounds, SHAPE_TOKENS), innermost.config)
        with inference(self.device), probe.cached_attention(innermost), probe.uncompiled(innermost):
            program.hidden(ids[None], ids[None] - 1, reader)
        if not reader.shapes:
            raise NotImplementedError("no layer attends to keys and values that are kept for it")
        layers = innermost.config.get_text_config().num_hidden_layers
        if len(reader.shapes) != layers and not reader.states:  # beside mixers there may be layers with neither
            raise NotImplementedError(f"{len(reader.shapes)} of {layers} layers attend to keys and values of their own")
        shapes = {layer: replace(shape, in_eight_bits=self.rounds_cache) for layer, shape in reader.shapes.items()}
        program.store = KeyValueStore(shapes, self.device)
        if reader.states:
            program.states = MixerStates(innermost.config, reader.states)
            self.use_graphs = False  # states move to other memory when rows come and go
            self.max_slots = min(self.max_slots, self._slots_for(program.states.bytes))
        return program

    def _slots_for(self, state_bytes: int) -> int:
        on_gpu = self.device.type == "cuda"
        room = STATES_SHARE * free_memory(self.device) if on_gpu else CPU_KV_BYTES
        return max(int(room // state_bytes), 1)

    def sampler(self, params: SamplingParams) -> Sampler:
        """The same object for the same way to draw: graphs read its tensors."""
        rule = DrawRule.of(params)
        key = (params.stop_ids, params.regex is None, *sorted(rule.logit_bias.items()), *rule.numbers)
        if key not in self._samplers:
            shape = (self.max_slots, self.vocabulary)
            seen = torch.zeros(shape, dtype=torch.bool, device=self.device) if rule.penalises else None
            allowed = None
            if params.regex is not None or self.forbidden:
                allowed = torch.ones(shape, dtype=torch.bool, device=self.device)
                allowed[:, self.forbidden] = False
            stop_ids = torch.tensor(params.stop_ids, dtype=torch.int64, device=self.device)
            bias = rule.bias(self.vocabulary, self.device)
            self._samplers = dict([*self._samplers.items()][-1:]) | {key: Sampler(rule, stop_ids, bias, seen, allowed)}
        return self._samplers[key]

    def page_budget(self) -> int:
        """Pages that a session may have, page 0 included."""
        program = self._made[0]
        if self.kv_memory is not None:
            budget = self.kv_memory
        elif self.device.type == "cuda":
            budget = int(SHARE_OF_FREE_MEMORY * free_memory(self.device)) + program.pages * program.page_bytes
        else:
            budget = CPU_KV_BYTES
        return max(budget // program.page_bytes, 3)

    def why_no_room(self, prompt: int, limit: int) -> str | None:
        """Asked before a session, of an engine whose memory has been measured (by `why_not`)."""
        return no_room(prompt, limit, self.page_budget())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        if weights is not None:
            raise ValueError("This engine reads the trainer's weights in place: call load_weights(None, version).")
        self.version = version

    def sleep(self) -> None:
        """Keys and values, the large part, exist inside of a session only. Graphs are kept: to capture them takes seconds."""
        if self._in_session:
            raise RuntimeError("This engine has an open session; close it before `sleep`.")

    def wake(self) -> None:
        """Nothing was given back."""


def no_room(prompt: int, limit: int, budget: int) -> str | None:
    """Why a prompt of so many tokens cannot be run on `budget` pages; None: it can."""
    if 2 + pages_for(prompt - 1 + limit) <= budget:  # wherever its prefix ends after it was put back
        return None
    return (
        f"{prompt} tokens, which may be followed by {limit}, are more than the memory for keys and values holds: "
        f"{(budget - 1) * PAGE}. Raise `kv_memory`."
    )


class NativeSession:
    """One running batch."""

    def __init__(
        self, engine: NativeEngine, params: SamplingParams, program: Program, graphs: StepGraphs | None, pool: PagePool
    ) -> None:
        self.engine, self.params, self.program, self.graphs, self.pool = engine, params, program, graphs, pool
        # States of a prefix may take as much as thousands of its tokens on pages.
        self.scheduler = Scheduler(pool, engine.max_slots, engine.prefill_tokens, looks_ahead=not program.has_states)
        self.end = EndOfText(params, engine.decode)
        self.grammar = Grammar(params, engine.decode, engine.vocabulary) if params.regex is not None else None
        self.readers: dict[int, GrammarReader] = {}
        self.sampler = engine.sampler(params)
        if engine.use_graphs and graphs is not None:
            graphs.begin(self.sampler)
        # A mask of allowed tokens or penalties changes with every token, and lines of drafts have those of their row.
        has_masks = self.grammar is not None or self.sampler.seen is not None
        self.drafting = engine.drafting if graphs is not None and not has_masks else None
        if self.drafting is not None and engine.use_graphs:
            self.drafting[1].begin(self.sampler)
        self._trial = Trial(LEAST_ACCEPTED["cuda" if engine.device.type == "cuda" else "cpu"], engine.drafts)
        self._looks = 0  # without drafts
        self._has_drafted = False  # in the last look: the history of the rows is on the device, and no columns are
        self.steps = 1 if self.grammar is not None else engine.steps_per_look
        self.budget = engine.page_budget()
        program.begin(dense_bytes=int(DENSE_SHARE * self.budget * program.page_bytes))
        self._failed: list[tuple[int, Completion]] = []
        self._tickets = 0
        self._laid_out, self._width = -1, 0  # the scheduler's count of changes when the rows were laid out

    # ---- from outside ------------------------------------------------------------------------------------------------------

    def add(self, prompt: Prompt) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        refuse_unseen(prompt, self.engine.pixels)
        made = request_or_error(ticket, prompt, self.params, self.engine.context, self.engine.vocabulary)
        if isinstance(made, Request):
            why_not = no_room(len(prompt.ids), made.limit, self.budget)
            if why_not is None:
                self.scheduler.add(made)
                return ticket
            made = f"Prompt {prompt.key}: {why_not}"
        self._failed.append((ticket, Completion.failed(made, self.engine.version)))
        return ticket

    def cancel(self, tickets: Collection[int]) -> None:
        """They are handed over no more; what they held is free."""
        self.scheduler.drop(tickets)
        self._failed = [(ticket, failed) for ticket, failed in self._failed if ticket not in tickets]
        for ticket in tickets:
            self.readers.pop(ticket, None)

    @property
    def in_flight(self) -> int:
        return self.scheduler.in_flight + len(self._failed)

    @property
    def room(self) -> int:
        """None while a request waits for a slot or for pages: what was put back goes first."""
        return 0 if self.scheduler.is_waiting else self.engine.max_slots - self.scheduler.in_flight

    @property
    def used_share(self) -> float:
        """Of the pages that there is memory for; page 0 belongs to no request."""
        return (self.pool.size - 1 - self.pool.free) / (self.budget - 1)

    def advance(self) -> list[tuple[int, Completion]]:
        finished, self._failed = self._failed, []
        if self.scheduler.in_flight:
            with self.engine.running():
                self._fit_memory()
                self.prefill(self.scheduler.admit(self.steps))
                finished += self._decode()
        return finished

    def change_weights(self, load: Callable[[], int], keeps_cache: bool = False) -> None:
        """Between two looks: `load` writes other weights into the model and says which version; all continue with them.

        Keys and values are computed again under the new weights; with `keeps_cache` those of running completions stay as they are.
        Completions say which tokens were written by which version.
        """
        for request in self.scheduler.requests():
            request.close_span(self.engine.version)
        self.engine.load_weights(None, load())
        if keeps_cache:
            self.scheduler.keep_from_others()
        else:
            self.scheduler.compute_again()

    # ---- inside ------------------------------------------------------------------------------------------------------------

    def _fit_memory(self) -> None:
        """Memory for all that is in flight, within the budget. It grows when more is added, never shrinks."""
        if self._is_settled and not self.scheduler.is_waiting:
            return
        wanted = self.pool.size + max(self.scheduler.wanted_pages(), 0)
        if wanted > self.pool.size and self.pool.size < self.budget:
            self.grow(min(max(wanted, 2 * self.pool.size), self.budget))
        self.scheduler.has_spare_pages = wanted <= self.pool.size

    @property
    def _is_settled(self) -> bool:
        """All that ran in the last steps still run, on pages that last to their ends."""
        return self.scheduler.has_spare_pages and self.scheduler.changes == self._laid_out

    def grow(self, pages: int) -> None:
        self.program.grow(pages)
        self.pool.grow(pages)

    def prefill(self, prefixes: list[Prefix]) -> None:
        """Compute prefixes, as many together as the token budget of one pass allows."""
        began, batch, tokens = time.perf_counter(), [], 0
        for prefix in prefixes:
            if batch and tokens + len(prefix.ids) > self.engine.prefill_tokens:
                self._prefill(batch)
                batch, tokens = [], 0
            if len(prefix.ids):  # a prompt of one token has nothing before that one
                batch.append(prefix)
                tokens += len(prefix.ids)
        if batch:
            self._prefill(batch)
        if prefixes and self.engine.device.type == "cuda":
            # Rare, and the times below are then those of the device. Not of the whole device: training may run on it meanwhile.
            torch.cuda.current_stream(self.engine.device).synchronize()
        now, new = time.perf_counter(), {id(prefix) for prefix in prefixes}
        for run in self.scheduler.running:
            if run.request.started is None:
                run.request.started = began
            if id(run.prefix) in new:
                run.request.prefill_seconds += now - began

    def _prefill(self, prefixes: list[Prefix]) -> None:
        device = self.engine.device
        lengths = [len(prefix.ids) for prefix in prefixes]
        places = [np.arange(length) for length in lengths]
        pages = [np.asarray(prefix.pages)[place // PAGE] for prefix, place in zip(prefixes, places)]
        units = [(prefix.sample,) for prefix in prefixes]
        batch = collate(units, ("text",), RAGGED, pixels=self.engine.pixels).to(device)
        pages, offsets = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
            for parts in (pages, [place % PAGE for place in places])
        )
        self.program.prefill(prefixes, batch, Segments(batch.cu_segments, max(lengths)), pages, offsets)

    def _decode(self) -> list[tuple[int, Completion]]:
        """Some steps of all that run, then one look at what they drew."""
        steps = min(self.steps, max(run.request.remaining for run in self.scheduler.running))
        if not self._is_settled:
            self.scheduler.reserve(steps)
        running = self.scheduler.running
        count = self.graphs.bucket(len(running)) if self.engine.use_graphs else len(running)
        is_other = self._lay_out(running, count)
        self._lay_out_masks(running)
        may_draft = self._may_draft(count)
        if may_draft and self._trial.is_on:
            return self._collect_finished(running, self._write_drafted(running, count, steps, is_other))
        self._looks += 1
        run = running[self._looks % len(running)]
        before = len(run.request.ids)
        reasons = self._write(running, count, steps, is_other)
        if may_draft:
            self._trial.look_back(run, before)
        return self._collect_finished(running, reasons)

    def _may_draft(self, count: int) -> bool:
        """Few rows, all on pages to their ends."""
        if self.drafting is None or not self.scheduler.has_spare_pages:
            return False
        program, graphs = self.drafting
        return count <= program.max_rows and not graphs.has_failed

    def _write(self, running: list[Running], count: int, steps: int, is_other: bool) -> list[str | None]:
        """Why each is over, or None, after `steps` steps."""
        if self.engine.use_graphs:
            self.graphs.run(count, steps, self.sampler)
        else:
            self.program.lay_out(count, self._width, steps, is_other or self._has_drafted)
            for _ in range(steps):
                self.program.run(count, self._width, self.sampler)
            self.program.keep()
        self._has_drafted = False
        ids, logps = self.program.rows.drawn(steps, len(running))
        if self.grammar is not None:
            for run, token in zip(running, ids[0].tolist()):
                self.readers[run.request.ticket].take(token)
        return self.end.take_all([run.request for run in running], ids, logps)

    def _write_drafted(self, running: list[Running], count: int, steps: int, is_other: bool) -> list[str | None]:
        """As `_write`, with drafts."""
        program, graphs = self.drafting
        if is_other or not self._has_drafted:
            program.put(running)
        self._has_drafted = True
        program.restart()
        if self.engine.use_graphs:
            graphs.run(count, steps, self.sampler)
        else:
            for _ in range(steps):
                program.run(count, self._width, self.sampler)
        ids, logps, (written, own_steps, drafted) = program.drawn(len(running))
        accepted = int(written.sum() - own_steps.sum())
        self._trial.note(int(own_steps.sum()), accepted)
        self.engine.drafted += int(drafted.sum())
        self.engine.accepted += accepted
        return [
            self.end.take(run.request, ids[row, :end].tolist(), *logps[:, row, :end].tolist())
            for row, (run, end) in enumerate(zip(running, written.tolist()))
        ]

    def _lay_out(self, running: list[Running], count: int) -> bool:
        """Rows advance on the device by themselves; they are copied there where something else changed. Returns whether it did."""
        has_changed = self.scheduler.changes != self._laid_out
        if has_changed:
            self._width = self.program.rows.put(running, count)
            self.program.seat(running)
            self._laid_out = self.scheduler.changes
        else:
            self.program.rows.restart()
        return has_changed

    def _lay_out_masks(self, running: list[Running]) -> None:
        """Tokens that the rows contain already, for the penalty; tokens that a grammar allows next."""
        if self.sampler.seen is not None:
            tokens = [run.request.tokens().astype(np.int64) for run in running]
            places = np.repeat(np.arange(len(tokens)), [len(part) for part in tokens])
            self.sampler.seen.zero_()
            rows, ids = (torch.from_numpy(x).to(self.engine.device) for x in (places, np.concatenate(tokens)))
            self.sampler.seen[rows, ids] = True
        if self.grammar is not None:
            for run in running:
                if run.request.ticket not in self.readers:
                    self.readers[run.request.ticket] = self.grammar.reader()
            masks = [self.readers[run.request.ticket].allowed() for run in running]
            allowed = torch.stack(masks)
            allowed[:, self.engine.forbidden] = False
            self.sampler.allowed[: len(masks)] = allowed.to(self.engine.device)

    def _collect_finished(self, running: list[Running], reasons: list[str | None]) -> list[tuple[int, Completion]]:
        finished, done = [], []
        for run, reason in zip(running, reasons):
            if reason is not None:
                self.readers.pop(run.request.ticket, None)
                done.append(run)
                finished.append(
                    (run.request.ticket, run.request.completion(reason, self.engine.version, self.engine.labels_tokens))
                )
        self.scheduler.release(done)
        return finished
