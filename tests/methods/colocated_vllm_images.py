"""Images in front of a vLLM in this process. `test_vllm_images.py` runs this file with an interpreter that has vLLM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig

from posttrain.models.load.model import innermost_model
from posttrain.models.vision.features import vision_parameters
from posttrain.rollout.engines.protocol import ERROR, WROTE_PLACEHOLDER, SamplingParams, generate
from posttrain.rollout.engines.vllm.sync_probe import WeightsDiffer
from posttrain.serve.errors import PromptDiffers
from tests.methods.vllm_image_runs import COLOCATED, FAMILIES, asked, largest_gap, model, trainer

GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture
def made(tmp_path):
    """Makes trainers, and ends their vLLM, of which a process has one."""
    trainers = []

    def make(family, **options):
        trainers.append(trainer(model(family), tmp_path, **COLOCATED, **options))
        return trainers[-1]

    yield make
    for one in trainers:
        one.engine.close()


def disturb_vision(run):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in vision_parameters(innermost_model(run.model), run.vision.family):
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3)


def has_moved(one, other):
    length = min(len(one.ids), len(other.ids))
    apart = np.abs(one.policy_logps[:length] - other.policy_logps[:length]).max(initial=0)
    return one.ids.tolist() != other.ids.tolist() or apart > 1e-2


@pytest.mark.parametrize(
    "family", [*FAMILIES[:2], *(pytest.param(one, marks=pytest.mark.trust) for one in FAMILIES[2:])]
)
def test_log_probs_are_the_trainers_and_follow_a_changed_tower(family, made):
    """vLLM's tokens of every prompt were compared with ours on the way: a difference is an error."""
    run = made(family)
    run.weight_sync.ready(0)
    prompts = asked(run)
    before = generate(run.engine, prompts, GREEDY)
    assert all(one.error is None or one.error.startswith(WROTE_PLACEHOLDER) for one in before)
    assert largest_gap(run, before) < 1e-3
    assert has_moved(before[0], before[1])  # the same text about another image
    assert run.engine.differing_tensors(100) == []
    disturb_vision(run)
    run.weight_sync.ready(1)
    after = generate(run.engine, prompts, GREEDY)
    assert largest_gap(run, after) < 1e-3
    np.testing.assert_allclose(before[3].policy_logps, after[3].policy_logps, atol=1e-5)  # it has no image
    assert any(map(has_moved, before[:3], after[:3]))


def test_images_that_were_encoded_before_an_update_would_be_shown_again(made):
    """The reason why caches are emptied: where tower and projector are said to be frozen, and are not, the sampler is wrong."""
    run = made("qwen2_5_vl")
    run.engine.options = replace(run.engine.options, keeps_images=True)
    run.weight_sync.ready(0)
    prompts = asked(run)[:3]
    generate(run.engine, prompts, GREEDY)
    disturb_vision(run)
    with pytest.raises(
        WeightsDiffer, match=r"version 1 the engine's log-probs after an image differ .* agree after texts"
    ):
        run.weight_sync.ready(1)
    assert largest_gap(run, generate(run.engine, prompts, GREEDY)) > 1e-2


def test_pixels_that_vllm_normalises_otherwise_are_found_out(made):
    """As where its loader of random numbers has written into the buffers of a tower."""
    run = made("qwen2_5_vl")

    def spoil(worker):
        buffers = dict(worker.model_runner.model.visual.named_buffers())
        for name in [name for name in buffers if "input_norm" in name]:
            buffers[name].add_(0.01)

    run.engine.engine.in_workers(spoil)
    with pytest.raises(WeightsDiffer, match="after an image"):
        run.weight_sync.ready(0)


def test_a_prompt_of_which_vllm_makes_other_tokens_ends_the_run(made):
    run = made("llava")
    run.weight_sync.ready(0)
    run.engine.pictures.mark = run.engine.pictures.mark * 2  # one image is written twice
    with pytest.raises(Exception, match="image"):
        generate(run.engine, asked(run)[:1], GREEDY)[0].ids[0]
    run.engine.pictures.mark = run.engine.pictures.mark[:1]
    prompt = asked(run)[0]
    (image,) = prompt.images
    wrong = replace(prompt, ids=np.delete(prompt.ids, image.start), images=(replace(image, stop=image.stop - 1),))
    with pytest.raises(PromptDiffers, match=rf"makes {len(prompt.ids)} tokens .* {len(prompt.ids) - 1} .*60 x 40"):
        generate(run.engine, [wrong], GREEDY)
    assert generate(run.engine, [prompt], GREEDY)[0].error is None


def test_a_placeholder_that_is_written_ends_its_completion(made):
    run = made("llava")
    run.weight_sync.ready(0)
    bias = {run.vision.family.placeholder_id: 1000.0}
    written = generate(run.engine, asked(run), SamplingParams(max_tokens=4, temperature=0, logit_bias=bias))
    assert {(one.finish_reason, len(one.ids)) for one in written} == {(ERROR, 0)}
    assert all(one.error.startswith(WROTE_PLACEHOLDER) for one in written)


def test_options_of_the_image_processor_reach_vllm(made):
    few = made("qwen2_5_vl", max_pixels=56 * 56)
    few.weight_sync.ready(0)
    assert largest_gap(few, generate(few.engine, asked(few), GREEDY)) < 1e-3
    assert few.vision.layouts.options["size"]["longest_edge"] == 56 * 56


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_run(family, made):
    run = made(family, steps_per_generation=1)
    run.train()
    logged = [entry for entry in run.state.log_history if "completions/placeholder_ratio" in entry]
    assert len(logged) == 2
    assert all(entry[f"sync/logp_difference/{name}"] < 1e-3 for entry in logged for name in ("max", "images"))


@pytest.mark.parametrize(("lora_vision", "by_adapter"), [(False, True), (True, False)])
def test_adapters(lora_vision, by_adapter, made):
    """On the language model they travel alone; those on the tower are merged, since vLLM would leave them out."""
    adapter = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    run = made("qwen2_5_vl", peft_config=adapter, lora_vision=lora_vision)
    assert run.engine.options.adapter_sync is by_adapter
    run.weight_sync.ready(0)
    assert largest_gap(run, generate(run.engine, asked(run), GREEDY)) < 1e-3


def test_adapters_on_the_tower_cannot_travel_alone(made):
    adapter = LoraConfig(r=8, target_modules="all-linear")
    with pytest.raises(ValueError, match="`vllm_sync='adapter'` cannot be done: the adapter changes the vision tower"):
        made("qwen2_5_vl", peft_config=adapter, lora_vision=True, vllm_sync="adapter")
