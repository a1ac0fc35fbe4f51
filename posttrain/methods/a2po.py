"""A*-PO: regression of the policy's log-ratio to the reference on the advantage over the optimal value of a prompt."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.options import refused
from posttrain.core.processes import of_every_process
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import Unit
from posttrain.losses.formulas import Formula, Totals, number
from posttrain.models.load.adapters import is_peft_model
from posttrain.rollout.collector import GroupTable, RolloutCollector
from posttrain.rollout.eval_loader import runs_of_rows
from posttrain.rollout.loader import RolloutLoader
from posttrain.rollout.rollout import POLICY, REFERENCE, Request, Rollout
from posttrain.rollout.source import PromptStream
from posttrain.trainer.checkpoints.checkpoint import best_effort
from posttrain.trainer.checkpoints.run_state import RunIdentity, load_method_state
from posttrain.trainer.checkpoints.snapshot import write_json
from posttrain.trainer.online.authors import other_authors
from posttrain.trainer.online_trainer import FAILURES, OnlineTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import PromptLengthConfig
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.step.gathering import any_process

logger = logging.getLogger(__name__)

ADVANTAGE, V_STAR = "advantage", "v_star"
"""Scalars of a sample: r - V*, and V* of its row. In evaluation there is no V*."""
VALUES_FILE = "v_star.json"
"""In the output folder: V*, for a run that is stopped before its first checkpoint."""
VALUE_SEED = 0x0A2B0  # the samples of stage 1 are drawn with other numbers than those that are trained on
MOVES = "V* was estimated from the reference as the run began: a reference that moves would leave it behind."
REPLACES = "A completion whose advantage is 0 teaches, too: it holds the policy near the reference."


@dataclass
class A2POConfig(PromptLengthConfig, OnlineConfig):
    """Options of A*-PO."""

    learning_rate: float = option(5e-5, "Initial learning rate of AdamW.")
    num_value_samples: int = option(
        8, "Completions of each training row that the reference writes before the first step, for V* of the row."
    )
    beta1: float = option(
        0.5, "Temperature of V*: towards 0 it is the best reward of those completions, far above 1 the mean."
    )
    beta2: float = option(1e-3, "What the log-ratio of policy and reference is multiplied by, in the regression.")
    filter_all_incorrect: bool = option(
        True, "Rows whose completions by the reference all have a reward of 0 are left out of training."
    )
    num_generations: int = option(1, "Completions of each prompt in a generation.")
    top_k: int | None = option(None, "Sample from this many most likely tokens. None or 0: all.")
    beta: float = refused(0.0, "A*-PO has two: `beta1`, of V*, and `beta2`, of the regression.")
    sync_ref_model: bool = refused(False, MOVES)
    ref_model_mixup_alpha: float = refused(0.6, MOVES)
    ref_model_sync_steps: int = refused(512, MOVES)
    drop_zero_variance: bool = refused(False, REPLACES)
    refill_rounds: int = refused(4, REPLACES)
    replay_buffer_size: int = refused(0, REPLACES)

    smallest_group = 1
    has_reference = True

    def __post_init__(self) -> None:
        self.top_k = self.top_k or 0
        super().__post_init__()
        check_range("num_value_samples", self.num_value_samples, 1)
        check_range("beta1", self.beta1, 0, open_low=True)
        check_range("beta2", self.beta2, 0, open_low=True)
        if self.metric_for_best_model in ("loss", "eval_loss"):
            raise ValueError(
                "A2PO has no loss in evaluation, where V* is not estimated: set `metric_for_best_model='reward'` (and "
                "`greater_is_better=True`)."
            )


def optimal_value(rewards: Tensor, beta1: float) -> float:
    """V* = beta1 * log(mean(exp(r / beta1))) over the rewards of the reference's completions of a prompt (arXiv:2505.20686).

    The largest is taken out first: equal rewards give exactly their value, and nothing overflows.
    """
    largest = rewards.max()
    return float(largest + beta1 * ((rewards - largest) / beta1).exp().mean().log())


class A2POTrainer(OnlineTrainer):
    """A*-PO (arXiv:2505.20686). V* of each row is estimated before the first step; then loss = (beta2 * l - (r - V*))**2."""

    method, title = "a2po", "A*-PO: policy optimisation with the optimal value of each prompt"
    paper = Paper(
        "brantley2025accelerating", "Accelerating RL for LLM Reasoning with Optimal Advantage Regression",
        "Brantley, Kiant{\\'e} and Chen, Mingyu and Gao, Zhaolin and Lee, Jason D. and Sun, Wen and others",
        2025, "2505.20686",
    )  # fmt: skip
    config_class = A2POConfig
    needs_old_logps = False
    values: dict[str, Tensor] | None = None  # of every row: V* (NaN: unknown), and whether it is trained on
    evaluates = False
    has_graded = False  # whether a reward other than 0 and 1 was reported

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: A2POConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **named: Any,
    ) -> None:
        """Arguments in TRL's order; further ones are OnlineTrainer's, by name (`ref_model`, `peft_config`, `engine`, ...)."""
        data = (train_dataset, eval_dataset, processing_class)
        super().__init__(model, reward_funcs, args, *data, callbacks=callbacks, optimizers=optimizers, **named)
        if self.value_author != POLICY:
            self.collector.writer.others |= other_authors(self, {self.value_author})

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        super().prepare_reference(ref_model, policy)
        is_same = ref_model is None and begins_as_reference(self.model, policy)
        self.value_author = POLICY if is_same else REFERENCE

    def _refuse_stream(self, name: str) -> None:
        if name == "train":
            raise ValueError(
                "`train_dataset` is a stream; A2PO estimates a value for each of its rows before the first step. Give a "
                "datasets.Dataset, such as Dataset.from_list(list(stream.take(10_000)))."
            )
        super()._refuse_stream(name)

    # ---- stage 1: V* of each row -------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> RolloutLoader:
        """Trainer asks for it before the first step, and for its length: rows that are left out must be known by then."""
        if self.train_dataset is not None and self.collector is not None:
            if self.lifecycle.resumed_from is not None:
                self.load_method_state(load_method_state(self.lifecycle.resumed_from, self.method_state()))
            elif self.values is None:
                self._refuse_moving_reference()
                self.values = self._remembered() or self._estimated()
        loader = super().get_train_dataloader()
        if self.values is not None:
            kept = self.values["kept"].nonzero()[:, 0].tolist()
            source = getattr(loader.source, "prompts", loader.source)
            source.order = PromptStream(len(kept), self.args.seed, self.args.shuffle_dataset, kept)
        return loader

    def _refuse_moving_reference(self) -> None:
        for callback in self.callback_handler.callbacks:
            if getattr(callback, "update_ref_model", False):
                raise ValueError(f"{type(callback).__name__} has `update_ref_model=True`. {MOVES} Turn it off.")

    def _estimated(self) -> dict[str, Tensor]:
        """V* of every row, from completions of the reference. All processes have all rewards, and so the same values."""
        args, rows = self.args, self.train_dataset
        collector = RolloutCollector(
            self.collector.writer, self.rewards, ValueSampling(self), args.world_size, self.collector.release
        )
        params = args.sampling(self.stop_ids)
        params = replace(params, seed=params.seed ^ VALUE_SEED)
        found = torch.full((len(rows),), math.nan, dtype=torch.float64)
        all_incorrect = torch.zeros(len(rows), dtype=torch.bool)
        failures: Counter[str] = Counter()
        for run in runs_of_rows(len(rows), args.process_index, args.world_size):
            requests = [Request(row, row, sample) for row in run for sample in range(args.num_value_samples)]
            collected = collector.collect(requests, rows, params)
            totals, numbers = collected.totals, collected.table.groups
            self._report_graded(totals)
            failures.update(collected.table.failures)
            for row in numbers[~totals.isnan()].unique().tolist():
                rewards = totals[(numbers == row) & ~totals.isnan()]
                found[row], all_incorrect[row] = optimal_value(rewards, args.beta1), bool((rewards == 0).all())
            self._leave_if_signalled()
            logger.info(f"V* of {int((~found.isnan()).sum()):,} of {len(rows):,} rows is estimated.")
        kept = ~found.isnan() & ~(all_incorrect & args.filter_all_incorrect)
        self._report(found, kept)
        for kind, count in failures.items():
            self.metrics.count(f"{FAILURES}{kind}", count)
        values = {"v_star": found, "kept": kept}
        self._remember(values, failures)
        return values

    def _remembered(self) -> dict[str, Tensor] | None:
        """What stage 1 of this run has found, where the run was stopped before its first checkpoint. Else what an earlier run has
        left is deleted: a resume of this one would take it for its own."""
        path, found = Path(self.args.output_dir) / VALUES_FILE, None
        if self.args.should_save and self.is_in_train and path.exists():
            if self.lifecycle.continues:
                found = self._usable(path)
            if found is None:
                path.unlink()
        found = of_every_process(found, self.args.world_size)[0]
        if found is None:
            return None
        logger.info(f"V* of {len(found['v_star']):,} rows was estimated before the run was stopped: {path}.")
        for kind, count in found["failures"].items():
            self.metrics.count(f"{FAILURES}{kind}", count)
        return {"v_star": torch.tensor(found["v_star"], dtype=torch.float64), "kept": torch.tensor(found["kept"])}

    def _usable(self, path: Path) -> dict[str, Any] | None:
        """What the file holds; None, with the reason in the log, where it is damaged or of another run."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            changes = self.identity().differences(RunIdentity(**found["identity"]), [])
        except (ValueError, KeyError, TypeError) as error:  # other processes wait for what this one has read
            changes = [f"it cannot be read: {error}"]
        if not changes:
            return found
        logger.warning(f"{path} is not of this run ({changes[0]}): V* is estimated again.")
        return None

    def _remember(self, values: dict[str, Tensor], failures: dict[str, int]) -> None:
        """Whole or absent: written beside its place and renamed. JSON has every digit of a float."""
        if not (self.args.should_save and self.is_in_train):
            return
        path = Path(self.args.output_dir) / VALUES_FILE
        kept = {"identity": asdict(self.identity()), "failures": failures}
        kept |= {name: v.tolist() for name, v in values.items()}
        with best_effort(
            f"{path}, without which a run that is resumed before its first checkpoint estimates V* again,"
        ):
            write_json(path.with_suffix(".tmp"), kept)
            os.replace(path.with_suffix(".tmp"), path)

    def _leave_if_signalled(self) -> None:
        """Of any process: there is no step to finish and nothing to save yet."""
        stop = self.lifecycle.stop_signal
        if any_process(stop is not None, self.args):
            logger.warning(
                "Stopped while V* was estimated: nothing is trained yet, and the run starts from its beginning."
            )
            raise SystemExit(128 + (stop or signal.SIGTERM))

    def _report(self, found: Tensor, kept: Tensor) -> None:
        unknown, rows = int(found.isnan().sum()), len(found)
        if unknown:
            logger.warning(
                f"{unknown:,} of {rows:,} rows have no V* and are not trained on: none of their {self.args.num_value_samples} "
                "completions by the reference got a reward."
            )
        if not kept.any():
            why = "no completion by the reference got a reward"
            if unknown < rows:
                why = f"the reference has solved none in {self.args.num_value_samples} tries (`filter_all_incorrect`)"
            raise ValueError(
                f"No row of `train_dataset` is left to train on: {why}. Check the rewards, raise `num_value_samples`, or train the "
                "model on such tasks first."
            )
        logger.info(
            f"V* is {found[kept].mean():.3f} in the mean over the {int(kept.sum()):,} rows that are trained on."
        )

    def _report_graded(self, totals: Tensor) -> None:
        graded = totals[~totals.isnan() & (totals != 0) & (totals != 1)]
        if len(graded) and not self.has_graded:
            self.has_graded = True
            logger.warning(
                f"A reward is {float(graded[0]):g}. A*-PO was made for rewards of 0 and 1: with others V* depends on their scale "
                "against `beta1`, and `filter_all_incorrect` leaves out only rows whose rewards are exactly 0."
            )

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        lines, samples = super().plan_lines(max_steps), self.args.num_value_samples
        if self.values is None:
            return lines
        kept = self.values["kept"]
        line = f"V* from {samples} completions of each row by the reference; {int(kept.sum()):,} of {len(kept):,} rows are kept"
        return lines | {"values": line}

    def method_state(self) -> dict[str, Any]:
        return self.values or {"v_star": torch.zeros(0), "kept": torch.zeros(0)}

    def load_method_state(self, state: dict[str, Any]) -> None:
        saved, rows = len(state["v_star"]), len(self.train_dataset)
        if saved != rows:
            raise ValueError(
                f"The checkpoint has V* of {saved:,} rows, and `train_dataset` has {rows:,}: which value belongs to which row is "
                "not known. Resume with the rows of that run, or start a new one from its model."
            )
        self.values = {"v_star": state["v_star"].double(), "kept": state["kept"].bool()}

    # ---- stage 2: one completion, and the regression -----------------------------------------------------------------

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """r - V* of the row; 0 without a reward, and in evaluation."""
        if self.evaluates:
            return torch.zeros_like(totals)
        self._report_graded(totals)
        order = self.loader.source.prompts.order
        rows = [order.row(group) for group in table.groups.tolist()]
        return (totals - self.values["v_star"][rows]).nan_to_num(nan=0.0)

    def spread(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            rollout.sample.scalars[ADVANTAGE] = rollout.advantage
            if not self.evaluates:
                rollout.sample.scalars[V_STAR] = float(self.values["v_star"][rollout.request.row])

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        """What has no reward is left out: an advantage of 0 would hold it near the reference."""
        rollouts = [rollout for group in groups for rollout in group]
        return [None if one.masked or math.isnan(one.reward) else (one.sample,) for one in rollouts]

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        implicit = self.args.beta2 * batch.sequence_sum(policy.logps - reference.logps)
        advantages = batch.scalars.get(ADVANTAGE, torch.zeros_like(implicit)).to(implicit)
        values = (implicit - advantages) ** 2 * (batch.counts > 0)  # what was cut off may train no token
        metrics = {"implicit_reward": implicit.detach()} if ADVANTAGE in batch.scalars else {}
        if V_STAR in batch.scalars:
            metrics |= {"advantage": advantages, "v_star": batch.scalars[V_STAR].to(implicit)}
        return LossOutput(values, per="sequence", metrics=metrics)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Rewards and divergence. There is no loss: V* of evaluation prompts is not estimated."""
        self.evaluates = True
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self.evaluates = False
        output.metrics.pop(f"{metric_key_prefix}_loss", None)
        return output

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        beta1 = number(args.beta1)
        names = (
            ("l", "sum_t(log(p / p_ref))"),
            ("A", "r - V*"),
            ("V*", f"{beta1} * log(mean(exp(r' / {beta1}))) over the rewards r' of {args.num_value_samples} completions of the row "
                   "by the reference, before the first step"),
        )  # fmt: skip
        divided = f"sum over completions / {totals['sequences']} completions of the step"
        return Formula((f"({number(args.beta2)} * l - A)**2",), (divided,), names)


class ValueSampling:
    """MethodHooks of stage 1: completions of the reference that get rewards, and are not trained on."""

    def __init__(self, trainer: A2POTrainer) -> None:
        self.state, self.author = trainer.state, trainer.value_author

    def author_of(self, request: Request) -> str:
        return self.author

    def annotate(self, rollouts: list[Rollout]) -> None:
        """No log-prob is needed."""

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        return torch.zeros_like(totals)

    def spread(self, rollouts: list[Rollout]) -> None:
        """Nothing is trained."""

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        return []


def begins_as_reference(model: nn.Module, policy: Any) -> bool:
    """Whether `model`, before its first step, says what a reference made of `policy` says; its engine can then write for both."""
    if not is_peft_model(model) or (isinstance(policy, nn.Module) and is_peft_model(policy)):
        return True  # the reference is a copy of the model, or of the adapter that is trained further
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    return all("lora_A" in name or ("lora_B" in name and not weight.any()) for name, weight in trained)
