"""Rollouts beside training: without a lead it is the synchronous run, in order it depends on nothing but its numbers."""

from __future__ import annotations

import copy
import json
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from posttrain import GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.core import faults
from posttrain.losses.importance import age_correction
from posttrain.rollout.feed.group import Group
from posttrain.rollout.feed.journal import Journal, JournalNotWritten
from posttrain.rollout.feed.judging import Judge
from posttrain.rollout.feed.worker import RolloutWorker
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import POLICY_LOGPS, versions_of
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.online.async_rollouts import AsyncRollouts
from tests.forked import Child, start_group, wait_for_group
from tests.forked_workers import forked_workers  # noqa: F401
from tests.forked_workers import use as use_forked_workers
from tests.trainer import fsdp_on_cpu
from tests.trainer.resumable_run import KillAfter
from tests.trainer.test_online import logged, rows, trainer, weights
from tests.waiting import eventually

NATIVE = {"rollout_engine": "native", "max_steps": 5, "learning_rate": 0.05, "seed": 7}
RLOO = {"cls": RLOOTrainer, "config": RLOOConfig}
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


def odd_sums(completions, completion_ids, **kwargs):
    """Any other token changes it."""
    return [float(sum(ids) % 11) for ids in completion_ids]


def run(folder, **options):
    made = trainer(folder, **{"rewards": odd_sums, **NATIVE, **options})
    made.train()
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain rollouts"]
    return made


def written(folder):
    """Every rollout, without times."""
    rows = read_rollouts(folder).to_pylist()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def same_numbers(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other):
        left, right = ({k: v for k, v in line.items() if not k.startswith("async/")} for line in (left, right))
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert value == right[name] or (value != value and right[name] != right[name]), name


@pytest.mark.parametrize("order", ["in_order", "window", "first_finished"])
@pytest.mark.parametrize(
    "options",
    [{}, RLOO, LORA, {"steps_per_generation": 2, "num_iterations": 2, "max_staleness": 4}, {"beta": 0.1}],
    ids=["grpo", "rloo", "lora", "iterations", "reference"],
)
def test_without_a_lead_it_is_the_synchronous_run_to_the_bit(tmp_path, order, options):
    plain = run(tmp_path / "plain", **options)
    beside = run(tmp_path / "beside", async_rollouts=True, async_lead=0, async_order=order, **options)
    for (name, wanted), found in zip(weights(plain).items(), weights(beside).values()):
        assert torch.equal(wanted, found), name
    assert written(tmp_path / "beside") == written(tmp_path / "plain")
    same_numbers(logged(tmp_path / "beside"), logged(tmp_path / "plain"))


@pytest.mark.slow
def test_without_a_lead_the_engine_is_the_trainer_s_which_may_evaluate(tmp_path):
    """A worker that wrote as soon as a step is done would meet the evaluation in the one engine that there is."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows()}
    plain = run(tmp_path / "plain", **options)
    beside = run(tmp_path / "beside", async_rollouts=True, async_lead=0, **options)
    assert all(torch.equal(left, right) for left, right in zip(weights(plain).values(), weights(beside).values()))
    same_numbers(logged(tmp_path / "beside"), logged(tmp_path / "plain"))


# ---- ahead of training ---------------------------------------------------------------------------------------------------


class Delayed(GRPOTrainer):
    """The oracle: a synchronous run whose window b is written by the weights of `lead` windows before."""

    lead = 2
    corrects_sampler = True
    needs_old_logps = False

    def _correction(self, batch, old_logps, sampling_logps):
        return age_correction(old_logps, batch.per_token[POLICY_LOGPS], batch), {}

    def _make_engine(self):
        self.kept = []
        self.copy = copy.deepcopy(self.model)
        engine = self.local_engine(self.copy)
        load = engine.load_weights

        def load_older(_, version):
            self.kept.append([parameter.detach().clone() for parameter in self.model.parameters()])
            label = max(version - self.lead, 0)
            with torch.no_grad():
                for own, kept in zip(self.copy.parameters(), self.kept[label]):
                    own.copy_(kept)
            load(None, label)

        engine.load_weights = load_older
        return engine


@pytest.fixture
def jitter(monkeypatch):
    """Threads that are held up at random."""
    rng = random.Random(0)

    def slowed(method):
        def run(self, *args, **named):
            time.sleep(rng.choice([0, 0, 0.002, 0.02]))
            return method(self, *args, **named)

        return run

    for cls, name in [(RolloutWorker, "_begin_all"), (Judge, "add"), (AsyncRollouts, "on_step_end")]:
        monkeypatch.setattr(cls, name, slowed(getattr(cls, name)))


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_in_order_each_window_is_written_by_the_weights_of_its_label(tmp_path, monkeypatch, lead, jitter):
    monkeypatch.setattr(Delayed, "lead", lead)
    wanted = run(tmp_path / "wanted", cls=Delayed, max_steps=8)
    found = run(tmp_path / "found", async_rollouts=True, async_lead=lead, async_order="in_order", max_steps=8)
    for (name, left), right in zip(weights(wanted).items(), weights(found).values()):
        assert torch.equal(left, right), name
    assert written(tmp_path / "found") == written(tmp_path / "wanted")
    versions = {(row["step"], row["policy_version"]) for row in written(tmp_path / "found")}
    assert versions == {(step, max(step - 1 - lead, 0)) for step in range(1, 9)}


SEEDS = [pytest.param(seed, marks=pytest.mark.trust if seed >= 5 else pytest.mark.slow) for seed in range(20)]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_in_order_any_number_of_workers_under_any_delays_writes_the_plain_loop(
    tmp_path, monkeypatch, seed, workers, jitter
):
    """Each worker sleeps half a second before some of its groups, others than those of other seeds."""
    rng = random.Random(seed)
    slow = {rng.randrange(1, 8) for _ in range(3)}
    options = {"seed": seed, "max_steps": 6}
    wanted = run(tmp_path / "wanted", cls=Delayed, **options)
    monkeypatch.setenv("POSTTRAIN_FAULTS", ",".join(f"slow:generate:{count}" for count in slow))
    exact = {"async_rollouts": True, "async_lead": 2, "async_order": "in_order", "rollout_workers": workers}
    found = run(tmp_path / "found", **exact, **options)
    for (name, left), right in zip(weights(wanted).items(), weights(found).values()):
        assert torch.equal(left, right), name
    assert written(tmp_path / "found") == written(tmp_path / "wanted")


def assert_ages_are_those_of_the_journal(folder, bound, masks, steps=1):
    """What was logged of each window is what its groups say, token by token; and of its oldest what the store says. A window of
    several steps trains on the same tokens in its last one, where they are oldest."""
    journal, stored = Journal(folder), written(folder)
    lines = {line["step"]: line for line in logged(folder) if "async/token_age/max" in line}
    assert len(lines) == len(journal.windows())
    for (window, _), entry in journal.windows().items():
        groups = [Group.from_bytes(journal.read(number), lambda row: NO_ROW) for number in entry["numbers"]]
        rollouts = [rollout for group in groups for rollout in group.written.rollouts]
        last = (window + 1) * steps - 1
        ages = np.concatenate([last - versions_of(rollout)[rollout.sample.trained] for rollout in rollouts])
        ages = ages[ages <= bound] if masks else ages
        line = lines[window * steps + 1]
        assert line["async/token_age/mean"] == pytest.approx(ages.mean())
        assert line["async/token_age/p95"] == pytest.approx(np.percentile(ages, 95))
        assert (line["async/token_age/max"], ages.max() <= bound) == (ages.max(), True)
        assert line["async/bound_used"] == ages.max() / bound
        oldest = max(last - row["policy_version"] for row in stored if row["step"] == window * steps + 1)
        assert line["async/group_age/max"] == oldest == max(last - group.label for group in groups)


NO_ROW = PromptRow(np.arange(2), "", {}, 0)


@pytest.mark.parametrize("order", ["window", "first_finished"])
@pytest.mark.parametrize("update", ["continue", "finish", "restart"])
@pytest.mark.parametrize("on_stale", ["wait", "mask", "drop"])
def test_no_trained_token_is_older_than_the_bound_and_no_prompt_is_trained_twice(
    tmp_path, order, update, on_stale, jitter
):
    made = run(
        tmp_path,
        async_rollouts=True,
        async_lead="auto" if update == "continue" else 1.5,
        async_order=order,
        update_in_flight=update,
        on_stale=on_stale,
        max_staleness=2,
        max_steps=12,
        keep_journal=True,
    )
    assert_ages_are_those_of_the_journal(tmp_path, 2, on_stale == "mask")
    rows = written(tmp_path)
    groups = [row["group"] for row in rows if row["sample"] == 0]
    assert len(groups) == len(set(groups)) == 24
    if on_stale != "mask":
        assert max(row["step"] - 1 - row["policy_version"] for row in rows) <= 2
    for line in [line for line in logged(tmp_path) if "async/lead" in line]:
        shares = [line[f"async/token_age/share/{age}"] for age in range(3)]
        assert (sum(shares), shares[1] + 2 * shares[2]) == pytest.approx((1.0, line["async/token_age/mean"]))
        assert 0 <= line["async/worker_idle/inline-0"] <= 1
        parts = line["async/token_age/in_flight"] + line["async/token_age/in_queue"]
        assert parts == pytest.approx(line["async/token_age/mean"])
        open_groups = line["async/in_flight"] + line["async/waiting"]
        assert line["async/begun"] == line["async/taken"] + line.get("async/dropped/stale", 0) + open_groups
        assert (line["async/workers_up"], 0 <= line["async/overlap"] <= 1) == (1, True)
        assert line["async/token_age/max"] <= 2
    assert made.state.global_step == 12
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "async/lead" in line][-1]
    assert min(last["sync/trainer_held_s"], last["async/queue_s"], last["async/journal_mb"]) > 0
    assert max(line.get("sync/worker_paused_s", 0) for line in lines) > 0


def test_ages_are_those_of_the_last_step_of_a_window(tmp_path):
    """Two micro-batches, twice each: the bound of 7 is reached by what was written a window before."""
    options = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1}
    run(
        tmp_path,
        async_rollouts=True,
        async_lead=1,
        async_order="in_order",
        max_staleness=7,
        max_steps=12,
        keep_journal=True,
        **options,
    )
    assert_ages_are_those_of_the_journal(tmp_path, 7, masks=False, steps=4)
    assert [line["async/bound_used"] for line in logged(tmp_path) if "async/lead" in line] == [3 / 7, 1.0, 1.0]


# ---- kills ---------------------------------------------------------------------------------------------------------------

AHEAD = {"async_rollouts": True, "max_steps": 9, "save_strategy": "steps", "save_steps": 3}


class KillAfterSave(KillAfter):
    """When the checkpoint of step 3, which is written on a thread, is there."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            eventually((Path(args.output_dir) / "checkpoint-3").exists)
        super().on_step_begin(args, state, control, **kwargs)


def killed_at(folder, step, log, **options):
    """A run that is killed when it begins a step, in a process of its own; its losses up to then."""
    child = Child(lambda: run(folder, callbacks=[KillAfterSave(step)], **options), log)
    assert child.wait() == -signal.SIGKILL, child.output()
    return losses(folder)


def losses(folder):
    return {line["step"]: line["loss"] for line in logged(folder) if "loss" in line}


def resumed(folder, resume_from=None, **options):
    made = trainer(folder, **{"rewards": odd_sums, **NATIVE, **options})
    made.train(resume_from_checkpoint=True if resume_from is None else str(resume_from))
    made.close()
    return made


@pytest.mark.parametrize("step", [3, 5, 8])
@pytest.mark.parametrize("lead", [0, 2])
def test_in_order_a_killed_run_ends_as_the_undisturbed_one(tmp_path, step, lead):
    options = {**AHEAD, "async_order": "in_order", "async_lead": lead}
    whole = run(tmp_path / "whole", **options)
    killed_at(tmp_path / "killed", step, tmp_path / "log", **options)
    again = resumed(tmp_path / "killed", **options)
    for (name, left), right in zip(weights(whole).items(), weights(again).values()):
        assert torch.equal(left, right), name
    assert written(tmp_path / "killed") == written(tmp_path / "whole")


@pytest.mark.parametrize("step", [4, 5, 8])
def test_whatever_the_order_the_steps_before_a_kill_are_repeated_from_the_journal(tmp_path, step):
    options = {**AHEAD, "async_order": "first_finished", "async_lead": 2, "keep_rollouts": True}
    before = killed_at(tmp_path, step, tmp_path / "log", **options)
    assert sorted(before) == list(range(1, step + 1))
    kept = {row["step"]: row for row in written(tmp_path)}
    resumed(tmp_path, **options)
    after = losses(tmp_path)
    assert {number: after[number] for number in before} == before
    assert {number: row for number, row in {r["step"]: r for r in written(tmp_path)}.items() if number in kept} == kept
    groups = [row["group"] for row in written(tmp_path) if row["sample"] == 0]
    assert len(groups) == len(set(groups)) == 18


SHORT = {"async_rollouts": True, "async_order": "in_order", "save_strategy": "steps", "save_steps": 2}


def assert_same_end(one, other):
    assert all(torch.equal(left, right) for left, right in zip(weights(one).values(), weights(other).values()))


def test_a_run_whose_disk_is_full_says_so_and_is_resumed(tmp_path):
    options = {**SHORT, "async_lead": 1, "max_steps": 4}
    whole = run(tmp_path / "whole", **options)
    faults.arm("oserror:journal:4")
    try:
        with pytest.raises(JournalNotWritten, match=r"could not be written to .*rollout_journal/process-0 .*Make room"):
            run(tmp_path / "full", **options)
    finally:
        faults.arm(None)
    assert_same_end(whole, resumed(tmp_path / "full", **options))
    assert written(tmp_path / "full") == written(tmp_path / "whole")


def test_in_order_a_damaged_journal_is_said_at_once_and_an_earlier_checkpoint_is_exact(tmp_path):
    """The run waited `heartbeat_stale_after_s` for a group that nobody could write, and spoke of slow episodes."""
    options = {**SHORT, "async_lead": 2, "max_steps": 6}
    whole = run(tmp_path, **options)
    path, start = Journal(tmp_path).places[8]
    content = bytearray(path.read_bytes())
    content[start + 300] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"numbers 8: .* checkpoint of step 2 or before"):
        resumed(tmp_path, tmp_path / "checkpoint-4", **options)
    assert_same_end(whole, resumed(tmp_path, tmp_path / "checkpoint-2", **options))


# ---- several processes ---------------------------------------------------------------------------------------------------

WINDOWS = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_staleness": 16}


def on_two(folder, **options):
    def train(rank):
        if options.get("fsdp"):
            fsdp_on_cpu.allow()
        if options.get("rollout_workers"):
            use_forked_workers()
        run(folder, per_device_train_batch_size=8, dataset_cache_dir=f"{folder}-cache-{rank}", **WINDOWS, **options)
        dist.destroy_process_group()

    children = start_group(2, train, folder / "rank")
    assert wait_for_group(children) == [0, 0], "\n".join(child.output() for child in children)


IN_WORKERS = pytest.param({"rollout_workers": 1}, id="workers", marks=pytest.mark.slow)


@pytest.mark.parametrize("workers", [pytest.param({}, id="threads"), IN_WORKERS])
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("lead", [0, 1])
def test_two_processes_write_what_one_does(tmp_path, lead, fsdp, workers):
    """Sharded ones gather their weights together, for whoever writes."""
    ahead = {"async_rollouts": True, "async_order": "in_order", "async_lead": lead}
    run(tmp_path / "one", per_device_train_batch_size=16, **WINDOWS, **ahead)
    on_two(tmp_path / "two", **ahead, **workers, **{"fsdp": True} if fsdp else {})
    key = lambda row: (row["step"], row["group"], row["sample"])  # noqa: E731
    one, two = (sorted(written(tmp_path / name), key=key) for name in ("one", "two"))
    assert [key(row) for row in one] == [key(row) for row in two]
    assert [row["completion_ids"] for row in one] == [row["completion_ids"] for row in two]
    assert [row["policy_version"] for row in one] == [row["policy_version"] for row in two]
    np.testing.assert_allclose(*([row["advantage"] for row in rows] for rows in (one, two)), atol=1e-6)


def test_an_engine_that_is_given_is_refused(tmp_path):
    """It would be left unused: each writer makes one of its own."""
    engine = trainer(tmp_path, odd_sums, **NATIVE).engine
    with pytest.raises(ValueError, match="leave `engine` out"):
        trainer(tmp_path, odd_sums, engine=engine, async_rollouts=True, **NATIVE)
    trainer(tmp_path, odd_sums, engine=engine, async_rollouts=True, async_lead=0, **NATIVE).train()
