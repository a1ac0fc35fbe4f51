"""PPO: its arithmetic of batches, its critics and their files, and a run that equals a plain loop in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain.core.batch import SHARED
from posttrain.methods.ppo import PPOConfig, PPOTrainer
from posttrain.models.layers.kernels import LIGER, PLAIN
from posttrain.models.load.model import innermost_model
from posttrain.models.load.weight_export import exported_weights
from posttrain.models.scoring.heads import SEQUENCE_REWARD
from posttrain.rollout.rollout import ADVANTAGES, RETURNS
from posttrain.trainer.references import setup
from tests import tiny
from tests.rollout.scripted_engine import ScriptedEngine
from tests.trainer.resumable_run import checksum

END = 256  # <|im_end|>


def config(folder: Any, **options: Any) -> PPOConfig:
    shape = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 2,
        "response_length": 5,
    }
    given = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "reward_workers": 0}
    return PPOConfig(output_dir=str(folder), **{**shape, **given, **options})


def prompts(count: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": f"Say {number}"} for number in range(count)])


def trainer(
    folder: Any, model: Any = None, reward: Any = checksum, options: dict[str, Any] | None = None, **named: Any
):
    args = config(folder, **{"max_steps": 2, **(options or {})})
    data = {"train_dataset": prompts(), "reward_funcs": reward, **named}
    return PPOTrainer(args, tiny.tokenizer(), tiny.causal_lm() if model is None else model, **data)


# ---- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "accumulation", "parts", "found"),
    [
        (4, 6, 3, (4, 2, 6)),  # 24 completions, steps of 8 in two micro-batches
        (8, 1, 4, (2, 1, 4)),  # the micro-batch becomes smaller
        (4, 2, 1, (4, 2, 2)),
    ],
)
def test_mini_batches_are_optimizer_steps(size, accumulation, parts, found, tmp_path):
    shape = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    made = config(tmp_path, num_mini_batches=parts, total_episodes=2 * size * accumulation - 1, **shape)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps, made.steps_per_generation) == found
    assert made.schedule().samples == size * accumulation
    assert made.schedule().window // made.gradient_accumulation_steps == parts * 2  # of each of two epochs
    assert made.max_steps == 2 * parts * 2  # two generations: the last one is whole
    again = PPOConfig(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.init})
    assert again.to_dict() == made.to_dict(), "options that were written down mean the same when they are read"
    assert again.max_completion_length == 5


@pytest.mark.parametrize(("parts", "shared"), [(1, 2), (2, 2), (4, 2)])
def test_the_memory_plan_counts_the_prompts_of_groups_that_mini_batches_split(parts, shared, tmp_path):
    """8 completions of 2 prompts. A mini-batch of 4 or 2 may have both prompts, though half of a group would have one."""
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 4}
    made = trainer(tmp_path, options=options | {"num_mini_batches": parts})
    assert made.data_collator.layout == SHARED
    prompt, samples = made.train_dataset.longest, 8 // parts
    assert made.batch_limits() == (shared * prompt + samples * 5, prompt + 5)


def test_a_value_model_that_is_given_runs_with_the_policys_kernels(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(setup, "load_model", lambda model, options: seen.append(options.layer_kernels) or 1 / 0)
    with_own = trainer(tmp_path).reference_setup()
    with_own.policy.kernels = LIGER
    for module in (tiny.reward_model(), get_peft_model(tiny.causal_lm(), LoraConfig(target_modules=["q_proj"]))):
        with pytest.raises(ZeroDivisionError):
            with_own.loaded_beside(module, SEQUENCE_REWARD)
    assert seen == [(LIGER,), (PLAIN,)]  # an adapter has its layers for itself


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_mini_batches": 3}, "A generation has 8 completions a process"),
        ({"total_episodes": 8, "max_steps": 5}, "makes 2 optimizer steps, and `max_steps` is 5"),
        ({"steps_per_generation": 4}, "`num_mini_batches` says that a generation is cut into 1"),
        ({"num_iterations": 3}, "PPO's name of it is `num_ppo_epochs`"),
        ({"stop_token": "eos", "stop_token_id": 3}, "at most one of"),
        ({"stop_token": "end"}, "it is 'eos' or left out"),
        ({"target": 3.0}, "`target` is an option of `adap_kl_ctrl`, which is off"),
        ({"adap_kl_ctrl": True, "kl_coef": 0.0}, "it would stay there"),
        ({"kl_estimator": "k2"}, "k1, k3, abs, mse"),
        ({"beta": 0.1}, "set `kl_coef`"),
        ({"mini_batch_size": 8}, "Completions of an optimizer step"),
        ({"init_kl_coef": 0.2, "kl_coef": 0.1}, "give one of them"),
        ({"sync_ref_model": True, "kl_coef": 0.0}, "with `kl_coef=0` there is none"),
        ({"replay_buffer_size": 4}, "an older policy's completions"),
        ({"kl_penalty": "full"}, "sums over the vocabulary"),
        ({"kl_penalty": "abs", "kl_estimator": "k3"}, "give one of them"),
        ({"use_score_norm": True}, "an option of `use_score_scaling`, which is off"),
        ({"score_clip": 0.0}, "score_clip"),
        ({"ratio_threshold": 5.0}, "`cliprange` bounds what a token can do"),
        ({"early_stopping": True}, "trained on `num_ppo_epochs` times"),
        ({"target_kl": 0.1}, "held by `adap_kl_ctrl` and `target`"),
    ],
)
def test_options_without_a_meaning_are_refused(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        config(tmp_path, **options)


def test_arguments_without_a_meaning_are_refused(tmp_path):
    with pytest.raises(ValueError, match="leave `data_collator` out"):
        trainer(tmp_path, data_collator=print)
    with pytest.raises(ValueError, match="`reward_model` or `reward_funcs`"):
        trainer(tmp_path, reward_model=tiny.reward_model())
    with pytest.raises(ValueError, match="pass it, or its name, as `model`"):
        PPOTrainer(config(tmp_path), tiny.tokenizer())
    with pytest.raises(ValueError, match="`kl_coef` is 0: a reference model"):
        trainer(tmp_path, ref_model=tiny.causal_lm(1), options={"kl_coef": 0.0})
    with pytest.raises(ValueError, match=r"num_labels=2. Load it with num_labels=1"):
        trainer(tmp_path, value_model=tiny.process_reward_model())


# ---- a run and a plain loop ----------------------------------------------------------------------------------------------

OPTIONS = {
    "num_mini_batches": 2, "num_ppo_epochs": 2, "kl_coef": 0.3, "adap_kl_ctrl": True, "target": 0.05, "horizon": 20.0,
    "whiten_rewards": True, "missing_eos_penalty": 0.7, "gamma": 0.98, "lam": 0.9, "cliprange": 0.05, "vf_coef": 0.5,
    "cliprange_value": 0.1, "temperature": 0.8, "total_episodes": 24, "learning_rate": 0.05, "optim": "sgd", "seed": 7,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "shuffle_dataset": False, "max_steps": -1,
}  # fmt: skip


def said(number: int) -> list[int]:
    """Completions of 1 to 5 tokens; some end by themselves."""
    ids = np.random.default_rng(number).integers(0, 250, 1 + number % 5).tolist()
    return ids if number % 3 == 0 else [*ids[: 1 + number % 4], END]


class PlainLoop:
    """PPO with one sequence at a time, full logits, Python's own numbers and an update by hand."""

    def __init__(self, policy: Any, value_model: Any, estimator: str) -> None:
        self.policy, self.reference, self.critic = policy, copy.deepcopy(policy), value_model
        self.head = None if value_model else torch.nn.Linear(tiny.SHAPE["hidden_size"], 1, dtype=torch.float64)
        if self.head is not None:
            torch.nn.init.zeros_(self.head.weight)
            torch.nn.init.zeros_(self.head.bias)
        self.coefficient, self.estimator = OPTIONS["kl_coef"], estimator
        self.parameters = [*policy.parameters(), *(value_model or self.head).parameters()]

    def asked(self, model: Any, sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs of the completion's tokens, the value before each of them)."""
        ids = torch.tensor(sample["prompt"] + sample["completion"])
        first = len(sample["prompt"])
        logits = model(input_ids=ids[None]).logits[0] / OPTIONS["temperature"]
        logps = logits.log_softmax(-1)[torch.arange(first - 1, len(ids) - 1), ids[first:]]
        body, head = (self.critic.model, self.critic.score) if self.critic else (model.model, self.head)
        hidden = body(input_ids=ids[None]).last_hidden_state[0, first - 1 : -1]
        return logps, head(hidden).squeeze(-1)

    def train(self, generations: list[list[dict[str, Any]]]) -> None:
        for number, samples in enumerate(generations):
            self.generated(samples)
            for epoch in range(OPTIONS["num_ppo_epochs"]):
                order = np.random.default_rng([OPTIONS["seed"], 8 * number, epoch]).permutation(len(samples))
                for part in (order[:4], order[4:]):
                    self.step([samples[place] for place in part])
            error = sum(sum(s["k1"]) for s in samples) / len(samples) / OPTIONS["target"] - 1
            self.coefficient *= 1 + min(max(error, -0.2), 0.2) * len(samples) / OPTIONS["horizon"]

    @torch.no_grad()
    def generated(self, samples: list[dict[str, Any]]) -> None:
        for s in samples:
            s["old"], s["V"] = (x.tolist() for x in self.asked(self.policy, s))
            reference = self.asked(self.reference, s)[0].tolist()
            s["k1"] = [old - ref for old, ref in zip(s["old"], reference)]
            k3 = [math.exp(-k) + k - 1 for k in s["k1"]]
            s["r"] = [-self.coefficient * k for k in (s["k1"] if self.estimator == "k1" else k3)]
            s["r"][-1] += checksum([s["completion"]])[0] - (0.7 if s["completion"][-1] != END else 0.0)
        mean, scale = self.moments([r for s in samples for r in s["r"]])
        for s in samples:
            s["r"] = [(r - mean) / scale + mean for r in s["r"]]
            later, value, s["A"] = 0.0, 0.0, []
            for r, v in zip(reversed(s["r"]), reversed(s["V"])):
                later = r + OPTIONS["gamma"] * value - v + OPTIONS["gamma"] * OPTIONS["lam"] * later
                value, s["A"] = v, [later, *s["A"]]
            s["R"] = [a + v for a, v in zip(s["A"], s["V"])]
        mean, scale = self.moments([a for s in samples for a in s["A"]])
        for s in samples:
            s["A"] = [(a - mean) / scale for a in s["A"]]

    @staticmethod
    def moments(values: list[float]) -> tuple[float, float]:
        mean = math.fsum(values) / len(values)
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) + 1e-8)

    def step(self, samples: list[dict[str, Any]]) -> None:
        total, tokens, eps, width = 0.0, 0, OPTIONS["cliprange"], OPTIONS["cliprange_value"]
        for s in samples:
            logps, values = self.asked(self.policy, s)
            for lp, v, old, gain, value, due in zip(logps, values, s["old"], s["A"], s["V"], s["R"]):
                ratio = torch.exp(lp - old)
                total = total + max(-gain * ratio, -gain * ratio.clamp(1 - eps, 1 + eps))
                total = total + OPTIONS["vf_coef"] / 2 * max(
                    (v - due) ** 2, (v.clamp(value - width, value + width) - due) ** 2
                )
                tokens += 1
        gradients = torch.autograd.grad(total / tokens, self.parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients):
                if gradient is not None:
                    parameter -= OPTIONS["learning_rate"] * gradient


@pytest.mark.parametrize(("critic", "estimator"), [("head", "k1"), ("model", "k3")])
def test_scripted_rollouts_train_as_a_plain_loop_in_float64(critic, estimator, tmp_path):
    policy = tiny.with_exact_norms(tiny.causal_lm(0, torch.float64))
    value_model = tiny.with_exact_norms(tiny.reward_model(3, torch.float64)) if critic == "model" else None
    loop = PlainLoop(*copy.deepcopy((policy, value_model)), estimator)
    engine = ScriptedEngine(lambda prompt: said(prompt.key), shuffle=3)
    options = {**OPTIONS, "kl_estimator": estimator}
    made = trainer(tmp_path, policy, options=options, engine=engine, value_model=value_model, train_dataset=prompts(24))
    made.train()
    assert made.state.global_step == 3 * 2 * 2

    tokenizer = tiny.tokenizer()
    written = [{"prompt": tokenizer(f"Say {n}")["input_ids"], "completion": said(n)} for n in range(24)]
    assert {w["completion"][-1] == END for w in written} == {True, False}
    loop.train([written[:8], written[8:16], written[16:]])
    assert made.controller.coefficient == pytest.approx(loop.coefficient, abs=1e-12)
    assert made.controller.coefficient != OPTIONS["kl_coef"]
    found = dict(made.model.named_parameters())
    before = dict(tiny.causal_lm(0, torch.float64).named_parameters())
    for name, parameter in loop.policy.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-9, msg=name)
        assert not torch.equal(found[name], before[name]), f"{name} was not trained"
    for name, parameter in (loop.critic or loop.head).named_parameters():
        torch.testing.assert_close(found[f"critic.{name}"], parameter, rtol=0, atol=1e-9, msg=name)


def test_the_first_ratio_is_1_and_the_log_has_the_names_of_trl(tmp_path):
    made = trainer(tmp_path, options={"missing_eos_penalty": 2.0, "max_steps": 3})
    made.train()
    first, second = made.state.log_history[:2]
    assert (first["val/ratio"], first["val/ratio_var"], first["policy/approxkl_avg"], first["objective/kl"]) == (
        1,
        0,
        0,
        0,
    )
    assert first["val/explained_variance"] == 0  # the first values are 0
    assert first["objective/scores"] == pytest.approx(first["reward"] - 2 * first["completions/clipped_ratio"])
    assert first["objective/rlhf_reward"] == pytest.approx(first["objective/scores"])
    assert first["val/num_eos_tokens"] == pytest.approx(8 * (1 - first["completions/clipped_ratio"]))
    assert first["loss"] == pytest.approx(first["loss/policy_avg"] + 0.1 * first["loss/value_avg"], rel=1e-5)
    assert (first["episode"], second["episode"], made.state.log_history[2]["episode"]) == (8, 8, 16)
    assert {
        "eps",
        "lr",
        "objective/entropy",
        "objective/non_score_reward",
        "policy/clipfrac_avg",
        "policy/entropy_avg",
    } <= {*first}
    assert {"val/clipfrac_avg", "objective/kl_coef"} <= {*first}
    assert second["val/ratio"] != 1
    assert second["val/ratio_var"] > 0


def test_a_completion_without_a_score_takes_no_part(tmp_path):
    def undecided(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
        return [None if sum(ids) % 2 else 1.0 for ids in completion_ids]

    made = trainer(tmp_path, reward=undecided, options={"reward_batching": "all"})
    loader = made.get_train_dataloader()
    window = loader.source.next_window()
    (collected,) = loader.source.take_finished()
    scored = [not math.isnan(rollout.reward) for rollout in collected.rollouts]
    assert {True, False} == set(scored)
    assert [unit is not None for unit in window] == scored
    tokens = np.concatenate([unit[0].read_trained(ADVANTAGES) for unit in window if unit is not None])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1, abs=1e-5)
    assert [unit[0].read_trained(RETURNS)[-1] for unit in window if unit is not None] == pytest.approx(
        [1.0] * sum(scored)
    )


def test_rewards_are_scaled_by_those_of_the_run_so_far(tmp_path):
    """Two generations: scores, then their divisor, are worked out by numpy; evaluation moves nothing, a checkpoint has it all."""
    scaling = {"use_score_scaling": True, "use_score_norm": True, "score_clip": 1.5, "missing_eos_penalty": 0.25}
    options = {"num_ppo_epochs": 1, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, **scaling}
    made = trainer(tmp_path, options=options, eval_dataset=prompts(3))
    windows, credit = [], made.credit
    made.credit = lambda table, totals: (
        windows.append((totals, table.truncated, credit(table, totals))) or windows[-1][2]
    )
    made.train()
    seen = np.zeros(0)
    for totals, truncated, scores in windows:
        seen = np.concatenate([seen, totals.numpy()])
        expected = np.clip((totals.numpy() - seen.mean()) / seen.std(ddof=1), -1.5, 1.5) - 0.25 * truncated.numpy()
        assert scores.numpy() == pytest.approx(expected, abs=1e-12)
    assert len(seen) == 16
    assert dataclasses.astuple(made.seen_rewards) == pytest.approx((16, seen.mean(), seen.var(ddof=1)))
    before = made.seen_rewards
    made.evaluate()
    assert made.seen_rewards == before
    again = trainer(tmp_path, options=options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.seen_rewards == before


def test_rewards_that_are_all_equal_are_not_divided(tmp_path):
    made = trainer(
        tmp_path, reward=lambda completions, **columns: [3.0] * len(completions), options={"use_score_scaling": True}
    )
    made.train()
    assert made.state.log_history[0]["objective/scores"] == 3


def test_another_token_may_end_a_completion(tmp_path):
    engine = ScriptedEngine(lambda prompt: [65, 66, 67, 68])
    made = trainer(tmp_path, engine=engine, options={"stop_token_id": 66, "missing_eos_penalty": 9.0})
    made.train()
    first = made.state.log_history[0]
    assert (first["completions/mean_length"], first["val/num_eos_tokens"]) == (2, 8)
    assert first["objective/scores"] == float((65 + 66) % 13)


def test_prompts_may_come_as_tokens(tmp_path):
    """As TRL's scripts prepare them, padded or not; rewards are given the text."""
    tokenizer, seen = tiny.tokenizer(), []

    def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.extend(prompts)
        return checksum(completion_ids)

    ids = [tokenizer(row["prompt"])["input_ids"] for row in prompts()]
    mask = [[0, 0] + [1] * len(one) for one in ids]
    padded = Dataset.from_dict({"input_ids": [[257, 257, *one] for one in ids], "attention_mask": mask})
    losses = []
    for name, data in {"text": prompts(), "ids": Dataset.from_dict({"input_ids": ids}), "padded": padded}.items():
        made = trainer(tmp_path / name, reward=reward, train_dataset=data, eval_dataset=data.select(range(2)))
        made.train()
        losses.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] == losses[2]
    assert set(seen) <= {row["prompt"] for row in prompts()}
    with pytest.raises(ValueError, match=r"(?s)input_ids.*9999"):
        trainer(tmp_path / "bad", train_dataset=Dataset.from_dict({"input_ids": [[1, 9999]]}))


def test_evaluation_moves_neither_the_controller_nor_the_order(tmp_path):
    made = trainer(tmp_path, options={"adap_kl_ctrl": True}, eval_dataset=prompts(3))
    found = made.evaluate()
    assert made.controller.coefficient == 0.05
    assert "eval_objective/kl" in found
    assert found["eval_reward"] == pytest.approx(made.evaluate()["eval_reward"])


# ---- the critic's weights ------------------------------------------------------------------------------------------------


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["head", "model"])
def test_the_critic_is_trained_and_saved_apart_from_the_policy(kind, with_adapter, tmp_path):
    named = {"value_model": tiny.reward_model(3)} if kind == "model" else {}
    before = {name: p.clone() for name, p in named["value_model"].named_parameters()} if named else {}
    made = trainer(tmp_path / "run", peft_config=lora() if with_adapter else None, **named)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    exported = {name for name, _ in exported_weights(made.model)}
    assert "model.norm.weight" in exported
    assert not [name for name in exported if "critic" in name]
    for path in (tmp_path / "saved").glob("*.safetensors"):
        if path.name != "value_head.safetensors":
            assert not [name for name in load_file(path) if "critic" in name], path
    if made.live.model is not made.model:
        assert not hasattr(innermost_model(made.live.model), "critic")
    if not with_adapter:
        plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not report["unexpected_keys"] | report["missing_keys"]
        ids = torch.arange(6)[None]
        torch.testing.assert_close(plain(ids).logits, made.model(input_ids=ids).logits.detach())
    if kind == "head":
        assert made.critic.weight.abs().sum() > 0
        again = trainer(tmp_path / "other", options={"value_model_path": str(tmp_path / "saved")})
    else:
        assert any(not torch.equal(p, before[name]) for name, p in made.critic.named_parameters())
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "value_model")
        assert loaded.config.num_labels == 1
        again = trainer(tmp_path / "other", value_model=str(tmp_path / "saved"))
    for (name, one), other in zip(made.critic.state_dict().items(), again.critic.state_dict().values()):
        assert torch.equal(one, other), name


def test_a_saved_critic_that_does_not_fit_is_refused(tmp_path):
    made = trainer(tmp_path / "run")
    made.save_model(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"does not fit this critic: weight is missing or has another shape"):
        trainer(tmp_path / "other", tiny.causal_lm(hidden_size=32), value_model=str(tmp_path / "saved"))


def test_the_best_checkpoint_has_policy_and_critic_of_one_step(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    made = trainer(tmp_path, options=options | best | {"learning_rate": 1e-2}, eval_dataset=prompts(3))
    made.train()
    saved = load_file(f"{made.state.best_model_checkpoint}/value_head.safetensors")
    assert torch.equal(made.critic.weight, saved["weight"])
    policy = load_file(f"{made.state.best_model_checkpoint}/model.safetensors")
    assert torch.equal(made.model.model.norm.weight, policy["model.norm.weight"])


# ---- learning ------------------------------------------------------------------------------------------------------------


def low_bytes(completion_ids: list[list[int]], bonus: list[float], **kwargs: Any) -> list[float]:
    """What the policy can raise, and what only the prompt decides: a critic should foresee that part."""
    return [sum(i < 64 for i in ids) / len(ids) + more for ids, more in zip(completion_ids, bonus)]


@pytest.mark.parametrize("vf_coef", [0.5, 0.0], ids=["learns", "control"])
def test_rewards_rise_and_values_foresee_them(vf_coef, tmp_path):
    rows = [{"prompt": ("evil", "good")[number % 2], "bonus": float(number % 2)} for number in range(64)]
    options = {
        "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "num_mini_batches": 2, "num_ppo_epochs": 4,
        "max_steps": 96, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "vf_coef": vf_coef, "cliprange_value": 0.5,
        "temperature": 1.0, "kl_coef": 0.01, "response_length": 6, "disable_tqdm": True,
    }  # fmt: skip
    made = trainer(tmp_path, reward=low_bytes, options=options, train_dataset=Dataset.from_list(rows))
    made.train()
    generations = [entry for entry in made.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in generations]
    explained = [entry["val/explained_variance"] for entry in generations]
    assert explained[0] == 0
    if vf_coef:
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
        assert min(explained[-3:]) > 0.5, explained
    else:
        assert max(explained) < 0.1, explained


@pytest.mark.slow
@pytest.mark.parametrize("controlled", [True, False], ids=["controlled", "control"])
def test_the_controller_holds_the_divergence_near_its_target(controlled, tmp_path):
    """Of a completion, over 30 generations whose reward pulls away from the reference; without it the divergence grows sixfold."""
    follows = (
        {"adap_kl_ctrl": True, "target": 2.0, "horizon": 100.0, "kl_coef": 0.2} if controlled else {"kl_coef": 0.02}
    )
    options = {
        "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "num_mini_batches": 2, "num_ppo_epochs": 4,
        "max_steps": 240, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "vf_coef": 0.5, "cliprange_value": 0.5,
        "temperature": 1.0, "response_length": 6, "disable_tqdm": True,
    }  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"say {number}", "bonus": 0.0} for number in range(64)])

    def tripled(**given: Any) -> list[float]:
        return [3 * value for value in low_bytes(**given)]

    made = trainer(tmp_path, reward=tripled, options=options | follows, train_dataset=rows)
    made.train()
    generations = [entry for entry in made.state.log_history if "reward" in entry]
    divergences = [entry["objective/kl"] for entry in generations]
    late = sum(divergences[-3:]) / 3
    assert 1 < late < 4 if controlled else late > 8, divergences
    assert generations[-1]["reward"] > generations[0]["reward"] + 0.5
    assert (generations[-1]["objective/kl_coef"] > 0.2) == controlled
