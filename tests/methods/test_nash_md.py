"""Nash-MD: golden numbers, who writes and who wins, the loss at temperature 1, options and refusals."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import NashMDConfig, NashMDTrainer
from posttrain.core.results import TokenScores
from posttrain.methods.nash_md import KL_LEVELS
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rewards.judging import BasePairwiseJudge
from posttrain.rollout.collector import GroupTable
from posttrain.rollout.rollout import ADVANTAGES, MIXTURE, POLICY, SAMPLING_LOGPS, Request
from posttrain.rollout.store import read_rollouts
from tests import tiny
from tests.losses.policy_oracle import token_batch
from tests.rollout.scripted_engine import ScriptedEngine


def letters(completion_ids, **columns):
    return [sum(33 <= token < 97 for token in ids) / len(ids) for ids in completion_ids]


def trainer(folder, reward_funcs=letters, model=None, count=12, given=None, **options):
    defaults = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "max_new_tokens": 6, "use_cpu": True,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "reward_workers": 0, "learning_rate": 1e-3,
        "dataset_cache_dir": str(Path(folder) / "cache"), "disable_tqdm": True,
    }  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"Say {i}" for i in range(count)]})
    return NashMDTrainer(
        model or tiny.causal_lm(), reward_funcs=reward_funcs, args=NashMDConfig(**defaults | options), train_dataset=rows,
        processing_class=tiny.tokenizer(), **given or {},
    )  # fmt: skip


def logged(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


# ---- numbers ---------------------------------------------------------------------------------------------------------------


LOGPS, REFERENCE = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
PREFERENCE = 0.622459  # sigmoid(1.2 - 0.7)


@pytest.mark.parametrize(("level", "divergence"), [("token", 1.5), ("sequence", 1.75), ("to_go", 2.5)])
def test_golden_numbers(level, divergence):
    batch = token_batch([3])
    batch.per_token[ADVANTAGES] = torch.full((3,), PREFERENCE - 0.5)
    made = SimpleNamespace(
        args=SimpleNamespace(beta=[0.1], kl_level=level, mixture_coef=[0.5]), state=SimpleNamespace(epoch=None),
        mixture_weight=lambda: 0.5, is_judged=False, age_weights=lambda *given: None,
    )  # fmt: skip
    made._metrics = lambda *given: NashMDTrainer._metrics(made, *given)
    weights = KL_LEVELS[level](batch, LOGPS - REFERENCE)
    assert (weights * LOGPS).sum().item() == pytest.approx(divergence, abs=1e-6)
    output = NashMDTrainer.loss(made, batch, TokenScores(logps=LOGPS), TokenScores(logps=REFERENCE))
    assert output.metrics["loss/score"].item() == pytest.approx(-0.428608, abs=1e-5)
    assert output.local(batch).item() == pytest.approx(0.1 * divergence + 0.428608, abs=1e-5)
    if level == "token":
        assert output.local(batch).item() == pytest.approx(0.578608, abs=1e-5)


def test_the_divergence_to_go_is_that_of_each_sample_alone():
    together = KL_LEVELS["to_go"](token_batch([2, 0, 3]), torch.tensor([1.0, 2.0, 10.0, 20.0, 30.0]))
    assert together.tolist() == [3.0, 2.0, 60.0, 50.0, 30.0]


def table(groups):
    nothing = torch.zeros(len(groups))
    return GroupTable(
        nothing[:, None], torch.tensor(groups), nothing.bool(), nothing.long(), nothing.bool(), nothing.bool(), nothing,
        torch.arange(len(groups)),
    )  # fmt: skip


@pytest.mark.parametrize("is_judged", [False, True])
def test_the_advantage_is_the_preference_less_a_half(is_judged):
    made = SimpleNamespace(is_judged=is_judged, scores=lambda table, totals: totals)
    totals = torch.tensor([1.2, 0.7, 0.25, 0.75, 1.0, float("nan")], dtype=torch.float64)
    found = NashMDTrainer.credit(made, table([4, 4, 2, 2, 9, 9]), totals)
    wins = [1.2, 0.25] if is_judged else [0.622459, 1 / (1 + np.exp(0.5))]
    edges = [wins[0] - 0.5, wins[1] - 0.5]
    assert found.tolist() == pytest.approx([edges[0], -edges[0], edges[1], -edges[1], 0, 0], abs=1e-6)


# ---- a run -----------------------------------------------------------------------------------------------------------------


KEYS = {
    "loss/score", "loss/kl", "objective/entropy", "rewards/probabilities", "rewards/chosen", "rewards/rejected",
    "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "val/model_contain_eos_token",
    "val/ref_contain_eos_token", "beta", "mixture_coef",
}  # fmt: skip


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_the_policys_completion_is_trained_and_the_mixtures_is_kept(tmp_path, engine):
    made = trainer(tmp_path, rollout_engine=engine, max_steps=1)
    assert [made.author_of(Request(0, 0, sample)) for sample in (0, 1)] == [POLICY, MIXTURE]
    seen = []
    loss = made.loss
    made.loss = lambda batch, *given: seen.append(batch) or loss(batch, *given)
    made.train()
    assert [batch.num_units for batch in seen] == [4]
    entry = logged(tmp_path)[0]
    assert entry.keys() >= KEYS
    assert entry["rewards/chosen"] != entry["rewards/rejected"]
    assert (entry["loss/kl"], entry["beta"], entry["mixture_coef"]) == (
        pytest.approx(0, abs=1e-5),
        pytest.approx(0.1),
        0.5,
    )
    kept = read_rollouts(tmp_path).to_pylist()
    assert [row["author"] for row in kept] == ["policy", "mixture"] * 4
    assert len(kept) == 8  # both completions of each of the four prompts
    edges = [row["advantage"] for row in kept]
    assert all(one == pytest.approx(-other) for one, other in zip(edges[::2], edges[1::2]))


def test_log_probs_of_the_loss_are_those_at_temperature_1(tmp_path):
    """They are sampled at 0.5. At the first step the policy is its reference, and both are what the scorer says of the model."""
    made = trainer(tmp_path, max_steps=1, temperature=0.5)
    seen = []
    loss = made.loss
    made.loss = lambda batch, policy, reference: (
        seen.append((batch, policy, reference)) or loss(batch, policy, reference)
    )
    made.train()
    batch, policy, reference = seen[0]
    with torch.no_grad():  # the frozen copy is what the policy was
        wanted, at_half = (score_tokens(made.live.model, batch, temperature=t).logps for t in (1.0, 0.5))
    assert torch.allclose(policy.logps.detach(), reference.logps, atol=1e-5)
    assert torch.allclose(policy.logps.detach(), wanted, atol=1e-5)
    assert torch.allclose(batch.per_token[SAMPLING_LOGPS], at_half, atol=1e-5)
    assert (wanted - at_half).abs().max() > 0.1


def test_what_is_preferred_becomes_more_frequent_and_the_coefficient_follows_the_epochs(tmp_path):
    made = trainer(
        tmp_path, reward_weights=[5.0], max_steps=24, per_device_train_batch_size=12, learning_rate=1e-2, beta=[0.01],
        lr_scheduler_type="constant", mixture_coef=[0.5, 0.25, 0.125],
    )  # fmt: skip
    weights = []
    share = made.collector.writer.others[MIXTURE].mixture.share
    made.collector.writer.others[MIXTURE].mixture.share = lambda: weights.append(share()) or weights[-1]
    made.train()
    entries = [entry for entry in logged(tmp_path) if "rewards/probabilities" in entry]
    assert [entry["mixture_coef"] for entry in entries[:4]] == [0.5, 0.25, 0.125, 0.125]  # an epoch is one step
    assert weights == [entry["mixture_coef"] for entry in entries]
    won = [entry["rewards/probabilities"] for entry in entries]
    assert np.mean(won[-5:]) > 0.58 > np.mean(won[:3])
    rewards = [entry["reward"] for entry in entries]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.5


def coin(completion_ids, **columns):
    """Says nothing about a completion that could be learnt."""
    return [float(zlib.crc32(bytes(str(ids), "ascii")) % 2) for ids in completion_ids]


def test_a_reward_that_tosses_coins_teaches_nothing(tmp_path):
    made = trainer(
        tmp_path, coin, reward_weights=[5.0], max_steps=24, per_device_train_batch_size=12, learning_rate=1e-2, beta=[0.01],
        lr_scheduler_type="constant",
    )  # fmt: skip
    made.train()
    won = [entry["rewards/probabilities"] for entry in logged(tmp_path) if "rewards/probabilities" in entry]
    assert np.mean(won) == pytest.approx(0.5, abs=0.06)


def test_under_an_adapter_the_mixture_is_that_of_policy_and_base(tmp_path):
    """No second model is loaded, and the mixture's log-probs are neither the policy's nor the base's."""
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    made = trainer(tmp_path, max_steps=1, mixture_coef=0.3, temperature=1.0, given={"peft_config": lora})
    assert made.live.model is made.model
    model = made.model
    collected = []
    collect = made.collector.collect
    made.collector.collect = lambda *given: collected.append(collect(*given)) or collected[-1]
    states = {name: value.clone() for name, value in model.state_dict().items()}
    made.train()
    model.load_state_dict(states)
    model.eval()
    for rollout in collected[0].rollouts:
        ids = torch.from_numpy(rollout.sample.input_ids.astype(np.int64))[None]
        with torch.no_grad():
            own = model(input_ids=ids).logits[0].double()
            with model.disable_adapter():
                base = model(input_ids=ids).logits[0].double()
        weight = 0.3 if rollout.request.sample == 1 else 0.0
        at = torch.arange(rollout.prompt_length - 1, ids.shape[1] - 1)
        wanted = ((1 - weight) * own + weight * base).log_softmax(-1)[at, ids[0, at + 1]].numpy()
        found = rollout.sample.per_token[SAMPLING_LOGPS][rollout.prompt_length :]
        assert np.abs(found - wanted).max() < 1e-4


class Longer(BasePairwiseJudge):
    """Prefers the longer answer."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [int(len(two[1]) > len(two[0])) for two in completions]


def test_a_judge_gives_the_probability_itself(tmp_path):
    made = trainer(tmp_path, None, given={"judge": Longer()}, max_steps=1)
    made.train()
    entry = logged(tmp_path)[0]
    kept = read_rollouts(tmp_path).to_pylist()
    assert {abs(row["advantage"]) for row in kept} == {0.5}
    assert entry["rewards/probabilities"] == pytest.approx(np.mean([row["advantage"] + 0.5 for row in kept[::2]]))
    assert "rewards/chosen" not in entry


def test_a_prompt_with_a_failed_reward_is_left_out(tmp_path):
    def sometimes(completion_ids, prompts, **columns):
        if prompts[0].endswith(("1", "3")):
            raise RuntimeError("no opinion")
        return letters(completion_ids)

    made = trainer(tmp_path, sometimes, max_steps=1, count=4, shuffle_dataset=False)
    made.train()
    assert logged(tmp_path)[0]["rollouts/masked"] == 0.5
    assert np.isfinite(logged(tmp_path)[0]["loss"])


def test_evaluation_compares_policy_and_mixture(tmp_path):
    made = trainer(tmp_path)
    found = made.evaluate(Dataset.from_dict({"prompt": [f"Tell {i}" for i in range(3)]}))
    assert 0 < found["eval_rewards/probabilities"] < 1
    assert found["eval_loss/kl"] == pytest.approx(0, abs=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixture_coef": 1.5}, "mixture_coef"),
        ({"mixture_coef": [0.5, -0.1]}, "mixture_coef"),
        ({"kl_level": "word"}, "kl_level"),
        ({"num_generations": 4}, "One completion of the policy is compared with one of the mixture"),
        ({"use_vllm": True}, "drawn from the logits of two models at once"),
        ({"num_iterations": 2}, "no ratio that would correct"),
        ({"max_new_tokens": 600}, "leaves no token for a prompt"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        NashMDConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)


class Foreign(ScriptedEngine):
    is_foreign = True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"engine": Foreign(lambda prompt: [40])},
            "needs completions of the mixture, and vLLM has the policy's weights",
        ),
        ({"ref_model": tiny.causal_lm(vocab_size=300)}, "that of the reference 300"),
        ({"data_collator": print}, "leave `data_collator` out"),
        ({"compute_metrics": print}, "leave `compute_metrics` out"),
        ({"preprocess_logits_for_metrics": print}, "keeps no logits"),
        ({"judge": Longer()}, "give one of them"),
    ],
)
def test_what_cannot_be_is_refused_before_training(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, given=given)


def test_a_judge_takes_no_penalty(tmp_path):
    with pytest.raises(ValueError, match="`missing_eos_penalty` and `reward_weights` change rewards"):
        trainer(tmp_path, None, given={"judge": Longer()}, missing_eos_penalty=1.0)


def test_arguments_are_in_trls_order(tmp_path):
    import inspect

    names = list(inspect.signature(NashMDTrainer.__init__).parameters)[1:14]
    assert names == [
        "model", "ref_model", "reward_funcs", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class",
        "peft_config", "compute_metrics", "callbacks", "optimizers", "preprocess_logits_for_metrics",
    ]  # fmt: skip
