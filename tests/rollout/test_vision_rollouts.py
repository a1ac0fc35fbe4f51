"""Engines write after images: what they write is what full forwards of transformers say, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Completion, Prompt, RolloutEngine, SamplingParams, generate
from posttrain.rollout.engines.request import Request, request_or_error
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from tests.tiny_vision import images
from tests.vision_samples import RAGGED_FAMILIES, Shown

TOKENS = 10
WHOLE_FAMILIES = ("gemma3", "paligemma")  # images, or whole prompts, attend in both directions


def prompts(shown: Shown) -> list[Prompt]:
    """One image, the same text about another, two images, none, and the first again."""
    a, b, c = images((60, 40), (60, 40), (30, 90), seed=7)
    parts = [(a, "What is it?"), (b, "What is it?"), (a, " and ", c, "?"), ("Hello, who is it?",), (a, "What is it?")]
    samples = [shown.sample(*some, answer="") for some in parts]
    return [
        Prompt(sample.input_ids, number, images=sample.images, positions=sample.positions)
        for number, sample in enumerate(samples)
    ]


def full_forward(shown: Shown, prompt: Prompt, written: np.ndarray) -> torch.Tensor:
    """(tokens, V) logits before each written token, by transformers' own forward of the whole sequence."""
    ids = torch.from_numpy(np.concatenate([prompt.ids, written]).astype(np.int64))[None]
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    family = shown.family
    if family.three_axis_positions:
        kwargs["mm_token_type_ids"] = (ids == family.placeholder_id).long()
    elif family.prefix_sees_itself_whole:
        kwargs[family.token_types_key] = (torch.arange(ids.shape[1]) >= len(prompt.ids)).long()[None]
    elif family.token_types_key is not None:
        kwargs[family.token_types_key] = (ids == family.placeholder_id).long()
    if prompt.images:
        kwargs |= shown.load(prompt.images)
    with torch.no_grad():
        logits = shown.tiny.model._forward_without_scores(**kwargs, use_cache=False).logits[0]
    return logits[len(prompt.ids) - 1 : -1]


def loaded(family: str) -> Shown:
    shown = Shown.of(family, torch.float32)
    load_model(shown.tiny.model, LoadOptions(vision=shown.family))
    return shown


def check_against_full_forwards(shown: Shown, engine: RolloutEngine, temperature: float = 0.0) -> list[Completion]:
    asked = prompts(shown)
    found = generate(engine, asked, SamplingParams(temperature=temperature, max_tokens=TOKENS))
    forbidden = torch.tensor(shown.family.forbidden_ids)
    for prompt, completion in zip(asked, found):
        assert completion.error is None
        logits = full_forward(shown, prompt, completion.ids)
        logps = logits.log_softmax(-1)[range(len(completion.ids)), completion.ids.tolist()]
        assert np.abs(logps.numpy() - completion.policy_logps).max() < 1e-5
        assert not np.isin(completion.ids, shown.family.forbidden_ids).any()
        if temperature == 0:
            logits[:, forbidden[forbidden < logits.shape[-1]]] = -torch.inf
            assert logits.argmax(-1).tolist() == completion.ids.tolist()
    assert found[0].ids.tolist() == found[4].ids.tolist() or temperature
    assert np.abs(found[0].policy_logps - found[1].policy_logps).max() > 1e-3  # the same text about another image
    return found


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
@pytest.mark.parametrize("slots", [5, 2])
def test_greedy_completions_are_those_of_full_forwards(family, slots):
    shown = loaded(family)
    engine = NativeEngine(shown.tiny.model, pixels=shown, max_slots=slots, max_context=512)
    assert engine.why_not() is None
    check_against_full_forwards(shown, engine)


@pytest.mark.parametrize("family", [*RAGGED_FAMILIES, *WHOLE_FAMILIES])
@pytest.mark.parametrize("batch_size", [5, 2])
def test_greedy_completions_of_left_padded_batches_are_those_of_full_forwards(family, batch_size):
    """Prompts with images of other sizes, with several and with none, lie in one batch."""
    shown = loaded(family)
    check_against_full_forwards(shown, TransformersEngine(shown.tiny.model, batch_size=batch_size, pixels=shown))


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
def test_both_engines_draw_the_same_with_equal_noise(family):
    shown = loaded(family)
    plain = TransformersEngine(shown.tiny.model, pixels=shown)
    native = NativeEngine(shown.tiny.model, pixels=shown, max_context=512)
    drawn = [check_against_full_forwards(shown, engine, temperature=1.0) for engine in (plain, native)]
    assert [one.ids.tolist() for one in drawn[0]] == [one.ids.tolist() for one in drawn[1]]
    for one, other in zip(*drawn):
        assert np.abs(one.sampling_logps - other.sampling_logps).max() < 1e-5


@pytest.mark.parametrize("family", WHOLE_FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_the_native_engine_cannot_show_the_plain_one_does(family, temperature, caplog):
    shown = loaded(family)
    engine = ENGINES["native"](shown.tiny.model, pixels=shown)
    assert isinstance(engine, TransformersEngine)
    assert "is generated from by transformers" in caplog.text
    check_against_full_forwards(shown, engine, temperature)


def test_a_prefix_lm_continues_no_episode():
    shown = loaded("paligemma")
    engine = TransformersEngine(shown.tiny.model, pixels=shown)
    (completion,) = generate(engine, [Prompt(np.arange(5, 9), first_token=3)], SamplingParams(max_tokens=2))
    assert "sees its whole prompt in both directions" in completion.error


def test_placeholders_may_lie_beyond_the_vocabulary():
    shown = Shown.of("llava", torch.float32)
    prompt, params = prompts(shown)[0], SamplingParams(max_tokens=2)
    vocabulary = shown.family.placeholder_id
    assert isinstance(request_or_error(0, prompt, params, None, vocabulary), Request)
    assert "knows 0 to" in request_or_error(0, Prompt(prompt.ids), params, None, vocabulary)


def test_a_prompt_that_ends_with_an_image_is_refused():
    shown = loaded("llava")
    engine = NativeEngine(shown.tiny.model, pixels=shown, max_context=512)
    (picture,) = images((60, 40))
    sample = shown.sample("Look: ", picture, answer="")
    with engine.session(SamplingParams(max_tokens=2)) as session:
        session.add(Prompt(sample.input_ids, images=sample.images))
        ((_, completion),) = session.advance()
    assert "ends with an image" in completion.error


@pytest.mark.parametrize("engine_class", [NativeEngine, TransformersEngine])
def test_an_engine_without_pixels_refuses_images(engine_class):
    shown = Shown.of("llava", torch.float32)
    engine = engine_class(shown.tiny.model, max_context=512)
    with engine.session(SamplingParams(max_tokens=2)) as session, pytest.raises(ValueError, match="without `pixels`"):
        session.add(prompts(shown)[0])
