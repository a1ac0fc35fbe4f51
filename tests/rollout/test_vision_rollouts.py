"""The native engine writes after images: what it writes is what full forwards of transformers say, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams
from tests.tiny_vision import images
from tests.vision_samples import RAGGED_FAMILIES, Shown

TOKENS = 10


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
    if prompt.images:
        kwargs |= shown.load(prompt.images)
    with torch.no_grad():
        logits = shown.tiny.model._forward_without_scores(**kwargs, use_cache=False).logits[0]
    return logits[len(prompt.ids) - 1 : -1]


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
@pytest.mark.parametrize("slots", [5, 2])
def test_greedy_completions_are_those_of_full_forwards(family, slots):
    shown = Shown.of(family, torch.float32)
    load_model(shown.tiny.model, LoadOptions(vision=shown.family))
    engine = NativeEngine(shown.tiny.model, pixels=shown, max_slots=slots, max_context=512)
    assert engine.why_not() is None
    asked = prompts(shown)
    with engine.session(SamplingParams(temperature=0.0, max_tokens=TOKENS)) as session:
        tickets = [session.add(prompt) for prompt in asked]
        found = {}
        while session.in_flight:
            found |= dict(session.advance())
    forbidden = torch.tensor(shown.family.forbidden_ids)
    for prompt, ticket in zip(asked, tickets):
        completion = found[ticket]
        assert completion.error is None
        logits = full_forward(shown, prompt, completion.ids)
        logps = logits.log_softmax(-1)[range(len(completion.ids)), completion.ids.tolist()]
        assert np.abs(logps.numpy() - completion.policy_logps).max() < 1e-4
        logits[:, forbidden] = -torch.inf
        assert logits.argmax(-1).tolist() == completion.ids.tolist()
    assert found[tickets[0]].ids.tolist() == found[tickets[4]].ids.tolist()
    assert found[tickets[0]].ids.tolist() != found[tickets[1]].ids.tolist()  # the same text about another image


def test_a_prompt_that_ends_with_an_image_is_refused():
    shown = Shown.of("llava", torch.float32)
    load_model(shown.tiny.model, LoadOptions(vision=shown.family))
    engine = NativeEngine(shown.tiny.model, pixels=shown, max_context=512)
    (picture,) = images((60, 40))
    sample = shown.sample("Look: ", picture, answer="")
    with engine.session(SamplingParams(max_tokens=2)) as session:
        session.add(Prompt(sample.input_ids, images=sample.images))
        ((_, completion),) = session.advance()
    assert "ends with an image" in completion.error


def test_an_engine_without_pixels_refuses_images():
    shown = Shown.of("llava", torch.float32)
    engine = NativeEngine(shown.tiny.model, max_context=512)
    with engine.session(SamplingParams(max_tokens=2)) as session, pytest.raises(ValueError, match="without `pixels`"):
        session.add(prompts(shown)[0])
