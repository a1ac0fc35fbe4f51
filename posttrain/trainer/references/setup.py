"""ReferenceSetup: how a policy gets the reference that it is compared with, and how that follows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerCallback

from posttrain.core.batch import RAGGED, SHARED
from posttrain.data.collate import Collator
from posttrain.data.options import PrepareOptions
from posttrain.data.store.prepare import cache_folder
from posttrain.data.store.row_store import AnnotatedDataset, RowStore
from posttrain.models.layers.kernels import COMPILED, PLAIN, compile_layers
from posttrain.models.load.adapters import TEACHER_ADAPTER, is_peft_model, is_quantized
from posttrain.models.load.model import (
    CAUSAL_LM,
    LoadedModel,
    LoadOptions,
    innermost_model,
    load_model,
    load_tokenizer,
    model_type_of,
)
from posttrain.models.load.reference import (
    GIVEN_SUMS,
    FrozenCopy,
    GivenSums,
    ModelReference,
    MovableReference,
    Precomputed,
    Reference,
    adapter_off,
    copy_on_host,
    create_reference_model,
    frozen_adapter,
    frozen_copy,
)
from posttrain.models.load.teacher import BASE, LIVE, ModelTeacher
from posttrain.models.vision.features import family_of
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.sharding import shard_frozen
from posttrain.trainer.options.base import DEEPSPEED, FSDP, BaseConfig, ReferenceConfig
from posttrain.trainer.references.cache import store_of, with_reference_logps

logger = logging.getLogger(__name__)

MOVED_REFERENCE, MOVED_TEACHER = "moved_reference", "moved_teacher"
NO_REFERENCE, FROM_ROWS, COMPUTED_BEFORE, ADAPTER_OFF, COPY = (
    "none", "brought by the rows", "computed once, before training", "the model without its adapter", "a frozen copy",
)  # fmt: skip


class SyncRefModelCallback(TrainerCallback):
    """TR-DPO (arXiv:2404.09656): every `ref_model_sync_steps` the reference moves a share towards the policy.

    reference = (1 - ref_model_mixup_alpha) * reference + ref_model_mixup_alpha * policy
    """

    options: tuple[str, str] = ("ref_model_sync_steps", "ref_model_mixup_alpha")
    file: str = MOVED_REFERENCE

    def __init__(self, ref_model: Reference | nn.Module, accelerator: Accelerator | None = None) -> None:
        self.reference = ref_model if isinstance(ref_model, Reference) else frozen_copy(ref_model)
        self.accelerator = accelerator
        self._gathered: dict[str, Tensor] | None = None  # for the next checkpoint

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps, share = (getattr(args, name) for name in self.options)
        if state.global_step % steps == 0:
            model = kwargs["model"]
            if self.accelerator is not None:
                model = self.accelerator.unwrap_model(model)
            self.reference.sync(model, share)

    def gather(self) -> None:
        """By all processes, before any of them writes a checkpoint: the reference as a whole, where FSDP2 holds it in pieces. Once
        one has failed to write, it would no longer take part."""
        if self.accelerator is not None and self.accelerator.is_fsdp2:
            self._gathered = self.reference.state(is_kept=self.accelerator.is_main_process)

    def save_state_files(self, folder: Path) -> None:
        """A reference that has moved is a part of the run's state."""
        state, self._gathered = self._gathered, None
        files.save_tree(Path(folder) / self.file, self.reference.state() if state is None else state)

    def load_state_files(self, folder: Path) -> None:
        load_moved(self.reference, Path(folder), self.file)


class MoveTeacherCallback(SyncRefModelCallback):
    """Every `teacher_sync_steps` a teacher that averages the policy moves by `teacher_update_rate` towards it."""

    options = ("teacher_sync_steps", "teacher_update_rate")
    file = MOVED_TEACHER


def save_moved(reference: MovableReference, folder: Path) -> None:
    files.save_tree(folder / MOVED_REFERENCE, reference.state())


def load_moved(reference: MovableReference, folder: Path, file: str = MOVED_REFERENCE) -> None:
    reference.load_state(files.load_tree(folder / file))


@dataclass
class ReferenceSetup:
    """Makes references of a loaded policy, for batches as `collator` lays them out."""

    args: BaseConfig
    policy: LoadedModel
    collator: Collator
    accelerator: Accelerator

    def make(self, ref_model: Any, source: Any, train_dataset: Any, eval_dataset: Any) -> tuple[Reference, Any, Any]:
        """What the user gave, else what costs least memory and is exact; `source` is what the policy was loaded from.

        Returns the datasets, too: with its log-probs, where they are precomputed.
        """
        args = self.args
        if ref_model is not None and ref_model is self.policy.model:
            raise ValueError("`ref_model` is the model that is trained: it would move. Leave it out, or pass a copy.")
        if rows_carry_reference(train_dataset):
            return _given(args, ref_model), train_dataset, eval_dataset
        # Before training the policy is its own reference: no second model is made, unless later rows could not be answered.
        asks_policy = ref_model is None and not is_peft_model(self.policy.model) and args.sharding is None
        asks_policy = asks_policy and args.precompute_ref_log_probs
        if asks_policy:
            reference = ModelReference(self.policy.model, "the policy before training")
        else:
            reference = self.live(ref_model, source)
        if args.precompute_ref_log_probs:
            folder = cache_folder(PrepareOptions(cache_dir=args.dataset_cache_dir))
            store = store_of(reference, folder, args.world_size)
            train_dataset = self._annotated(reference, store, train_dataset, "train")
            eval_dataset = self._annotated(reference, store, eval_dataset, "eval")
            # Rows that are evaluated on later are asked of what the reference comes from.
            source = source if ref_model is None else ref_model
            if asks_policy:
                is_there = not isinstance(source, nn.Module)
                reference = None if is_there else frozen_copy(copy_on_host(self.policy.model))
            reference = Precomputed(_LateRows(self, reference, store, source))
        logger.info(f"The reference is {reference}.")
        return reference, train_dataset, eval_dataset

    def followers(self, reference: Reference) -> list[TrainerCallback]:
        """With `sync_ref_model`, what moves the reference towards the policy during training."""
        if not self.args.sync_ref_model:
            return []
        if self.args.sharding == DEEPSPEED:
            raise ValueError(
                "`sync_ref_model` moves a reference towards weights that DeepSpeed holds in pieces of its own. Use FSDP "
                "(`fsdp=True`), or leave it out."
            )
        reference.check_sync()
        return [SyncRefModelCallback(reference, self.accelerator)]

    def live(self, ref_model: Any, source: Any) -> ModelReference:
        """A reference that answers with weights that are in memory."""
        policy = self.policy
        if ref_model is not None:
            return replace(frozen_copy(self._placed(self.loaded_beside(ref_model))), is_given=True)
        if is_peft_model(policy.model):
            if isinstance(source, nn.Module) and is_peft_model(source):  # an adapter that is trained further
                return frozen_adapter(policy.model)
            return adapter_off(policy.model)
        return self._copy_of_policy()

    def _copy_of_policy(self) -> FrozenCopy:
        copy = create_reference_model(self.policy.model)
        if self.policy.kernels == COMPILED:
            compile_layers(innermost_model(copy))  # a copy leaves the compiled code behind
        return frozen_copy(self._placed(copy))

    def self_teacher(self, kind: str, source: Any, reference: ModelReference | None = None) -> ModelTeacher:
        """The policy as its own teacher: as the run began (`base`), as it is (`live`), or averaged (`ema`).

        `reference` is the policy as the run began, where there is one already."""
        self._refuse_deepspeed()
        model = self.policy.model
        if kind == LIVE:
            asked = ModelReference(model, "the policy itself, without a gradient")
        elif kind == BASE:
            asked = reference or self.live(None, source)
        else:
            asked = frozen_adapter(model, TEACHER_ADAPTER) if is_peft_model(model) else self._copy_of_policy()
            asked.description = "the moving average of the policy"
            asked.keep_averages()
        own_head = innermost_model(model).get_output_embeddings()
        if kind != LIVE and is_peft_model(model) and any(w.requires_grad for w in own_head.parameters()):
            raise ValueError(
                f"The adapter is on the output head, too, which reads the states of the teacher ({asked}) beside the policy's and "
                "can be in one state only. Leave the head out of `target_modules` and `modules_to_save`, or use "
                "`teacher_model_kind='live'`."
            )
        asked.chunk_tokens = self.args.chunk_tokens
        return ModelTeacher(asked, str(asked))

    def _refuse_deepspeed(self) -> None:
        if self.args.sharding == DEEPSPEED:
            raise ValueError(
                "A teacher's head is read whole beside the student's, and DeepSpeed has both in pieces. Use FSDP (`fsdp=True`), or "
                "one process per GPU without sharding."
            )

    def teacher(
        self,
        model: Any,
        init_kwargs: dict[str, Any],
        tokenizer: Any = None,
        reads_the_students: bool = True,
        seen: dict[str, Any] | None = None,
    ) -> ModelTeacher:
        """Another model that the policy learns from, loaded with arguments of its own: dtype, quantisation, revision.

        `reads_the_students`: tokens, that is; otherwise it is only shown tokens of its own tokenizer. `seen`: arguments of
        LoadOptions that say how it is shown images, where that is not as the student is.
        """
        if model is self.policy.model:
            raise ValueError("`teacher_model` is the model that is trained: it would move with it. Pass another model.")
        self._refuse_deepspeed()
        if isinstance(model, nn.Module) and init_kwargs:
            raise ValueError(
                "`teacher_model_init_kwargs` and `teacher_model_revision` are for teachers given by name or path; this one is "
                "loaded already. Leave them out."
            )
        if tokenizer is None:
            tokenizer = self._tokenizer_of_teacher(model, init_kwargs)
        loaded = self._loaded(
            model, CAUSAL_LM, replace(self._options(), model_init_kwargs=init_kwargs, fp8=False), seen
        )
        words = innermost_model(loaded.model).get_input_embeddings().num_embeddings
        if reads_the_students:
            self._grow(loaded)  # the policy may write any token that it has a row for, and the teacher must read it
        size = sum(parameter.numel() for parameter in loaded.model.parameters())
        dtype = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        asked = frozen_copy(self._placed(loaded.model))
        asked.description, asked.chunk_tokens = f"{loaded.name} ({size:,} weights, {dtype})", self.args.chunk_tokens
        return ModelTeacher(asked, loaded.name, words, tokenizer)

    def _tokenizer_of_teacher(self, model: Any, init_kwargs: dict[str, Any]) -> Any:
        try:
            return load_tokenizer(model, init_kwargs, self.args.trust_remote_code)
        except ValueError as error:
            raise ValueError(
                "Whether the teacher reads the student's tokens is seen from its tokenizer, and it has none beside it "
                f"({error}) Pass it as `teacher_processing_class`."
            ) from error

    def loaded_beside(self, model: Any, task: str = CAUSAL_LM) -> nn.Module:
        """Another model, which will be asked about the policy's batches."""
        loaded = self._loaded(model, task, self._options())
        self._grow(loaded)
        return loaded.model

    def _loaded(self, model: Any, task: str, options: LoadOptions, seen: dict[str, Any] | None = None) -> LoadedModel:
        args, policy = self.args, self.policy
        if isinstance(model, nn.Module):  # its dtype and adapter are the caller's; how its layers are run is not
            has_own_layers = is_peft_model(model) or is_quantized(innermost_model(model))
            kernels, rounds = (PLAIN, False) if has_own_layers else (policy.kernels, options.fp8)
            options = LoadOptions(device=args.device, layer_kernels=(kernels,), fp8=rounds)
        is_shared = policy.layout == SHARED  # one that cannot share prefixes runs ragged
        layout = {"layout": RAGGED if is_shared else policy.layout, "share_prefixes": is_shared}
        seen = self._seen(model, options) if seen is None else seen
        loaded = load_model(model, replace(options, task=task, sharded=args.sharding == FSDP, **layout, **seen))
        if loaded.layout != policy.layout:  # the policy shares prefixes, the other cannot
            policy.layout = self.collator.layout = loaded.layout
        return loaded

    def _seen(self, model: Any, options: LoadOptions) -> dict[str, Any]:
        """How another model of the policy's family is shown images, where the policy is."""
        family = family_of(innermost_model(self.policy.model))
        if family is None or model_type_of(model, options.model_init_kwargs) != family.model_type:
            return {}
        return {"vision": family, "image_probe": self.policy.image_probe}

    def _grow(self, loaded: LoadedModel) -> None:
        """The policy has grown for its tokenizer, and may write any token that it has a row for."""
        policy = self.policy
        own, wanted = (
            innermost_model(one).get_input_embeddings().num_embeddings for one in (loaded.model, policy.model)
        )
        if own < wanted:
            innermost_model(loaded.model).resize_token_embeddings(wanted)
            logger.info(f"The embedding of {loaded.name} grew from {own} to {wanted} rows, which the policy has.")

    def _options(self) -> LoadOptions:
        args = self.args
        return LoadOptions(
            dtype=args.compute_dtype,
            model_init_kwargs=dict(args.model_init_kwargs or {}),
            trust_remote_code=args.trust_remote_code,
            layer_kernels=(self.policy.kernels,),
            fp8=args.fp8,
            fuse_lora=args.fuse_lora,
            device=args.device,
        )

    def _placed(self, model: nn.Module) -> nn.Module:
        """On the device; in pieces where the policy is."""
        model.requires_grad_(False)
        if self.args.sharding == FSDP:
            return shard_frozen(self.accelerator, model)
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    def _annotated(self, reference: ModelReference, store: RowStore, dataset: Any, name: str) -> Any:
        """The rows with the reference's log-probs, whose weights need no device memory afterwards."""
        if dataset is None:
            return None
        if isinstance(dataset, dict):
            return {key: self._annotated(reference, store, part, key) for key, part in dataset.items()}
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"`precompute_ref_log_probs` needs the whole {name} dataset; this one is streamed. Turn it off."
            )
        return with_reference_logps(self.args, self.collator, reference, store, dataset, name)


def kind_of_reference(run: Any, has_adapter: bool) -> str:
    """Who the policy of a run will be compared with, before anything is loaded; decided as in `ReferenceSetup.make`."""
    if isinstance(run.args, ReferenceConfig):
        if rows_carry_reference(run.train_dataset):
            return FROM_ROWS
        if run.args.precompute_ref_log_probs:
            return COMPUTED_BEFORE
    elif not getattr(run, "needs_reference", False):  # online methods say so
        return NO_REFERENCE
    return ADAPTER_OFF if has_adapter else COPY


def rows_carry_reference(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and len(dataset) > 0 and GIVEN_SUMS in dataset[0][0].scalars


def _given(args: Any, ref_model: Any) -> Reference:
    """The rows bring the reference's numbers along; whatever would compute others contradicts them."""
    for name, value in (
        ("ref_model", ref_model),
        ("sync_ref_model", args.sync_ref_model),
        ("precompute_ref_log_probs", args.precompute_ref_log_probs),
        ("ld_alpha", getattr(args, "ld_alpha", None)),
        ("image_augmentation", getattr(args, "image_augmentation", None)),
    ):
        if value:
            raise ValueError(
                f"The dataset brings sums of reference log-probs (ref_chosen_logps); `{name}` cannot go with them."
            )
    return GivenSums()


class _LateRows:
    """The reference's log-probs of rows that were given after the others' had been computed."""

    def __init__(self, setup: ReferenceSetup, reference: ModelReference | None, store: RowStore, source: Any) -> None:
        """`reference`: who is asked; None, and a copy of what has a name: it is loaded again."""
        self.setup, self.store, self.source = setup, store, source
        self.is_sharded = setup.args.sharding == FSDP
        is_copy, has_name = isinstance(reference, FrozenCopy), not isinstance(source, nn.Module)
        self.reference = None if is_copy and (has_name or self.is_sharded) else reference
        self.is_parked = is_copy and self.reference is not None and reference.model is not source
        if self.is_parked:  # in host memory: the policy that it was copied from will have moved
            reference.model.to("cpu")

    def __call__(self, rows: Any) -> Any:
        if isinstance(rows, AnnotatedDataset):
            return rows
        args = self.setup.args
        if not hasattr(rows, "__len__") or (self.is_sharded and self.reference is None):
            raise ValueError(
                "With `precompute_ref_log_probs` a stream cannot be evaluated on, nor, under FSDP and DeepSpeed, rows that the "
                "trainer was not given: pass them as `eval_dataset`, or turn it off."
            )
        reference = self.reference or self._loaded_again()
        if self.is_parked:
            reference.model.to(args.device)
        found = with_reference_logps(args, self.setup.collator, reference, self.store, rows, "eval")
        if self.is_parked:
            reference.model.to("cpu")
        return found

    def _loaded_again(self) -> ModelReference:
        reference = self.setup.live(self.source, None)
        cache = self.store.folder.parent.parent
        if store_of(reference, cache, self.setup.args.world_size).folder != self.store.folder:
            raise ValueError(
                f"The weights of {self.source} are not those that the reference log-probs were computed with: the files have "
                "changed, or tokens were added to the vocabulary. Give these rows to the trainer as `eval_dataset`."
            )
        return reference
