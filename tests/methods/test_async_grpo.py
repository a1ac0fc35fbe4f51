"""AsyncGRPO: TRL's names, defaults and numbers, with and without somebody else's worker."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from benchmarks.parity import async_grpo
from posttrain import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    PPOConfig,
    PPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from posttrain.core.options import default_of
from posttrain.rollout.rollout import ADVANTAGES
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.options import trl_async
from tests import tiny
from tests.forked import start_group, wait_for_group
from tests.methods import model_server
from tests.methods.scripted_worker import RecordingTransfer, ScriptedWorker, scripted
from tests.trainer import fsdp_on_cpu
from tests.trainer.test_online import Peek, logged, numbered, rows
from tests.trainer.test_online import trainer as online_trainer

DEFAULTS = {
    "model_init_kwargs": None, "dtype": "float32", "trust_remote_code": False, "router_aux_loss_coef": None,
    "learning_rate": 1e-6, "logging_steps": 1, "lr_scheduler_type": "constant", "ignore_data_skip": True,
    "num_generations": 8, "max_completion_length": 2048, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0, "chat_template_kwargs": None, "max_tool_calling_iterations": None,
    "fork_threshold_tokens": 1024, "vllm_server_base_url": "http://localhost:8000", "vllm_server_timeout": 240.0,
    "request_timeout": 600, "weight_sync_timeout": 1800, "epsilon": 0.2, "epsilon_high": None, "token_budget": None,
    "max_inflight_tasks": -1, "max_staleness": 4, "queue_maxsize": 1024, "weight_sync_steps": 1,
    "heartbeat_stale_after_s": 300.0, "log_completions": False, "num_completions_to_print": None,
}  # fmt: skip
"""The 32 fields of TRL 1.16's AsyncGRPOConfig."""
ORDER = (
    "model", "reward_funcs", "args", "train_dataset", "processing_class", "callbacks", "optimizers", "peft_config", "tools",
    "environment_factory", "rollout_worker", "weight_transfer",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    """Whatever listens on this machine."""
    monkeypatch.setattr(trl_async, "_answers", lambda address: False)


def config(folder, **options):
    own = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 8}
    return AsyncGRPOConfig(**{**own, "num_generations": 4, "max_completion_length": 6, **options})


def played(folder, worker=None, transfer=None, callbacks=None, more=None, **options):
    """A run on what a scripted worker puts into its buffer."""
    options = {"max_steps": 3, "learning_rate": 0.05, "save_strategy": "no", "disable_tqdm": True, **options}
    worker, transfer = worker or ScriptedWorker(), transfer or RecordingTransfer()
    made = AsyncGRPOTrainer(
        tiny.causal_lm(), None, config(folder, **options), rows(), tiny.tokenizer(), callbacks=callbacks,
        rollout_worker=worker, weight_transfer=transfer, **(more or {}),
    )  # fmt: skip
    made.train()
    made.close()
    return made, worker, transfer


# ---- names and defaults --------------------------------------------------------------------------------------------------


def test_fields_and_defaults_are_trl_s():
    fields = {field.name: field for field in dataclasses.fields(AsyncGRPOConfig)}
    assert {name: default_of(fields[name]) for name in DEFAULTS} == DEFAULTS
    assert {field.name for field in dataclasses.fields(GRPOConfig)} <= fields.keys()


def test_arguments_are_in_trl_s_order():
    named = list(inspect.signature(AsyncGRPOTrainer.__init__).parameters)[1:]
    assert tuple(named[: len(ORDER)]) == ORDER


def test_options_of_trl_s_have_their_effect(tmp_path, caplog):
    made = config(tmp_path, token_budget=64, dtype="bfloat16", ignore_data_skip=True, fork_threshold_tokens=5)
    assert (made.max_tokens_per_pass, made.model_init_kwargs) == (64, {"dtype": "bfloat16"})
    assert "`fork_threshold_tokens`=5 decides nothing" in caplog.text
    assert config(tmp_path, token_budget=0).max_tokens_per_pass is None
    served = config(tmp_path, request_timeout=7, weight_sync_timeout=9)
    assert (served.use_vllm, served.vllm_mode) == (True, "server")
    assert (served.vllm_completion_timeout, served.vllm_commit_timeout) == (7.0, 9.0)
    assert config(tmp_path, vllm_server_base_url="http://there:1").vllm_addresses() == ["http://there:1"]
    assert config(tmp_path, rollout_workers=1).use_vllm is False
    assert (config(tmp_path).use_vllm, config(tmp_path).model_init_kwargs) == (None, None)


REFUSED = {
    "`request_timeout` is set, but `use_vllm` is False": {"request_timeout": 7, "use_vllm": False},
    "`token_budget` is TRL's name of `max_tokens_per_pass`": {"token_budget": 7, "max_tokens_per_pass": 8},
    "`request_timeout` is TRL's name": {"request_timeout": 7, "vllm_completion_timeout": 8},
    "`async_rollouts` is False, which has no effect": {"async_rollouts": False},
    "`dtype` is 'int8'": {"dtype": "int8"},
    "would correct for it twice": {"vllm_importance_sampling_clip_max": 3.5},
    "dppo measures from the sampler": {"loss_type": "dppo", "epsilon": None},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused(tmp_path, said):
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **REFUSED[said])


@pytest.mark.parametrize("answers", [True, False])
def test_the_server_of_the_default_address_is_used_where_one_answers(tmp_path, monkeypatch, answers):
    monkeypatch.setattr(trl_async, "_answers", lambda address: answers)
    args = config(tmp_path)
    said = args.look_for_servers()
    assert args.use_vllm is answers
    wanted = "a server answers" if answers else "no server answers, and none was asked for,"
    assert said == f"{wanted} at http://localhost:8000"
    args.use_vllm = True
    assert args.look_for_servers() == ""  # somebody has decided


# ---- a script of TRL's without any server --------------------------------------------------------------------------------


def test_a_script_in_trl_s_style_runs_without_any_server(tmp_path, capsys):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i}?"}]} for i in range(6)])

    def unique_letters(completions, **kwargs):
        return [float(len(set(completion[0]["content"]))) for completion in completions]

    trainer = AsyncGRPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=unique_letters,
        args=config(tmp_path / "run", max_steps=3, max_completion_length=5),
        train_dataset=dataset,
    )
    trainer.train()
    trainer.close()
    assert trainer.state.global_step == 3
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "NativeEngine; rewards: unique_letters; no server answers, and none was asked for, at http://localhost" in told
    )


@pytest.mark.slow
def test_a_server_that_is_named_writes_and_gets_new_weights(tmp_path):
    """Our server around the tiny model; with vLLM behind it: tests/methods/test_vllm_training.py."""
    pytest.importorskip("uvicorn")
    tiny.causal_lm(vocab_size=320).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    server, options = model_server.started(tmp_path / "model", tmp_path)
    served = {
        "vllm_server_base_url": options["teacher_model_server_url"],
        "vllm_server_token_file": options["teacher_server_token_file"],
    }
    try:
        args = config(tmp_path / "run", max_steps=4, learning_rate=0.05, **served)
        made = AsyncGRPOTrainer(str(tmp_path / "model"), numbered, args, rows())
        made.train()
        made.close()
    finally:
        server.end()
    assert args.use_vllm
    lines = [line for line in logged(tmp_path / "run") if "loss" in line]
    assert len(lines) == 4
    assert max(line["async/token_age/max"] for line in lines) <= 4
    assert any(row["policy_version"] > 0 for row in read_rollouts(tmp_path / "run").to_pylist())


def test_advantages_have_the_population_s_deviation(tmp_path):
    made = online_trainer(tmp_path, numbered, cls=AsyncGRPOTrainer, config=AsyncGRPOConfig, rollout_engine="native")
    peek = Peek(made)
    made.train()
    made.close()
    decode = made.collector.writer.decode
    for window in peek.windows:
        for start in range(0, len(window), 4):
            group = window[start : start + 4]
            rewards = np.array(numbered([decode(one.input_ids[one.trained]) for one in group], None))
            wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            found = [one.per_token[ADVANTAGES][-1] for one in group]
            np.testing.assert_allclose(found, wanted, atol=1e-6)
    for line in [line for line in logged(tmp_path) if "async/lead" in line]:  # TRL counts samples
        assert (line["rollout/inflight"], line["sample/rollout_queue_size"]) == (
            4 * line["async/in_flight"],
            4 * line["async/waiting"],
        )
        assert line["sample/staleness_max"] == line["async/group_age/max"]


# ---- another's worker ----------------------------------------------------------------------------------------------------


class KeepWeights(TrainerCallback):
    """Those that each step begins with."""

    def __init__(self):
        self.kept = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.kept.append({name: tensor.detach().double().clone() for name, tensor in model.state_dict().items()})


def clipped_loss(model, samples, low=0.2, high=0.2):
    """TRL's, in float64: -min(rho A, clip(rho) A), rho to the sampler, over all trained tokens."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for one in samples:
        logits = model(input_ids=torch.tensor(one.input_ids)[None]).logits[0, :-1]
        logps = logits.log_softmax(-1).gather(-1, torch.tensor(one.input_ids)[1:, None])[:, 0]
        rho = (logps - torch.tensor(one.old_log_probs).double()[1:]).exp()
        values = -torch.minimum(rho * one.advantage, rho.clamp(1 - low, 1 + high) * one.advantage)
        trained = torch.tensor(one.completion_mask).bool()[1:]
        total, tokens = total + values[trained].sum(), tokens + int(trained.sum())
    return total / tokens


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.1, "epsilon_high": 0.4}], ids=["0.2", "two bounds"])
def test_losses_of_scripted_rollouts_are_trl_s(tmp_path, options):
    keep = KeepWeights()
    _, worker, _ = played(tmp_path, callbacks=[keep], **options)
    found = [line["loss"] for line in logged(tmp_path) if "loss" in line]
    model = tiny.causal_lm().double()
    bounds = (options.get("epsilon", 0.2), options.get("epsilon_high", options.get("epsilon", 0.2)))
    for step, loss in enumerate(found):
        model.load_state_dict(keep.kept[step])
        assert loss == pytest.approx(clipped_loss(model, worker.put[8 * step : 8 * step + 8], *bounds).item(), abs=1e-6)
    assert len(found) == 3


def test_the_gradient_is_that_of_the_oracle(tmp_path):
    keep = KeepWeights()
    made, worker, _ = played(tmp_path, callbacks=[keep], max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0.0)
    model = tiny.causal_lm().double()
    model.load_state_dict(keep.kept[0])
    clipped_loss(model, worker.put[:8]).backward()
    for (name, wanted), found in zip(model.named_parameters(), made.model.parameters()):
        np.testing.assert_allclose(keep.kept[0][name] - found.detach().double(), wanted.grad, atol=2e-6, err_msg=name)


RECORDED = json.loads(Path(__file__).with_name("trl_async_recorded.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", async_grpo.VARIANTS)
def test_trl_itself_says_the_same_of_the_same_worker(variant):
    """Recorded by benchmarks/parity/async_grpo.py from TRL 1.16.0: losses, weights, and how worker and transfer were called."""
    found = async_grpo.played(AsyncGRPOTrainer, AsyncGRPOConfig, variant)
    assert async_grpo.differences(found, RECORDED[variant]) == []
    assert async_grpo.differences(found, RECORDED[variant] | {"losses": [0.5] * 4, "calls": []})[-1].startswith("calls")


@pytest.mark.parametrize("steps", [1, 2])
def test_worker_and_transfer_are_used_as_in_trl(tmp_path, steps):
    made, worker, transfer = played(
        tmp_path, max_steps=4, weight_sync_steps=steps, worker=ScriptedWorker(groups=2 * steps)
    )
    sent = 4 // steps
    assert transfer.calls == ["init", *["pause", "send", "resume"] * (1 + sent), "destroy"]
    versions = [("version", number) for number in range(2, 2 + sent)]
    assert worker.calls == [("version", 1), "start", *versions, "stop"]
    wanted = made.model.state_dict()
    assert transfer.sent[-1].keys() <= wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in transfer.sent[-1].items())
    assert any(not torch.equal(tensor, transfer.sent[0][name]) for name, tensor in transfer.sent[-1].items())


def test_an_adapter_is_sent_as_part_of_the_weights(tmp_path):
    more = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}
    made, _, transfer = played(tmp_path, more=more)
    assert transfer.sent[-1].keys() <= tiny.causal_lm().state_dict().keys()
    name = next(name for name in transfer.sent[0] if name.endswith("q_proj.weight"))
    assert not torch.equal(transfer.sent[0][name], transfer.sent[-1][name])
    assert made.state.global_step == 3


def test_what_is_logged_and_kept_is_the_worker_s(tmp_path):
    _, worker, _ = played(tmp_path)
    lines = [line for line in logged(tmp_path) if "loss" in line]
    for step, line in enumerate(lines):
        own = worker.put[8 * step : 8 * step + 8]
        assert line["reward"] == pytest.approx(np.mean([one.advantage for one in own]))
        assert (line["rollout/inflight"], line["rollout/retry_total"]) == (2.0, 1.0)
        assert line["async/group_age/max"] == line["async/dropped/stale"] == 0
        assert line["sample/staleness_mean"] == line["sample/dropped_stale_total"] == 0
    kept = read_rollouts(tmp_path).to_pylist()
    assert [row["advantage"] for row in kept] == pytest.approx([one.advantage for one in worker.put[:24]])
    assert [row["policy_version"] for row in kept] == [row["step"] - 1 for row in kept]


def test_samples_that_are_too_old_are_dropped_and_counted(tmp_path):
    """Versions 1 to 4 are stamped two behind; with a bound of 1 none may be trained, and the worker is asked how it is."""
    with pytest.raises(RuntimeError, match="has played everything"):
        played(tmp_path / "none", worker=ScriptedWorker(late=2), max_staleness=1)
    made, _, _ = played(tmp_path / "all", worker=ScriptedWorker(late=2), max_staleness=2)
    assert made.state.global_step == 3
    fresh = ScriptedWorker(sample=lambda rng, group, version: scripted(rng, group, version - 5 * (group % 2)), groups=4)
    played(tmp_path / "half", worker=fresh, max_staleness=2)
    assert [line["async/dropped/stale"] for line in logged(tmp_path / "half") if "loss" in line] == [4.0, 12.0, 20.0]


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_share_what_the_first_one_reads(tmp_path, fsdp):
    """Only the first process's worker and transfer are used; under FSDP whole weights are sent."""
    _, _, transfer = played(tmp_path / "one")

    def train(rank):
        if fsdp:
            fsdp_on_cpu.allow()
        more = {"fsdp": True} if fsdp else {}
        _, worker, sent = played(
            tmp_path / "two", per_device_train_batch_size=4, dataset_cache_dir=str(tmp_path / f"{rank}"), **more
        )
        assert bool(worker.calls) == bool(sent.calls) == (rank == 0)
        if rank == 0:
            torch.save(sent.sent[-1], tmp_path / "sent.pt")
        dist.destroy_process_group()

    children = start_group(2, train, tmp_path / "rank")
    assert wait_for_group(children) == [0, 0], "\n".join(child.output() for child in children)
    found, wanted = ([line["loss"] for line in logged(tmp_path / name) if "loss" in line] for name in ("two", "one"))
    assert found == pytest.approx(wanted, abs=1e-6)
    sent = torch.load(tmp_path / "sent.pt")
    assert sent.keys() == transfer.sent[-1].keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, transfer.sent[-1][name], atol=1e-5, rtol=0)


def test_forked_rows_of_any_number_and_length_make_a_step(tmp_path):
    """A worker may split groups and put what it has in any order: a step takes the next samples."""
    made, _, _ = played(tmp_path, worker=ScriptedWorker(groups=3, size=3), max_steps=3)
    assert made.state.global_step == 3
    assert len(read_rollouts(tmp_path).to_pylist()) == 24


def test_a_resumed_run_continues_with_its_versions(tmp_path):
    played(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    options = {"max_steps": 4, "learning_rate": 0.05, "save_strategy": "no", "disable_tqdm": True}
    worker = ScriptedWorker(seed=1)
    made = AsyncGRPOTrainer(
        tiny.causal_lm(), None, config(tmp_path, **options), rows(), tiny.tokenizer(), rollout_worker=worker,
        weight_transfer=RecordingTransfer(),
    )  # fmt: skip
    made.train(resume_from_checkpoint=True)
    made.close()
    assert worker.calls == [("version", 4), "start", ("version", 5), ("version", 6), "stop"]
    kept = read_rollouts(tmp_path).to_pylist()
    assert [row["policy_version"] for row in kept] == [row["step"] - 1 for row in kept]


REFUSED_WITH_WORKER = {
    "`drop_zero_variance` is set": {"drop_zero_variance": True},
    "`on_stale` is set": {"on_stale": "mask"},
    "`scale_rewards` is set": {"scale_rewards": "batch"},
}


@pytest.mark.parametrize("said", REFUSED_WITH_WORKER)
def test_options_that_the_worker_decides_are_refused(tmp_path, said):
    with pytest.raises(ValueError, match=f"{said}, and `rollout_worker` decides|drop_zero_variance"):
        played(tmp_path, **REFUSED_WITH_WORKER[said])


@pytest.mark.parametrize("given", [{"rollout_worker": ScriptedWorker()}, {"weight_transfer": RecordingTransfer()}])
def test_a_worker_alone_or_a_transfer_alone_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match="`rollout_worker` and `weight_transfer` belong together"):
        AsyncGRPOTrainer(tiny.causal_lm(), numbered, config(tmp_path), rows(), tiny.tokenizer(), **given)


# ---- proximal_policy -----------------------------------------------------------------------------------------------------


def of_method(cls, folder, **options):
    own = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 8}
    return cls(**{**own, "async_rollouts": True, **options})


@pytest.mark.parametrize("cls", [GRPOConfig, RLOOConfig, PPOConfig])
def test_methods_that_clip_a_ratio_take_the_sampler_as_its_centre(tmp_path, cls):
    own = {} if cls is not PPOConfig else {"num_mini_batches": 1, "num_ppo_epochs": 1}
    made = of_method(cls, tmp_path, proximal_policy="sampler", **own)
    assert made.centres_on_sampler
    assert not of_method(cls, tmp_path, **own).centres_on_sampler


def test_elsewhere_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the loss of OnlineDPOConfig clips no ratio"):
        of_method(OnlineDPOConfig, tmp_path, proximal_policy="sampler")
    with pytest.raises(ValueError, match="`proximal_policy` is set, but `async_rollouts` is not"):
        of_method(GRPOConfig, tmp_path, async_rollouts=False, proximal_policy="sampler")


def test_the_plan_says_whose_ratio_it_is(tmp_path):
    totals = dict.fromkeys(("tokens", "sequences", "units", "completions"), "8")
    lines = AsyncGRPOTrainer.formula(config(tmp_path), totals).lines()
    assert any("p_old = probability under the weights that wrote the token" in line for line in lines)
    assert any("population_std_group(r) + 1e-08" in line for line in lines)


def ppo(model, rewards, args, data, **named):
    return PPOTrainer(model=model, reward_funcs=rewards, args=args, train_dataset=data, **named)


METHODS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig), "ppo": (ppo, PPOConfig)}


@pytest.mark.parametrize("method", METHODS)
def test_ratios_are_to_who_wrote(tmp_path, method):
    """In order, both runs write the same until their weights differ: after the first step that trains on older tokens."""
    cls, its_config = METHODS[method]
    own = {"num_ppo_epochs": 1, "num_mini_batches": 1, "num_generations": 1} if method == "ppo" else {}
    exact = {"async_rollouts": True, "async_order": "in_order", "async_lead": 1, "rollout_engine": "native", **own}
    found = {}
    for centre in ("step_start", "sampler"):
        made = online_trainer(
            tmp_path / centre, numbered, cls, its_config, proximal_policy=centre, learning_rate=0.5, **exact
        )
        made.train()
        made.close()
        found[centre] = [line["loss"] for line in logged(tmp_path / centre) if "loss" in line]
    first, second = found["step_start"], found["sampler"]
    assert first[0] == pytest.approx(second[0], abs=1e-5)
    assert abs(first[1] - second[1]) > 1e-4
