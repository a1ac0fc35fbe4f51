"""Options of a reference, and how a trainer gets one."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from posttrain.data.annotated import AnnotatedDataset, trained_starts
from posttrain.data.loader import EpochBatches, UnitLoader
from posttrain.data.prepare import PrepareOptions, cache_folder
from posttrain.models.adapters import freeze_copy_of_adapter, is_peft_model
from posttrain.models.load import LoadOptions, load_model
from posttrain.models.reference import (
    GIVEN_SUMS,
    PRECOMPUTED,
    GivenSums,
    Precomputed,
    Reference,
    adapter_off,
    create_reference_model,
    frozen_adapter,
    frozen_copy,
)
from posttrain.models.weights import weights_fingerprint
from posttrain.trainer.callbacks import SyncRefModelCallback
from posttrain.trainer.config import check_range, option

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer

logger = logging.getLogger(__name__)


@dataclass
class ReferenceConfig:
    """Options of methods that compare the policy with a reference; mixed into their configs."""

    precompute_ref_log_probs: bool = option(
        False, "Run the reference over the data once before training and keep its log-probs on disk."
    )
    precompute_ref_batch_size: int | None = option(None, "Rows per batch of that pass. None: as in training.")
    sync_ref_model: bool = option(False, "TR-DPO: move the reference towards the policy every `ref_model_sync_steps`.")
    ref_model_mixup_alpha: float = option(0.6, "reference = alpha * policy + (1 - alpha) * reference.")
    ref_model_sync_steps: int = option(512, "Optimizer steps between two moves of the reference.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ref_model_mixup_alpha", self.ref_model_mixup_alpha, 0, 1)
        check_range("ref_model_sync_steps", self.ref_model_sync_steps, 1)
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
    reference = _live_reference(trainer, ref_model, policy)
    if args.precompute_ref_log_probs:
        trainer.train_dataset = precomputed(trainer, reference, trainer.train_dataset, "train")
        trainer.eval_dataset = precomputed(trainer, reference, trainer.eval_dataset, "eval")
        reference = Precomputed()
    if args.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(reference, trainer.accelerator))
    logger.info(f"The reference is {reference}.")
    return reference


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


def _live_reference(trainer: BaseTrainer, ref_model: Any, policy: Any) -> Reference:
    model = trainer.loaded.model
    if ref_model is not None:
        if not isinstance(ref_model, nn.Module):
            ref_model = load_model(ref_model, _reference_options(trainer)).model
        else:
            load_model(ref_model, LoadOptions(layout=trainer.loaded.layout, device=trainer.args.device))
        return frozen_copy(_placed(trainer, ref_model))
    if is_peft_model(model):
        if isinstance(policy, nn.Module) and is_peft_model(policy):  # an adapter that is trained further
            return frozen_adapter(model, freeze_copy_of_adapter(model, model.active_adapter))
        return adapter_off(model)
    return frozen_copy(_placed(trainer, create_reference_model(model)))


def _reference_options(trainer: BaseTrainer) -> LoadOptions:
    args = trainer.args
    return LoadOptions(
        dtype=args.compute_dtype,
        model_init_kwargs=dict(args.model_init_kwargs or {}),
        trust_remote_code=args.trust_remote_code,
        use_liger_kernel=args.wants_liger,
        layout=trainer.loaded.layout,
        device=args.device,
    )


def _placed(trainer: BaseTrainer, model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


# ---- precomputed log-probs -----------------------------------------------------------------------------------------------


def precomputed(trainer: BaseTrainer, reference: Reference, dataset: Any, name: str) -> Any:
    """The dataset with the reference's log-prob on every trained token, from the cache where it was computed before."""
    if dataset is None:
        return None
    if isinstance(dataset, dict):
        return {key: precomputed(trainer, reference, part, key) for key, part in dataset.items()}
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"`precompute_ref_log_probs` needs the whole {name} dataset; this one is streamed. Turn it off."
        )
    key = hashlib.sha256(
        f"{dataset.fingerprint}|{weights_fingerprint(reference.model)}|{reference}".encode()
    ).hexdigest()
    path = cache_folder(PrepareOptions(cache_dir=trainer.args.dataset_cache_dir)) / f"reference_logps_{key[:32]}.npy"
    starts = trained_starts(dataset)
    if not path.exists():
        _write_logps(trainer, reference, dataset, starts, path, name)
    trainer.accelerator.wait_for_everyone()
    return AnnotatedDataset(dataset, PRECOMPUTED, np.load(path, mmap_mode="r"), starts)


def _write_logps(
    trainer: BaseTrainer, reference: Reference, dataset: Any, starts: np.ndarray, path: Path, name: str
) -> None:
    """One pass over the data, each process its share; the first process writes the file."""
    args = trainer.args
    rows = args.precompute_ref_batch_size or args.per_device_train_batch_size
    batches = EpochBatches(len(dataset), rows, rank=args.process_index, world_size=args.world_size, order="sequential")
    loader = UnitLoader(dataset, batch_sampler=batches, collate_fn=trainer.data_collator)
    values = torch.zeros(int(starts[-1]), dtype=torch.float32)
    logger.info(f"Reference log-probs of {len(dataset)} {name} rows are computed once and kept in {path}.")
    for units, batch in zip(batches, loader):
        logps = reference.scores(batch.to(args.device)).logps.float().cpu()
        place = 0
        for unit in units:
            size = int(starts[unit + 1] - starts[unit])
            values[starts[unit] : starts[unit + 1]] = logps[place : place + size]
            place += size
    if args.world_size > 1:
        values = values.to(args.device)
        torch.distributed.all_reduce(values)  # each process filled its own rows, the others are 0
        values = values.cpu()
    if args.should_save:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(".tmp.npy")
        np.save(staged, values.numpy())
        staged.rename(path)
