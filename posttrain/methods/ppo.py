"""Proximal policy optimisation with a critic."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.core.sample import Sample, Unit
from posttrain.data.rows.formats import PROMPT_ONLY, TOKENISED_PROMPT
from posttrain.losses.formulas import PPO_FORMULAS, Formula, Totals, filled, number, old_policy_names
from posttrain.losses.gae import (
    KL_ESTIMATORS,
    KLController,
    Moments,
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_loss,
    whitened,
)
from posttrain.losses.policy import PolicyTokens, clipped, token_ratios
from posttrain.models import critic as critics
from posttrain.models.inference import evaluating
from posttrain.models.load.model import innermost_model
from posttrain.models.load.reference import PRECOMPUTED
from posttrain.models.scoring.heads import SEQUENCE_REWARD
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.collector import Collected, GroupTable
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, RETURNS, VALUES, Rollout
from posttrain.trainer.checkpoints.snapshot import write_json, write_tensors
from posttrain.trainer.online.agents import make_agents
from posttrain.trainer.online.rollout_metrics import as_tensors
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.ppo import PPOConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.step.gathering import summed_over_processes


class PPOTrainer(OnlineTrainer):
    """Proximal policy optimisation (arXiv:1707.06347): clipped steps on advantages of single tokens, estimated with a critic."""

    method, title = "ppo", "proximal policy optimisation"
    paper = Paper(
        "schulman2017proximal", "Proximal Policy Optimization Algorithms",
        "Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg",
        2017, "1707.06347",
    )  # fmt: skip
    config_class = PPOConfig
    formats = (PROMPT_ONLY, TOKENISED_PROMPT)
    needs_old_logps = True

    def __init__(
        self,
        args: PPOConfig | None = None,
        processing_class: Any = None,
        model: str | Path | nn.Module | None = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[Any] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        tools: Any = None,
        environment_factory: Any = None,
        **named: Any,
    ) -> None:
        """`reward_model` is a classifier (id, folder or module); `reward_funcs`, `tools` and `environment_factory` are GRPO's."""
        if data_collator is not None:
            raise ValueError("PPOTrainer makes batches of its own completions: leave `data_collator` out.")
        if reward_model is not None and reward_funcs is not None:
            raise ValueError("Give `reward_model` or `reward_funcs`; a list of rewards may hold models and functions.")
        rewards = reward_funcs if reward_model is None else reward_model
        if isinstance(args, PPOConfig):
            model = args.sft_model_path if model is None else model
            rewards = args.reward_model_path if rewards is None else rewards
            value_model = args.value_model_path if value_model is None else value_model
        if model is None:
            raise ValueError("PPOTrainer trains the model that it is given: pass it, or its name, as `model`.")
        if isinstance(reward_model, nn.Module) and reward_processing_classes is None:
            reward_processing_classes = [processing_class]
        self._value_source = value_model
        self.agents = make_agents(tools, environment_factory, named.get("rollout_func"))
        data = (train_dataset, eval_dataset, processing_class, reward_processing_classes)
        loading = {"peft_config": peft_config, "ref_model": ref_model, **named}
        super().__init__(model, rewards, args, *data, callbacks, optimizers, **loading)
        target = self.args.target if self.args.adap_kl_ctrl else None
        self.controller = KLController(self.args.kl_coef, target, self.args.horizon)
        self.seen_rewards = Moments(0, 0.0, 0.0)  # of the run so far, where rewards are scaled by them

    def step(self, *given: Any, **named: Any) -> None:
        """Of the trainer that TRL had up to 0.11."""
        raise TypeError(
            "PPOTrainer.step(queries, responses, scores) is the program that TRL had up to 0.11. This trainer writes and scores "
            "completions itself: give it prompts and a reward, and call `train()`."
        )

    # ---- the critic --------------------------------------------------------------------------------------------------

    @property
    def critic(self) -> nn.Module:
        return getattr(innermost_model(self.model), critics.CRITIC)

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        """The critic comes last: neither the reference nor the adapter has a part of it."""
        super().prepare_reference(ref_model, policy)
        source = self._value_source
        folder = None if source is None or isinstance(source, nn.Module) else critics.saved_head(source)
        if source is None or folder is not None:
            critic = critics.value_head(self.model)
        else:
            source = source if isinstance(source, nn.Module) else critics.classifier_folder(source)
            critic = critics.as_critic(self.reference_setup().loaded_beside(source, SEQUENCE_REWARD))
        critics.attach_critic(self.model, critic)
        if folder is not None:
            critics.load_critic(critic, folder)

    def policy_columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        with evaluating(self.model):
            scores = self.score(self.model_wrapped, batch, ())
        return {OLD_LOGPS: scores.logps, VALUES: scores.values}

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        values = critics.value_question(self.critic, batch)
        return score_tokens(
            model, batch, stats, also=(values,), temperature=self.args.temperature, **self.scoring_options()
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy as `save_pretrained` writes it, and the critic apart from it. To be called by all processes."""
        folder, critic = Path(output_dir or self.args.output_dir), self.critic
        tensors = critics.critic_tensors(critic)
        if self.args.should_save:
            path = critics.critic_file(critic, folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, tensors, {"format": "pt"})
            if hasattr(critic, "config"):
                config = critic.config.to_diff_dict() | {"architectures": [type(critic).__name__]}
                write_json(path.parent / "config.json", config)
        super().save_model(output_dir, _internal_call)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self.is_fully_sharded:  # shards come with the optimizer's
            critics.load_critic(self.critic, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if not self.is_fully_sharded:
            critics.load_critic(self.critic, Path(self.state.best_model_checkpoint))
        super()._load_best_model()

    def identity_parts(self) -> dict[str, Any]:
        critic = self.critic
        kind = "linear head" if isinstance(critic, nn.Linear) else type(critic).__name__
        return super().identity_parts() | {"critic": kind}

    # ---- rewards and advantages --------------------------------------------------------------------------------------

    @property
    def stop_ids(self) -> tuple[int, ...]:
        more = self.args.stop_token_id
        return super().stop_ids if more is None else tuple(dict.fromkeys((*super().stop_ids, more)))

    def annotated(self, rollouts: list[Rollout]) -> None:
        for sample in [rollout.sample for rollout in rollouts]:
            if self.needs_reference:
                difference = sample.read_trained(OLD_LOGPS).astype(np.float64) - sample.read_trained(PRECOMPUTED)
                sample.scalars["kl_sum"] = float(difference.sum())

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """(N,) scores: what the last token of a completion is given. Advantages are those of tokens (see `spread`).

        All processes have all rewards, and so the same moments. What is scaled now is among what it is scaled by.
        """
        if self.args.use_score_scaling:
            moments = self.seen_rewards.joined(Moments.of(totals[~totals.isnan()]))
            centre = moments.mean if self.args.use_score_norm else 0.0
            totals = (totals - centre) / (moments.variance**0.5 or 1.0)
        if self.args.score_clip is not None:
            totals = totals.clamp(-self.args.score_clip, self.args.score_clip)
        if self.args.missing_eos_penalty is not None:
            totals = totals - self.args.missing_eos_penalty * table.truncated
        return totals.nan_to_num(0.0)

    def spread(self, rollouts: list[Rollout]) -> None:
        """Advantages and returns of the tokens of a generation. Collective: what is whitened is whitened over all processes."""
        args, scored = self.args, [rollout for rollout in rollouts if is_scored(rollout)]
        samples = [rollout.sample for rollout in scored]
        counts = torch.tensor([sample.num_trained for sample in samples], dtype=torch.long)
        scores = torch.tensor([rollout.advantage for rollout in scored], dtype=torch.float64)
        values = self._flat(samples, VALUES)
        rewards = token_rewards(scores, counts, self._divergences(samples), self.controller.coefficient)
        if args.whiten_rewards:
            rewards = whitened(rewards, keep_mean=True, summed=self._summed)
        advantages, returns = generalised_advantages(rewards, values, counts, args.gamma, args.lam)
        columns = {ADVANTAGES: whitened(advantages, summed=self._summed), RETURNS: returns}
        for name, column in columns.items():
            for sample, part in zip(samples, torch.split(column, counts.tolist())):
                sample.write_trained(name, part.numpy().astype(sample.per_token[OLD_LOGPS].dtype))
        for rollout in scored:  # to look at
            tokens = rollout.sample.read_trained(ADVANTAGES)
            rollout.advantage = float(tokens.mean()) if len(tokens) else 0.0

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        """Without a score there is nothing that a token could be worth."""
        return [(rollout.sample,) if is_scored(rollout) else None for group in groups for rollout in group]

    def _flat(self, samples: list[Sample], name: str) -> Tensor:
        columns = [sample.read_trained(name) for sample in samples]
        return torch.from_numpy(np.concatenate([np.zeros(0), *columns]))

    def _divergences(self, samples: list[Sample]) -> Tensor:
        old = self._flat(samples, OLD_LOGPS)
        if not self.needs_reference:
            return torch.zeros_like(old)
        return KL_ESTIMATORS[self.args.kl_estimator](old, self._flat(samples, PRECOMPUTED))

    def _summed(self, sums: Tensor) -> Tensor:
        return summed_over_processes(sums, self.args)

    # ---- the loss ----------------------------------------------------------------------------------------------------

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        nothing = torch.zeros_like(policy.logps.detach())
        column = {name: batch.per_token.get(name, nothing) for name in (ADVANTAGES, RETURNS, VALUES)}
        old_logps = self.proximal_logps(batch, policy.logps)
        age = self.age_weights(batch, old_logps)
        tokens = PolicyTokens(batch, policy.logps, old_logps, column[ADVANTAGES], age)
        ratios = token_ratios(tokens)
        gains, clips = clipped(tokens, ratios, epsilon=self.args.cliprange)
        gains = tokens.weighted(gains)
        errors, held = value_loss(policy.values, column[VALUES], column[RETURNS], self.args.cliprange_value)
        ratio = ratios.tokens.detach()
        metrics = {
            "policy/approxkl_avg": ratios.log_tokens.detach().square() / 2,
            "policy/clipfrac_avg": clips["clip_ratio/region_mean"],
            "loss/policy_avg": gains.detach(),
            "loss/value_avg": errors.detach(),
            "val/clipfrac_avg": held,
            "val/ratio": ratio,
            "val/ratio_var": (ratio - 1).square(),
        }
        if "entropy" in policy.stats:
            metrics["policy/entropy_avg"] = policy.stats["entropy"]
        return LossOutput([LossTerm(gains, "token"), LossTerm(errors, "token", self.args.vf_coef)], metrics=metrics)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        values = {"below": 1 - args.cliprange, "above": 1 + args.cliprange, **vars(args)}
        divergence = filled(PPO_FORMULAS[args.kl_estimator], values) if args.kl_coef else ""
        penalty = f" - {number(args.missing_eos_penalty)} (where it was cut off)" if args.missing_eos_penalty else ""
        follows = f"; the weight follows a divergence of {number(args.target)}" if args.adap_kl_ctrl else ""
        white = ", then scaled to deviation 1 over the generation" if args.whiten_rewards else ""
        names = (
            ("rho", "p / p_old"),
            ("A", filled(PPO_FORMULAS["advantage"], values)),
            ("R", "A before it was whitened + V, with V the value v at the time of generation"),
            ("r", f"{divergence}{score_formula(args)}{penalty}, at the last token{follows}{white}"),
        )
        divided = f"sum over tokens / {totals['tokens']} trained tokens of the optimizer step"
        terms = tuple(filled(PPO_FORMULAS[name], values) for name in ("policy", "value"))
        return Formula(terms, (divided,), names + old_policy_names(args))

    # ---- the log, and what is remembered -----------------------------------------------------------------------------

    def _measure(self, collected: Collected, mode: str) -> None:
        super()._measure(collected, mode)
        table, known = collected.table, ~collected.totals.isnan()
        self.metrics.add(mode, as_tensors(self._objective(collected, known)))
        if mode == "train":  # once a generation: its numbers were made with the coefficient before
            self._written += len(known)
            if self.args.use_score_scaling:
                self.seen_rewards = self.seen_rewards.joined(Moments.of(collected.totals[known]))
            self.controller.observe(float(table.kl_sums[known].mean()) if known.any() else 0.0, int(known.sum()))

    def _objective(self, collected: Collected, known: Tensor) -> dict[str, Any]:
        table, scores = collected.table, collected.advantages
        samples = [rollout.sample for rollout in collected.rollouts if is_scored(rollout)]
        mine = table.mine[known[table.mine]]
        sizes = [sample.num_trained for sample in samples]
        coefficient = self.controller.coefficient
        penalties = [-coefficient * part.sum().item() for part in torch.split(self._divergences(samples), sizes)]
        values, returns = (self._flat(samples, name) for name in (VALUES, RETURNS))
        return {
            "objective/kl": table.kl_sums[mine],
            "objective/kl_coef": coefficient,
            "objective/entropy": [-float(sample.read_trained(OLD_LOGPS).sum()) for sample in samples],
            "objective/non_score_reward": penalties,
            "objective/rlhf_reward": [a + b for a, b in zip(penalties, scores[mine].tolist())],
            "objective/scores": scores[mine],
            "val/num_eos_tokens": float((known & ~table.truncated).sum()),
            "val/explained_variance": explained_variance(values, returns, self._summed),
        }

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._began, self._written = time.perf_counter(), 0
        return super().train(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs and self.loader is not None:
            episodes = self.loader.source.prompts.taken * self.args.num_generations
            speed = self._written / max(time.perf_counter() - self._began, 1e-9)
            logs |= {"lr": logs["learning_rate"], "episode": episodes, "eps": speed}
        super().log(logs, start_time)

    def method_state(self) -> dict[str, Any]:
        scaled = {"rewards": asdict(self.seen_rewards)} if self.args.use_score_scaling else {}
        return self.controller.state() | scaled

    def load_method_state(self, state: dict[str, Any]) -> None:
        self.controller.load(state)
        if "rewards" in state:  # not where scaling was turned on since
            self.seen_rewards = Moments(**state["rewards"])


def score_formula(args: PPOConfig) -> str:
    """What is made of a reward, in words."""
    score = "(score - mean of the run)" if args.use_score_norm else "score"
    score = f"{score} / deviation of the run" if args.use_score_scaling else score
    return score if args.score_clip is None else f"clip({score}, -{number(args.score_clip)}, {number(args.score_clip)})"


def is_scored(rollout: Rollout) -> bool:
    """Whether a completion takes part: it was written, and a reward had an opinion about it."""
    return not rollout.masked and not np.isnan(rollout.reward)
