"""Drafts change how many steps it takes, and nothing that is written."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.models.layers.kernels import decoder_layers
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native import drafts as drafting
from posttrain.rollout.engines.native import step
from posttrain.rollout.engines.native.drafts import NONE, DraftedProgram, Trial, drafts_from
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import LENGTH, STOP, SamplingParams, generate
from tests.rollout.families import FAMILIES, SEEDED, loaded, prompts, texts
from tests.rollout.test_native_engine import captured, with_graphs  # noqa: F401 - a fixture
from tests.rollout.test_native_states import made as recurrent
from tests.rollout.test_vision_rollouts import loaded as shown_model
from tests.rollout.test_vision_rollouts import prompts as shown_prompts

GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Drafts for up to twelve rows, whether they are accepted or not."""
    monkeypatch.setitem(drafting.MAX_LINES, "cpu", 64)
    monkeypatch.setitem(drafting.LEAST_ACCEPTED, "cpu", 0.0)
    monkeypatch.setattr(Trial, "is_on", True)  # from the first look


@pytest.fixture(scope="module")
def qwen():
    return loaded("qwen2")


@pytest.fixture
def steps(monkeypatch):
    """Lines of each row in every step of a model."""
    found, run = [], step.DecodeProgram.logits
    monkeypatch.setattr(
        step.DecodeProgram, "logits", lambda self, lines: found.append(lines.of_each_row) or run(self, lines)
    )
    return found


def foretell(monkeypatch, asked, completions, right=1.0):
    """Draft what will be written, each token with this probability, instead of looking it up."""
    rng = np.random.default_rng(0)
    wholes = [np.concatenate([prompt.ids, one.ids]) for prompt, one in zip(asked, completions)]

    def known(history, positions, count):
        found = torch.full((len(history), count), NONE)
        for row, last in enumerate(positions.tolist()):
            so_far = history[row, : last + 1].numpy()
            is_text = so_far != NONE
            for whole in wholes:
                ahead = whole[last + 1 : last + 1 + count]
                if len(ahead) and np.array_equal(whole[: last + 1][is_text], so_far[is_text]):
                    ahead = np.where(rng.random(len(ahead)) < right, ahead, 3)
                    found[row, : len(ahead)] = torch.from_numpy(ahead)
        return found

    monkeypatch.setattr(drafting, "drafts_from", known)


def assert_equal(found, wanted):
    assert texts(found) == texts(wanted)
    for one, other in zip(found, wanted):
        assert (one.finish_reason, one.error) == (other.finish_reason, other.error)
        np.testing.assert_allclose(one.policy_logps, other.policy_logps, atol=1e-5)
        np.testing.assert_allclose(one.sampling_logps, other.sampling_logps, atol=1e-5)


# ---- what is looked up --------------------------------------------------------------------------------------------------


def looked_up(tokens, count):
    """The definition, in plain Python."""
    last = len(tokens) - 1
    for length in (3, 2):
        end = tokens[-length:]
        starts = (
            [i for i in range(length - 1, last) if tokens[i - length + 1 : i + 1] == end] if last + 1 > length else []
        )
        if starts:
            between = tokens[starts[-1] + 1 :]
            return [between[i % len(between)] for i in range(count)]
    return [NONE] * count


@settings(deadline=None, max_examples=300)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=5), st.integers(1, 9))
def test_the_draft_is_what_followed_the_latest_place_that_looks_alike(rows, count):
    history = torch.randint(0, 3, (len(rows), 32))  # what lies behind the last token counts for nothing
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = torch.tensor(tokens)
    positions = torch.tensor([len(tokens) - 1 for tokens in rows])
    assert drafts_from(history, positions, count).tolist() == [looked_up(tokens, count) for tokens in rows]


# ---- what is written ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_families_write_what_they_write_without_drafts(family, monkeypatch, steps):
    """Most drafts are right, so lines are accepted to any length; wrong ones leave keys behind that must not be seen."""
    model, asked = loaded(family), prompts(9, longest=50)
    for params in (SEEDED, replace(SEEDED, temperature=0.8, top_p=0.7), GREEDY):
        wanted = generate(NativeEngine(model), asked, params)
        with monkeypatch.context() as patch:
            foretell(patch, asked, wanted, right=0.7)
            steps.clear()
            engine = NativeEngine(model, drafts=3)
            assert_equal(generate(engine, asked, params), wanted)
        assert set(steps) == {4}
        assert 0.3 * engine.drafted < engine.accepted < 0.9 * engine.drafted


@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("right", [1.0, 0.5])
def test_any_number_of_drafts_and_few_slots_write_the_same(qwen, monkeypatch, count, right):
    asked = prompts(14, samples=1)
    wanted = generate(NativeEngine(qwen), asked, SEEDED)
    foretell(monkeypatch, asked, wanted, right)
    for slots in (1, 4, 14):  # 14 rows are too many at first
        assert_equal(generate(NativeEngine(qwen, drafts=count, max_slots=slots), asked, SEEDED), wanted)


def test_right_drafts_save_steps_up_to_the_allowance_and_to_a_stop_id(qwen, monkeypatch, steps):
    (prompt,) = prompts(1, longest=50)
    long = SamplingParams(max_tokens=23, seed=5)
    ids = generate(NativeEngine(qwen), [prompt], long)[0].ids.tolist()
    stop = next(place for place, token in enumerate(ids) if place > 8 and place % 5 == 2 and token not in ids[:place])
    for params, length, reason in (
        (long, 23, LENGTH),  # four whole steps and three tokens of the fifth
        (replace(long, stop_ids=(ids[stop],)), stop + 1, STOP),
    ):
        with monkeypatch.context() as patch:
            foretell(patch, [prompt], [SimpleNamespace(ids=ids)])
            steps.clear()
            engine = NativeEngine(qwen, drafts=4, steps_per_look=1)
            (found,) = generate(engine, [prompt], params)
        assert (len(found.ids), found.finish_reason) == (length, reason)
        assert found.ids.tolist() == ids[:length]
        assert steps == [5] * -(-length // 5)
        assert engine.accepted == length - len(steps)


def test_a_model_that_repeats_itself_takes_fewer_steps(qwen, steps):
    asked = prompts(4, longest=20)
    long = replace(GREEDY, max_tokens=200)
    wanted = generate(NativeEngine(qwen), asked, long)
    plain, engine = len(steps), NativeEngine(qwen, drafts=4)
    steps.clear()
    assert_equal(generate(engine, asked, long), wanted)
    assert len(steps) < 0.6 * plain
    assert engine.accepted > 0.7 * engine.drafted


def test_stop_strings_cut_what_lies_behind_them(qwen, monkeypatch):
    from tests.rollout.families import letters

    asked = prompts(6, longest=30)
    plain = generate(NativeEngine(qwen), asked, SEEDED)
    params = replace(SEEDED, stop_ids=(), stop=tuple(letters(one.ids[9:11]) for one in plain[:3]))
    wanted = generate(NativeEngine(qwen, letters), asked, params)
    assert {one.finish_reason for one in wanted} >= {STOP}
    foretell(monkeypatch, asked, wanted)
    assert_equal(generate(NativeEngine(qwen, letters, drafts=6), asked, params), wanted)


def test_tokens_that_images_forbid_are_never_drawn_and_bias_applies_to_every_line(qwen, monkeypatch):
    asked, params = prompts(5), replace(SEEDED, logit_bias={7: 5.0})

    def engine(**options):
        made = NativeEngine(qwen, **options)
        made.forbidden = [9, 30]
        return made

    wanted = generate(engine(), asked, params)
    foretell(monkeypatch, asked, wanted)
    found = engine(drafts=4)
    assert_equal(generate(found, asked, params), wanted)
    assert found.accepted > 0


def test_where_memory_is_short_completions_are_put_back_and_drafts_wait(qwen, monkeypatch, steps):
    asked = prompts(12, samples=2)
    wanted = generate(NativeEngine(qwen), asked, SEEDED)
    foretell(monkeypatch, asked, wanted, right=0.6)
    engine = NativeEngine(qwen, max_slots=12, drafts=4)
    with engine.session(SEEDED):
        engine.kv_memory = 24 * engine._made[0].page_bytes
    steps.clear()
    with engine.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in asked]
        found = {}
        while session.in_flight:
            found.update(session.advance())
        assert session.scheduler.preempted > 0
        assert session.pool.free == session.pool.size - 1
    assert_equal([found[ticket] for ticket in tickets], wanted)
    assert set(steps) == {1, 5}


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_cancelled_rows_and_reloaded_weights_disturb_nobody(qwen, monkeypatch, keeps_cache):
    asked = prompts(10)
    wanted = generate(NativeEngine(qwen), asked, SEEDED)
    foretell(monkeypatch, asked, wanted, right=0.5)
    with NativeEngine(qwen, drafts=3, steps_per_look=1).session(SEEDED) as session:
        tickets, found = [session.add(prompt) for prompt in asked[:8]], {}
        found.update(session.advance())
        session.cancel(tickets[1:4])
        found.update(session.advance())
        tickets += [session.add(prompt) for prompt in asked[8:]]
        session.change_weights(lambda: 1, keeps_cache)  # to the same
        while session.in_flight:
            found.update(session.advance())
    left = [place for place in range(10) if place not in (1, 2, 3)]
    assert_equal([found[tickets[place]] for place in left], [wanted[place] for place in left])


def test_looks_with_and_without_drafts_may_take_turns(qwen, monkeypatch, steps):
    """A look without leaves the history behind, and a look with drafts leaves the rows side by side behind."""
    asked = prompts(8)
    wanted = generate(NativeEngine(qwen), asked, SEEDED)
    foretell(monkeypatch, asked, wanted, right=0.5)
    turns = iter([True, False, False, True, False, True, True] * 20)
    monkeypatch.setattr(Trial, "is_on", property(lambda self: next(turns), lambda self, value: None))
    laid_out = []
    keep = step.DecodeProgram.keep
    monkeypatch.setattr(step.DecodeProgram, "keep", lambda self: laid_out.append(self.dense) or keep(self))
    assert_equal(generate(NativeEngine(qwen, drafts=3, steps_per_look=2), asked, SEEDED), wanted)
    assert set(steps) == {1, 4}
    assert None not in laid_out  # without drafts rows lie side by side again


def test_a_look_without_drafts_leaves_no_old_history(qwen, monkeypatch):
    asked, params = prompts(1), SamplingParams(max_tokens=40, seed=5)
    wanted = generate(NativeEngine(qwen), asked, params)
    foretell(monkeypatch, asked, wanted)
    turns = iter([True, False] * 4)
    monkeypatch.setattr(Trial, "is_on", property(lambda self: next(turns), lambda self, value: None))
    engine = NativeEngine(qwen, drafts=3, steps_per_look=2)
    assert_equal(generate(engine, asked, params), wanted)
    assert (engine.drafted, engine.accepted) == (24, 24)  # of four looks of two steps, all that is looked up is right


def test_lines_without_a_draft_count_for_nothing(qwen, monkeypatch):
    asked = prompts(3)
    wanted = generate(NativeEngine(qwen), asked, SEEDED)
    monkeypatch.setattr(
        drafting, "drafts_from", lambda history, positions, count: torch.full((len(history), count), NONE)
    )
    engine = NativeEngine(qwen, drafts=3)
    assert_equal(generate(engine, asked, SEEDED), wanted)
    assert (engine.drafted, engine.accepted) == (0, 0)


def test_keys_and_values_in_8_bits_are_drafted_for_as_well(monkeypatch):
    """In float64, whose last bits do not tip the rounding to 8."""
    model, asked = loaded("qwen2").double(), prompts(8)
    wanted = generate(NativeEngine(model, kv_dtype="fp8"), asked, SEEDED)
    assert texts(wanted) != texts(generate(NativeEngine(model), asked, SEEDED))
    foretell(monkeypatch, asked, wanted, right=0.6)
    assert_equal(generate(NativeEngine(model, kv_dtype="fp8", drafts=3), asked, SEEDED), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_mixture_is_drafted_for_as_well(family, monkeypatch):
    model, other = loaded(family), loaded(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    asked = prompts(6)
    wanted = generate(NativeEngine(model, mixture=Mixture(other, 0.4)), asked, SEEDED)
    foretell(monkeypatch, asked, wanted, right=0.7)
    engine = NativeEngine(model, mixture=Mixture(other, 0.4), drafts=3)
    assert_equal(generate(engine, asked, SEEDED), wanted)
    assert engine.accepted > 20


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_with_images_are_drafted_for_as_well(family, temperature, monkeypatch):
    """Rotary positions of three axes; placeholders in the history, which are never fed."""
    shown = shown_model(family)
    asked, params = shown_prompts(shown), SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    fed, run = [], step.DecodeProgram.logits
    monkeypatch.setattr(step.DecodeProgram, "logits", lambda self, lines: fed.append(lines.tokens) or run(self, lines))

    def engine(**options):
        return NativeEngine(shown.tiny.model, pixels=shown, max_context=512, **options)

    wanted = generate(engine(), asked, params)
    if temperature:  # such a model does not repeat itself
        foretell(monkeypatch, asked, wanted, right=0.7)
    drafted = engine(drafts=3)
    assert_equal(generate(drafted, asked, params), wanted)
    assert drafted.accepted > 0
    assert not np.isin(torch.cat(fed).numpy(), shown.family.forbidden_ids).any()
    history = drafted.drafting[0].history.numpy()
    assert not np.isin(history, shown.family.forbidden_ids).any()
    assert (history == NONE).any()


# ---- graphs -------------------------------------------------------------------------------------------------------------


def test_steps_with_drafts_are_captured_too(qwen, captured, monkeypatch):  # noqa: F811
    asked = prompts(14)
    wanted = generate(NativeEngine(qwen), asked, SEEDED)
    foretell(monkeypatch, asked, wanted, right=0.6)
    engine = with_graphs(qwen, max_slots=24, drafts=3)
    for _ in range(2):
        assert_equal(generate(engine, asked, SEEDED), wanted)
    kinds = [(graph.step[0], isinstance(graph.program, DraftedProgram)) for graph in captured]
    assert len(set(kinds)) == len(kinds)
    assert (16, True) in kinds
    assert len(kinds) > 1
    assert all(graph.replays > 1 for graph in captured)


def test_where_drafts_cannot_be_captured_there_are_none(qwen, captured, monkeypatch, caplog):  # noqa: F811
    from posttrain.rollout.engines.native.graphs import StepGraphs

    capture = StepGraphs._captured_from_nothing

    def fails(self, rows, sampler):
        if isinstance(self._program, DraftedProgram):
            raise RuntimeError("this step waits for the device")
        return capture(self, rows, sampler)

    monkeypatch.setattr(StepGraphs, "_captured_from_nothing", fails)
    engine = with_graphs(qwen, drafts=3)
    asked = prompts(6)
    assert_equal(generate(engine, asked, SEEDED), generate(NativeEngine(qwen), asked, SEEDED))
    assert len(caplog.records) == 1
    assert captured


class Waits(TorchDispatchMode):
    """Fails where the host would wait for a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), (
            func
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("params", [SEEDED, replace(SEEDED, top_p=0.8, top_k=20)])
def test_a_step_with_drafts_never_waits_for_the_device_and_leaves_its_tensors_where_they_are(qwen, params):
    engine = NativeEngine(qwen, drafts=3)
    with engine.session(params) as session:
        for prompt in prompts(5):
            session.add(prompt)
        session.advance()
        program, _ = engine.drafting
        before = [getattr(program, name).data_ptr() for name in ("history", "ids", "logps", "counts")]
        with engine.running(), Waits():
            program.run(5, session._width, session.sampler)
        assert [getattr(program, name).data_ptr() for name in ("history", "ids", "logps", "counts")] == before


def test_layers_that_are_compiled_are_not_compiled_again_for_drafts():
    model, asked = loaded("qwen2"), prompts(8)
    wanted = generate(NativeEngine(model), asked, GREEDY)
    pieces = []
    for count in (0, 3):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for layer in decoder_layers(model):
            layer.compile(dynamic=True, backend="eager")
        assert_equal(generate(NativeEngine(model, drafts=count), asked, GREEDY), wanted)
        pieces.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert pieces[0] == pieces[1]


# ---- when ---------------------------------------------------------------------------------------------------------------


def test_drafts_that_nobody_accepts_are_given_up_after_one_look(qwen, monkeypatch, steps):
    monkeypatch.setitem(drafting.LEAST_ACCEPTED, "cpu", 0.5)
    monkeypatch.setattr(drafting, "drafts_from", lambda history, positions, count: torch.full((len(history), count), 3))
    params = replace(SEEDED, max_tokens=150, stop_ids=())
    engine = NativeEngine(qwen, drafts=2)
    (found,) = generate(engine, prompts(1, longest=20), params)
    assert 3 not in found.ids
    assert steps == [3] * 4 + [1] * 146
    assert (engine.drafted, engine.accepted) == (8, 0)


def test_drafts_begin_where_they_would_have_been_accepted_and_end_where_they_are_not(qwen, monkeypatch, steps):
    """What is looked up is right from the 40th token of the completion to the 100th."""
    monkeypatch.setitem(drafting.LEAST_ACCEPTED, "cpu", 1.5)
    monkeypatch.setattr(Trial, "is_on", False)
    asked, params = prompts(1, longest=20), replace(SEEDED, max_tokens=160, stop_ids=())
    (wanted,) = generate(NativeEngine(qwen), asked, params)
    whole = np.concatenate([asked[0].ids, wanted.ids])
    first = len(asked[0].ids)

    def known(history, positions, count):
        last = positions.item()
        ahead = torch.full((1, count), 3)
        if 40 <= last + 1 - first < 100:
            ahead[0] = torch.from_numpy(whole[last + 1 : last + 1 + count])
        return ahead

    monkeypatch.setattr(drafting, "drafts_from", known)
    steps.clear()
    engine = NativeEngine(qwen, drafts=3)
    assert_equal(generate(engine, asked, params), [wanted])
    # Looks of four steps: that from the 40th on shows it. Then three looks of four tokens a step, one that passes the 100th and
    # still has half of its drafts accepted, and one that has none.
    begun, ended = steps.index(4), len(steps) - steps[::-1].index(4)
    assert begun == 44
    assert set(steps[begun:ended]) == {4}
    assert ended - begun == 20
    assert engine.accepted == 3 * 14


def test_too_many_rows_a_penalty_and_a_state_mean_no_drafts(qwen, steps):
    generate(NativeEngine(qwen, drafts=4), prompts(13, samples=1), replace(SEEDED, max_tokens=4))
    assert set(steps) == {1}
    steps.clear()
    generate(NativeEngine(qwen, drafts=4), prompts(3), replace(SEEDED, repetition_penalty=1.2))
    model = recurrent("lfm2")
    generate(NativeEngine(model, drafts=4), prompts(3), replace(GREEDY, max_tokens=8))
    assert set(steps) == {1}


def test_fewer_than_no_drafts_are_refused(qwen):
    with pytest.raises(ValueError, match="`drafts` is -1; it must be 0"):
        NativeEngine(qwen, drafts=-1)
