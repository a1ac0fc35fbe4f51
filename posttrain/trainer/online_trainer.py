"""OnlineTrainer: a BaseTrainer whose batches are what the model itself has written.

A method adds `credit` (rewards -> advantages) and `loss`. Generation happens in the dataloader's `next()` (see rollout/loader), so
that transformers.Trainer's loop stays as it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor, nn

from posttrain.core.batch import SHARED, StepTotals, TokenBatch
from posttrain.core.results import TokenScores
from posttrain.core.sample import Sample, Unit
from posttrain.data.collate import Pixels
from posttrain.data.images.media import FOLDER, MediaFolder
from posttrain.data.images.streamed_span import StreamedSpan
from posttrain.data.render.byte_decoding import text_decoder
from posttrain.data.render.templates import adopt_chat_format
from posttrain.data.rows.formats import PROMPT_ONLY
from posttrain.losses.importance import age_correction
from posttrain.models.inference import evaluating
from posttrain.models.load.model import innermost_model
from posttrain.models.load.reference import PRECOMPUTED, ModelReference
from posttrain.models.scoring.float32_head import compute_head_in_float32
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rewards.reward_set import RewardSet, refuse_text_readers
from posttrain.rollout.collector import Collected, GroupTable, RolloutCollector, joined
from posttrain.rollout.engines.gathered_engine import GatheredEngine
from posttrain.rollout.engines.joint_export import JointExport
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.weight_sync import WeightSync
from posttrain.rollout.episodes.writing import MakeEpisodes, Writer
from posttrain.rollout.eval_loader import EvalRolloutLoader
from posttrain.rollout.group_filter import GroupFilter
from posttrain.rollout.loader import RolloutLoader
from posttrain.rollout.prompt_rows import PromptRows, StreamedPrompts
from posttrain.rollout.replay_buffer import ReplayBuffer
from posttrain.rollout.rollout import ADVANTAGES, DATASET, OLD_LOGPS, POLICY, POLICY_LOGPS, Request, Rollout
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.sharding import most_of_any_process
from posttrain.trainer.online.agents import Agents, refuse_agent_options, rows_for
from posttrain.trainer.online.async_rollouts import AsyncRollouts, refuse_async
from posttrain.trainer.online.authors import other_authors, refuse_vllm
from posttrain.trainer.online.image_sync import OWN, ImageSync
from posttrain.trainer.online.rollout_log import RolloutLog
from posttrain.trainer.online.rollout_metrics import as_tensors, placeholder_metrics, rollout_metrics
from posttrain.trainer.online.vllm_setup import (
    PromptImages,
    refuse_correction_without_logps,
    refuse_given_engine,
    refuse_images_in_vllm,
    show_images,
    vllm_engine,
)
from posttrain.trainer.online.windows import ScoredWithRollouts, rollout_loader, skipping_by_position, write_columns
from posttrain.trainer.options.base import DEEPSPEED
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.report.progress import count, several
from posttrain.trainer.step.memory_fit import fit_memory
from posttrain.trainer.vision import image_probe

logger = logging.getLogger(__name__)

ROLLOUTS_FILE = "rollouts_{rank}"
FAILURES = "reward_failures/"  # and the kind: how many calls of rewards have failed since the beginning of the run


class OnlineTrainer(BaseTrainer):
    """Trains on completions of a dataset's prompts. See the module's docstring for what a method provides."""

    config_class: ClassVar[type[OnlineConfig]] = OnlineConfig
    formats = (PROMPT_ONLY,)
    roles = ("completion",)
    token_stats: ClassVar[tuple[str, ...]] = ("entropy",)
    loads_more: ClassVar[bool] = True  # reward models
    needs_rewards: ClassVar[bool] = True  # else there may be none
    runs_under_deepspeed: ClassVar[bool] = False  # seen to train there as one process does
    corrects_sampler: bool = False  # whether tokens are weighed by the log-probs that they were drawn with

    agents: Agents | None = None  # methods with tools set it before they call this class's __init__
    replay: ReplayBuffer | None = None
    group_filter: GroupFilter | None = None
    live: ModelReference | None = None
    collector: RolloutCollector | None = None  # there is none where a run is only explained
    loader: RolloutLoader | None = None
    eval_loader: EvalRolloutLoader | None = None
    ahead: AsyncRollouts | None = None  # while it trains, where rollouts are written meanwhile
    joint_export: JointExport | None = None  # where weights that an engine is sent are in pieces

    def __init__(
        self,
        model: str | Path | nn.Module,
        reward_funcs: Any = None,
        args: OnlineConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        engine: RolloutEngine | None = None,
        ref_model: Any = None,
    ) -> None:
        """`engine` writes the completions; None: the one that `rollout_engine` names, reading this model's weights in place."""
        self.rollout_func = rollout_func
        data = (None, train_dataset, eval_dataset, processing_class)
        loading = {"quantization_config": quantization_config, "peft_config": peft_config, "ref_model": ref_model}
        super().__init__(model, args, *data, None, callbacks, optimizers, **loading)
        if self.agents is None:
            refuse_agent_options(self.args)
        if reward_funcs is None and not self.needs_rewards:
            reward_funcs = []
        rewards = (reward_funcs, self.args.reward_weights, reward_processing_classes)
        funcs, weights, tokenizers = rewards if self.agents is None else self.agents.with_rewards(*rewards)
        if self.shown_pixels is not None:
            refuse_text_readers(funcs)
        self.rewards = RewardSet(
            funcs,
            weights,
            self.args.reward_options(),
            tokenizers=tokenizers,
            model_options={"device": self.args.device, "dtype": self.args.compute_dtype},
            report=self.loaded.notes.append,
            watch=False,  # the log of rollouts looks at those of all processes
            may_be_empty=not self.needs_rewards,
        )
        if self.rewards.compares_groups:
            self.args.refuse_lone_completions(self.rewards.names[0])
        refuse_given_engine(engine, self.args)
        if self.args.async_rollouts:
            refuse_async(self, has_given_engine=engine is not None)
        fit_memory(self)
        self.shown_images = self._shown_images() if self.args.use_vllm or engine is not None else None
        self.engine = engine if engine is not None else self._make_engine()
        if engine is not None and self.shown_images is not None:
            show_images(engine, self.shown_images)
        if self.corrects_sampler or self.args.centres_on_sampler:
            refuse_correction_without_logps(self.engine, self.args.sampling(self.stop_ids))
        self.weight_sync = WeightSync(
            self.engine,
            self.model,
            self.joint_export,
            image_gap=None if self.shown_images is None else self.shown_images.sync.gap,
            tolerance=self.args.vllm_sync_tolerance,
            sharded_dtype=self.args.compute_dtype if self.gathers_together else None,
            process_index=self.args.process_index,
            world_size=self.args.world_size,
        )
        if self.args.replay_buffer_size:
            self.replay = ReplayBuffer(self.args.replay_buffer_size, self.args.seed)
        self.has_old_logps = self.needs_old_logps  # the options are asked once, not in every window
        self.log_of_rollouts = RolloutLog(self)
        self.add_callback(self.log_of_rollouts)
        self.collector = self._make_collector()

    def reserved_bytes(self) -> float:
        return self.args.vllm_resident_share * torch.cuda.get_device_properties(self.args.device).total_memory

    # ---- what a method provides --------------------------------------------------------------------------------------

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """(N,) advantages of the samples of all processes; `totals` are their weighted rewards, NaN where there is none."""
        raise NotImplementedError

    def spread(self, rollouts: list[Rollout]) -> None:
        """Write the advantage of each token, and whatever else is the method's, on rollouts that have their `advantage`."""
        for rollout in rollouts:
            rollout.sample.per_token[ADVANTAGES] = np.full(len(rollout.sample), rollout.advantage, dtype=np.float32)

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        """The units that are trained on; None for what takes part in nothing. As many for each group."""
        return [None if rollout.masked else (rollout.sample,) for group in groups for rollout in group]

    def author_of(self, request: Request) -> str:
        """Who writes this request: one of `authors`. The same on every process and after a resume."""
        return POLICY

    def author_in_training(self, request: Request) -> str:
        """Who writes this request of the training, also while an evaluation runs, to which `author_of` may answer otherwise."""
        return self.author_of(request)

    def authors(self) -> set[str]:
        """Every author that `author_of` may name: those that it names for the samples of a prompt, where only they decide."""
        samples = range(max(self.args.num_generations, self.args.num_generations_eval or 0))
        return {self.author_of(Request(row=0, number=0, sample=sample)) for sample in samples}

    def mixture_weight(self) -> float:
        """Of the reference, where MIXTURE writes."""
        raise NotImplementedError

    @property
    def needs_reference(self) -> bool:
        return self.args.has_reference

    @property
    def scoring_temperature(self) -> float:
        """What logits are divided by where policy and reference score tokens."""
        return self.args.temperature

    @property
    def needs_old_logps(self) -> bool:
        """Whether the trainer's own log-probs at the time of generation are computed in a pass of their own."""
        is_older = not self.args.schedule().is_on_policy or self.replay is not None
        return is_older and not self.args.centres_on_sampler

    def proximal_logps(self, batch: TokenBatch, logps: Tensor) -> Tensor:
        """(N,) at the centre of the clip: of the weights that the step begins with, or of those that wrote each token."""
        own = batch.per_token.get(OLD_LOGPS, logps.detach())
        if not self.args.centres_on_sampler:
            return own
        drawn = batch.per_token.get(POLICY_LOGPS, own)
        return drawn.where(~drawn.isnan(), own)

    def age_weights(self, batch: TokenBatch, old_logps: Tensor) -> Tensor | None:
        """(N,) weights of tokens that older weights than those of `old_logps` wrote; None where there are none."""
        args = self.args
        if not args.trains_on_older_tokens or args.centres_on_sampler or POLICY_LOGPS not in batch.per_token:
            return None
        return age_correction(old_logps, batch.per_token[POLICY_LOGPS], batch)

    # ---- construction ------------------------------------------------------------------------------------------------

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        if self.args.cast_lm_head_to_fp32:  # before a copy is made of it
            compute_head_in_float32(innermost_model(self.model))
        if not self.needs_reference:
            if ref_model is not None:
                raise ValueError(
                    f"`{self.args.reference_weight}` is 0: a reference model would be loaded and never asked. Leave "
                    "`ref_model` out."
                )
            return
        references = self.reference_setup()
        self.live = references.live(ref_model, policy)
        if self.args.cast_lm_head_to_fp32:
            compute_head_in_float32(innermost_model(self.live.model))
        self.live.temperature, self.live.chunk_tokens = self.scoring_temperature, self.args.chunk_tokens
        self.reference = ScoredWithRollouts(self.live)
        for callback in references.followers(self.live):
            self.add_callback(callback)

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        of_agents = {} if self.agents is None else self.agents.prepare_options()
        return {"shuffle_seed": None, **of_agents}  # the order of prompts is the stream's

    def _prepared(self, dataset: Any, name: str) -> Any:
        if self.agents is not None and name == "train":
            if self.agents.schemas and not self.renderer.has_template:  # tools are called in messages
                logger.warning(f"{adopt_chat_format(self.renderer)}.".capitalize())
            dataset = self.agents.set_up(self.renderer, self.args, dataset, self.vision)
            if self.agents.shows_images:
                self._refuse_tool_images()
        if dataset is None or isinstance(dataset, PromptRows | StreamedPrompts):
            return dataset
        decode = functools.partial(self.renderer.tokenizer.decode, skip_special_tokens=False)
        if isinstance(dataset, IterableDataset):
            self._refuse_stream(name)
            rows = StreamedPrompts(super()._prepared(dataset, name), decode)
            if self.vision is not None:  # a checkpoint inside of a window has to find its images again
                self.vision.media = self.vision.media or MediaFolder(Path(self.args.output_dir) / FOLDER)
        else:
            rows = PromptRows(super()._prepared(dataset, name), dataset, decode)
        if self.vision is not None and self.vision.datasets_with_images:
            self._refuse_images(name)
        return rows_for(self.agents, rows, name)

    @property
    def shown_pixels(self) -> Pixels | None:
        """Who makes the pixels of prompts; None where neither a dataset nor a tool has images."""
        return self.pixels if self.vision is not None and self.vision.shows_images else None

    def _refuse_images(self, name: str) -> None:
        """Where images cannot be shown, before a model is loaded."""
        if self.rollout_func is not None:
            raise ValueError(f"The dataset {name} has images, which a `rollout_func` is not shown: leave it out.")
        if self.args.use_vllm:
            refuse_images_in_vllm(self.vision.family, self.args, name)

    def _refuse_tool_images(self) -> None:
        """Where images that join a prompt between its turns cannot be shown."""
        if self.args.use_vllm:
            raise ValueError(
                "Tools or environments return images, and vLLM is not shown images that come between turns: leave `use_vllm` out."
            )

    def _refuse_stream(self, name: str) -> None:
        """Where a stream cannot serve, before anything of it is read."""
        if name != "train":
            raise ValueError(
                f"The dataset {name} is a stream; evaluation answers all prompts of a set each time. Give a datasets.Dataset, such "
                "as Dataset.from_list(list(stream.take(100)))."
            )
        if self.args.max_steps <= 0:
            raise ValueError("`train_dataset` is a stream, whose length is not known: set `max_steps`.")

    def _make_engine(self) -> RolloutEngine:
        if self.args.sharding == DEEPSPEED and not self.runs_under_deepspeed:
            raise ValueError(
                f"{type(self).__name__} has not been tried under DeepSpeed: GRPO and RLOO train there. Use FSDP (`fsdp=True`), or "
                "one process per GPU without sharding."
            )
        if self.args.use_vllm:
            refuse_vllm(self)
            given = (self.args, self.model, self.renderer.tokenizer, self.decode_exactly, self.gathers_together)
            engine, self.joint_export = vllm_engine(*given, self.loaded.notes, self.shown_images)
            return engine
        if self.args.sharding == DEEPSPEED:
            raise ValueError(
                f"The {self.args.rollout_engine!r} engine reads whole weights; under DeepSpeed they are in pieces. Use a server "
                "(`use_vllm=True, vllm_mode='server'`), FSDP (`fsdp=True`), or one process per GPU without sharding."
            )
        if self.is_fully_sharded:
            return GatheredEngine(self.model, self.local_engine, self.args.device, self.args.compute_dtype)
        return self.local_engine(self.model)

    def _shown_images(self) -> PromptImages | None:
        """What an engine with weights of its own must know of the images in prompts; None: there are none."""
        if self.shown_pixels is None:
            return None
        evaluated = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        lengths = [getattr(rows, "longest", None) for rows in (self.train_dataset, *evaluated) if rows is not None]
        known = self.agents is None and None not in lengths  # what tools or a stream will say is not known
        longest = max(lengths) + self.args.max_completion_length if known else None
        trains_vision = bool(self.vision.trained_parameters(innermost_model(self.model)))
        sync = ImageSync(image_probe(self.vision, self.renderer).one, self._write_own_logps)
        return PromptImages(self.vision, longest, trains_vision, sync)

    def _write_own_logps(self, samples: Sequence[Sample]) -> None:
        """Those of the trainer's weights, at temperature 1."""

        def own(batch: TokenBatch) -> dict[str, Tensor]:
            with evaluating(self.model):
                return {OWN: score_tokens(self.model_wrapped, batch, chunk_tokens=self.args.chunk_tokens).logps}

        self._write_columns(samples, own)

    def local_engine(self, model: nn.Module, **options: Any) -> RolloutEngine:
        """One that reads the weights of `model` in place."""
        return self.engine_maker(**options)(model)

    def engine_maker(self, **options: Any) -> Callable[[nn.Module], RolloutEngine]:
        asked = {
            "max_slots": self.args.max_rollout_slots,
            "kv_dtype": self.args.rollout_kv_dtype,
            "weight_dtype": self.args.rollout_weight_dtype,
            "drafts": self.args.rollout_drafts or None,
        }
        chosen = {name: value for name, value in asked.items() if value is not None}
        how = {"decode": self.decode_exactly, "pixels": self.shown_pixels} | chosen | options
        return functools.partial(ENGINES[self.args.rollout_engine], **how)

    def _make_collector(self) -> RolloutCollector:
        """It owns what a window needs; of this trainer it calls what is the method's (MethodHooks)."""
        agents = self.agents
        writer = Writer(
            self.weight_sync,
            text_decoder(self.renderer.tokenizer),
            self.make_episodes(),
            self.rollout_func,
            self,
            other_authors(self),
            only_given=self.authors() == {DATASET},
        )
        has_environments = agents is not None and agents.environments is not None
        release = {"release": agents.environments.give_back} if has_environments else {}
        return RolloutCollector(writer, self.rewards, self, self.args.world_size, **release)

    def make_episodes(self) -> MakeEpisodes | None:
        """What makes the episodes of requests; None: each is a prompt and its completion."""
        return None if self.agents is None else self.agents.episodes(self.renderer, self.engine, self.args)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a completion: the tokenizer's end of text, and those that the model's generation config names."""
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        named = named if isinstance(named, (list, tuple)) else [named]
        ids = tuple(dict.fromkeys(i for i in (self.renderer.tokenizer.eos_token_id, *named) if i is not None))
        return ids if self.agents is None else self.agents.stop_ids(ids)

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        args, report = self.args, self.train_dataset.report
        has_length = hasattr(self.train_dataset, "__len__")
        engine = "your rollout_func" if self.rollout_func is not None else f"{type(self.engine).__name__}"
        return {
            "data": f"{report.kept:,} prompts, {count(report.tokens)} tokens" if has_length else "a stream of prompts",
            "steps": f"{args.schedule().sentence(args.max_completion_length)}; {several(max_steps, 'step')}",
            "rollouts": f"written by {engine}; rewards: {', '.join(self.rewards.names) or 'none'}",
        }

    def batch_limits(self, samples: int | None = None) -> tuple[int, int]:
        """Completions as long as they may be; the prompt of a group lies once in a batch, where the model allows it.

        Of a micro-batch, or of so many `samples`.
        """
        schedule = self.args.schedule()
        size, group = samples or schedule.batch_size, self.args.num_generations
        prompt = getattr(self.train_dataset, "longest", self.args.max_length or 1024)
        completion = self.args.max_completion_length
        fits_evenly = size % group == 0 or group % size == 0
        groups = -(-size // group) + (0 if fits_evenly else 1)
        # groups are split among steps
        if self.args.permutes_windows and schedule.micro_batches > schedule.accumulation:
            groups = min(size, -(-schedule.batch_size * schedule.micro_batches // group))
        prompts = groups if self.data_collator.layout == SHARED else size
        return prompts * prompt + size * completion, prompt + completion

    # ---- rollouts ----------------------------------------------------------------------------------------------------

    @property
    def decode_exactly(self) -> Callable[[Any], str]:
        return functools.partial(self.renderer.tokenizer.decode, skip_special_tokens=False)

    def annotate(self, rollouts: list[Rollout]) -> dict[int, str] | None:
        """The trainer's own log-probs, and the reference's, written on the samples."""
        if self.has_old_logps:
            self.write_columns(rollouts, self.policy_columns)
        if self.live is not None:
            self.write_columns(rollouts, lambda batch: {PRECOMPUTED: self.live.scores(batch).logps})
        return self.annotated(rollouts)

    def write_columns(self, rollouts: list[Rollout], columns_of: Callable[[TokenBatch], dict[str, Tensor]]) -> None:
        """On their samples: as the function of that name, with this run's batches."""
        self._write_columns([rollout.sample for rollout in rollouts], columns_of)

    def _write_columns(self, samples: Sequence[Sample], columns_of: Callable[[TokenBatch], dict[str, Tensor]]) -> None:
        collator = replace(self.data_collator, max_tokens=self.args.max_tokens_per_pass)
        passes = (lambda count: most_of_any_process(count, self.args)) if self.gathers_together else int
        write_columns(samples, columns_of, collator, self.args.device, passes)

    def annotated(self, rollouts: list[Rollout]) -> dict[int, str] | None:
        """A method may write further numbers on samples that have their log-probs; numbers of those that it masks, and why."""

    def policy_columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """What the trainer's own weights say about each token at the time of generation: name of a column -> (N,)."""
        with evaluating(self.model):
            scores = score_tokens(
                self.model_wrapped, batch, temperature=self.scoring_temperature, chunk_tokens=self.args.chunk_tokens
            )
        return {OLD_LOGPS: scores.logps}

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> StepTotals | None:
        """The micro-batches of a step are here: what was collected for them is counted, shown and kept."""
        generates = self.loader is not None and self.collector is not None
        for collected in self.loader.source.take_finished() if generates else []:
            self._measure(collected, "train")
            self.metrics.count("num_tokens", sum(len(rollout.sample) for rollout in collected.rollouts))
            for kind, number in collected.table.failures.items():
                self.metrics.count(f"{FAILURES}{kind}", number)
            self.log_of_rollouts.on_collected(collected)
        return super()._get_num_items_in_batch(batch_samples, device)

    def add_evaluation_metrics(self) -> None:
        """The numbers of all prompts together: the last ones of many are not a batch of their own."""
        if self.eval_loader is not None and self.eval_loader.collected:
            self._measure(joined(self.eval_loader.collected), "eval")
        self.eval_loader = None

    def _measure(self, collected: Collected, mode: str) -> None:
        found = rollout_metrics(collected, self.rewards.names)
        if self.agents is not None:
            found |= self.agents.metrics(collected)
        if self.shown_pixels is not None and getattr(self.engine, "is_foreign", False):
            found |= placeholder_metrics(collected)
        self.metrics.add(mode, as_tensors(found))

    # ---- as dataloaders ----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> RolloutLoader:
        if self.train_dataset is None:
            raise ValueError(f"{type(self).__name__}.train() needs a `train_dataset`.")
        self.loader = self._rollout_loader(self.train_dataset, is_training=True)
        return self.loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalRolloutLoader:
        self.eval_loader = self._rollout_loader(self.evaluation_rows(eval_dataset), is_training=False)
        return self.eval_loader

    def _rollout_loader(self, rows: Any, is_training: bool) -> Any:
        params = None if self.collector is None else self.args.sampling(self.stop_ids)
        how = (self.args, self.data_collator, self.collector, params)
        ahead = self._write_ahead if self.args.async_rollouts and is_training else None
        return rollout_loader(rows, *how, is_training, self.replay, self.group_filter, ahead)

    def _write_ahead(self, *given: Any) -> AsyncRollouts:
        self._end_writing()
        self.ahead = self.rollouts_ahead(*given)
        self.add_callback(self.ahead)
        return self.ahead

    def rollouts_ahead(self, *given: Any) -> AsyncRollouts:
        """What writes completions while this trains."""
        return AsyncRollouts(self, *given)

    def _end_writing(self) -> None:
        if self.ahead is not None:
            self.ahead.stop()
            self.remove_callback(self.ahead)
            self.ahead = None

    # ---- the step ----------------------------------------------------------------------------------------------------

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        return score_tokens(model, batch, stats, temperature=self.scoring_temperature, **self.scoring_options())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs:
            logs |= {name: total for name, total in self.metrics.totals.items() if name.startswith(FAILURES)}
        super().log(logs, start_time)

    def count_tokens(self, batch: TokenBatch) -> None:
        """Tokens are counted when they are written, once, however often they are trained on."""

    # ---- resuming ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As BaseTrainer's. What waits to be written to the store of rollouts is written however it ends."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._end_writing()
            self.log_of_rollouts.close()

    def close(self) -> None:
        """Give back what outlives the trainer: workers of rewards, and vLLM. It cannot train or evaluate afterwards."""
        self.rewards.close()
        if hasattr(self.engine, "close"):
            self.engine.close()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        with skipping_by_position():
            super()._run_epoch(*args, **kwargs)

    def identity_parts(self) -> dict[str, Any]:
        return super().identity_parts() | {"rewards": self.rewards.names}

    def rollout_state(self) -> dict[str, Any]:
        """What decides the coming rollouts besides the weights."""
        replay = {} if self.replay is None else {"replay": self.replay.state()}
        return {"loader": self.loader.state(), **replay}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        self.loader.load_state(state["loader"])
        if self.replay is not None:
            self.replay.load_state(state["replay"])

    def save_state_files(self, folder: Path) -> None:
        super().save_state_files(folder)
        self._keep_streamed_images()
        files.save_tree(folder / ROLLOUTS_FILE.format(rank=self.args.process_index), self.rollout_state())

    def _keep_streamed_images(self) -> None:
        """Of samples that a resumed run trains on without reading their rows again."""
        remembered = [] if self.replay is None else [group for _, group in self.replay.groups]
        for unit in (*self.loader.window, *remembered):
            for span in (span for sample in unit or () for span in sample.images if isinstance(span, StreamedSpan)):
                self.vision.media.keep_streamed(span)

    def load_state_files(self, folder: Path) -> None:
        super().load_state_files(folder)
        written_by = len(list(folder.glob(ROLLOUTS_FILE.format(rank="*") + ".json")))
        if written_by != self.args.world_size:
            raise ValueError(
                f"{folder} has the rollouts of {written_by} process{'es' * (written_by > 1)}, there are {self.args.world_size}: "
                "a run that writes its own rows is resumed on as many as it was saved by. Or start a new run from its model."
            )
        self.load_rollout_state(files.load_tree(folder / ROLLOUTS_FILE.format(rank=self.args.process_index)))
