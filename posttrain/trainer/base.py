"""BaseTrainer: the only `compute_loss`, the only data preparation, the only log. A method adds its options and its loss.

The hooks of a method, and there are no others: `formats` and `roles` (what it reads), `score` (what it asks the model),
`loss` (what it makes of the answers), `token_stats` (what it logs about tokens), `before_step` (only for losses that couple the
pairs of a whole optimizer step). None of them loads a model, pads a tensor, or knows an adapter or a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import TrainingArguments, enable_full_determinism, set_seed

from posttrain.core import faults
from posttrain.core.batch import PADDED, Passes, StepTotals, TokenBatch, passes_of
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.collate import Collator
from posttrain.data.loader import EpochBatches, StreamBatches, UnitLoader, first_of
from posttrain.data.options import PrepareOptions
from posttrain.data.rows.formats import RowFormat
from posttrain.data.store.prepare import prepare_dataset
from posttrain.data.store.report import PreparationReport
from posttrain.losses.formulas import Formula, Totals
from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.load.adapters import adapter_settings
from posttrain.models.load.model import CAUSAL_LM, LoadOptions, load_model, load_tokenizer
from posttrain.models.load.reference import Reference
from posttrain.models.memory.activation_offloading import offloaded_activations
from posttrain.models.memory.fit import EIGHT_BIT
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.trainer.checkpoints.checkpoint import refuse_unwritable
from posttrain.trainer.checkpoints.hub import HubTrainer
from posttrain.trainer.checkpoints.persistence import PersistentTrainer, RunLifecycle
from posttrain.trainer.checkpoints.run_state import RunIdentity, load_method_state, save_method_state
from posttrain.trainer.checkpoints.tokenizer import adopt_vocabulary, prepare_tokenizer, renderer_of
from posttrain.trainer.options.base import BaseConfig, SharedPromptsConfig
from posttrain.trainer.plan.memory_fit import fit_memory
from posttrain.trainer.report.display import display_callbacks
from posttrain.trainer.report.evaluation import EvaluatingTrainer
from posttrain.trainer.report.model_card import Paper, write_model_card
from posttrain.trainer.step.adam8bit import adamw_8bit
from posttrain.trainer.step.metrics import MetricStore
from posttrain.trainer.step.optimizer import FiniteSteps, MasterWeights, has_low_precision
from posttrain.trainer.step.skipped import SkippedSteps

STAT_METRICS = {"entropy": "entropy", "is_most_likely": "mean_token_accuracy"}
"""Token statistics that every language-model method logs, and TRL's names for them."""


class BaseTrainer(EvaluatingTrainer, HubTrainer, PersistentTrainer):
    """transformers.Trainer on Samples. See the module's docstring for what a method provides."""

    method: ClassVar[str]
    title: ClassVar[str] = ""
    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    formats: ClassVar[tuple[RowFormat, ...]]
    roles: ClassVar[tuple[str, ...]]
    task: ClassVar[str] = CAUSAL_LM
    token_stats: ClassVar[tuple[str, ...]] = ("entropy", "is_most_likely")
    paper: ClassVar[Paper | None] = None
    loads_more: ClassVar[bool] = False
    """Whether the constructor of a derived class puts more on the device after this one's, and calls `fit_memory` itself."""

    reference: Reference | None = None

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
        self.args = args = self._config(args, model)
        self.check_options(args, getattr(self, "custom_loss", None))
        if args.n_gpu > 1:
            raise ValueError(
                "nn.DataParallel is not supported: start one process per GPU (accelerate launch or torchrun)."
            )
        if args.full_determinism:  # before the first kernel: cuBLAS reads its part of it once
            enable_full_determinism(args.seed)
        if args.should_save and train_dataset is not None:
            refuse_unwritable(args.output_dir)
        set_seed(args.seed)
        self.formatting_func = formatting_func
        tokenizer = self._tokenizer(model, processing_class)
        prepare_tokenizer(tokenizer, args)
        self.renderer = renderer_of(tokenizer, model, args)
        # Data first: a bad row must be found before minutes go into loading a model.
        train_dataset = self._prepared(train_dataset, "train")
        eval_dataset = self._prepared_evaluation(eval_dataset)
        set_seed(args.seed)  # adapters start from the same numbers whatever the preparation drew
        self.loaded = load_model(model, self._load_options(peft_config, quantization_config, train_dataset))
        adopt_vocabulary(self.loaded.model, self.renderer, args)
        self.metrics = MetricStore()
        super().__init__(
            model=self.loaded.model,
            args=args,
            data_collator=self._collator(data_collator, tokenizer),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._after_trainer_init()
        self.prepare_reference(ref_model, model)
        if not self.loads_more:
            fit_memory(self)

    @classmethod
    def without_model(cls, model: str, args: BaseConfig, processing_class: Any = None) -> Self:
        """As much of a trainer as data need, to look at them beforehand: tokenizer, template and `prepared`, no model."""
        made = cls.__new__(cls)
        made.args, made.formatting_func = args, None
        tokenizer = made._tokenizer(model, processing_class)
        prepare_tokenizer(tokenizer, args)
        made.renderer = renderer_of(tokenizer, model, args)
        return made

    # ---- what a method provides --------------------------------------------------------------------------------------

    @classmethod
    def check_options(cls, args: Any, loss: Callable | None = None) -> None:
        """Refuse options that would have no effect, where it takes the user's own `loss` to know that."""

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        """The loss with the numbers of a config, for `posttrain explain` and the method's page."""
        return Formula((f"{cls.__name__}.loss",), ("as its terms say: token, sequence or unit of the step",))

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        """Arguments of PrepareOptions that are peculiar to the method."""
        return {}

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        """Methods with a reference make it here."""
        if ref_model is not None:
            raise ValueError(f"{type(self).__name__} has no reference model; leave `ref_model` out.")

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        """What is asked of the model about a batch."""
        return score_tokens(model, batch, stats, **self.scoring_options())

    def scoring_options(self) -> dict[str, Any]:
        """How the policy's tokens are scored, whatever is asked about them."""
        args = self.args
        return {
            "chunk_tokens": args.chunk_tokens,
            "keep_logits": bool(args.keep_logits),
            "router_loss": self.uses_router_loss,
        }

    def reserved_bytes(self) -> float:
        """Of the device, which somebody else will take afterwards and keep during the update."""
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
        self.metrics.count("num_tokens", batch.num_tokens)

    def longest_row(self) -> int:
        """Tokens of the longest unit, where the data does not tell."""
        return len(self.roles) * (self.args.max_length or 4096)

    def largest_batch(self) -> int:
        """Tokens of a micro-batch of such units."""
        return self.args.per_device_train_batch_size * self.longest_row()

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        """Lines of the block that opens a run which are peculiar to this kind of trainer; those of the same name give way."""
        return {}

    def method_state(self) -> dict[str, Any]:
        """What the method has learnt that is no weight (a running mean, a controller): numbers and tensors, equal on all processes.
        It is saved with every checkpoint."""
        return {}

    def load_method_state(self, state: dict[str, Any]) -> None:
        """Take over what `method_state` returned when the checkpoint was written."""

    def before_step(self, batches: list[TokenBatch]) -> None:
        """Sees all micro-batches of an optimizer step (on the host) before the first of them is used."""

    # ---- construction ------------------------------------------------------------------------------------------------

    def _config(self, args: BaseConfig | TrainingArguments | None, model: Any) -> BaseConfig:
        if args is None:
            name = type(model).__name__ if isinstance(model, nn.Module) else str(model).rstrip("/").split("/")[-1]
            return self.config_class(output_dir=f"{name}-{self.method.upper()}")
        if isinstance(args, self.config_class):
            return args
        if type(args) is TrainingArguments:
            known = args.to_dict() | {"hub_token": args.hub_token}
            names = [name for name, field in self.config_class.__dataclass_fields__.items() if field.init]
            return self.config_class(**{name: known[name] for name in names if name in known})
        raise TypeError(
            f"`args` is a {type(args).__name__}; {type(self).__name__} takes a {self.config_class.__name__}."
        )

    def _tokenizer(self, model: Any, processing_class: Any) -> Any:
        if processing_class is None:
            return load_tokenizer(model, self.args.model_init_kwargs, self.args.trust_remote_code)
        if not hasattr(processing_class, "convert_tokens_to_ids"):
            raise TypeError(
                f"`processing_class` is a {type(processing_class).__name__}; {type(self).__name__} trains text models and needs "
                "their tokenizer."
            )
        return processing_class

    def _load_options(self, peft_config: Any, quantization_config: Any, train_dataset: Any) -> LoadOptions:
        args = self.args
        return LoadOptions(
            # A frozen base needs no masters: its shards are kept in the dtype that it computes in.
            dtype=args.load_dtype if peft_config is None else args.compute_dtype,
            task=self.task,
            model_init_kwargs=dict(args.model_init_kwargs or {}),
            trust_remote_code=args.trust_remote_code,
            disable_dropout=args.disable_dropout,
            layer_kernels=args.layer_kernels(self._steps_ahead(train_dataset)),
            peft_config=peft_config,
            fuse_lora=args.fuse_lora,
            quantization_config=quantization_config,
            layout=args.layout if args.neftune_noise_alpha is None else PADDED,
            share_prefixes=isinstance(args, SharedPromptsConfig) and args.share_prompts,
            router_aux_loss_coef=args.router_aux_loss_coef,
            device=args.device,
            sharded=args.sharding is not None,
        )

    def _steps_ahead(self, train_dataset: Any) -> int:
        """Optimizer steps of the run, as far as they can be known before the model is there."""
        args = self.args
        if args.max_steps > 0 or not hasattr(train_dataset, "__len__"):
            return max(args.max_steps, 0)
        rows_a_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return int(args.num_train_epochs * len(train_dataset) / rows_a_step)

    def _collator(self, given: Any, tokenizer: Any) -> Collator:
        if given is None:
            return Collator(self.roles, tokenizer.pad_token_id, self.loaded.layout, self.args.pad_multiple)
        if not isinstance(given, Collator):
            raise TypeError(
                f"`data_collator` is a {type(given).__name__}; batches are made from Samples by posttrain.data.collate.Collator. "
                "Change what goes into a Sample with `formatting_func`, or derive from Collator."
            )
        return given

    def _after_trainer_init(self) -> None:
        args = self.args
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides; Trainer must not divide again
        args.use_liger_kernel = (
            False  # the layers are in place since loading; Trainer would patch the forward over ours
        )
        self.skipped = SkippedSteps(args.output_dir, args.max_skipped_steps, args.should_save)
        self._step_loss: Tensor | float = 0.0
        self._step_rows: list[int] = []
        self._eval_terms = []
        self.add_callback(RunLifecycle(self))
        display_callbacks(self)
        allow_selective_checkpointing(self.model)

    @property
    def uses_router_loss(self) -> bool:
        return self.loaded.router_loss_weight != 0

    # ---- data --------------------------------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Check and encode one dataset; what is prepared already passes."""
        if dataset is None or hasattr(dataset, "report"):
            return dataset
        args = self.args
        shared = {
            "max_length": args.max_length,
            "truncation_mode": args.truncation_mode,
            "on_bad_rows": args.on_bad_rows,
            "chat_template_kwargs": args.chat_template_kwargs,
            "formatting_func": self.formatting_func,
            "cache_dir": args.dataset_cache_dir,
            "bad_rows_file": str(Path(args.output_dir) / f"bad_rows_{name}.jsonl"),
            "shuffle_seed": args.seed if args.shuffle_dataset and name == "train" else None,
        }
        options = PrepareOptions(**{**shared, **self.prepare_options(is_training=name == "train")})
        with args.main_process_first(desc=f"preparing the {name} dataset"):
            prepared = prepare_dataset(dataset, self.formats, self.renderer, options, name, args.dataset_num_proc)
        if args.should_log:
            print(prepared.report.summary(), flush=True)
        return prepared

    def _prepared_evaluation(self, dataset: Any) -> Any:
        if isinstance(dataset, dict):
            return {name: self._prepared(part, name) for name, part in dataset.items()}
        return self._prepared(dataset, "eval")

    def get_train_dataloader(self) -> UnitLoader:
        if self.train_dataset is None:
            raise ValueError(f"{type(self).__name__}.train() needs a `train_dataset`.")
        args = self.args
        order = args.train_sampling_strategy
        collator = replace(self.data_collator, max_tokens=args.max_tokens_per_pass)
        return self._loader(self.train_dataset, self._train_batch_size, order, args.dataloader_drop_last, collator)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> UnitLoader:
        dataset = self.evaluation_rows(eval_dataset)
        return self._loader(dataset, self.args.eval_batch_size, "sequential", False, self.data_collator)

    def get_test_dataloader(self, test_dataset: Any) -> UnitLoader:
        return self.get_eval_dataloader(test_dataset)

    def _loader(self, dataset: Any, batch_size: int, order: str, drop_last: bool, collator: Collator) -> UnitLoader:
        args = self.args
        workers = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if isinstance(dataset, IterableDataset):
            stream = StreamBatches(dataset, batch_size, args.process_index, args.world_size, collator)
            return UnitLoader(stream, batch_size=1, collate_fn=first_of, **workers)
        batches = self.epoch_batches(dataset, batch_size, order, drop_last)
        return UnitLoader(dataset, batch_sampler=batches, collate_fn=collator, **workers)

    def epoch_batches(self, dataset: Any, batch_size: int, order: str, drop_last: bool) -> EpochBatches:
        """Which rows this process reads together."""
        args = self.args
        return EpochBatches(
            len(dataset),
            batch_size,
            rank=args.process_index,
            world_size=args.world_size,
            accumulation=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            order=order,
            drop_last=drop_last,
            lengths=getattr(dataset, "unit_lengths", None),
        )

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
        self._step_rows = list(dict.fromkeys(row for part in passes for row in part.rows))
        totals = StepTotals.of(passes)
        if self.args.world_size > 1:
            counts = torch.tensor(list(totals.counts.values()), dtype=torch.float64, device=device)
            torch.distributed.all_reduce(counts)
            totals = StepTotals(dict(zip(totals.counts, counts.unbind())))
        self.before_step(passes)
        self.even_out(batch_samples, self.data_collator)
        faults.fault_point("data")
        return totals

    def training_step(self, model: nn.Module, inputs: TokenBatch | Passes, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch, in one pass or in several; what is divided by are the totals of the step."""
        passes = passes_of(inputs)
        losses = [self._one_pass(model, part, num_items_in_batch, part is passes[-1]) for part in passes]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        self._step_loss = self._step_loss + loss
        # A loss that is not finite is reported by `skipped`; in Trainer's running sum it would stay for ever.
        return torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))

    def _one_pass(self, model: nn.Module, inputs: TokenBatch, totals: Any, is_last: bool) -> Tensor:
        with ExitStack() as stack:
            # MasterWeights.all_reduce averages whole steps; without masters DDP reduces with the last pass, FSDP with each.
            is_copied = self.args.world_size > 1 and not self.is_fully_sharded
            if is_copied and (self.masters is not None or not is_last):
                stack.enter_context(self.accelerator.no_sync(model))
            if self.args.activation_offloading:
                stack.enter_context(offloaded_activations(self.args.device))
            return super().training_step(model, inputs, totals)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: TokenBatch,
        return_outputs: bool = False,
        num_items_in_batch: StepTotals | None = None,
    ) -> Any:
        output, policy = self._loss_output(model, inputs, "train")  # evaluation goes through `prediction_step`
        totals = inputs.totals() if num_items_in_batch is None else num_items_in_batch
        faults.fault_point("forward")
        loss = output.reduce(totals, 1 if num_items_in_batch is None else self.args.world_size)
        if faults.armed():
            loss.register_hook(faults.in_backward)
        return (loss, policy) if return_outputs else loss

    def _loss_output(self, model: nn.Module, batch: TokenBatch, mode: str) -> tuple[LossOutput, TokenScores]:
        stats = self.token_stats if mode == "eval" or self._step_will_log() else ()
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

    def _step_will_log(self) -> bool:
        """Statistics that cost a pass over the vocabulary are taken on the steps whose log will show them."""
        is_logged = self.args.logs_at(self.state.global_step + 1, self.state)
        return is_logged or self.args.logging_strategy == "epoch"

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: BaseConfig, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """transformers' table, but "adamw_8bit" is our own; bitsandbytes' is "adamw_bnb_8bit", and it serves sharded weights."""
        if args.optim == EIGHT_BIT and args.sharding is None:
            return adamw_8bit(args)
        return PersistentTrainer.get_optimizer_cls_and_kwargs(args, model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if not self._own_formats or (self.finite is not None and self.finite.optimizer is optimizer):
            return optimizer
        if self.args.fp16:  # the gradient scaler unscales, checks and skips by itself
            return optimizer
        is_low = has_low_precision(p for group in optimizer.param_groups for p in group["params"])
        if is_low and not self.keeps_masters_in_shards():
            one_pass = (
                self.args.gradient_accumulation_steps == self.args.world_size == 1 and not self.args.max_tokens_per_pass
            )
            self.masters = MasterWeights(optimizer, accumulates=not one_pass)
        self.finite = FiniteSteps(optimizer, self.args.world_size, self.masters)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return super()._clip_grad_norm(model) if self.finite is None else self._clip_and_check(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor | float:
        if self.finite is None:
            return super()._get_grad_norm(model, grad_norm)
        return self._clip_and_check(None) if grad_norm is None else grad_norm

    def _clip_and_check(self, max_norm: float | None) -> Tensor:
        if self.masters is not None and self.args.world_size > 1:
            self.masters.all_reduce()
        loss = torch.as_tensor(self._step_loss, device=self.args.device)
        if faults.fault_point("gradient"):
            self.finite.gradients()[0].fill_(torch.nan)
        norm = self.finite.clip(max_norm, loss, (self.state.global_step + 1, self._step_rows))
        self._step_loss = 0.0
        return norm

    def settle_skipped_steps(self, wait: bool = False) -> None:
        """Take note of steps whose flag has arrived from the device; stop the run after too many in a row."""
        if self.finite is not None:
            for (step, rows), was_skipped in self.finite.finished(wait):
                self.skipped.record(step, rows, was_skipped, self.run_state)

    # ---- the log and the rest ----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and "learning_rate" in logs:
            self.settle_skipped_steps()
            logs["loss"] *= self.skipped.correction(self.run_state, self.state.global_step)
            logs.update(self.metrics.flush("train", self.args.device, self.args.world_size))
            logs["num_tokens"] = self._over_processes(self.metrics.totals.get("num_tokens", 0))
            if self.run_state.skipped_total:
                logs["skipped_steps"] = self.run_state.skipped_total
        super().log(logs, start_time)

    def _over_processes(self, amount: float) -> float:
        if self.args.world_size == 1:
            return amount
        total = torch.tensor(amount, dtype=torch.float64, device=self.args.device)
        torch.distributed.all_reduce(total)
        return total.item()

    def floating_point_ops(self, inputs: TokenBatch | Passes) -> int:
        return 6 * inputs.num_tokens * self._num_parameters

    @property
    def _num_parameters(self) -> int:
        if not hasattr(self, "_parameter_count"):
            self._parameter_count = sum(p.numel() for p in self.model.parameters())
        return self._parameter_count

    def _track_num_input_tokens(self, inputs: TokenBatch | Passes) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += int(self._over_processes(inputs.num_tokens))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_method_state(Path(output_dir), self.method_state(), self.args.process_index, self.args.world_size)

    def restore_run_state(self) -> None:
        super().restore_run_state()
        if self.resumed_from is not None:
            self.load_method_state(load_method_state(self.resumed_from, self.method_state()))

    def identity(self) -> RunIdentity:
        dataset = getattr(self.train_dataset, "fingerprint", "none")
        name, parts = self.loaded.name, self.identity_parts()
        report: PreparationReport | None = getattr(self.train_dataset, "report", None)
        data = "" if report is None else report.name_and_rows()
        return RunIdentity.of(self.method, self.args, dataset, self.renderer.fingerprint, name, parts, data)

    def identity_parts(self) -> dict[str, Any]:
        """What makes the run what it is and is no option of it; a resume with another is refused."""
        return {"adapter": adapter_settings(self.loaded.model)}

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.is_world_process_zero():
            write_model_card(self, model_name, dataset_name, tags, **kwargs)
