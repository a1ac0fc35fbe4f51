"""What the log, the table and the files say of rollouts: each sample counts once, and what was not written counts nowhere."""

from __future__ import annotations

import sys
import types

import pytest
from peft import LoraConfig

from posttrain import GRPOConfig, RLOOConfig
from posttrain.rollout import eval_loader
from posttrain.rollout.episodes.writing import FROM_DRAFTS
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.online.rollout_log import clipped
from tests import tiny
from tests.rollout.scripted_engine import ScriptedEngine
from tests.trainer import test_agents
from tests.trainer.test_online import logged, rows, trainer


def written(*lengths, stops=True, logprobs=None):
    """A rollout_func whose completions have these lengths, one after the other."""

    def write(prompts, trainer):
        end = [256] if stops else []
        ids = [[40 + i % 8] * lengths[i % len(lengths)] + end for i, _ in enumerate(prompts)]
        return {"prompt_ids": [[65, 66]] * len(prompts), "completion_ids": ids, "logprobs": logprobs}

    return write


def in_turn(*turns):
    """A reward that says each of these once, and the last for ever: one entry a call, a call a group."""
    calls = iter(turns)
    state = {"last": None}

    def reward(completions, **kwargs):
        state["last"] = next(calls, state["last"])
        return state["last"]

    return reward


# ---- means ----------------------------------------------------------------------------------------------------------------


def test_an_evaluation_weighs_all_prompts_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_loader, "PROMPTS_AT_ONCE", 4)

    def last_one(completions, answer, **kwargs):
        return [float(number == 4) for number in answer]

    made = trainer(tmp_path, rewards=last_one, eval_dataset=rows(5), num_generations_eval=2)
    found = made.evaluate()
    assert found["eval_reward"] == pytest.approx(0.2)  # 4 prompts and then 1: not the mean of 0 and 1
    assert found["eval_reward_std"] == pytest.approx((0.2 * 0.8 * 10 / 9) ** 0.5)
    assert found["eval_frac_reward_zero_std"] == 1


def test_a_refill_weighs_as_many_samples_as_it_has(tmp_path):
    flat, other = [0.0] * 4, [9.0, 10.0, 10.0, 11.0]
    reward = in_turn(flat, other, other, other, other)
    trainer(tmp_path, rewards=reward, max_steps=1, drop_zero_variance=True, per_device_train_batch_size=16).train()
    assert logged(tmp_path)[0]["reward"] == pytest.approx((0 + 4 * 10) / 5)  # 16 samples, and 4 for the flat ones


def test_what_could_not_be_written_has_no_length(tmp_path):
    data = rows(2).map(lambda row: {"prompt": "x" * (600 if row["answer"] else 3)})
    made = trainer(tmp_path, data=data, max_steps=1, shuffle_dataset=False)
    made.train()
    (entry, *_) = logged(tmp_path)
    assert entry["rollouts/masked"] == 0.5
    assert entry["completions/min_length"] == entry["completions/mean_length"] == 6
    assert entry["completions/clipped_ratio"] == 1


def test_lengths_of_those_that_ended_are_not_those_of_a_generation_without_any(tmp_path):
    turns = iter([written(4, stops=False), written(4)])
    options = {"max_steps": 2, "logging_steps": 2, "logging_first_step": False}  # one entry of both generations
    made = trainer(tmp_path, rollout_func=lambda prompts, trainer: next(turns)(prompts, trainer), **options)
    made.train()
    (entry, *_) = logged(tmp_path)
    lengths = [entry[f"completions/{which}_terminated_length"] for which in ("min", "mean", "max")]
    assert lengths == [5, 5, 5]
    assert entry["completions/clipped_ratio"] == 0.5


def test_failures_of_tools_are_counted_by_calls(tmp_path):
    calls, episodes = [], []

    def flaky(number: int) -> int:
        """Fails at first.

        Args:
            number: any
        """
        calls.append(number)
        if len(calls) == 1:
            raise ValueError("not yet")
        return number

    def speak(prompt):
        if test_agents.TOKENIZER.decode(prompt.ids).count("<|im_start|>assistant") == 1:
            episodes.append(prompt)
            if len(episodes) == 1 or len(episodes) > 8:  # one of the first generation, all of the second
                return test_agents.said(test_agents.call("flaky", number=1))
        return test_agents.said(f"done {prompt.sample}")

    options = {"engine": ScriptedEngine(speak), "tools": [flaky], "max_steps": 2, "logging_steps": 2}
    options["logging_first_step"] = False  # one entry of both generations
    test_agents.trainer(tmp_path, data=test_agents.chats(), **options).train()
    (entry, *_) = logged(tmp_path)
    assert entry["tools/failure_frequency"] == pytest.approx(1 / 9)
    assert entry["tools/call_frequency"] == pytest.approx(9 / 16)


def test_groups_of_several_rounds_are_scaled_together(tmp_path):
    flat, narrow, wide = [0.0] * 4, [9.0, 10.0, 10.0, 11.0], [-100.0, 0.0, 0.0, 100.0]
    reward = in_turn(flat, narrow, narrow, narrow, wide)
    options = {"drop_zero_variance": True, "per_device_train_batch_size": 16, "scale_rewards": "batch"}
    trainer(tmp_path, rewards=reward, max_steps=1, **options).train()
    kept = read_rollouts(tmp_path)
    found = {r: a for r, a in zip(kept["reward"].to_pylist(), kept["advantage"].to_pylist()) if a}
    assert found[100.0] == pytest.approx(100 * found[11.0])  # one deviation for all that is trained on
    assert found[100.0] > 2


# ---- what is said of single rollouts --------------------------------------------------------------------------------------


def noted(completions, log_extra=None, **kwargs):
    log_extra("note", [f"seen {i}" if i % 2 else None for i in range(len(completions))])
    log_extra("parts", [{"n": i} for i in range(len(completions))])
    return [float(i) for i in range(len(completions))]


def test_columns_of_rewards_are_kept_and_shown(tmp_path, capsys):
    trainer(tmp_path, rewards=noted, max_steps=1, log_completions=True).train()
    extras = [dict(row) for row in read_rollouts(tmp_path)["extras"].to_pylist()]
    assert extras[:2] == [{"parts": '{"n": 0}'}, {"note": "seen 1", "parts": '{"n": 1}'}]
    assert "note seen 1" in capsys.readouterr().out


def test_completions_that_are_shown_have_their_tool_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    as_text = {"name": "look", "arguments": '{"at": "this"}'}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call, as_text]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three."},
    ]
    assert clipped(said).splitlines() == [
        'assistant: add({"a": 1, "b": 2}) look({"at": "this"})',
        "tool: 3",
        "assistant: Three.",
    ]


def test_wandb_is_given_one_row_a_prompt_where_that_is_asked(tmp_path, monkeypatch):
    tables = []
    stand_in = types.ModuleType("wandb")
    stand_in.run, stand_in.Table = types.SimpleNamespace(url=""), lambda columns, data: (columns, data)
    stand_in.log = lambda logs: tables.append(logs["completions"])
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    made = trainer(tmp_path, rewards=noted, max_steps=1, log_completions=True, log_unique_prompts=True)
    made.args.report_to = ["wandb"]
    made.train()
    ((columns, data),) = tables
    assert columns == ["step", "prompt", "completion", "noted", "advantage", "parts"]  # no note of the first ones
    assert len(data) == 2


def test_the_table_shows_all_rounds_of_a_refill(tmp_path, capsys):
    flat, other = [0.0] * 4, [9.0, 10.0, 10.0, 11.0]
    options = {"drop_zero_variance": True, "per_device_train_batch_size": 16, "log_completions": True}
    trainer(tmp_path, rewards=in_turn(flat, other), max_steps=1, **options).train()
    assert sum(line.startswith("  > ") for line in capsys.readouterr().out.splitlines()) == 20


# ---- refused, or heard --------------------------------------------------------------------------------------------------


def test_a_run_that_writes_nothing_is_stopped(tmp_path):
    data = rows(4).map(lambda row: {"prompt": "x" * 600})
    with pytest.raises(
        RuntimeError, match=r"Not one of the 8 completions of a generation could be written. The first: .*600"
    ):
        trainer(tmp_path, data=data, max_steps=2).train()


def test_a_moving_reference_needs_a_model_of_its_own(tmp_path):
    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="`sync_ref_model` moves a reference that is a model of its own"):
        trainer(tmp_path, peft_config=adapter, beta=0.1, sync_ref_model=True)


def test_slots_are_rows_at_a_time_for_the_plain_engine(tmp_path):
    assert trainer(tmp_path, max_rollout_slots=3).engine.batch_size == 3


def test_drafts_reach_the_native_engine(tmp_path):
    made = trainer(tmp_path, rollout_engine="native", rollout_drafts=4)
    assert (made.engine.drafts, made.engine.max_slots) == (4, 64)


@pytest.mark.parametrize("drafts", [0, 4])
def test_what_drafts_brought_is_logged(tmp_path, drafts):
    """Completions of one letter over and over: every token but the first ones can be looked up."""
    made = trainer(
        tmp_path,
        max_steps=1,
        rollout_engine="native",
        rollout_drafts=drafts,
        max_rollout_slots=1,
        max_completion_length=40,
        generation_kwargs={"logit_bias": {65: 100.0}},
    )
    made.train()
    found = [line[FROM_DRAFTS] for line in made.state.log_history if FROM_DRAFTS in line]
    completions = len(read_rollouts(tmp_path)["completion_ids"])
    assert found == ([pytest.approx(made.engine.accepted / completions)] if drafts else [])
    assert all(20 < mean < 40 for mean in found)  # of 40 tokens; drafts begin after the first look


def test_one_tokenizer_is_a_list_of_one(tmp_path):
    assert trainer(tmp_path, reward_processing_classes=tiny.tokenizer()).rewards.names == ["share_of_letters"]


def test_generation_options_as_json(tmp_path):
    made = trainer(tmp_path, max_steps=1, generation_kwargs='{"logit_bias": {"65": 100.0}, "stop_token_ids": 66}')
    made.train()
    assert {token for ids in read_rollouts(tmp_path)["completion_ids"].to_pylist() for token in ids} == {65}


@pytest.mark.parametrize("given", [{"seed": None}, {"logit_bias": [65]}, {"logit_bias": {"a": 1}}])
def test_generation_options_that_mean_nothing(tmp_path, given):
    with pytest.raises(ValueError, match=f"Sampling: `{next(iter(given))}` is"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, generation_kwargs=given)


def test_rloo_refuses_a_negative_range(tmp_path):
    with pytest.raises(ValueError, match="A clip range has no negative width"):
        RLOOConfig(output_dir=str(tmp_path), use_cpu=True, epsilon_high=-0.5)


def test_the_limit_of_tokens_holds_with_tools(tmp_path):
    options = {"max_completion_length": 40, "generation_kwargs": {"max_new_tokens": 3}}
    made = test_agents.trainer(
        tmp_path, data=test_agents.chats(), tools=test_agents.TOOLS, max_steps=1, engine=None, **options
    )
    made.train()
    assert max(map(len, read_rollouts(tmp_path)["completion_ids"].to_pylist())) == 3


def test_drifted_completions_are_masked_where_the_sampler_said_nothing(tmp_path):
    """Against the trainer's own log-probs at the time of generation."""

    def losses(name, threshold):
        folder = tmp_path / name
        options = {"num_iterations": 3, "max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
        reward = in_turn([0.0, 1.0, 2.0, 3.0])
        made = trainer(
            folder, rewards=reward, rollout_func=written(1, 3, 7, 2), off_policy_mask_threshold=threshold, **options
        )
        made.train()
        return [entry["loss"] for entry in logged(folder) if "loss" in entry]

    free, bound = losses("free", None), losses("bound", 0.0)
    assert free[0] == bound[0]  # nothing has drifted yet
    assert abs(free[1] - bound[1]) > 1e-3


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "grpo"])
def test_passes_do_not_change_the_step(tmp_path, loss_type):
    def step(limit):
        folder = tmp_path / str(limit)
        options = {"max_tokens_per_pass": limit, "max_completion_length": 40, "max_grad_norm": 0.0, "optim": "sgd"}
        reward = in_turn([0.0, 1.0, 4.0, 9.0])
        made = trainer(
            folder, rewards=reward, rollout_func=written(1, 3, 7, 20), max_steps=1, loss_type=loss_type, **options
        )
        made.train()
        (entry, *_) = logged(folder)
        return [entry[name] for name in ("loss", "grad_norm", "policy_loss")]

    assert step(30) == pytest.approx(step(None), rel=1e-5, abs=1e-6)
