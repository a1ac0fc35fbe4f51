"""Binary classifier optimisation: answers that are wanted or not, told apart by their implicit reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import Unit
from posttrain.data.store.row_store import DatasetView
from posttrain.data.unpaired import parted
from posttrain.losses.formulas import UNPAIRED_FORMULAS, Formula, Totals, filled, number
from posttrain.losses.unpaired import LogisticRegression, Unpaired, bco, density_ratios
from posttrain.trainer.construction import refuse_arguments
from posttrain.trainer.options.base import (
    BaseConfig,
    OlderPairOptions,
    ReferenceConfig,
    check_choice,
    check_range,
    option,
)
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.step.gathering import over_processes
from posttrain.trainer.unpaired_trainer import UnpairedTrainer

DENSITY_RATIO = "density_ratio"
PROMPTS_A_BATCH = 32


@dataclass
class BCOConfig(OlderPairOptions, ReferenceConfig, ImageConfig, BaseConfig):
    """Options of binary classifier optimisation."""

    learning_rate: float = option(5e-7, "Initial learning rate of AdamW.")
    beta: float = option(0.1, "Strength of the pull towards the reference.")
    delta_mean: str = option(
        "pooled",
        "The running mean of rewards: pooled over all rows (as TRL), or the mean of both classes' means (the paper).",
    )
    prompt_sample_size: int = option(1024, "Most prompts of each label that the density ratio is estimated from.")
    min_density_ratio: float = option(0.5, "Smallest weight of an unwanted row.")
    max_density_ratio: float = option(10.0, "Largest weight of an unwanted row.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0, open_low=True)
        check_choice("delta_mean", self.delta_mean, ("pooled", "classes"))
        check_range("prompt_sample_size", self.prompt_sample_size, 1)
        check_range("min_density_ratio", self.min_density_ratio, 0, self.max_density_ratio)


@dataclass
class RunningRewards:
    """Rewards of all steps so far: sum and number of wanted rows, then of unwanted ones; equal on all processes."""

    sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def mean(self, kind: str) -> float:
        """The mean of all rewards, or of the two classes' means; 0 before the first."""
        wanted, num_wanted, unwanted, num_unwanted = self.sums
        if kind == "pooled":
            return (wanted + unwanted) / max(num_wanted + num_unwanted, 1)
        means = [total / count for total, count in ((wanted, num_wanted), (unwanted, num_unwanted)) if count]
        return sum(means) / max(len(means), 1)


class BCOTrainer(UnpairedTrainer):
    """Binary classifier optimisation (arXiv:2404.04656), with the density ratio of its section 4.2 where prompts are embedded.

    delta is updated once an optimizer step, with the rewards of the whole step, and used from the next one on.
    """

    method, title = "bco", "binary classifier optimisation"
    paper = Paper(
        "jung2024binary", "Binary Classifier Optimization for Large Language Model Alignment",
        "Jung, Seungjae and Han, Gunsoo and Nam, Daniel Wontae and On, Kyoung-Woon",
        2024, "2404.04656",
    )  # fmt: skip
    config_class = BCOConfig

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: Any = None,
        model_init: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Any = None,
        compute_metrics: Callable | None = None,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
        embedding_func: Callable[..., Tensor] | None = None,
        embedding_tokenizer: Any = None,
        **named: Any,
    ) -> None:
        """As KTOTrainer, and `embedding_func(input_ids, attention_mask) -> (B, D)` with its tokenizer, for the density ratio."""
        refused = {"model_init": model_init, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        refused |= {"model_adapter_name": model_adapter_name, "ref_adapter_name": ref_adapter_name}
        refuse_arguments(type(self).__name__, model, **refused)
        if (embedding_func is None) != (embedding_tokenizer is None):
            raise ValueError("`embedding_func` and `embedding_tokenizer` go together: give both or neither.")
        self.rewards, self._pending = RunningRewards(), None
        self.embed, self.embedding_tokenizer, self.classifier = embedding_func, embedding_tokenizer, None
        super().__init__(
            model, ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks,
            optimizers, peft_config=peft_config, **named,
        )  # fmt: skip
        if embedding_func is not None and self.train_dataset is not None:
            self._weigh_rows()

    # ---- delta ---------------------------------------------------------------------------------------------------------------

    def before_step(self, batches: list[TokenBatch]) -> None:
        self._take_in()

    def _take_in(self) -> None:
        """Add the rewards of the last step, over all processes. Collective."""
        mine = [0.0] * 4 if self._pending is None else self._pending.tolist()
        self._pending = None
        sums = zip(self.rewards.sums, mine)
        self.rewards = RunningRewards(tuple(old + over_processes(new, self.args) for old, new in sums))

    def _remember(self, rewards: Tensor, wanted: Tensor) -> None:
        sides = [part for side in (wanted, ~wanted) for part in ((rewards * side).sum(), side.sum())]
        new = torch.stack([part.double() for part in sides])
        self._pending = new if self._pending is None else self._pending + new

    def method_state(self) -> dict[str, Any]:
        self._take_in()  # what the next step would do first
        classifier = self.classifier
        fitted = {} if classifier is None else {"weights": classifier.weights.cpu(), "bias": classifier.bias.cpu()}
        return {"rewards": list(self.rewards.sums), "classifier": fitted}

    def load_method_state(self, state: dict[str, Any]) -> None:
        self.rewards, self._pending = RunningRewards(tuple(state["rewards"])), None
        saved = state["classifier"]
        if saved and not torch.equal(saved["weights"], self.classifier.weights.cpu()):
            self._weigh_rows(LogisticRegression(saved["weights"], saved["bias"]))

    # ---- the density ratio ---------------------------------------------------------------------------------------------------

    def _weigh_rows(self, classifier: LogisticRegression | None = None) -> None:
        """Write on every unwanted row how much likelier its prompt is among wanted ones."""
        rows = self.train_dataset
        if isinstance(rows, IterableDataset):
            raise ValueError(
                "The density ratio is estimated before training; a streamed dataset has no end to look at."
            )
        rows = rows.dataset if isinstance(rows, WeightedRows) else rows
        features, wanted = self._embedded(rows)
        if classifier is None:
            generator = np.random.default_rng(self.args.seed)
            drawn = [
                generator.permutation(np.flatnonzero(side))[: self.args.prompt_sample_size]
                for side in (wanted.numpy(), ~wanted.numpy())
            ]
            places = torch.from_numpy(np.sort(np.concatenate(drawn)))
            classifier = LogisticRegression.fitted(features[places], wanted[places])
        self.classifier = classifier
        bounds = (self.args.min_density_ratio, self.args.max_density_ratio)
        ratios = density_ratios(classifier.probabilities(features), *bounds).where(~wanted, torch.tensor(1.0).double())
        self.train_dataset = WeightedRows(rows, ratios.float().numpy())

    @torch.no_grad()
    def _embedded(self, rows: Any) -> tuple[Tensor, Tensor]:
        """((n, D) embeddings of the prompts, (n,) whether the answer is wanted)."""
        found, labels = [], []
        for start in range(0, len(rows), PROMPTS_A_BATCH):
            samples = [rows[place][0] for place in range(start, min(start + PROMPTS_A_BATCH, len(rows)))]
            texts = [
                self.renderer.tokenizer.decode(parted(sample)[0].input_ids, skip_special_tokens=True)
                for sample in samples
            ]
            tokens = self.embedding_tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            tokens = {name: tokens[name].to(self.args.device) for name in ("input_ids", "attention_mask")}
            features = self.embed(**tokens)
            if features.ndim != 2 or len(features) != len(texts):
                raise ValueError(
                    f"`embedding_func` returned a tensor of shape {tuple(features.shape)} for {len(texts)} prompts; it must "
                    "return one row for each of them: (prompts, dimensions)."
                )
            found.append(features.float().cpu())
            labels += [sample.scalars["label"] > 0.5 for sample in samples]
        return torch.cat(found), torch.tensor(labels)

    # ---- the loss ------------------------------------------------------------------------------------------------------------

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        args, delta = self.args, self.rewards.mean(self.args.delta_mean)
        rows = Unpaired.of(batch, policy.logps, reference.logps)
        values = bco(rows, beta=args.beta, delta=delta)
        if DENSITY_RATIO in batch.scalars:
            values = values * batch.scalars[DENSITY_RATIO][: batch.num_units].to(values.dtype)
        if self.model.training:
            self._remember(args.beta * rows.log_ratios.detach(), rows.wanted)
        metrics = rows.metrics(args.beta) | self.token_metrics(batch, policy, rows)
        return LossOutput(values, per="unit", metrics=metrics | {"delta": torch.full_like(values, delta)})

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        mean = "of all rows" if args.delta_mean == "pooled" else "of wanted and of unwanted rows, halved"
        names = (
            ("s", "1 of a wanted answer, -1 of an unwanted one"),
            ("l", "log(policy / reference) of a whole answer"),
            ("delta", f"mean of {number(args.beta)} * l {mean}, over all steps before"),
        )
        term = filled(UNPAIRED_FORMULAS["bco"], args)
        return Formula((term,), (f"sum over rows / {totals['units']} rows of the step",), names)


class WeightedRows(DatasetView):
    """Rows with the weight that the density ratio gives each of them."""

    def __init__(self, dataset: Any, ratios: np.ndarray) -> None:
        super().__init__(dataset)
        self.ratios = ratios

    def __getitem__(self, index: int) -> Unit:
        (sample,) = self.dataset[index]
        return (replace(sample, scalars={**sample.scalars, DENSITY_RATIO: float(self.ratios[index])}),)
