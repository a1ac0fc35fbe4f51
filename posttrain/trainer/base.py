"""BaseTrainer: the only `compute_loss`, the only data preparation, the only log. A method adds its options and its loss.

The hooks of a method stand under "what a method provides": above all `formats` and `roles` (what it reads), `score` (what it asks
the model) and `loss` (what it makes of the answers). None of them loads a model, pads a tensor, or knows an adapter or a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainingArguments, set_seed

from posttrain.core import faults
from posttrain.core.batch import Passes, StepTotals, TokenBatch, passes_of
from posttrain.core.processes import naming_lost_processes
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.collate import Collator, Pixels
from posttrain.data.loader import UnitLoader
from posttrain.data.options import DROP
from posttrain.data.rows.formats import RowFormat
from posttrain.data.unpaired import Partners
from posttrain.losses.formulas import Formula, Totals
from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.load.adapters import adapter_settings
from posttrain.models.load.model import CAUSAL_LM, innermost_model, load_model
from posttrain.models.load.reference import Reference
from posttrain.models.memory.fit import EIGHT_BIT
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.models.sharding import whole_size
from posttrain.trainer import construction
from posttrain.trainer.checkpoints import hub, run_state, sharding
from posttrain.trainer.checkpoints.checkpoint import refuse_unwritable
from posttrain.trainer.checkpoints.persistence import RunLifecycle
from posttrain.trainer.checkpoints.saving import Checkpoints, is_whole
from posttrain.trainer.checkpoints.skipped import SkippedSteps
from posttrain.trainer.options.base import DEEPSPEED, FSDP, BaseConfig, ReferenceConfig
from posttrain.trainer.options.images import unused_rate
from posttrain.trainer.references.setup import ReferenceSetup
from posttrain.trainer.report.display import display_callbacks
from posttrain.trainer.report.model_card import Paper, write_model_card
from posttrain.trainer.step.adam8bit import adamw_8bit
from posttrain.trainer.step.gathering import over_processes, step_totals
from posttrain.trainer.step.memory_fit import fit_memory
from posttrain.trainer.step.metrics import EvaluationLoss, MetricStore
from posttrain.trainer.step.optimizer import StepGuard, set_rate
from posttrain.trainer.step.unreadable import METRIC as UNREADABLE
from posttrain.trainer.step.unreadable import UnreadableImages

STAT_METRICS = {"entropy": "entropy", "is_most_likely": "mean_token_accuracy"}
"""Token statistics that every language-model method logs, and TRL's names for them."""


class BaseTrainer(transformers.Trainer):
    """transformers.Trainer on Samples. See the module's docstring for what a method provides."""

    method: ClassVar[str]
    title: ClassVar[str] = ""
    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    formats: tuple[RowFormat, ...]
    roles: tuple[str, ...]
    task: ClassVar[str] = CAUSAL_LM
    token_stats: ClassVar[tuple[str, ...]] = ("entropy", "is_most_likely")
    paper: ClassVar[Paper | None] = None
    shares_rows: ClassVar[bool] = False
    """Whether `sequence_parallel_size` is known to the method: it asks about trained tokens alone, and rows have no twins."""

    loads_more: ClassVar[bool] = False
    """Whether the constructor of a derived class puts more on the device after this one's, and calls `fit_memory` itself."""

    graphs: ClassVar[int] = 1
    """Passes with gradient that a batch is run in before its backward: their activations are kept beside each other."""

    reference: Reference | None = None
    teacher_name: str | None = None  # of methods that have a teacher

    def __init__(
        self,
        model: str | Path | nn.Module,
        args: BaseConfig | TrainingArguments | None = None,
        data_collator: Collator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
        ref_model: Any = None,
    ) -> None:
        name = type(self).__name__
        self.args = args = construction.config_of(args, self.config_class, model, name, self.method)
        self.check_options(args, getattr(self, "custom_loss", None))
        if args.sequence_parallel_size > 1 and not self.shares_rows:
            raise ValueError(f"{name} trains on whole rows: leave `sequence_parallel_size` at 1.")
        if args.sequence_parallel_size > 1 and compute_metrics is not None:
            raise ValueError(
                "`compute_metrics` would see each row once for every process that shares it: leave it out, or "
                "`sequence_parallel_size` at 1."
            )
        if optimizers[0] is not None and getattr(args, "vision_learning_rate", None) is not None:
            raise ValueError(
                "`vision_learning_rate` is set, and `optimizers` brings rates of its own: leave one of them out."
            )
        construction.prepare_process(args)
        if args.should_save and train_dataset is not None:
            refuse_unwritable(args.output_dir)
        self.formatting_func = formatting_func
        self.formats, self.roles = self.rows_read(args)
        self.renderer, self.vision = construction.renderer_of(model, processing_class, args, name)
        # Data first: a bad row must be found before minutes go into loading a model.
        train_dataset = self._prepared(train_dataset, "train")
        construction.refuse_nothing(train_dataset, "train")
        eval_dataset = self._prepared_evaluation(eval_dataset)
        if self.vision is not None:
            self.vision.choose_workers(args, train_dataset)
        set_seed(args.seed)  # adapters start from the same numbers whatever the preparation drew
        seen = {} if self.vision is None else self.vision.load_options(args, self.renderer)
        loading = construction.load_options(args, self.task, peft_config, quantization_config, train_dataset, **seen)
        self.loaded = load_model(model, loading)
        construction.adopt_vocabulary(self.loaded.model, self.renderer, args)
        pad, layout = self.renderer.tokenizer.pad_token_id, self.loaded.layout
        super().__init__(
            model=self.loaded.model,
            args=args,
            data_collator=construction.collator_of(
                data_collator, self.roles, pad, layout, args, self.pixels, self.graphs
            ),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self.renderer.tokenizer if self.vision is None else self.vision.processor,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._make_parts()
        self.prepare_reference(ref_model, model)
        if not self.loads_more:
            fit_memory(self)

    @classmethod
    def without_model(cls, model: str, args: BaseConfig, processing_class: Any = None) -> Self:
        """As much of a trainer as data need, to look at them beforehand: tokenizer, template and `prepared`, no model."""
        made = cls.__new__(cls)
        made.args, made.formatting_func = args, None
        made.formats, made.roles = cls.rows_read(args)
        made.renderer, made.vision = construction.renderer_of(model, processing_class, args, cls.__name__)
        return made

    @property
    def pixels(self) -> Pixels | None:
        """Who makes the pixels of images; None: there are none."""
        return None if self.vision is None else self.vision.pixels

    @property
    def row_collator(self) -> Collator:
        """Lays out batches of which this process computes its part; `data_collator` lays out whole ones."""
        return replace(self.data_collator, part=self.args.row_part)

    @property
    def is_fully_sharded(self) -> bool:
        """By FSDP, which `gathers_together`, too."""
        return self.args.sharding == FSDP

    @property
    def gathers_together(self) -> bool:
        """Every process must take part in every forward, and in every look at a whole weight."""
        return self.args.sharding is not None

    def _make_parts(self) -> None:
        """The objects that overrides of transformers.Trainer ask."""
        args = self.args
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides; Trainer must not divide again
        args.use_liger_kernel = False  # its layers are in place since loading; Trainer would patch our forward
        self.metrics, self.evaluation, self.guard = MetricStore(), EvaluationLoss(), StepGuard(args)
        self.unreadable = UnreadableImages()
        self.skipped = SkippedSteps(args.output_dir, args.max_skipped_steps, args.should_save)
        self.checkpoints = Checkpoints(self)
        self.lifecycle = RunLifecycle(self, self.checkpoints, self.skipped)
        self.add_callback(self.lifecycle)
        display_callbacks(self)
        allow_selective_checkpointing(self.model)

    # ---- what a method provides --------------------------------------------------------------------------------------

    @classmethod
    def check_options(cls, args: Any, loss: Callable | None = None) -> None:
        """Refuse options that would have no effect, where it takes the user's own `loss` to know that."""

    @classmethod
    def rows_read(cls, args: Any) -> tuple[tuple[RowFormat, ...], tuple[str, ...]]:
        """The formats of rows, and the roles of a unit's samples, where they depend on options."""
        return cls.formats, cls.roles

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        """The loss with the numbers of a config, for `posttrain explain` and the method's page."""
        return Formula((f"{cls.__name__}.loss",), ("as its terms say: token, sequence or unit of the step",))

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        """Arguments of PrepareOptions that are peculiar to the method."""
        return {}

    def partners(self, is_training: bool) -> Partners | None:
        """How rows get twins from other rows of their step, where a method reads such."""
        return None

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        """Make `reference`, where the method has one; its log-probs may be put on the rows of the datasets."""
        if isinstance(self.args, ReferenceConfig):
            setup, rows = self.reference_setup(), (self.train_dataset, self.eval_dataset)
            self.reference, self.train_dataset, self.eval_dataset = setup.make(ref_model, policy, *rows)
            for callback in setup.followers(self.reference):
                self.add_callback(callback)
        elif ref_model is not None:
            raise ValueError(f"{type(self).__name__} has no reference model; leave `ref_model` out.")

    def reference_setup(self) -> ReferenceSetup:
        return ReferenceSetup(self.args, self.loaded, self.data_collator, self.accelerator)

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Any, Any]:
        """What `compute_metrics` is given: (predictions, labels)."""
        return None, None

    def add_evaluation_metrics(self) -> None:
        """What is known of an evaluation only when all of its rows have been seen."""

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        """What is asked of the model about a batch."""
        return score_tokens(model, batch, stats, **self.scoring_options())

    def scoring_options(self) -> dict[str, Any]:
        """How the policy's tokens are scored, whatever is asked about them."""
        options = {"chunk_tokens": self.args.chunk_tokens, "keep_logits": bool(self.args.keep_logits)}
        return {**options, "router_loss": self.loaded.router_loss_weight != 0}

    def reserved_bytes(self) -> float:
        """Memory of the device that another engine will take later and keep during the update."""
        return 0.0

    def recomputes_logits(self) -> bool:
        """Whether the backward of the loss needs the logits once more: what `keep_logits` saves."""
        return self.task == CAUSAL_LM

    def differentiable_stats(self) -> tuple[str, ...]:
        """Statistics of tokens, besides their log-probs, through which the loss may have a gradient."""
        return ()

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        """What the method makes of the answers."""
        raise NotImplementedError

    def count_tokens(self, batch: TokenBatch) -> None:
        """Add a batch that is trained on to the tokens of the run."""
        if batch.part is None or batch.part.rank == 0:  # the others of its row have the same batch
            self.metrics.count("num_tokens", batch.num_tokens)

    def batch_limits(self) -> tuple[int, int]:
        """Tokens of the largest micro-batch and of the longest unit, where the data does not tell."""
        longest = len(self.roles) * (self.args.max_length or 4096)
        return self.args.per_device_train_batch_size * longest, longest

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        """Lines of the block that opens a run which are peculiar to this kind of trainer; those of the same name give way."""
        return {}

    def method_state(self) -> dict[str, Any]:
        """What the method learns besides the weights: numbers and tensors, equal on all processes, part of checkpoints."""
        return {}

    def load_method_state(self, state: dict[str, Any]) -> None:
        """Take over what `method_state` returned when the checkpoint was written."""

    def before_step(self, batches: list[TokenBatch]) -> None:
        """Sees all micro-batches of an optimizer step (on the host) before the first of them is used."""

    def forward_before_step(self, passes: float) -> str | None:
        """What `before_step` asks policy and reference for in a forward pass over a step of so many passes, in words."""
        return None

    # ---- data --------------------------------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Check and encode one dataset; what is prepared already passes."""
        how = (self.args, self.formats, self.renderer, self.formatting_func, self.vision)
        return construction.prepared_rows(dataset, name, *how, **self.prepare_options(is_training=name == "train"))

    def _prepared_evaluation(self, dataset: Any) -> Any:
        if isinstance(dataset, dict):
            return {name: self._prepared(part, name) for name, part in dataset.items()}
        rows = self._prepared(dataset, "eval")
        construction.refuse_nothing(rows, "eval")
        return rows

    def get_train_dataloader(self) -> UnitLoader:
        if self.train_dataset is None:
            raise ValueError(f"{type(self).__name__}.train() needs a `train_dataset`.")
        collator = replace(self.offline_collator, max_tokens=self.args.max_tokens_per_pass)
        order = (self.args.train_sampling_strategy, self.args.dataloader_drop_last, self.partners(is_training=True))
        is_augmented = getattr(self.args, "image_augmentation", None) is not None
        how = (collator, self._train_batch_size, *order, is_augmented)
        return construction.unit_loader(self.train_dataset, self.args, *how)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> UnitLoader:
        rows, args = self.evaluation_rows(eval_dataset), self.args
        order = ("sequential", False, self.partners(is_training=False))
        return construction.unit_loader(rows, args, self.offline_collator, args.eval_batch_size, *order)

    @property
    def offline_collator(self) -> Collator:
        """That of rows of a dataset, which `on_bad_rows` is about."""
        return replace(self.row_collator, leaves_out_unreadable=self.args.on_bad_rows == DROP)

    def get_test_dataloader(self, test_dataset: Any) -> UnitLoader:
        return self.get_eval_dataloader(test_dataset)

    def evaluation_rows(self, eval_dataset: Any) -> Any:
        """What is evaluated on: a dataset that is given now, or one of the trainer's own by its name, or that one."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        rows = self.eval_dataset if eval_dataset is None else self._prepared(eval_dataset, "eval")
        if rows is None:
            raise ValueError(f"{type(self).__name__}.evaluate() needs an `eval_dataset`.")
        return rows if self.reference is None else self.reference.annotated(rows)

    def _prepare_inputs(self, inputs: TokenBatch) -> TokenBatch:
        return inputs.to(self.args.device, non_blocking=True)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(
        self, batch_samples: list[TokenBatch | Passes], device: torch.device
    ) -> StepTotals | None:
        """Denominators of the step, over its micro-batches and over the processes. Trainer shows all micro-batches first."""
        if not batch_samples:
            return None
        passes = [part for batch in batch_samples for part in passes_of(batch)]
        self.guard.rows = list(dict.fromkeys(row for part in passes for row in part.rows))
        if left_out := self.unreadable.note(passes):
            self.metrics.count(UNREADABLE, left_out)
        totals = step_totals(passes, self.args)
        self.before_step(passes)
        sharding.even_out(batch_samples, self.row_collator, self.args)
        faults.fault_point("data")
        return totals

    def training_step(self, model: nn.Module, inputs: TokenBatch | Passes, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch, in one pass or in several; what is divided by are the totals of the step."""
        passes, losses = passes_of(inputs), []
        for part in passes:
            with self.guard.around_pass(self.accelerator, model, part is passes[-1]):
                losses.append(super().training_step(model, part, num_items_in_batch))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        self.guard.loss = self.guard.loss + loss
        # A loss that is not finite is reported by `skipped`; in Trainer's running sum it would stay.
        return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))

    def compute_loss(
        self, model: nn.Module, inputs: TokenBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output, policy = self._loss_output(model, inputs, "train")  # evaluation goes through `prediction_step`
        totals = inputs.totals() if num_items_in_batch is None else num_items_in_batch
        faults.fault_point("forward")
        # Processes that share a row have the same loss, and each the gradient of its own tokens times their number.
        loss = output.reduce(totals, 1 if num_items_in_batch is None else self.args.readers)
        if faults.armed():
            loss.register_hook(faults.in_backward)
        return (loss, policy) if return_outputs else loss

    def _loss_output(self, model: nn.Module, batch: TokenBatch, mode: str) -> tuple[LossOutput, TokenScores]:
        stats = self.token_stats if mode == "eval" or self.args.shows_next_step(self.state) else ()
        policy = self.score(model, batch, stats)
        reference = None if self.reference is None else self.reference.scores(batch)
        output = self.loss(batch, policy, reference)
        output.check(batch)
        if policy.aux_loss is not None:
            output.terms.append(LossTerm(policy.aux_loss * batch.share, "batch", self.loaded.router_loss_weight))
            output.metrics["aux_loss"] = policy.aux_loss[None]
        shown = {STAT_METRICS[name]: value for name, value in policy.stats.items() if name in STAT_METRICS}
        self.metrics.add(mode, {**shown, **output.metrics})
        if mode == "train":
            self.count_tokens(batch)
        return output, policy

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: BaseConfig, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """transformers' table, but "adamw_8bit" is our own; bitsandbytes' is "adamw_bnb_8bit", and it serves sharded weights."""
        if args.optim == EIGHT_BIT and args.sharding is None:
            return adamw_8bit(args)
        return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        rate = getattr(self.args, "vision_learning_rate", None)
        if is_new and rate is not None:
            set_rate(optimizer, self._vision_parameters(model), rate)
        return self.guard.watch(optimizer)

    def _vision_parameters(self, model: nn.Module | None) -> list[nn.Parameter]:
        """What `vision_learning_rate` is about; an error where there is nothing."""
        found = self.vision.trained_parameters(innermost_model(self.model if model is None else model))
        if not found:
            raise unused_rate("adapters are on the language model alone; `lora_vision=True` puts some there")
        return found

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        if self.guard.finite is None:
            return super()._clip_grad_norm(model)
        return self.guard.clip(self.args.max_grad_norm, self.state.global_step + 1)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | float:
        if self.guard.finite is None:
            return super()._get_grad_norm(model, grad_norm)
        return self.guard.clip(None, self.state.global_step + 1) if grad_norm is None else grad_norm

    def settle_skipped_steps(self, wait: bool = False) -> None:
        """Take note of steps whose flag has arrived from the device; stop the run after too many in a row."""
        self.skipped.settle(self.guard.finite, self.checkpoints.run_state, wait)

    # ---- evaluation and the log --------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: TokenBatch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Any, Any]:
        self.unreadable.note([inputs])
        batch = self._prepare_inputs(inputs)
        with torch.no_grad():
            output, policy = self._loss_output(model, batch, "eval")
        self.evaluation.add(output, batch.totals())
        predictions, labels = (None, None) if prediction_loss_only else self.predictions(batch, policy, output)
        return output.local(batch).detach(), predictions, labels

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Trainer's loop; the loss is that of all rows as one batch, not a mean over batches of different size."""
        self.evaluation = EvaluationLoss()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss = self.evaluation.value(self.args.world_size)
        self.add_evaluation_metrics()
        shown = {} if loss is None else {"loss": loss}
        shown |= self.metrics.flush("eval", self.args.device, self.args.world_size)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in shown.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and "learning_rate" in logs:
            self.settle_skipped_steps()
            state = self.checkpoints.run_state
            logs["loss"] *= self.skipped.correction(state, self.state.global_step)
            logs.update(self.metrics.flush("train", self.args.device, self.args.world_size))
            logs["num_tokens"] = over_processes(self.metrics.totals.get("num_tokens", 0), self.args)
            if state.skipped_total:
                logs["skipped_steps"] = state.skipped_total
            drops = self.args.on_bad_rows == DROP
            if drops and (left_out := over_processes(self.metrics.totals.get(UNREADABLE, 0), self.args)):
                logs[UNREADABLE] = left_out
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.lifecycle.wants_last_log():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def floating_point_ops(self, inputs: TokenBatch | Passes) -> int:
        """6 for each weight of the language model and token; of images, by their patches and features (`TowerShape`)."""
        if not hasattr(self, "_parameter_count"):
            self._parameter_count = sum(whole_size(p) for p in self.model.parameters())
            self._tower = None if self.vision is None else self.vision.tower(innermost_model(self.model))
            self._parameter_count -= 0 if self._tower is None else self._tower.parameters
        shown = [] if self._tower is None else [part.images for part in passes_of(inputs) if part.images is not None]
        of_images = sum(self._tower.training(images.tiles, images.num_features) for images in shown)
        of_texts = 6 * inputs.num_tokens * self._parameter_count // self.args.sequence_parallel_size
        return of_texts + int(of_images)

    def _track_num_input_tokens(self, inputs: TokenBatch | Passes) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            seen = over_processes(inputs.num_tokens, self.args) / self.args.sequence_parallel_size
            self.state.num_input_tokens_seen += int(seen)

    def get_total_train_batch_size(self, args: BaseConfig) -> int:
        """Rows of an optimizer step."""
        return self._train_batch_size * args.gradient_accumulation_steps * args.readers

    # ---- the run -----------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train. `resume_from_checkpoint=True` takes the newest checkpoint that verifies, or starts afresh with none."""
        with naming_lost_processes(), self.lifecycle.running(resume_from_checkpoint) as checkpoint:
            if checkpoint is not None and self.is_fully_sharded and is_whole(Path(checkpoint)):
                self._load_before_sharding(checkpoint)
            return super().train(checkpoint, trial, ignore_keys_for_eval)

    def _load_before_sharding(self, checkpoint: str) -> None:
        """The weights of a run without shards: with shards, Trainer would look for FSDP's own files."""
        self.is_fsdp_enabled = False
        load = super()._load_from_checkpoint
        self.checkpoints.load_weights(lambda: load(checkpoint, self.model), Path(checkpoint))
        self.is_fsdp_enabled = True

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.sharding == FSDP:
            sharding.set_up_fsdp(self.args, self.accelerator, self.is_fsdp_enabled)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trainer asks whether the run is over only after a step: resumed at its end, it would take one step too many."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.checkpoints.settle(wait=True)  # the best checkpoint is loaded, and callbacks see the end of the run
        return super()._finalize_training(*args, **kwargs)

    def identity(self) -> run_state.RunIdentity:
        """What this run is made of; two runs of equal identity take equal steps."""
        made_of = (self.train_dataset, self.renderer.fingerprint, self.loaded.name, self.identity_parts())
        return run_state.RunIdentity.of(self.method, self.args, *made_of)

    def identity_parts(self) -> dict[str, Any]:
        """What makes the run what it is besides its options; a resume with another is refused."""
        return {"adapter": adapter_settings(self.loaded.model)}

    # ---- checkpoints and the Hub -------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        saved = self.checkpoints.save(Path(self._get_output_dir(trial=trial)))
        if self.args.push_to_hub and saved is not None:
            hub.push_checkpoint(self, saved)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights as `save_pretrained` writes them, under FSDP and DeepSpeed too. To be called by all processes."""
        if self.args.sharding is None:
            return super().save_model(output_dir, _internal_call)
        state = sharding.whole_state(self.model, self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        self.checkpoints.save_model_files(Path(output_dir or self.args.output_dir), state_dict)

    def save_state_files(self, folder: Path) -> None:
        """Into a checkpoint, what this kind of trainer has to remember."""
        run_state.save_method_state(folder, self.method_state(), self.args.process_index, self.args.world_size)

    def load_state_files(self, folder: Path) -> None:
        """Take over what `save_state_files` has written."""
        self.load_method_state(run_state.load_method_state(folder, self.method_state()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.args.sharding == DEEPSPEED:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self.checkpoints.load_optimizer(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Sharded, trained weights come with the optimizer's shards; all others are as the run began.
        if not self.is_fully_sharded:
            load = super()._load_from_checkpoint
            self.checkpoints.load_weights(lambda: load(resume_from_checkpoint, model), Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self.checkpoints.load_best(super()._load_best_model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            run_state.load_rng(Path(checkpoint), self.args.process_index)

    def push_to_hub(self, *given: Any, **named: Any) -> Any:
        """Save the model, write its card, upload both. Arguments are those of `hub.push_model`."""
        return hub.push_model(self, *given, **named)

    def create_model_card(self, *given: Any, **named: Any) -> None:
        """Write README.md into the output folder. Arguments are those of `write_model_card`."""
        if self.is_world_process_zero():
            write_model_card(self, *given, **named)
