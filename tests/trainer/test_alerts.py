"""Healthy curves raise no alert; each disease raises its own."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from posttrain.trainer.report.alerts import RULES, AlertsCallback, Thresholds, Watch

LOGS = 200
EVERY = 10  # steps between logs


def rate(i: int) -> float:
    """Linear warm-up over a tenth of the run, then a linear decay that ends at 0."""
    return 1e-4 * min(i / (LOGS / 10), (LOGS - i) / (LOGS * 0.9))


def healthy_sft(rng: np.random.Generator) -> list[dict[str, float]]:
    """A falling loss with lognormal noise of up to a quarter, heavy-tailed gradient norms, evaluations that level off."""
    floor, height, scale = rng.uniform(0.3, 2.5), rng.uniform(0.2, 3), rng.uniform(5, 60)
    spread, entropy, norm = rng.uniform(0.02, 0.25), rng.uniform(0.3, 2), rng.lognormal(0, 1)
    logs = []
    for i in range(1, LOGS + 1):
        expected = floor + height * math.exp(-i / scale)
        logs.append(
            {
                "loss": expected * rng.lognormal(0, spread),
                "grad_norm": norm * (1 + math.exp(-i / scale)) * rng.lognormal(0, 0.45),
                "learning_rate": rate(i),
                "entropy": entropy * (0.5 + 0.5 * math.exp(-i / scale)) * rng.lognormal(0, 0.1),
                "mean_token_accuracy": 0.6,
            }
        )
        if i % 20 == 0:
            logs.append({"eval_loss": (expected + 0.05) * rng.lognormal(0, 0.005), "eval_entropy": entropy / 2})
    return logs


def healthy_dpo(rng: np.random.Generator) -> list[dict[str, float]]:
    """From ln 2 and accuracy 0 (policy = reference) to 60 to 85 % on batches of 16 pairs; chosen rewards may sink a little."""
    final, scale, noise = rng.uniform(0.62, 0.85), rng.uniform(5, 40), rng.uniform(0.02, 0.12)
    logs = []
    for i in range(LOGS):
        share = 1 - math.exp(-i / scale)
        margin = share * 2 * (final - 0.5) + rng.normal(0, noise) * (0.1 + share)
        logs.append(
            {
                "loss": math.log1p(math.exp(-margin)) + abs(rng.normal(0, noise / 2)),
                "grad_norm": 3 * rng.lognormal(0, 0.4),
                "learning_rate": rate(i + 1),
                "entropy": 1.2 + rng.normal(0, 0.1),
                "rewards/accuracies": 0.0 if i == 0 else rng.binomial(16, 0.5 + share * (final - 0.5)) / 16,
                "rewards/margins": 0.0 if i == 0 else margin,
                "rewards/chosen": -0.5 * share + rng.normal(0, noise),
            }
        )
    return logs


def healthy_reward(rng: np.random.Generator) -> list[dict[str, float]]:
    final, scale, offset = rng.uniform(0.6, 0.9), rng.uniform(5, 40), 0.0
    logs = []
    for i in range(LOGS):
        share = 1 - math.exp(-i / scale)
        offset += rng.normal(0, 0.05)
        logs.append(
            {
                "loss": 0.693 - share * (final - 0.5) + abs(rng.normal(0, 0.05)),
                "grad_norm": 5 * rng.lognormal(0, 0.5),
                "learning_rate": rate(i + 1),
                "accuracy": rng.binomial(32, 0.5 + share * (final - 0.5)) / 32,
                "margin": share * 2 + rng.normal(0, 0.2),
                "mean_reward": offset + rng.normal(0, 0.3),
            }
        )
    return logs


def healthy_online(rng: np.random.Generator) -> list[dict[str, float]]:
    """Reward and KL rise and level off, completions grow by a third, the loss stays around 0."""
    final, scale = rng.uniform(0.4, 0.9), rng.uniform(20, 80)
    logs = []
    for i in range(LOGS):
        share = 1 - math.exp(-i / scale)
        logs.append(
            {
                "loss": rng.normal(0, 0.02) + 0.01 * share,
                "grad_norm": 0.3 * rng.lognormal(0, 0.4),
                "learning_rate": 1e-6,
                "reward": 0.1 + share * final + rng.normal(0, 0.08),
                "kl": 0.001 + 0.3 * share * rng.lognormal(0, 0.2),
                "entropy": 0.8 - 0.4 * share + rng.normal(0, 0.05),
                "completions/mean_length": (200 + 66 * share) * rng.lognormal(0, 0.05),
            }
        )
    return logs


HEALTHY = {"sft": healthy_sft, "dpo": healthy_dpo, "reward": healthy_reward, "online": healthy_online}


def alerts_of(logs: list[dict[str, float]], thresholds: Thresholds | None = None) -> list[tuple[str, str]]:
    watch, step, found = Watch(thresholds or Thresholds()), 0, []
    last = sum("loss" in entry for entry in logs) * EVERY
    for entry in logs:
        step += EVERY if "loss" in entry else 0
        found += [(alert.kind, alert.sentence(step)) for alert in watch.look(step, entry, step < last)]
    return found


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 50), marks=pytest.mark.slow)], ids=["15", "50"])
@pytest.mark.parametrize("kind", HEALTHY)
def test_no_alert_on_healthy_runs(kind, seeds):
    """50 seeds of each kind: 200 noisy runs of 200 logs, not one alert."""
    noisy = {seed: alerts_of(HEALTHY[kind](np.random.default_rng(seed))) for seed in seeds}
    assert {seed: found for seed, found in noisy.items() if found} == {}


def changed(kind: str, **change) -> list[dict[str, float]]:
    """A healthy run in which each named metric is a function of (number of the log, healthy value)."""
    logs = HEALTHY[kind](np.random.default_rng(3))
    numbers = iter(range(len(logs)))
    for entry in logs:
        if "loss" in entry:
            i = next(numbers)
            for name, function in change.items():
                name = name.replace("__", "/")
                entry[name] = function(i, entry.get(name))
    return logs


def overfitted() -> list[dict[str, float]]:
    logs = changed("sft", loss=lambda i, v: 2 * math.exp(-i / 60))
    for n, entry in enumerate(entry for entry in logs if "eval_loss" in entry):
        entry["eval_loss"] = 2 - 0.2 * n if n < 4 else 1.4 + 0.1 * (n - 3)
    return logs


DISEASES = {
    "loss_not_finite": lambda: changed("sft", loss=lambda i, v: math.nan if i == 50 else v),
    "loss_exploded": lambda: changed("sft", loss=lambda i, v: 30.0 if i == 60 else v),
    "loss_rising": lambda: changed("sft", loss=lambda i, v: v * (1 + max(i - 60, 0) / 60)),
    "loss_constant": lambda: changed("sft", loss=lambda i, v: 2.25),
    "gradient_spike": lambda: changed("sft", grad_norm=lambda i, v: 80 * v if i == 60 else v),
    "gradient_vanished": lambda: changed("sft", grad_norm=lambda i, v: v if i < 100 else 0.0),
    "entropy_collapsed": lambda: changed("online", entropy=lambda i, v: v * math.exp(-i / 20)),
    "margins_negative": lambda: changed("dpo", rewards__margins=lambda i, v: -0.02 * i - abs(v) * 0.1),
    "accuracy_stuck": lambda: changed("dpo", rewards__accuracies=lambda i, v: [0.5, 0.4375, 0.5625][i % 3]),
    "reward_drifted": lambda: changed("reward", mean_reward=lambda i, v: v + 0.4 * i),
    "reward_falling": lambda: changed("online", reward=lambda i, v: v if i < 100 else v - (i - 100) / 50),
    "reward_hacked": lambda: changed("online", **{"completions/mean_length": lambda i, v: v * (1 + i / 20)}),
    "kl_growing": lambda: changed("online", kl=lambda i, v: 0.01 * math.exp(i / 8)),
    "rollouts_wait": lambda: changed("online", async__trainer_idle=lambda i, v: 0.4 + 0.01 * i),
    "rollouts_at_the_bound": lambda: changed("online", async__bound_used=lambda i, v: min(0.5 + 0.01 * i, 1.0)),
    "few_samples_count": lambda: changed("online", sampling__effective_sample_size=lambda i, v: 0.9 - 0.01 * i),
    "old_tokens_masked": lambda: changed("online", async__masked_share=lambda i, v: 0.002 * i),
    "rate_zero": lambda: changed("sft", learning_rate=lambda i, v: v if i < 30 else 0.0),
    "overfitting": overfitted,
}
BESIDE = {"kl_growing": {"reward_hacked"}}
"""Kinds that rightly come with another: a KL that explodes while the reward rises is suspicious twice."""


@pytest.mark.parametrize("kind", DISEASES)
def test_each_disease_raises_its_own_alert(kind):
    found = alerts_of(DISEASES[kind]())
    assert {name for name, _ in found} - BESIDE.get(kind, set()) == {kind}
    sentence = next(text for name, text in found if name == kind)
    assert sentence.startswith("Alert at step ")
    assert "This usually means" in sentence
    assert "Try: " in sentence


def test_every_rule_has_a_disease():
    assert DISEASES.keys() == RULES.keys()


def test_the_numbers_seen_are_in_the_sentence():
    logs = [{"loss": 2.0 + 0.01 * (i % 3), "learning_rate": 1e-4} for i in range(15)] + [
        {"loss": 50.0, "learning_rate": 1e-4}
    ]
    ((kind, sentence),) = alerts_of(logs)
    assert kind == "loss_exploded"
    assert "loss is 50 at step 160; its median over the 15 logs before is 2.01" in sentence


def test_a_kind_is_given_once_in_so_many_logs():
    logs = [{"loss": 1.0, "learning_rate": 1e-4} for _ in range(100)]
    found = alerts_of(logs, Thresholds(repeat_after_logs=30))
    assert [kind for kind, _ in found] == ["loss_constant"] * 4  # at logs 8, 38, 68 and 98


def test_the_last_log_may_have_a_rate_of_zero():
    """A linear schedule ends at exactly 0, with nothing left to train."""
    logs = [{"loss": 1 + 0.1 * (i % 7), "learning_rate": 0.0 if i >= 17 else 1e-4} for i in range(20)]
    assert alerts_of(logs[:-1], Thresholds(rate_zero_logs=4)) == []
    assert [kind for kind, _ in alerts_of(logs, Thresholds(rate_zero_logs=2))] == ["rate_zero"]


class TestCallback:
    @staticmethod
    def state(step, history=(), first=True):
        return SimpleNamespace(global_step=step, max_steps=1000, log_history=list(history), is_world_process_zero=first)

    def run(self, callback, steps, history=(), first=True):
        begin = steps[0] - 1
        callback.on_train_begin(None, self.state(begin, history, first), None)
        for step in steps:
            callback.on_log(None, self.state(step, (), first), None, logs={"loss": 1.5, "learning_rate": 1e-4})

    def test_alerts_are_said_and_written(self, tmp_path, capsys):
        self.run(AlertsCallback(str(tmp_path)), range(1, 9))
        (line,) = (tmp_path / "alerts.jsonl").read_text().splitlines()
        entry = json.loads(line)
        assert (entry["step"], entry["kind"]) == (8, "loss_constant")
        assert set(entry) == {"step", "kind", "seen", "meaning", "remedy"}
        assert capsys.readouterr().out.count("Alert at step 8 (loss_constant)") == 1

    def test_a_resumed_run_goes_on_where_it_was(self, tmp_path, capsys):
        self.run(AlertsCallback(str(tmp_path)), range(1, 9))
        capsys.readouterr()
        history = [{"step": step, "loss": 1.5, "learning_rate": 1e-4} for step in range(1, 8)]
        self.run(AlertsCallback(str(tmp_path)), range(8, 12), history)  # from a checkpoint at step 7, before the alert
        assert [json.loads(line)["step"] for line in (tmp_path / "alerts.jsonl").read_text().splitlines()] == [8]
        history.append({"step": 8, "loss": 1.5, "learning_rate": 1e-4})
        self.run(AlertsCallback(str(tmp_path)), range(9, 12), history)  # from step 8: said already
        assert [json.loads(line)["step"] for line in (tmp_path / "alerts.jsonl").read_text().splitlines()] == [8]

    def test_other_processes_are_silent(self, tmp_path, capsys):
        self.run(AlertsCallback(str(tmp_path)), range(1, 9), first=False)
        assert capsys.readouterr().out == ""
        assert not (tmp_path / "alerts.jsonl").exists()
