"""GFPO and DPPO end to end on a tiny model: who is compared with whom, what is masked, and what is refused."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import (
    DPPOConfig,
    DPPOTrainer,
    GFPOConfig,
    GFPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from posttrain.losses.advantages import group_normalised
from posttrain.losses.policy import TRUST_DIVERGENCES
from posttrain.rollout.collector import Collected, GroupTable
from posttrain.rollout.group_filter import GroupFilter
from posttrain.rollout.rollout import ADVANTAGES
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.policy_group_trainer import LIKELIEST
from tests import tiny
from tests.forked import start_group, wait_for_group
from tests.rollout.scripted_engine import ScriptedEngine
from tests.trainer.test_online import Peek, logged, numbered, rows, trainer

NAN = float("nan")


def shortest(group_completions, group_rewards):
    return [[-len(text.encode()) for text in group] for group in group_completions]


def gfpo(folder, group_filter_func=shortest, **options):
    args = GFPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4, max_completion_length=6,
        report_to="none", logging_steps=1, use_cpu=True, save_strategy="no", dataset_cache_dir=str(folder / "cache"),
        reward_workers=0, rollout_engine="transformers", disable_tqdm=True,
        **{"num_remains_in_group": 2, "max_steps": 1, **options},
    )  # fmt: skip
    return GFPOTrainer(tiny.causal_lm(), numbered, args, rows(), rows(4), tiny.tokenizer(), None, group_filter_func)


# ---- learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["binary_tv", "topk_kl"])
def test_what_is_rewarded_becomes_more_frequent_under_dppo(tmp_path, kind):
    """As under GRPO (test_online.py), and few tokens are masked."""
    made = trainer(
        tmp_path, cls=DPPOTrainer, config=DPPOConfig, max_steps=25, per_device_train_batch_size=32, num_generations=8,
        learning_rate=2e-2, lr_scheduler_type="constant", divergence_type=kind, num_iterations=2,
    )  # fmt: skip
    made.train()
    found = [entry for entry in logged(tmp_path) if "reward" in entry]
    rewards = [entry["reward"] for entry in found]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert np.mean([entry["mask_ratio/overall_mean"] for entry in found]) < 0.2


def extremes(group_completions, group_rewards):
    return [[abs(reward - np.mean(group)) for reward in group] for group in group_rewards]


def test_what_is_rewarded_becomes_more_frequent_under_gfpo(tmp_path):
    """On half of the completions, those that tell most."""
    made = trainer(
        tmp_path, max_steps=25, per_device_train_batch_size=32, num_generations=8, learning_rate=2e-2,
        lr_scheduler_type="constant", num_remains_in_group=4, group_filter_func=extremes,
    )  # fmt: skip
    made.train()
    found = [entry["reward"] for entry in logged(tmp_path) if "reward" in entry]
    assert np.mean(found[-5:]) > np.mean(found[:5]) + 0.2


def writer_of_letters(folder):
    """A tiny model that writes 2 to 10 letters after any prompt."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdef") for _ in range(rng.randint(2, 10))) for _ in range(160)]
    data = Dataset.from_list([{"prompt": f"Say {'mnop'[i % 4]}", "completion": text} for i, text in enumerate(texts)])
    args = SFTConfig(
        output_dir=str(folder), max_steps=80, learning_rate=1e-2, lr_scheduler_type="constant", per_device_train_batch_size=32,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    made = SFTTrainer(tiny.causal_lm(), args, train_dataset=data, processing_class=tiny.tokenizer())
    made.train()
    return made.model


def three_of_a(completions, **columns):
    return [float(text.count("a") >= 3) for text in completions]


def letters(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.mark.trust
def test_gfpo_is_shorter_than_grpo_at_equal_reward(tmp_path):
    """What is paid for is likelier in longer answers, so that GRPO's become as long as can be. GFPO compares the shortest half."""
    writer, ends = writer_of_letters(tmp_path / "sft"), {}
    asked = Dataset.from_list([{"prompt": f"Say {letter}"} for letter in "mnop"])
    options = {
        "per_device_train_batch_size": 64, "num_generations": 16, "max_completion_length": 12, "max_steps": 60,
        "learning_rate": 2e-3, "lr_scheduler_type": "constant", "reward_weights": [1.0, 0.0], "reward_workers": 0, "beta": 0.0,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    for kind, own in (("grpo", {}), ("gfpo", {"num_remains_in_group": 8})):
        config = (GFPOConfig if own else GRPOConfig)(output_dir=str(tmp_path / kind), **options, **own)
        given = (copy.deepcopy(writer), [three_of_a, letters], config, asked, None, tiny.tokenizer())
        made = GFPOTrainer(*given, None, shortest) if own else GRPOTrainer(*given)
        made.train()
        found = [entry for entry in logged(tmp_path / kind) if "reward" in entry][-10:]
        ends[kind] = [np.mean([entry[f"rewards/{name}/mean"] for entry in found]) for name in ("three_of_a", "letters")]
    assert min(ends["grpo"][0], ends["gfpo"][0]) > 0.95
    assert ends["gfpo"][1] < 0.7 * ends["grpo"][1]


# ---- GFPO ----------------------------------------------------------------------------------------------------------------


def test_advantages_are_those_among_the_completions_that_remain(tmp_path):
    """The function is given whole groups; two of four remain, the others are no part of the window."""
    asked = []

    def by_reward(group_completions, group_rewards):
        asked.append((group_completions, group_rewards))
        return [[-reward for reward in group] for group in group_rewards]  # the two worst remain

    made = gfpo(tmp_path, by_reward)
    peek = Peek(made)
    made.train()
    ((completions, rewards),) = asked
    assert [len(group) for group in completions] == [len(group) for group in rewards] == [4, 4]
    assert numbered(completions[0], None) == rewards[0]
    (window,) = peek.windows
    for group, scores in enumerate(rewards):
        order = sorted(range(4), key=lambda i: scores[i])[:2]
        members = window[4 * group : 4 * group + 4]
        assert [member is not None for member in members] == [i in order for i in range(4)]
        kept = [scores[i] for i in range(4) if i in order]
        expected = group_normalised(torch.tensor(kept).double(), torch.zeros(2)).tolist()
        found = [member.per_token[ADVANTAGES][-1] for member in members if member is not None]
        assert found == pytest.approx(expected, rel=1e-5)
    (entry, _) = logged(tmp_path)
    assert entry["rollouts/filtered"] == 0.5
    assert entry["rollouts/masked"] == 0
    assert entry["reward"] == pytest.approx(sum(map(sum, rewards)) / 8)  # of all that was written
    kept = read_rollouts(str(tmp_path)).to_pydict()
    assert sum(kept["masked"]) == 4
    assert sorted(kept["reward"]) == pytest.approx(sorted(r for group in rewards for r in group))


def test_a_group_whose_remaining_rewards_are_equal_teaches_exactly_nothing(tmp_path):
    """Whatever the others of it had: the best remain, and they all have the best reward there is."""
    made = gfpo(tmp_path, lambda completions, rewards: rewards)
    table = GroupTable(
        torch.tensor([[1.0], [0.0], [1.0], [0.3]]).double(), torch.zeros(4, dtype=torch.long), torch.zeros(4).bool(),
        torch.ones(4), torch.zeros(4).bool(), torch.zeros(4).bool(), torch.zeros(4), torch.arange(4),
        torch.tensor([False, True, False, True]),
    )  # fmt: skip
    compared = table.compared()
    totals = table.rewards[:, 0].masked_fill(compared.masked, NAN)
    assert made.credit(compared, totals).tolist() == [0, 0, 0, 0]
    assert made.credit(table, table.rewards[:, 0]).tolist() != [0, 0, 0, 0]


def test_evaluation_is_not_filtered(tmp_path):
    calls = []
    made = gfpo(tmp_path, lambda completions, rewards: calls.append(1) or rewards)
    assert made.evaluate()["eval_reward"] > 0
    assert not calls


@pytest.mark.parametrize("option", [{"drop_zero_variance": True}, {"replay_buffer_size": 4}], ids=str)
def test_refills_and_replays_are_filtered_as_well(tmp_path, option):
    made = gfpo(tmp_path, max_steps=3, **option)
    peek = Peek(made)
    made.train()
    for window in peek.windows:
        assert [sum(member is not None for member in window[start : start + 4]) for start in (0, 4)] == [2, 2]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            lambda completions, rewards: [[0.0] * 3, [0.0] * 4],
            r"returned groups of \[3, 4\] scores for groups of \[4, 4\]",
        ),
        (lambda completions, rewards: [[0.0] * 4], r"returned groups of \[4\] scores"),
        (lambda completions, rewards: [[NAN] * 4] * 2, "returned NaN for a completion"),
    ],
)
def test_what_a_filter_returns_is_checked(tmp_path, answer, sentence):
    with pytest.raises(ValueError, match=sentence):
        gfpo(tmp_path, answer).train()


def test_a_filter_and_a_number_need_each_other(tmp_path):
    for function, options in ((shortest, {"num_remains_in_group": None}), (None, {})):
        with pytest.raises(ValueError, match="need each other: give both, or neither"):
            gfpo(tmp_path, function, **options)
    for wrong in (1, 4):
        with pytest.raises(ValueError, match="at least 2 and not all must remain"):
            GRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, num_remains_in_group=wrong)


class Said:
    def __init__(self, completion):
        self.completion = completion


def collected(texts, rank):
    """Two groups of three, of which each process has the samples 0 to 2 and 3 to 5: the second group lies on both."""
    groups, masked = torch.tensor([0, 1, 1, 0, 0, 1]), torch.tensor([False] * 5 + [True])
    nothing = torch.zeros(6)
    table = GroupTable(nothing[:, None], groups, masked, nothing, masked, masked, nothing, torch.arange(3) + 3 * rank)
    totals = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, NAN])
    return Collected([Said(text) for text in texts[3 * rank : 3 * rank + 3]], table, totals, totals, None)


def on_two_processes(rank, folder):
    torch.distributed.init_process_group("gloo")
    texts = ["aaa", "b", "cc", "dd", "e", "f"]
    calls = []

    def lengths(group_completions, group_rewards):
        calls.append((group_completions, group_rewards))
        return [[len(text) for text in group] for group in group_completions]

    kept = GroupFilter(lengths, 2).kept(collected(texts, rank), 2).tolist()
    try:
        GroupFilter(lambda *_: 1 / 0, 2).kept(collected(texts, rank), 2)
    except (ZeroDivisionError, RuntimeError) as error:
        (folder / f"{rank}.json").write_text(json.dumps([kept, calls, str(error)]))
    torch.distributed.destroy_process_group()


def test_a_group_that_lies_on_two_processes_is_filtered_as_one(tmp_path):
    """One process asks the function, both know the answer, or why there is none."""
    group = start_group(2, lambda rank: on_two_processes(rank, tmp_path), tmp_path / "rank")
    assert wait_for_group(group, 300) == [0, 0], "\n".join(child.output() for child in group)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first[0] == second[0] == [True, True, True, True, False, False]
    assert first[1] == [[[["aaa", "dd", "e"], ["b", "cc"]], [[0, 3, 4], [1, 2]]]]
    assert second[1] == []
    assert first[2] == "division by zero"
    assert second[2] == "The group filter failed on the first process: ZeroDivisionError: division by zero"


# ---- DPPO ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRUST_DIVERGENCES)
def test_dppo_masks_what_has_left_the_sampler_s_neighbourhood(tmp_path, kind):
    """In the first of two passes over a generation policy and sampler are one; in the second, after a large step, they are not."""
    made = trainer(
        tmp_path, numbered, cls=DPPOTrainer, config=DPPOConfig, divergence_type=kind, epsilon=1e-4, num_iterations=2,
        max_steps=2, learning_rate=5e-2, lr_scheduler_type="constant",
        **({"divergence_topk": 5} if kind.startswith("topk") else {}),
    )  # fmt: skip
    peek = Peek(made)
    made.train()
    first, second = (entry for entry in logged(tmp_path) if "mask_ratio/overall_mean" in entry)
    assert first["mask_ratio/overall_mean"] == 0
    assert abs(first["prob_diff/max"]) < 1e-5
    assert 0.05 < second["mask_ratio/overall_mean"] < 1
    assert second["prob_diff/min"] < -1e-3 < 1e-3 < second["prob_diff/max"]
    assert {
        "mask_ratio/positive_adv_mean",
        "mask_ratio/negative_adv_mean",
        "advantages/mean",
        "entropy",
    } <= first.keys()
    # Eight of two groups, each of deviation 1 (or 0).
    assert first["advantages/std"] == pytest.approx((6 / 7) ** 0.5, abs=0.2)
    assert all((LIKELIEST in sample.per_token) == kind.startswith("topk") for sample in peek.windows[0])


def test_the_likeliest_tokens_are_those_of_a_plain_forward(tmp_path):
    model = tiny.causal_lm()
    made = trainer(
        tmp_path, numbered, model=model, cls=DPPOTrainer, config=DPPOConfig, divergence_type="topk_kl", divergence_topk=3,
        temperature=0.7, max_steps=1, learning_rate=0.0,
    )  # fmt: skip
    peek = Peek(made)
    made.train()
    sample = peek.windows[0][0]
    with torch.no_grad():
        logits = model(torch.tensor(sample.input_ids.astype("int64"))[None]).logits[0] / 0.7
    expected = logits.log_softmax(-1).topk(3)
    places = sample.trained[1:].nonzero()[0]
    column = torch.from_numpy(sample.per_token[LIKELIEST])[1:][places]
    assert column[:, :3].long().tolist() == expected.indices[places].tolist()
    torch.testing.assert_close(column[:, 3:], expected.values[places], rtol=1e-4, atol=1e-5)


def test_only_an_engine_of_ours_makes_the_likeliest_tokens_known(tmp_path):
    engine = ScriptedEngine(lambda prompt: [65, 66])
    engine.is_foreign = True
    args = DPPOConfig(
        output_dir=str(tmp_path), use_cpu=True, num_generations=4, divergence_type="topk_tv", reward_workers=0,
        vllm_importance_sampling_correction=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="only our own engines, which draw from this model's weights, make them known"):
        DPPOTrainer(tiny.causal_lm(), numbered, args, rows(), processing_class=tiny.tokenizer(), engine=engine)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"divergence_topk": 5}, "only `divergence_type` topk_tv and topk_kl of dppo read it"),
        ({"vllm_importance_sampling_correction": True}, "leave `vllm_importance_sampling_correction` out"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "leave `vllm_importance_sampling_mode` out"),
        ({"divergence_type": "js"}, "divergence_type 'js' is unknown"),
        ({"delta": 2.0}, "the loss 'dppo' does not read it"),
        ({"loss_type": "dapo", "clip_ratio_c": 3.0}, "the loss 'dapo' does not read it"),
    ],
)
def test_options_of_dppo_that_would_do_nothing_are_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{"loss_type": "dppo", **options})


def test_a_relative_is_grpo_with_its_options(tmp_path):
    """DPPO by name and by option: the same weights."""
    runs = [
        trainer(tmp_path / "name", numbered, cls=DPPOTrainer, config=DPPOConfig, max_steps=2),
        trainer(tmp_path / "option", numbered, cls=GRPOTrainer, config=GRPOConfig, loss_type="dppo", max_steps=2),
    ]
    for made in runs:
        made.train()
    for (name, one), other in zip(runs[0].model.named_parameters(), runs[1].model.parameters()):
        assert torch.equal(one, other), name
