"""Options that every method shares, each declared and documented once.

`option(default, help)` is `dataclasses.field` with the help in its metadata; docs tables and `--help` are generated from it.
Checks that need only options live in `__post_init__`, beside the option.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from accelerate.utils.modeling import convert_file_size_to_int
from transformers import TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from posttrain.core.batch import PADDED, RAGGED
from posttrain.core.console import NORMAL, VERBOSITIES
from posttrain.core.options import default_of, is_ours, is_refused, option, refused
from posttrain.core.secrets import without_secrets
from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.memory.fit import LEAST
from posttrain.trainer.options.processes import lay_out_processes

STEPS_WORTH_COMPILING_FOR = 300
"""Compiling costs about as much time as it saves in a few dozen steps."""
MIN_LOGS = 10
"""A run logs at least so many times, where it has as many steps and `logging_steps` is not set."""
FSDP, DEEPSPEED = "fsdp", "deepspeed"
"""Who holds weights in pieces; accelerate's environment variables name them so, too."""
TRUNCATION_MODES = ("keep_start", "keep_end", "error", "drop")


@dataclass
class BaseConfig(TrainingArguments):
    """Options shared by all methods, on top of transformers.TrainingArguments."""

    reads_label_smoothing_factor: ClassVar[bool] = False
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs", "chat_template_kwargs"]

    # ---- how the run is shown and computed
    logging_steps: float = option(
        10,
        "Log every so many optimizer steps; below 1, a fraction of all steps. The last step is always logged; left at 10, runs of "
        "fewer than 100 steps log every tenth of them, those of fewer than 20 every step.",
    )
    logging_first_step: bool = option(True, "Log the first step, too, whatever `logging_steps` is.")
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations in the backward. None: as far as the measured need of the device's memory makes it necessary.",
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16 with float32 master weights. None: yes where the machine is fast at it, float32 elsewhere.",
    )
    use_liger_kernel: bool | None = option(
        None, "Replace norm, rotary and SwiGLU layers by Liger's. None: on CUDA when liger-kernel is installed."
    )
    compile_layers: bool | None = option(
        None,
        "Compile the decoder layers. None: on CUDA in runs of 300 steps or more, if one layer then runs faster than Liger's.",
    )
    fp8: bool = option(
        False,
        "Products of the decoder's linear layers in 8-bit floats (e4m3, a scale for each row), forward and backward. Weights, "
        "gradients and masters stay as they are. For `bf16` and methods without rollouts.",
    )
    activation_offloading: bool | None = option(
        None,
        "Saved activations (of checkpointed layers: their inputs) wait in host memory. None: when nothing less fits.",
    )
    memory: str | None = option(
        None,
        "GPU memory of a process that the plan of a step may use: a size such as `24GiB`, or `least` for the smallest peak, "
        "however slow. None: what is free, for speed.",
    )
    chunk_tokens: int | None = option(None, "Tokens whose logits exist at once. None: as many as fit the chunk budget.")
    keep_logits: bool | None = option(
        None,
        "Losses of log-probs: keep all logits for the backward instead of computing them again. None: where memory is left over.",
    )

    # ---- the model
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments of `from_pretrained` when the model is given by name or path; JSON text is accepted."
    )
    trust_remote_code: bool = option(False, "Allow Python code from the model's repository to run.")
    disable_dropout: bool = option(True, "Set every dropout probability of the model to 0.")
    fuse_lora: bool = option(
        True,
        "Compute LoRA linears and gated MLPs as single functions: less time and memory. False: PEFT's own forwards.",
    )
    router_aux_loss_coef: float | None = option(
        None, "Weight of a mixture-of-experts' load-balancing loss. None: the model's own; 0: off."
    )

    # ---- the data
    chat_template_path: str | None = option(
        None, "A .jinja file, a built-in format's name, or a tokenizer whose template (and tokens) are cloned."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(None, "Arguments for the chat template, for all rows.")
    eos_token: str | None = option(None, "Token that ends a text; must be in the vocabulary. None: the tokenizer's.")
    pad_token: str | None = option(None, "Deprecated: set `pad_token` on the tokenizer. Still honoured.")
    max_length: int | None = option(1024, "Longest sequence in tokens, prompt and completion together. None: no limit.")
    truncation_mode: str = option(
        "keep_start", "What happens to a longer one: keep_start, keep_end, error or drop. Always counted and reported."
    )
    on_bad_rows: str = option(
        "error",
        "Rows that fail the check: 'error' stops before training, 'drop' leaves them out, also rows of offline methods whose "
        "images cannot be read any more.",
    )
    dataset_num_proc: int | None = option(
        None, "Processes that render and tokenise. None: one for every 5,000 rows, at most one a core."
    )
    dataset_cache_dir: str | None = option(None, "Where tokenised data is kept. None: the Hugging Face datasets cache.")
    shuffle_dataset: bool = option(False, "Shuffle the dataset once, with `seed`, before it is packed or batched.")
    padding_free: bool | None = option(
        None, "True: ragged batches, no padding. False: padded batches. None: ragged wherever the model can run it."
    )
    pad_to_multiple_of: int | str | None = option(
        "auto", "Fill batches up to a multiple of this many tokens; 'auto' and None: no filling."
    )

    max_tokens_per_pass: int | None = option(
        None,
        "A micro-batch with more tokens runs in several passes, rows kept whole, with the same gradient. None: on CUDA, what "
        "memory allows.",
    )

    # ---- several processes
    dp_replicate_size: int = option(
        1,
        "FSDP: whole copies of the model, each in shards on neighbouring processes (HSDP). With one copy a machine, weights are "
        "gathered inside of a machine.",
    )

    sequence_parallel_size: int = option(
        1,
        "Neighbouring processes that share each row, a part of its tokens each: for sequences whose activations one device cannot "
        "hold. The batch sizes are those of so many processes together.",
    )

    # ---- trust
    max_skipped_steps: int = option(3, "Stop after this many optimizer steps in a row whose gradient was not finite.")
    resume_allow_changes: list[str] = option(
        [],
        "Options (or 'dataset', 'tokenizer', 'model', 'adapter', 'rewards', 'teacher') that may differ from those of the "
        "checkpoint on resume.",
    )
    save_in_background: bool = option(
        True,
        "Copy the state to host memory and write checkpoints on a thread. With several processes they are written at once.",
    )
    alerts: bool = option(True, "Say in words when loss, gradient norm, entropy or rewards drift.")
    verbosity: str = option(
        NORMAL,
        "Our own lines: quiet (warnings, alerts and errors), normal (also plan, progress and summary) or verbose (also log records "
        "of level INFO). For the whole process; `log_level` is that of transformers.",
    )

    def __post_init__(self) -> None:
        self._set_by_user = {f.name for f in fields(self) if is_ours(f) and getattr(self, f.name) != default_of(f)}
        self._defaults_of_posttrain()
        requested_bf16 = self._resolve_precision()
        super().__post_init__()
        self.bf16 = requested_bf16
        if self.sharding is None and not self.fp16:
            self.mixed_precision = "no"
        self._check_shared_options()
        lay_out_processes(self)

    # ---- precision -----------------------------------------------------------------------------------------------

    def _resolve_precision(self) -> bool:
        """Decide on bf16 ourselves, and keep Accelerate's autocast out of it unless a sharded engine owns the masters."""
        if self.fp16 and self.bf16:
            raise ValueError("Set at most one of `fp16` and `bf16`.")
        launched_with = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if self.bf16 is None:
            fast = torch.cuda.is_available() and not self.use_cpu and torch.cuda.is_bf16_supported()
            self.bf16 = not self.fp16 and (fast or launched_with == "bf16")
        requested = bool(self.bf16)
        self.bf16 = requested and self.sharding is not None
        return requested

    @property
    def sharding(self) -> str | None:
        """FSDP or DEEPSPEED where the weights are held in pieces, by these options or by `accelerate launch`; else None.

        Both keep masters of their own; everywhere else those are `trainer/optimizer`'s business.
        """
        asked = {FSDP: self.fsdp, DEEPSPEED: self.deepspeed}
        launched = {name: os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true" for name in asked}
        return next((name for name in asked if asked[name] or launched[name]), None)

    @property
    def row_part(self) -> tuple[int, int] | None:
        """(which part of a row this process computes, of how many); None where it computes whole rows."""
        size = self.sequence_parallel_size
        return None if size == 1 else (self.process_index % size, size)

    @property
    def readers(self) -> int:
        """How many processes, or groups of processes that share their rows, read different rows."""
        return self.world_size // self.sequence_parallel_size

    @property
    def reader(self) -> int:
        """Which of them this process is, or belongs to."""
        return self.process_index // self.sequence_parallel_size

    @property
    def load_dtype(self) -> torch.dtype:
        """What trained weights are loaded in; float32 masters are kept beside them. Shards are the masters themselves."""
        return torch.float32 if self.sharding is not None else self.compute_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return torch.bfloat16 if self.bf16 else torch.float32

    # ---- checks --------------------------------------------------------------------------------------------------

    def _defaults_of_posttrain(self) -> None:
        """Options of transformers whose meaning would contradict a promise of this library."""
        self.logging_nan_inf_filter = False  # a NaN is reported, never replaced (trl-gaps: a NaN is hidden)
        if self.logging_strategy == "no":  # Trainer would log the first step regardless
            self.logging_first_step = False
        if isinstance(self.lr_scheduler_kwargs, str):
            self.lr_scheduler_kwargs = json.loads(self.lr_scheduler_kwargs)
        if self.gradient_checkpointing_kwargs is None:
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}

    def _refuse_options(self) -> None:
        """Raise for the first option that is there for its name's sake and was set."""
        for field in fields(self):
            value = getattr(self, field.name)
            if is_refused(field) and value != default_of(field):
                raise ValueError(f"`{field.name}` is {value!r}, which has no effect here. {field.metadata['help']}")

    def _check_shared_options(self) -> None:
        self._refuse_options()
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            check_range(name, getattr(self, name), 1)
        check_range("learning_rate", self.learning_rate, 0)
        check_range("seed", self.seed, 0, 2**32 - 1)
        for name in self.report_to:
            check_choice("report_to", name, tuple(INTEGRATION_TO_CALLBACK))
        check_choice("truncation_mode", self.truncation_mode, TRUNCATION_MODES)
        check_choice("on_bad_rows", self.on_bad_rows, ("error", "drop"))
        check_choice("verbosity", self.verbosity, VERBOSITIES)
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"`max_length` is {self.max_length}; a sequence that trains a token has at least 2.")
        if self.auto_find_batch_size:
            raise ValueError("`auto_find_batch_size` restarts the run; set `per_device_train_batch_size` instead.")
        if self.label_smoothing_factor and not self.reads_label_smoothing_factor:
            raise ValueError(f"`label_smoothing_factor` smooths token labels; {type(self).__name__} does not read it.")
        if not self.average_tokens_across_devices:
            raise ValueError(
                "Losses are always divided by the counts of all processes: `average_tokens_across_devices` is on."
            )
        if self.accelerator_config.split_batches or self.accelerator_config.dispatch_batches:
            raise ValueError("Every process makes its own batches: leave `split_batches` and `dispatch_batches` out.")
        if self.neftune_noise_alpha is not None and self.padding_free:
            raise ValueError(
                "NEFTune scales its noise by the length of a row, which a ragged row does not have: no `padding_free`."
            )
        if self.max_skipped_steps < 1:
            raise ValueError(f"`max_skipped_steps` is {self.max_skipped_steps}; it must be at least 1.")
        if self.max_tokens_per_pass is not None and (self.max_tokens_per_pass < 1 or self.sharding == DEEPSPEED):
            raise ValueError(
                f"`max_tokens_per_pass` is {self.max_tokens_per_pass}; it must be at least 1, and left out under DeepSpeed, which "
                "counts backward passes itself."
            )
        if self.memory is not None and self.memory != LEAST and not self.memory_bytes:
            raise ValueError(f"`memory` is {self.memory!r}; it is a size such as '24GiB', or {LEAST!r}.")
        if self.compile_layers and self.use_liger_kernel:
            raise ValueError("Set at most one of `compile_layers` and `use_liger_kernel`.")
        if self.compile_layers and self.sharding is not None:
            raise ValueError(
                "`compile_layers` is for whole models; FSDP and DeepSpeed gather the weights of a layer as it runs."
            )
        if self.fp8 and (not self.bf16 or self.sharding is not None):
            found = "`bf16` is off" if not self.bf16 else f"{self.sharding} holds the weights in pieces"
            raise ValueError(
                f"`fp8` rounds the operands of products in bfloat16 of whole weights; {found}. Leave it out."
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ValueError(f"`chunk_tokens` is {self.chunk_tokens}; it must be at least 1.")

    def logs_at(self, step: int, state: TrainerState) -> bool:
        """Whether `logging_strategy="steps"` logs this step; short runs log more often than a default of 10 would have it."""
        if self.logging_strategy != "steps":
            return False
        interval = state.logging_steps
        if "logging_steps" not in self._set_by_user:
            interval = min(interval, max(state.max_steps // MIN_LOGS, 1))
        return step % interval == 0 or step >= state.max_steps or (step == 1 and self.logging_first_step)

    @property
    def steps_in_one_pass(self) -> bool:
        """Whether an optimizer step is one pass of one process, so that gradients are never added up."""
        return self.gradient_accumulation_steps == self.world_size == 1 and not self.max_tokens_per_pass

    @property
    def memory_bytes(self) -> int | None:
        """Of `memory`, where it is a size; 0 where it is none that can be read."""
        if self.memory in (None, LEAST):
            return None
        try:
            return convert_file_size_to_int(self.memory)
        except ValueError:
            return 0

    def shows_next_step(self, state: TrainerState) -> bool:
        """Whether a log will show the coming step: statistics that cost a pass over the vocabulary are taken on those alone."""
        return self.logs_at(state.global_step + 1, state) or self.logging_strategy == "epoch"

    @property
    def layout(self) -> str | None:
        """The layout the user asked for (NEFTune's noise needs rows of their own), or None where the model decides."""
        if self.neftune_noise_alpha is not None:
            return PADDED
        return None if self.padding_free is None else RAGGED if self.padding_free else PADDED

    def layer_kernels(self, steps: int) -> tuple[str, ...]:
        """Candidates for the kernels of the decoder layers in a run of `steps`; of several, a probe takes the fastest."""
        has_liger = importlib.util.find_spec("liger_kernel") is not None
        if self.use_liger_kernel and not has_liger:
            raise ImportError("`use_liger_kernel=True` needs the liger-kernel package: pip install posttrain[gpu].")
        if self.device.type != "cuda":
            return (LIGER,) if self.use_liger_kernel else (PLAIN,)
        is_free = self.compile_layers is None and self.use_liger_kernel is None and self.sharding is None
        if self.compile_layers or (self.fp8 and is_free):  # uncompiled, rounding would cost more than 8 bits save
            return (COMPILED,)
        uncompiled = LIGER if (has_liger if self.use_liger_kernel is None else self.use_liger_kernel) else PLAIN
        return (uncompiled, COMPILED) if is_free and steps >= STEPS_WORTH_COMPILING_FOR else (uncompiled,)

    @property
    def pad_multiple(self) -> int | None:
        return None if self.pad_to_multiple_of in ("auto", "none", None) else int(self.pad_to_multiple_of)

    def to_dict(self) -> dict[str, Any]:
        """The options without secrets at any depth: it goes into files and to trackers."""
        options = super().to_dict()
        # not all of them are secrets
        options |= {name: getattr(self, name) for name in options if name.endswith("_token")}
        return without_secrets(options)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}({given})"

    __repr__ = __str__

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """`@dataclass` writes a `__repr__` with every value, unless the class has one of its own."""
        super().__init_subclass__(**kwargs)
        cls.__repr__ = BaseConfig.__str__

    def set_by_user(self) -> set[str]:
        """Names of our options whose value differed from the default when the config was made."""
        return set(self._set_by_user)


@dataclass
class SharedPromptsConfig:
    """Options of methods that train on several answers to one prompt; mixed into their configs."""

    share_prompts: bool = option(
        True,
        "Compute a prompt once for all answers to it in a micro-batch, wherever the model allows it. Same gradient, less work.",
    )


@dataclass
class OlderOptions:
    """Options of TRL's older configs of offline methods, known by their names; mixed into the configs that had them."""

    generate_during_eval: bool = refused(False, "LogCompletionsCallback writes answers to evaluation prompts.")
    is_encoder_decoder: bool | None = refused(None, "Encoder-decoder models are not supported.")
    max_prompt_length: int | None = refused(None, "`max_length` limits prompt and answer together.")
    label_pad_token_id: int = refused(-100, "Batches hold no padded labels.")
    padding_value: int | None = refused(None, "Set `pad_token` on the tokenizer.")


@dataclass
class OlderPairOptions(OlderOptions):
    """As OlderOptions, with what the reference-free methods of pairs had besides."""

    max_completion_length: int | None = refused(None, "`max_length` limits prompt and answer together.")


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


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise for a value that is not one of `choices`, before anything is loaded."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; it must be one of {', '.join(choices)}.")


def check_range(name: str, value: float, low: float, high: float = float("inf"), open_low: bool = False) -> None:
    """Raise unless `low <= value <= high` (`low < value` with `open_low`)."""
    if not (low < value if open_low else low <= value) or value > high:
        sign = ">" if open_low else ">="
        bound = f"{sign} {low}" + ("" if high == float("inf") else f" and <= {high}")
        raise ValueError(f"`{name}` is {value}; it must be {bound}.")
