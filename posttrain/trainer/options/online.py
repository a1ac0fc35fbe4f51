"""Options of methods that train on what the model itself writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from posttrain.core.options import refused, values_of
from posttrain.core.sample import KEEP_END
from posttrain.data.render.conversation import TOOL_ROLE, USER_ROLE
from posttrain.losses.advantages import DEVIATIONS
from posttrain.rewards.runtime.options import AUTO, IN_PROCESS, RewardOptions
from posttrain.rollout.engines.protocol import ROLLOUT_DTYPES, SamplingParams
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.schedule import Schedule
from posttrain.rollout.source import WindowRules
from posttrain.trainer.options.async_rollouts import AsyncConfig
from posttrain.trainer.options.base import (
    BaseConfig,
    MovingReferenceConfig,
    SharedPromptsConfig,
    check_choice,
    check_range,
    option,
)
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.options.vllm import VLLMConfig

GENERATION_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "stop_token_ids": "stop_ids"}
"""Keys of `generation_kwargs` under the names of transformers and vLLM -> ours."""


@dataclass
class RefusedOptions:
    """Options of TRL's GRPOConfig and RLOOConfig without a meaning here; mixed into the configs of online methods.

    Each is known by its name and refused with what to use instead: one that is accepted and has no effect would let someone believe
    in it; one that is unknown would end in a TypeError without a reason.
    """

    remove_unused_columns: bool | None = refused(
        False, "Rewards are given the columns that they name: remove others from the dataset itself."
    )

    # ---- transformers' `generate`
    ds3_gather_for_generation: bool = refused(
        True, "Under DeepSpeed servers write the rollouts, and are sent weights that are gathered tensor by tensor."
    )
    cache_implementation: str | None = refused(
        None,
        "The native engine keeps keys and values in pages of its own, the transformers engine in the model's own cache: choose "
        "between them with `rollout_engine`.",
    )
    use_transformers_continuous_batching: bool = refused(
        False, "The native engine, which is the default, fills free slots while other completions are being written."
    )
    use_transformers_paged: bool = refused(
        False, "The native engine, which is the default, keeps keys and values in pages."
    )
    transformers_continuous_batching_config: dict[str, Any] | str | None = refused(
        None, "The native engine takes the memory that is free; `max_rollout_slots` bounds what it writes side by side."
    )

    # ---- vLLM
    vllm_group_port: int = refused(
        51216, "Weights go to a server over the connection that prompts go over: there is no second port."
    )


@dataclass
class OnlineConfig(
    MovingReferenceConfig, RefusedOptions, AsyncConfig, VLLMConfig, SharedPromptsConfig, ImageConfig, BaseConfig
):
    """Options of online methods: sampling, groups and windows, rewards, and what is kept of rollouts."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    loss_on_image_tokens: bool = refused(False, "Nothing of a prompt is trained.")
    image_augmentation: list[dict[str, Any]] | str | None = refused(
        None,
        "Completions are written, rewarded and trained about one and the same picture: change images in the dataset itself.",
    )
    disable_dropout: bool = option(False, "Set every dropout probability of the model to 0.")
    shuffle_dataset: bool = option(
        True, "Another order of prompts in each epoch. False, and always of a stream: the dataset's own."
    )
    cast_lm_head_to_fp32: bool = option(
        False, "Compute logits in float32, in training and in generation, where the other weights are in less."
    )
    max_length: int | None = option(
        None, "Longest prompt in tokens; longer ones are cut as `truncation_mode` says. None: no limit."
    )

    max_prompt_length: int | None = option(
        None,
        "Old name of `max_length`; prompts are cut at their beginning then, unless `truncation_mode` says otherwise.",
    )

    # ---- what is generated
    num_generations: int = option(8, "Completions of each prompt: the size of a group.")
    num_generations_eval: int | None = option(None, "The same in evaluation. None: `num_generations`.")
    max_completion_length: int = option(512, "Most tokens of a completion; with tools, of all its turns together.")
    generation_batch_size: int | None = option(
        None, "Completions that are generated at once, over all processes. None: `steps_per_generation` micro-batches."
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches that one generation feeds. None: `gradient_accumulation_steps`, one optimizer step."
    )
    num_iterations: int = option(1, "Passes over each generated batch (mu in the GRPO paper).")
    rollout_engine: str = option(
        "native", f"Who writes completions: {', '.join(ENGINES)}. 'native' falls back to 'transformers' where it must."
    )
    max_rollout_slots: int | None = option(
        None, "Completions that the native engine writes side by side. None: as memory allows."
    )
    rollout_drafts: int = option(
        0,
        "Tokens that the native engine drafts for a completion, by looking up what followed the same tokens before, where few are "
        "left to write and drafts are accepted. What is written stays the same. 0: none.",
    )
    rollout_kv_dtype: str | None = option(
        None,
        "What the native engine keeps keys and values in: 'fp8', 8 bits, so that twice as many tokens of 16 bits fit; None or "
        "'auto', the model's dtype.",
    )
    rollout_weight_dtype: str | None = option(
        None,
        "What the native engine multiplies in: 'fp8', 8 bits, so that a step reads half of 16-bit weights; None or 'auto', the "
        "model's dtype.",
    )

    # ---- how
    temperature: float = option(1.0, "Divides the logits, in sampling and in training.")
    top_p: float = option(1.0, "Sample from the most likely tokens that make up this much probability. 1: all.")
    top_k: int = option(0, "Sample from this many most likely tokens. 0: all.")
    min_p: float | None = option(None, "Leave out tokens less likely than this share of the likeliest. None: none.")
    repetition_penalty: float = option(1.0, "Above 1: tokens that occurred become less likely. 1: off.")
    generation_kwargs: dict[str, Any] | str | None = option(
        None,
        "Further sampling options (stop_strings, stop_token_ids, logit_bias, seed, regex); they override the above.",
    )
    vllm_structured_outputs_regex: str | None = option(
        None, "Completions match this regular expression, whichever engine writes them. None: any text."
    )
    vllm_guided_decoding_regex: str | None = option(None, "Old name of `vllm_structured_outputs_regex`.")

    # ---- rewards
    reward_weights: list[float] | None = option(None, "One weight for each reward. None: 1 each.")
    reward_on_error: str = option(
        "mask", "A reward that fails: 'mask' leaves the sample out, 'default' gives `reward_default`, 'fail' stops."
    )
    reward_default: float = option(0.0, "Value of a failed reward under `reward_on_error='default'`.")
    reward_timeout: float | None = option(60.0, "Seconds that one call of a reward may take. None: any time.")
    reward_workers: int | None = option(
        None, "Processes that rewards run in. None: by cores, at most 8; 0: in this one."
    )
    reward_retries: int = option(0, "Further tries of a call that failed.")
    reward_batching: str = option(
        "group",
        "Rewards are called with each 'group' or 'sample' as soon as it is written, or once with 'all' completions.",
    )
    reward_cache: bool = option(False, "Remember the values of rewards by their arguments (pure functions only).")

    # ---- what is trained
    beta: float = option(0.0, "Weight of the divergence from the reference. 0: there is none.")
    mask_truncated_completions: bool = option(
        False, "Completions that were cut off by their length are not trained on (they count as sequences)."
    )
    drop_zero_variance: bool = option(
        False, "Groups whose rewards are all equal teach nothing: leave them out and generate others in their place."
    )
    refill_rounds: int = option(4, "How often, at most, groups are generated in the place of those left out.")

    replay_buffer_size: int = option(
        0, "Groups that are remembered and take the place of new ones whose rewards are all equal. 0: none."
    )

    # ---- what is kept
    keep_rollouts: bool = option(True, "Write every rollout to parquet files in `<output_dir>/rollouts`.")
    log_multimodal: bool = option(
        True,
        "With them, small pictures of the images that the model was shown, for `posttrain view`: at most 1 GiB. With "
        "`log_completions`, in the tables of wandb and trackio and on tensorboard as well.",
    )
    log_completions: bool = option(
        False,
        "Print some prompts, completions, rewards and advantages with each log; trackers with tables get them, too.",
    )
    num_completions_to_print: int | None = option(None, "Completions in that table. None: all.")
    log_unique_prompts: bool = option(False, "One completion of each prompt in that table.")
    log_completions_hub_repo: str | None = option(
        None, "A dataset on the Hub that the files of `keep_rollouts` are pushed to, every two minutes. None: none."
    )

    def __post_init__(self) -> None:
        if isinstance(self.generation_kwargs, str):
            self.generation_kwargs = json.loads(self.generation_kwargs)
        super().__post_init__()
        self._take_old_names()
        for name in ("num_generations", "max_completion_length"):
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is None; engines and losses need a number.")
        check_range("num_generations", self.num_generations, self.smallest_group)
        if self.num_generations_eval is not None:
            check_range("num_generations_eval", self.num_generations_eval, 1)
        check_range("max_completion_length", self.max_completion_length, 1)
        for value in values_of(getattr(self, self.reference_weight)):
            check_range(self.reference_weight, value, 0)
        if self.sync_ref_model and not self.has_reference:
            raise ValueError(f"`sync_ref_model` moves a reference; with `{self.reference_weight}=0` there is none.")
        check_range("num_iterations", self.num_iterations, 1)
        check_range("refill_rounds", self.refill_rounds, 0)
        check_choice("rollout_engine", self.rollout_engine, tuple(ENGINES))
        self.check_vllm_options()
        for name, of_vllm in (("rollout_kv_dtype", "kv_cache_dtype"), ("rollout_weight_dtype", "quantization")):
            self._check_rounding(name, of_vllm)
        check_range("rollout_drafts", self.rollout_drafts, 0)
        if self.rollout_drafts and (self.use_vllm or self.rollout_engine != "native"):
            writer = "vLLM (`use_vllm`)" if self.use_vllm else f"`rollout_engine={self.rollout_engine!r}`"
            raise ValueError(
                f"`rollout_drafts` is {self.rollout_drafts}, and only the native engine drafts; here {writer} writes. Leave it out."
            )
        if self.temperature <= 0:
            raise ValueError(f"`temperature` is {self.temperature}; training needs samples that differ: above 0.")
        if self.fp8:
            raise ValueError(
                "`fp8` rounds a weight anew in every call, which pays for rows of many tokens; completions are written token by "
                "token. Leave it out."
            )
        if self.ignore_data_skip:
            raise ValueError("`ignore_data_skip` would train on prompts twice after a resume; leave it out.")
        self.chooses_workers = False
        if self.dataloader_num_workers:
            raise ValueError("Rollouts are made in this process: leave `dataloader_num_workers` at 0.")
        if self.log_completions_hub_repo is not None and not self.keep_rollouts:
            raise ValueError("`log_completions_hub_repo` pushes the files of `keep_rollouts`, which is off.")
        check_range("replay_buffer_size", self.replay_buffer_size, 0)
        if self.drop_zero_variance and self.replay_buffer_size:
            raise ValueError(
                "`drop_zero_variance` and `replay_buffer_size` both replace groups that teach nothing: choose one."
            )
        written = self.writing_schedule()
        if (self.drop_zero_variance or self.replay_buffer_size) and written.share % self.num_generations:
            raise ValueError(
                f"Groups are replaced as a whole, so each process must hold whole ones: its {written.share} samples of a "
                f"generation are not a multiple of `num_generations`={self.num_generations}."
            )
        self.check_async_options()
        self.sampling(())
        self.reward_options()

    def _check_rounding(self, name: str, of_vllm: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        check_choice(name, value, ROLLOUT_DTYPES)
        if self.use_vllm:
            raise ValueError(
                f"`{name}` is of the native engine, and here vLLM writes: leave it out, and give vLLM its own `{of_vllm}` "
                "(`vllm_engine_args`; of a server, --engine-args at its start)."
            )
        if self.rollout_engine != "native":
            raise ValueError(
                f"`{name}` is of the native engine, and `rollout_engine` is {self.rollout_engine!r}: leave one of them out."
            )

    def _take_old_names(self) -> None:
        self._rename("max_prompt_length", self.max_prompt_length, "max_length")
        self._rename("vllm_guided_decoding_regex", self.vllm_guided_decoding_regex, "vllm_structured_outputs_regex")
        if self.max_prompt_length is not None and "truncation_mode" not in self.set_by_user():
            self.truncation_mode = KEEP_END

    def _rename(self, old: str, old_value: Any, new: str) -> None:
        """An option that may be given under either name."""
        new_value = getattr(self, new)
        if old_value is None:
            return
        if new_value not in (None, old_value):
            raise ValueError(f"`{old}` is {old_value!r} and `{new}`, its new name, is {new_value!r}: give one of them.")
        setattr(self, new, old_value)

    smallest_group = 2
    reference_weight = "beta"  # the option that weighs the divergence from the reference; at 0 there is none
    permutes_windows = False  # whether each pass over a generation has an order of its own

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with another one."""
        return any(values_of(getattr(self, self.reference_weight)))

    def schedule(self) -> Schedule:
        """How generation and optimisation interlock; raises where the numbers do not divide."""
        return Schedule.of(
            num_generations=self.num_generations,
            batch_size=self.samples_of(self.per_device_train_batch_size),
            world_size=self.readers,
            accumulation=self.gradient_accumulation_steps,
            num_iterations=self.num_iterations,
            generation_batch_size=self.generation_batch_size,
            steps_per_generation=self.steps_per_generation,
        )

    def writing_schedule(self) -> Schedule:
        """As `schedule`, but each process is one that writes: those that share their rows train on the same samples."""
        return self.schedule().written_by(self.sequence_parallel_size)

    def samples_of(self, batch_size: int) -> int:
        """Completions of a micro-batch whose size is this by the options."""
        return batch_size

    def refuse_lone_completions(self, judge: str) -> None:
        """Where a judge, which compares the completions of a prompt, would not see them together."""
        if self.writing_schedule().splits_groups:
            raise ValueError(
                f"{judge} compares the completions of a prompt, which here lie on several processes: make "
                "`per_device_train_batch_size` x `gradient_accumulation_steps` a multiple of `num_generations`."
            )
        for name in ("num_generations", "num_generations_eval"):
            if getattr(self, name) == 1:
                raise ValueError(f"{judge} compares the completions of a prompt, and `{name}` is 1: make it 2 or more.")

    def window_rules(self) -> WindowRules:
        return WindowRules(self.drop_zero_variance, self.refill_rounds, self.mask_truncated_completions)

    def sampling(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        """What engines are asked for."""
        given = {GENERATION_NAMES.get(name, name): value for name, value in (self.generation_kwargs or {}).items()}
        named = {
            "max_tokens": self.max_completion_length,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "regex": self.vllm_structured_outputs_regex,
            "seed": self.seed,
        }
        unknown = given.keys() - SamplingParams.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(
                f"`generation_kwargs` holds {', '.join(sorted(unknown))}; known are "
                f"{', '.join(SamplingParams.__dataclass_fields__)} and {', '.join(GENERATION_NAMES)}."
            )
        if given.get("temperature", self.temperature) != self.temperature:
            raise ValueError(
                f"`generation_kwargs` holds temperature={given['temperature']}, but training divides the logits by "
                f"`temperature`={self.temperature}: set that one, for both."
            )
        more = given.pop("stop_ids", ())
        stops = (*stop_ids, *([more] if isinstance(more, int) else more))
        return SamplingParams(**{**named, **given, "stop_ids": stops})

    def reward_options(self) -> RewardOptions:
        return RewardOptions(
            timeout=self.reward_timeout,
            workers=self.reward_workers or None,
            retries=self.reward_retries,
            on_error=self.reward_on_error,
            default_value=self.reward_default,
            reward_batching=self.reward_batching,
            isolation=IN_PROCESS if self.reward_workers == 0 else AUTO,
            cache=self.reward_cache,
        )


@dataclass
class AgentConfig:
    """Options of methods whose models may call tools or act in environments; mixed into their configs."""

    max_tool_calling_iterations: int | None = option(
        None,
        "How often, at most, the calls of an episode are run and the model speaks again. None: any number of times.",
    )
    tool_timeout: float | None = option(
        60.0, "Seconds that one call of a tool, or of an environment's reset, may take. None: any time."
    )
    max_tool_result: int = option(10_000, "Characters of a tool's result that the model is shown; the rest is cut off.")
    episode_timeout: float | None = option(
        None, "Seconds after which an episode gets no further turn. None: it may take any time."
    )
    tool_image_role: str | None = option(
        None,
        "Whose turn shows images that tools return: 'tool', the result's own, or 'user', one after the results, for chat templates "
        "that drop images of tools. None: 'tool', where annotations of tools or of an environment say that they return images.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tool_image_role is not None:
            check_choice("tool_image_role", self.tool_image_role, (TOOL_ROLE, USER_ROLE))
        check_range("max_tool_result", self.max_tool_result, 1)
        for name in ("max_tool_calling_iterations", "tool_timeout", "episode_timeout"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0)


@dataclass
class GroupConfig(OnlineConfig):
    """Options of methods that compare the completions of a group, and all of them with a reference."""

    log_kl: bool = option(
        False, "Log the divergence from the reference (`kl`) also where `beta` is 0 and the loss does not have it."
    )
    kl_clip: float | None = option(
        None, "The divergence of a token counts at most this; beyond, it has no gradient. None: any value."
    )
    advantage_std: str = option(
        "sample", "Advantages are scaled by the standard deviation of the 'sample' (n - 1) or of the 'population' (n)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("advantage_std", self.advantage_std, tuple(DEVIATIONS))
        if self.kl_clip is not None:
            check_range("kl_clip", self.kl_clip, 0, open_low=True)
            if self.beta == 0:
                raise ValueError(
                    "`kl_clip` bounds the divergence in the loss or the reward; with `beta=0` neither has it."
                )

    @property
    def has_reference(self) -> bool:
        return super().has_reference or self.log_kl

    @property
    def ddof(self) -> int:
        """What is taken off the number of rewards in a variance."""
        return DEVIATIONS[self.advantage_std]
