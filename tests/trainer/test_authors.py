"""Requests of one window by several authors: each completion is that of who wrote it, in the place of its request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.episodes.writing import FROM_DRAFTS
from posttrain.rollout.rollout import POLICY, REFERENCE, SAMPLING_LOGPS
from tests import tiny


class Both(GRPOTrainer):
    """Odd samples are the reference's."""

    def author_of(self, request):
        return REFERENCE if request.sample % 2 else POLICY


class Nobodys(GRPOTrainer):
    def author_of(self, request):
        return "nobody"


def collected(cls, folder, peft=None, ref_model=None, **options):
    """A trainer whose policy is not its reference, and what it collected for its first window."""
    args = GRPOConfig(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=8, num_generations=4,
        report_to="none", use_cpu=True, save_strategy="no", reward_workers=0, disable_tqdm=True,
        **{"beta": 0.1, "max_completion_length": 7} | options,
    )  # fmt: skip
    made = cls(
        tiny.causal_lm(), lambda completions, **_: [float(len(text)) for text in completions], args,
        Dataset.from_dict({"prompt": ["Say a", "Tell it all"]}), processing_class=tiny.tokenizer(), peft_config=peft,
        ref_model=ref_model,
    )  # fmt: skip
    found = []
    collect = made.collector.collect
    made.collector.collect = lambda *given: found.append(collect(*given)) or found[-1]
    next(iter(made.get_train_dataloader()))
    return made, found[0]


def logps_under(model, rollout):
    ids = torch.from_numpy(rollout.sample.input_ids.astype(np.int64))[None]
    at = torch.arange(rollout.prompt_length - 1, ids.shape[1] - 1)
    with torch.no_grad():
        return model(input_ids=ids).logits[0].log_softmax(-1)[at, ids[0, at + 1]].numpy()


def written(rollout):
    return rollout.sample.per_token[SAMPLING_LOGPS][rollout.prompt_length :]


LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # B is not 0


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize("has_adapter", [True, False])
def test_each_completion_is_that_of_its_author(tmp_path, engine, has_adapter):
    given = {"peft": LORA} if has_adapter else {"ref_model": tiny.causal_lm(seed=5)}
    made, of_both = collected(Both, tmp_path / "both", rollout_engine=engine, **given)
    rollouts = of_both.rollouts
    alone = collected(GRPOTrainer, tmp_path / "alone", rollout_engine=engine, **given)[1].rollouts
    assert [rollout.request for rollout in rollouts] == [rollout.request for rollout in alone]
    made.model.eval()
    for rollout, of_policy in zip(rollouts, alone):
        own = logps_under(made.model, rollout)
        with made.live.context():
            reference = logps_under(made.live.model, rollout)
        assert np.abs(own - reference).max() > 1e-2
        if rollout.request.sample % 2:
            assert np.abs(written(rollout) - reference).max() < 1e-4
        else:  # what it is where the policy writes all; the last bits depend on how many are written at once
            assert rollout.completion_ids.tolist() == of_policy.completion_ids.tolist()
            np.testing.assert_allclose(written(rollout), written(of_policy), atol=1e-5)


def test_drafts_are_counted_for_the_policys_completions(tmp_path):
    """All write one letter over and over, so that the mean is the same whoever writes the other half."""
    options = {"rollout_engine": "native", "rollout_drafts": 4, "max_rollout_slots": 1, "max_completion_length": 40}
    options |= {"generation_kwargs": {"logit_bias": {65: 100.0}}, "ref_model": tiny.causal_lm(seed=5)}
    alone, both = (collected(cls, tmp_path, **options)[1] for cls in (GRPOTrainer, Both))
    assert len(both.rollouts) == len(alone.rollouts) == 8
    assert both.numbers[FROM_DRAFTS] == pytest.approx(alone.numbers[FROM_DRAFTS], abs=4)
    assert alone.numbers[FROM_DRAFTS] > 20  # of 40: 28.5 of this model


def test_an_author_whom_nobody_knows_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="`author_of` returned 'nobody'; known are policy, reference, mixture, teacher"
    ):
        collected(Nobodys, tmp_path)


def test_without_a_reference_it_cannot_write(tmp_path):
    with pytest.raises(ValueError, match="Both needs completions of the reference, and there is no reference"):
        collected(Both, tmp_path, beta=0.0)


def test_vllm_is_refused_before_it_is_started(tmp_path):
    with pytest.raises(
        ValueError, match="Both needs completions of the reference, and vLLM has the policy's weights alone"
    ):
        collected(Both, tmp_path, use_vllm=True)


def test_a_rollout_function_writes_the_policys_alone(tmp_path):
    class WithFunction(Both):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, rollout_func=print)

    with pytest.raises(ValueError, match="a `rollout_func` writes the policy's alone"):
        collected(WithFunction, tmp_path)
