"""Options of PPO: what a generation is cut into, how tokens are rewarded, and the names that TRL has and had."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.options import refused
from posttrain.losses.gae import KL_ESTIMATORS
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.options.online import AgentConfig, OnlineConfig

COMPUTED = (
    "It follows from `per_device_train_batch_size`, `gradient_accumulation_steps`, `num_mini_batches` and the number of "
    "processes."
)
PASSES = (
    "A generation is always trained on `num_ppo_epochs` times: lower that one or `cliprange`, and look at `policy/approxkl_avg`. "
    "The divergence from the reference is held by `adap_kl_ctrl` and `target`."
)
DERIVED = ("num_iterations", "steps_per_generation")
"""Options of OnlineConfig that follow from PPO's own."""


@dataclass
class PPOConfig(AgentConfig, OnlineConfig):
    """Options of proximal policy optimisation.

    `gradient_accumulation_steps` counts, as in TRL, the micro-batches of a *generation*. After construction it counts those of an
    optimizer step, as everywhere else, and `steps_per_generation` those of a generation.
    """

    learning_rate: float = option(3e-6, "Initial learning rate of AdamW, for policy and critic.")
    num_generations: int = option(1, "Completions of each prompt.")
    max_completion_length: int = option(53, "Most tokens of a completion.")
    response_length: int | None = option(None, "TRL's name of `max_completion_length`.")
    temperature: float = option(0.7, "Divides the logits, in sampling and in training.")
    stop_token: str | None = option(
        None, "Only 'eos', which is what ends a completion where nothing is set, too: the tokenizer's end of text."
    )
    stop_token_id: int | None = option(None, "Another token that ends a completion, besides the end of text.")
    total_episodes: int | None = option(
        None, "Completions to train on, which decides `max_steps`. None: `num_train_epochs` or `max_steps` does."
    )

    # ---- optimisation
    num_ppo_epochs: int = option(4, "Passes over each generation, each in another order.")
    num_mini_batches: int = option(1, "Optimizer steps of a pass: a generation is cut into so many parts.")
    cliprange: float = option(0.2, "The ratio of a token is clipped at 1 - cliprange and 1 + cliprange.")
    vf_coef: float = option(0.1, "Weight of the value's loss.")
    cliprange_value: float = option(0.2, "A value may move so far from the one at the time of generation.")

    # ---- advantages
    gamma: float = option(1.0, "Discount of later rewards.")
    lam: float = option(0.95, "How far an advantage looks ahead: 0 one token, 1 to the end (GAE's lambda).")
    whiten_rewards: bool = option(
        False, "Scale the rewards of a generation's tokens to deviation 1; they keep their mean."
    )
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the score of a completion that did not end by itself. None: nothing."
    )
    use_score_scaling: bool = option(
        False, "Divide rewards by their standard deviation over the run so far; `missing_eos_penalty` is not divided."
    )
    use_score_norm: bool = option(False, "Subtract the mean over the run so far, too. Needs `use_score_scaling`.")
    score_clip: float | None = option(
        None, "Rewards, scaled where they are, count at most this and at least minus this. None: as they are."
    )
    beta: float = refused(
        0.0, "The divergence from the reference is subtracted from the rewards of tokens: set `kl_coef`."
    )
    kl_coef: float = option(0.05, "Weight of the divergence from the reference in a token's reward. 0: no reference.")
    init_kl_coef: float | None = option(None, "Old name of `kl_coef`.")
    kl_estimator: str = option(
        "k1",
        "The divergence at a token: 'k1', unbiased, or 'k3', never negative; 'abs' and 'mse' are |k1| and k1^2 / 2, which old "
        "runs have.",
    )
    kl_penalty: str | None = option(None, "Old name of `kl_estimator`, where 'kl' is 'k1'.")
    adap_kl_ctrl: bool = option(False, "After each generation `kl_coef` follows `target`.")
    target: float = option(6.0, "Divergence of a whole completion that `adap_kl_ctrl` aims at.")
    horizon: float = option(10000.0, "Completions in which `adap_kl_ctrl` corrects an error about once.")

    # ---- models
    value_model_path: str | None = option(
        None,
        "The critic: a sequence classifier with one output, whose weights are its own, or a folder that PPO has saved. "
        "None: a linear head on the policy's hidden states, whose gradient, times `vf_coef`, reaches the policy's body too.",
    )
    sft_model_path: str | None = option(None, "TRL's name of the model that is trained, where `model` is not given.")
    reward_model_path: str | None = option(None, "TRL's name of the reward model, where no other reward is given.")

    # ---- names of TRL's
    drop_zero_variance: bool = refused(False, "PPO compares no completions of one prompt with each other.")
    replay_buffer_size: int = refused(
        0, "Values and advantages of an older policy's completions do not fit the critic of today."
    )
    local_rollout_forward_batch_size: int = refused(64, "Passes over new completions are as large as memory allows.")
    num_sample_generations: int = refused(10, "Set `log_completions`, or look at all of them with `posttrain view`.")
    model_adapter_name: str | None = refused(None, "The adapter that is trained is found.")
    ref_adapter_name: str | None = refused(None, "The reference of an adapter is the model without it.")
    num_total_batches: int | None = refused(None, f"Set `total_episodes`. {COMPUTED}")
    batch_size: int | None = refused(None, f"Completions of a generation. {COMPUTED}")
    local_batch_size: int | None = refused(None, f"Completions of a generation of one process. {COMPUTED}")
    mini_batch_size: int | None = refused(None, f"Completions of an optimizer step. {COMPUTED}")
    local_mini_batch_size: int | None = refused(None, f"Completions of an optimizer step of one process. {COMPUTED}")
    micro_batch_size: int | None = refused(None, f"Completions of a micro-batch of all processes. {COMPUTED}")
    ratio_threshold: float = refused(
        10.0,
        "`cliprange` bounds what a token can do, `max_grad_norm` a step, and steps that are not finite are skipped.",
    )
    early_stopping: bool = refused(False, PASSES)
    target_kl: float = refused(1.0, PASSES)

    smallest_group = 1
    reference_weight = "kl_coef"
    permutes_windows = True
    clips_ratios = True

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in DERIVED}
        for name in ("num_ppo_epochs", "num_mini_batches"):
            check_range(name, getattr(self, name), 1)
        if self.num_iterations not in (1, self.num_ppo_epochs):
            raise ValueError(
                f"`num_iterations` is {self.num_iterations}; PPO's name of it is `num_ppo_epochs`: set that one."
            )
        self.num_iterations = self.num_ppo_epochs
        if self.generation_batch_size is None and self.steps_per_generation is None:
            self._cut_into_mini_batches()
        super().__post_init__()
        self._set_by_user -= {name for name in DERIVED if getattr(self, name) != given[name]}
        self._check_own_options()
        self._count_episodes()

    def _take_old_names(self) -> None:
        super()._take_old_names()
        if self.kl_penalty == "full":
            raise ValueError(
                "`kl_penalty` 'full' sums over the vocabulary, whose log-probs of two models are not kept; 'kl' has the same mean, "
                "and `kl_estimator='k3'` the same with less noise."
            )
        names = {"max_completion_length": "response_length", "kl_coef": "init_kl_coef", "kl_estimator": "kl_penalty"}
        penalty = "k1" if self.kl_penalty == "kl" else self.kl_penalty
        for (new, old), value in zip(names.items(), (self.response_length, self.init_kl_coef, penalty)):
            if value is None:
                continue
            if new in self.set_by_user() and getattr(self, new) != value:
                known = getattr(self, new)
                raise ValueError(f"`{old}` is {value!r} and `{new}`, its new name, is {known!r}: give one of them.")
            setattr(self, new, value)

    def _cut_into_mini_batches(self) -> None:
        """From TRL's accumulation, which fills a generation, to that of an optimizer step; a micro-batch may become smaller."""
        size, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        parts = self.num_mini_batches
        samples, rest = divmod(size * accumulation, parts)
        if rest or not samples or (samples % size and size % samples):
            raise ValueError(
                f"A generation has {size * accumulation} completions a process (`per_device_train_batch_size` {size} x "
                f"`gradient_accumulation_steps` {accumulation}), which cannot be cut into `num_mini_batches`={parts} optimizer "
                "steps of whole micro-batches. Change one of the three."
            )
        self.per_device_train_batch_size = min(size, samples)
        self.gradient_accumulation_steps = max(samples // size, 1)
        self.steps_per_generation = self.gradient_accumulation_steps * parts

    def _check_own_options(self) -> None:
        for name in ("cliprange", "vf_coef", "cliprange_value"):
            check_range(name, getattr(self, name), 0)
        check_range("cliprange", self.cliprange, 0, 1)
        check_range("gamma", self.gamma, 0, 1)
        check_range("lam", self.lam, 0, 1)
        check_choice("kl_estimator", self.kl_estimator, tuple(KL_ESTIMATORS))
        check_range("target", self.target, 0, open_low=True)
        check_range("horizon", self.horizon, 0, open_low=True)
        if self.score_clip is not None:
            check_range("score_clip", self.score_clip, 0, open_low=True)
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError(
                "`use_score_norm` is an option of `use_score_scaling`, which is off: turn it on, or leave this out."
            )
        if self.stop_token not in (None, "eos"):
            raise ValueError(
                f"`stop_token` is {self.stop_token!r}; it is 'eos' or left out. Name another by `stop_token_id`."
            )
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError("Set at most one of `stop_token` and `stop_token_id`.")
        if self.adap_kl_ctrl and not self.kl_coef:
            raise ValueError(
                "`adap_kl_ctrl` multiplies `kl_coef`, which is 0: it would stay there. Start with 0.2, say."
            )
        idle = {"target", "horizon"} & self.set_by_user()
        if idle and not self.adap_kl_ctrl:
            raise ValueError(
                f"`{min(idle)}` is an option of `adap_kl_ctrl`, which is off: turn it on, or leave this out."
            )

    def _count_episodes(self) -> None:
        schedule, parts = self.schedule(), self.num_mini_batches
        if schedule.micro_batches != self.gradient_accumulation_steps * parts:
            raise ValueError(
                f"A generation feeds {schedule.micro_batches} micro-batches, an optimizer step takes "
                f"{self.gradient_accumulation_steps}, and `num_mini_batches` says that a generation is cut into {parts}. Leave "
                "`steps_per_generation` and `generation_batch_size` out: a generation is then `gradient_accumulation_steps` "
                "micro-batches."
            )
        if self.total_episodes is None:
            return
        check_range("total_episodes", self.total_episodes, 1)
        steps = -(-self.total_episodes // schedule.samples) * self.num_ppo_epochs * parts
        if self.max_steps not in (-1, steps):
            raise ValueError(
                f"`total_episodes`={self.total_episodes} makes {steps} optimizer steps, and `max_steps` is {self.max_steps}: "
                "set one of them."
            )
        self.max_steps = steps
