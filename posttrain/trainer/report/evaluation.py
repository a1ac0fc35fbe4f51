"""EvaluatingTrainer: the loss of an evaluation is that of all of its rows as one batch."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from posttrain.core.batch import StepTotals, TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.trainer.step.metrics import MetricStore


class EvaluatingTrainer(transformers.Trainer):
    """transformers.Trainer whose evaluation does not depend on how its rows are cut into batches."""

    metrics: MetricStore
    _eval_terms: list[tuple[list[tuple[Tensor, str]], StepTotals]]  # of each batch: sums and what they are divided by

    def _loss_output(self, model: nn.Module, batch: TokenBatch, mode: str) -> tuple[LossOutput, TokenScores]:
        """What the method makes of a batch. Implemented by BaseTrainer."""
        raise NotImplementedError

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Check and encode a dataset. Implemented by BaseTrainer."""
        raise NotImplementedError

    def evaluation_rows(self, eval_dataset: Any) -> Any:
        """What is evaluated on: a dataset that is given now, or one of the trainer's own by its name, or that one."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        rows = self.eval_dataset if eval_dataset is None else self._prepared(eval_dataset, "eval")
        if rows is None:
            raise ValueError(f"{type(self).__name__}.evaluate() needs an `eval_dataset`.")
        reference = getattr(self, "reference", None)
        return rows if reference is None else reference.annotated(rows)

    def prediction_step(
        self, model: nn.Module, inputs: TokenBatch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Any, Any]:
        batch = self._prepare_inputs(inputs)
        with torch.no_grad():
            output, policy = self._loss_output(model, batch, "eval")
        sums = [term.weight * term.values.sum() for term in output.terms]
        self._eval_terms.append(([*zip(sums, [term.per for term in output.terms])], batch.totals()))
        predictions, labels = (None, None) if prediction_loss_only else self.predictions(batch, policy, output)
        return output.local(batch).detach(), predictions, labels

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Any, Any]:
        """What `compute_metrics` is given: (predictions, labels)."""
        return None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Trainer's loop; the loss is that of all rows as one batch, not a mean over batches of different size."""
        self._eval_terms = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._eval_terms:
            output.metrics[f"{metric_key_prefix}_loss"] = self._evaluation_loss()
        self.add_evaluation_metrics()
        shown = self.metrics.flush("eval", self.args.device, self.args.world_size)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in shown.items()})
        return output

    def add_evaluation_metrics(self) -> None:
        """What is known of an evaluation only when all of its rows have been seen."""

    def _evaluation_loss(self) -> float:
        names = dict.fromkeys(per for terms, _ in self._eval_terms for _, per in terms)
        pairs = []
        for name in names:
            total = sum(value for terms, _ in self._eval_terms for value, per in terms if per == name)
            pairs.append(torch.stack([total.double(), total.new_tensor(self._eval_count(name)).double()]))
        sums = torch.stack(pairs)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        return float((sums[:, 0] / sums[:, 1].clamp(min=1)).sum())

    def _eval_count(self, per: str) -> float:
        return sum(totals.counts[per] for _, totals in self._eval_terms)
