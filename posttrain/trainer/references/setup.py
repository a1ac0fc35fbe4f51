"""Options of a reference, and how a trainer gets one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.core.batch import RAGGED, SHARED
from posttrain.data.options import PrepareOptions
from posttrain.data.store.prepare import cache_folder
from posttrain.data.store.row_store import AnnotatedDataset, RowStore
from posttrain.models.layers.kernels import COMPILED, compile_layers
from posttrain.models.load.adapters import freeze_copy_of_adapter, is_peft_model
from posttrain.models.load.model import LoadOptions, innermost_model, load_model
from posttrain.models.load.reference import (
    GIVEN_SUMS,
    FrozenCopy,
    GivenSums,
    ModelReference,
    Precomputed,
    Reference,
    adapter_off,
    create_reference_model,
    frozen_adapter,
    frozen_copy,
)
from posttrain.trainer.checkpoints.sharding import shard_frozen
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.references.cache import store_of, with_reference_logps
from posttrain.trainer.report.callbacks import SyncRefModelCallback

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer

logger = logging.getLogger(__name__)


@dataclass
class MovingReferenceConfig:
    """Options of methods whose reference may follow the policy; mixed into their configs."""

    sync_ref_model: bool = option(False, "TR-DPO: move the reference towards the policy every `ref_model_sync_steps`.")
    ref_model_mixup_alpha: float = option(0.6, "reference = alpha * policy + (1 - alpha) * reference.")
    ref_model_sync_steps: int = option(512, "Optimizer steps between two moves of the reference.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ref_model_mixup_alpha", self.ref_model_mixup_alpha, 0, 1)
        check_range("ref_model_sync_steps", self.ref_model_sync_steps, 1)


@dataclass
class ReferenceConfig(MovingReferenceConfig):
    """Options of methods that compare the policy with a reference on rows that are known; mixed into their configs."""

    precompute_ref_log_probs: bool = option(
        False, "Run the reference over the rows it has never seen, before training, and keep its log-probs on disk."
    )
    precompute_ref_batch_size: int | None = option(
        None, "Rows per batch of that pass. None: as many as fill the device, by their tokens."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "`sync_ref_model` moves the reference; `precompute_ref_log_probs` freezes its numbers. Choose one."
            )


def make_reference(trainer: BaseTrainer, ref_model: Any, policy: Any) -> Reference:
    """The reference of `trainer`: what the user gave, else what costs least memory and is exact."""
    args = trainer.args
    if ref_model is not None and ref_model is trainer.model:
        raise ValueError("`ref_model` is the model that is trained: it would move. Leave it out, or pass a copy.")
    if _rows_carry_reference(trainer.train_dataset):
        return _given(args, ref_model)
    reference = live_reference(trainer, ref_model, policy)
    if args.precompute_ref_log_probs:
        reference = precomputed(trainer, reference, policy if ref_model is None else ref_model)
    follow_policy(trainer, reference)
    logger.info(f"The reference is {reference}.")
    return reference


def follow_policy(trainer: BaseTrainer, reference: Reference) -> None:
    """With `sync_ref_model`, move the reference towards the policy as training goes on."""
    if trainer.args.sync_ref_model:
        if trainer.args.sharding is not None:
            raise ValueError(
                "`sync_ref_model` moves whole weights; under FSDP and DeepSpeed they are in pieces. Leave it out."
            )
        reference.check_sync()
        trainer.add_callback(SyncRefModelCallback(reference, trainer.accelerator))


def _rows_carry_reference(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and len(dataset) > 0 and GIVEN_SUMS in dataset[0][0].scalars


def _given(args: Any, ref_model: Any) -> Reference:
    """The rows bring the reference's numbers along; whatever would compute others contradicts them."""
    for name, value in (
        ("ref_model", ref_model),
        ("sync_ref_model", args.sync_ref_model),
        ("precompute_ref_log_probs", args.precompute_ref_log_probs),
        ("ld_alpha", getattr(args, "ld_alpha", None)),
    ):
        if value:
            raise ValueError(
                f"The dataset brings sums of reference log-probs (ref_chosen_logps); `{name}` cannot go with them."
            )
    return GivenSums()


def live_reference(trainer: BaseTrainer, ref_model: Any, policy: Any) -> Reference:
    model = trainer.loaded.model
    if ref_model is not None:
        is_loaded = isinstance(ref_model, nn.Module)
        sharded = trainer.args.sharding is not None
        options = LoadOptions(device=trainer.args.device) if is_loaded else _reference_options(trainer)
        options = replace(options, sharded=sharded)
        loaded = load_model(ref_model, replace(options, **_layout_of(trainer)))
        if loaded.layout != trainer.loaded.layout:  # the policy shares prefixes, this reference cannot
            trainer.loaded.layout = trainer.data_collator.layout = loaded.layout
        return frozen_copy(_placed(trainer, loaded.model))
    if is_peft_model(model):
        if isinstance(policy, nn.Module) and is_peft_model(policy):  # an adapter that is trained further
            return frozen_adapter(model, freeze_copy_of_adapter(model, model.active_adapter))
        return adapter_off(model)
    copy = create_reference_model(model)
    if trainer.loaded.kernels == COMPILED:
        compile_layers(innermost_model(copy))  # a copy leaves the compiled code behind
    return frozen_copy(_placed(trainer, copy))


def _reference_options(trainer: BaseTrainer) -> LoadOptions:
    args = trainer.args
    return LoadOptions(
        dtype=args.compute_dtype,
        model_init_kwargs=dict(args.model_init_kwargs or {}),
        trust_remote_code=args.trust_remote_code,
        layer_kernels=(trainer.loaded.kernels,),
        fuse_lora=args.fuse_lora,
        layout=trainer.loaded.layout,
        device=args.device,
    )


def _layout_of(trainer: BaseTrainer) -> dict[str, Any]:
    """The layout that the policy runs, as options: a reference that cannot share prefixes runs ragged."""
    is_shared = trainer.loaded.layout == SHARED
    return {"layout": RAGGED if is_shared else trainer.loaded.layout, "share_prefixes": is_shared}


def _placed(trainer: BaseTrainer, model: nn.Module) -> nn.Module:
    """On the device; in pieces where the policy is."""
    model.requires_grad_(False)
    if trainer.is_fully_sharded:
        return shard_frozen(trainer.accelerator, model)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


# ---- precomputed log-probs -----------------------------------------------------------------------------------------------


def precomputed(trainer: BaseTrainer, reference: ModelReference, source: Any) -> Reference:
    """Put the reference's log-probs on the rows of the trainer's datasets; its weights need no device memory afterwards.

    `source` is the model or the name that the reference comes from: rows that are evaluated on later are asked of it again.
    """
    args = trainer.args
    folder = cache_folder(PrepareOptions(cache_dir=args.dataset_cache_dir))
    store = store_of(reference, folder, args.world_size)

    def annotated(dataset: Any, name: str) -> Any:
        if dataset is None:
            return None
        if isinstance(dataset, dict):
            return {key: annotated(part, key) for key, part in dataset.items()}
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"`precompute_ref_log_probs` needs the whole {name} dataset; this one is streamed. Turn it off."
            )
        return with_reference_logps(trainer, reference, store, dataset, name)

    trainer.train_dataset = annotated(trainer.train_dataset, "train")
    trainer.eval_dataset = annotated(trainer.eval_dataset, "eval")
    return Precomputed(_LateRows(trainer, reference, store, source))


class _LateRows:
    """The reference's log-probs of rows that nobody had given when the others' were computed."""

    def __init__(self, trainer: BaseTrainer, reference: ModelReference, store: RowStore, source: Any) -> None:
        self.trainer, self.store, self.source = trainer, store, source
        is_copy, has_name = isinstance(reference, FrozenCopy), not isinstance(source, nn.Module)
        self.reference = None if is_copy and (has_name or trainer.is_fully_sharded) else reference
        self.is_parked = is_copy and self.reference is not None and reference.model is not source
        if self.is_parked:  # in host memory: the policy that it was copied from will have moved
            reference.model.to("cpu")

    def __call__(self, rows: Any) -> Any:
        if isinstance(rows, AnnotatedDataset):
            return rows
        trainer = self.trainer
        if not hasattr(rows, "__len__") or (trainer.is_fully_sharded and self.reference is None):
            raise ValueError(
                "With `precompute_ref_log_probs` a stream cannot be evaluated on, nor, under FSDP and DeepSpeed, rows that the "
                "trainer was not given: pass them as `eval_dataset`, or turn it off."
            )
        reference = self.reference or self._loaded_again()
        if self.is_parked:
            reference.model.to(trainer.args.device)
        found = with_reference_logps(trainer, reference, self.store, rows, "eval")
        if self.is_parked:
            reference.model.to("cpu")
        return found

    def _loaded_again(self) -> ModelReference:
        reference = live_reference(self.trainer, self.source, None)
        if (
            store_of(reference, self.store.folder.parent.parent, self.trainer.args.world_size).folder
            != self.store.folder
        ):
            raise ValueError(
                f"The weights of {self.source} are not those that the reference log-probs were computed with: the files have "
                "changed, or tokens were added to the vocabulary. Give these rows to the trainer as `eval_dataset`."
            )
        return reference
