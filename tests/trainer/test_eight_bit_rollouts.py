"""`rollout_kv_dtype`, `rollout_weight_dtype`: completions that are drawn in 8 bits are weighed as those of another program are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain import AsyncGRPOConfig, DPPOConfig, DPPOTrainer, GRPOConfig, RLOOConfig, RLOOTrainer
from posttrain.rollout.engines.gathered_engine import GatheredEngine
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.rollout.rollout import OLD_LOGPS, SAMPLING_LOGPS
from posttrain.trainer import policy_group_trainer
from tests import tiny
from tests.forked_workers import forked_workers  # noqa: F401
from tests.trainer.test_async import odd_sums, run, written
from tests.trainer.test_online import Peek, logged, numbered, rows, trainer

ROUNDED = {"rollout_engine": "native", "rollout_kv_dtype": "fp8"}
PRODUCTS = {"rollout_engine": "native", "rollout_weight_dtype": "fp8"}
BY_TOKEN = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.02}


@pytest.fixture
def losses(monkeypatch):
    """What each loss was given, with the batch's own columns."""
    found, original = [], policy_group_trainer.policy_loss

    def watched(kind, tokens, *given):
        found.append(tokens)
        return original(kind, tokens, *given)

    monkeypatch.setattr(policy_group_trainer, "policy_loss", watched)
    return found


def own_logps(model, sample):
    ids = torch.from_numpy(sample.input_ids).long()
    with torch.no_grad():
        logps = model.eval()(ids[None]).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, ids[1:, None])[:, 0].numpy()[sample.trained[1:]]


@pytest.mark.parametrize("rounded", [ROUNDED, PRODUCTS])
def test_tokens_are_weighed_by_the_trainers_own_log_probs_over_the_samplers(rounded, tmp_path, losses):
    first = tiny.causal_lm()
    given = {"model": tiny.causal_lm(), "max_steps": 3, "max_completion_length": 12, **rounded, **BY_TOKEN}
    made = trainer(tmp_path, numbered, **given)
    assert isinstance(made.engine, NativeEngine)
    assert made.engine.rounds
    assert (made.engine.rounds_cache, made.engine.rounds_weights) == (rounded is ROUNDED, rounded is PRODUCTS)
    assert made.corrects_sampler
    assert made.has_old_logps  # in a pass of their own, although the window is one step
    peek = Peek(made)
    made.train()
    for sample in peek.windows[0]:  # written by the first weights
        own = own_logps(first, sample)
        assert np.abs(sample.per_token[OLD_LOGPS][sample.trained] - own).max() < 1e-5
        assert np.abs(sample.per_token[SAMPLING_LOGPS][sample.trained] - own).mean() > 1e-4
    assert len(losses) == 3
    for tokens in losses:
        old = tokens.batch.per_token[OLD_LOGPS]
        ratio = (old - tokens.sampling_logps).exp()
        assert torch.equal(tokens.old_logps, old)  # the clip is around the trainer's own
        assert torch.allclose(tokens.correction, ratio.clamp(max=1.02))
        assert ratio.max() > 1.02
    numbers = [line for line in logged(tmp_path) if "sampling/kl" in line]
    assert len(numbers) == 3
    for line in numbers:
        assert 1e-4 < line["sampling/sampling_logp_difference/mean"] < 0.1
        assert line["sampling/importance_sampling_ratio/min"] < 1 < line["sampling/importance_sampling_ratio/max"]


def test_without_8_bits_nothing_is_corrected(tmp_path, losses):
    made = trainer(tmp_path, numbered, max_steps=1, rollout_engine="native", rollout_kv_dtype="auto")
    assert not made.corrects_sampler
    assert not made.has_old_logps
    made.train()
    assert losses[0].correction is None
    assert logged(tmp_path)[0]["sampling/sampling_logp_difference/max"] < 1e-5


def test_an_engine_that_is_given_says_for_itself_whether_it_rounds(tmp_path):
    model = tiny.causal_lm()
    made = trainer(tmp_path / "a", numbered, model=model, engine=NativeEngine(model, kv_dtype="fp8"))
    assert made.corrects_sampler
    asked_not_to = {"vllm_importance_sampling_correction": False}
    engine = NativeEngine(model, kv_dtype="fp8")
    assert not trainer(tmp_path / "b", numbered, model=model, engine=engine, **asked_not_to).corrects_sampler
    assert not trainer(tmp_path / "c", numbered, model=model, engine=NativeEngine(model)).corrects_sampler


@pytest.mark.parametrize("rounded", [ROUNDED, PRODUCTS])
def test_a_given_engine_and_the_option_are_refused_together(rounded, tmp_path):
    model = tiny.causal_lm()
    with pytest.raises(ValueError, match="this run was given one"):
        trainer(tmp_path, numbered, model=model, engine=NativeEngine(model), **rounded)


def test_tokens_are_weighed_one_by_one_unless_the_user_says_otherwise(tmp_path):
    def made(**options):
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **options)
        return args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max

    assert made() == made(rollout_kv_dtype="auto") == ("sequence_mask", 3.0)
    assert made(**ROUNDED) == made(**PRODUCTS) == ("token_truncate", 2.0)
    assert made(**ROUNDED, vllm_importance_sampling_clip_max=1.5) == ("sequence_mask", 1.5)


def test_weights_that_are_gathered_first_are_run_by_an_engine_that_rounds(tmp_path):
    made = trainer(tmp_path, numbered, **ROUNDED)
    gathered = GatheredEngine(made.model, made.local_engine, torch.device("cpu"), torch.float32)
    assert gathered.rounds
    plain = GatheredEngine(made.model, TransformersEngine, torch.device("cpu"), torch.float32)
    assert not plain.rounds


def test_rloo_scores_with_its_own_weights(tmp_path):
    made = trainer(tmp_path, numbered, cls=RLOOTrainer, config=RLOOConfig, max_steps=2, num_iterations=2, **ROUNDED)
    first, peek = tiny.causal_lm(), Peek(made)
    made.train()
    for sample in peek.windows[0]:
        assert np.abs(sample.per_token[OLD_LOGPS][sample.trained] - own_logps(first, sample)).max() < 1e-5


@pytest.mark.parametrize("order", ["in_order", "first_finished"])
def test_rollouts_beside_training_round_as_well(tmp_path, order):
    """Written by copies of the weights, in a thread: the engine that is made for it has the same options."""
    given = {"async_rollouts": True, "async_order": order, "async_lead": 1, "max_steps": 3, **ROUNDED}
    run(tmp_path / "rounded", **given)
    numbers = [line for line in logged(tmp_path / "rounded") if "sampling/kl" in line]
    assert numbers[0]["sampling/sampling_logp_difference/mean"] > 1e-4  # by the first weights, which score as well
    assert trainer(tmp_path / "b", odd_sums, **ROUNDED).engine_maker().keywords["kv_dtype"] == "fp8"


def test_in_order_ahead_and_at_once_write_the_same(tmp_path):
    for name, more in (
        ("at once", {}),
        ("ahead", {"async_rollouts": True, "async_order": "in_order", "async_lead": 0}),
    ):
        run(tmp_path / name, max_steps=2, learning_rate=0.0, **ROUNDED | more)
    one, other = ([row["completion_ids"] for row in written(tmp_path / name)] for name in ("at once", "ahead"))
    assert one == other


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("rounded", [ROUNDED, PRODUCTS])
def test_a_worker_process_rounds_as_a_thread_does(rounded, tmp_path):
    given = {"async_rollouts": True, "async_order": "in_order", "async_lead": 1, "max_steps": 2, **rounded}
    for name, more in (("thread", {}), ("process", {"rollout_workers": 1})):
        run(tmp_path / name, **given | more)
    thread, process = ([row["sampling_logps"] for row in written(tmp_path / name)] for name in ("thread", "process"))
    assert thread == process


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rollout_kv_dtype": "int4"}, "must be one of auto, fp8"),
        (
            {"rollout_kv_dtype": "fp8", "rollout_engine": "transformers"},
            "`rollout_engine` is 'transformers': leave one",
        ),
        ({"rollout_kv_dtype": "fp8", "use_vllm": True}, "`kv_cache_dtype` .`vllm_engine_args`"),
        ({"rollout_kv_dtype": "auto", "use_vllm": True, "vllm_mode": "server"}, "leave it out, and give vLLM its own"),
        ({"rollout_weight_dtype": "fp4"}, "`rollout_weight_dtype` is 'fp4'.*must be one of auto, fp8"),
        ({"rollout_weight_dtype": "fp8", "use_vllm": True}, "`rollout_weight_dtype` is .*`quantization` .`vllm_engine"),
    ],
)
def test_options_of_other_engines_are_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **options)


@pytest.mark.parametrize("name", ["rollout_kv_dtype", "rollout_weight_dtype"])
def test_asking_for_it_means_our_own_engine(name, tmp_path):
    made = AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, **{name: "fp8"})
    assert made.use_vllm is False


def test_the_samplers_likeliest_tokens_are_not_the_trainers(tmp_path):
    args = DPPOConfig(
        output_dir=str(tmp_path), use_cpu=True, num_generations=4, divergence_type="topk_tv", reward_workers=0,
        per_device_train_batch_size=8, **ROUNDED,
    )  # fmt: skip
    with pytest.raises(ValueError, match="and not when they round to 8 bits"):
        DPPOTrainer(tiny.causal_lm(), numbered, args, rows(), processing_class=tiny.tokenizer())
