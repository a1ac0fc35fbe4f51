"""WinRateCallback: how often a judge prefers what the model writes to what the model before training, or the reference, wrote."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet
from torch import nn
from transformers import GenerationConfig, TrainerCallback, TrainerState

from posttrain.core.processes import of_every_process
from posttrain.data.render.byte_decoding import text_decoder
from posttrain.evaluation.run import stop_ids
from posttrain.models.inference import evaluating
from posttrain.models.load.reference import FrozenCopy
from posttrain.models.load.vocabulary import tokenizer_of
from posttrain.rewards.judges import verdicts_of
from posttrain.rewards.judging import CALLER, TIE, BasePairwiseJudge, Verdict, plain_lines, refuse_without_scores
from posttrain.rewards.runtime.invoke import ERROR, TIMEOUT, described
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams
from posttrain.rollout.episodes.episode import SingleTurn, run_episodes
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import Request
from posttrain.serve.wire.collective import in_background
from posttrain.trainer.online.log_completions import (
    DEFAULT_NEW_TOKENS,
    PRINTED_CHARACTERS,
    PRINTED_ROWS,
    AnsweringRun,
    evaluation_prompts,
    write_columns,
)
from posttrain.trainer.online.run_engine import RunEngine, WritingRun
from posttrain.trainer.options.base import BaseConfig, check_range
from posttrain.trainer.report.progress import cut, show_table
from posttrain.trainer.report.trackers import table_to_trackers

logger = logging.getLogger(__name__)

FOLDER = "win_rate"
OWN_SEED = 0x317  # other numbers are drawn than in training, and the same ones for the reference and in each evaluation
SPARE = 5.0  # seconds in which a judge that keeps the time itself hands over what it has
TOP_K = 50
"""What transformers' `generate` takes where a GenerationConfig that samples has no `top_k`."""


class JudgedRun(WritingRun, AnsweringRun, Protocol):
    """What is asked of the trainer, besides what its engine and its prompts ask. An online one has also `stop_ids`, and its
    reference is called `live`."""

    args: BaseConfig
    state: TrainerState
    model: nn.Module
    processing_class: Any
    is_fully_sharded: bool
    reference: Any
    log: Callable[[dict[str, float]], None]


class WinRateCallback(TrainerCallback):
    """At each evaluation, evaluation prompts are answered and a judge compares the answers with those of the reference.

    The reference is `ref_model` where the trainer was given one, else the model before training; its answers are written once and
    kept in `<output_dir>/win_rate/reference.parquet`, where a resumed run finds them. Logged are `eval_win_rate`, with
    `use_soft_judge` also `eval_avg_win_prob`, and the shares of comparisons that failed (`eval_judge_failed`) or were ties
    (`eval_judge_ties`), which are not counted in the win rate. Each table is in `<output_dir>/win_rate/step_N.parquet`.

    Args:
        judge: a pairwise judge.
        trainer: the trainer it is added to. Its own engine writes where it has one.
        generation_config: how to write; None: as an online trainer samples, else greedily, at most 128 new tokens.
        num_prompts: the first so many evaluation prompts; None: all.
        shuffle_order: whether the judge is shown either answer first.
        use_soft_judge: ask for probabilities.
        prompts: texts or conversations in the place of the evaluation set's.
        judge_timeout: seconds after which a judge that has not answered has failed.
    """

    def __init__(
        self,
        judge: BasePairwiseJudge,
        trainer: JudgedRun,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        shuffle_order: bool = True,
        use_soft_judge: bool = False,
        *,
        prompts: Sequence[Any] | None = None,
        judge_timeout: float = 600.0,
    ) -> None:
        if not isinstance(judge, BasePairwiseJudge):
            raise TypeError(f"A win rate needs a pairwise judge; {type(judge).__name__} is not one.")
        if use_soft_judge:
            refuse_without_scores(judge)
        if num_prompts is not None:
            check_range("num_prompts", num_prompts, 1)
        check_range("judge_timeout", judge_timeout, 0, open_low=True)
        self.judge, self.trainer = judge, trainer
        self.shuffle_order, self.soft, self.judge_timeout = shuffle_order, use_soft_judge, judge_timeout
        self.engine = RunEngine(trainer, "win rate")
        reference_model(trainer)  # may refuse
        self.rows = evaluation_prompts(trainer, prompts, num_prompts)
        ends = getattr(trainer, "stop_ids", None) or stop_ids(trainer.model, tokenizer_of(trainer.processing_class))
        self.sampling = sampling_of(generation_config, trainer.args, ends)
        self.decode = text_decoder(tokenizer_of(trainer.processing_class))
        self.reference: list[Any] | None = None  # its answers; None in the place of one that could not be written
        self._measured: tuple[int, dict[str, float]] = (-1, {})

    # ---- when --------------------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._know_reference()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        self._know_reference()
        if self._measured[0] != state.global_step:  # several evaluation sets are one evaluation
            numbers = self._measure(state)
            self._measured = (state.global_step, numbers)
            will_log = control.should_log
            self.trainer.log(dict(numbers))
            control.should_log = will_log  # transformers takes any log for the one of this step
        if metrics is not None:
            metrics.update(self._measured[1])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.engine.close()

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _know_reference(self) -> None:
        """Of the run's beginning: written now, or found where the run was resumed from."""
        if self.reference is not None:
            return
        trainer, path = self.trainer, Path(self.trainer.args.output_dir) / FOLDER / "reference.parquet"
        found = self._kept(path) if trainer.state.global_step and trainer.state.is_world_process_zero else None
        found = of_every_process(found, trainer.args.world_size)[0]
        if found is None:
            model = reference_model(trainer)
            if trainer.state.global_step and model is None:
                logger.warning(
                    f"There is no {path} with the answers of the model before training: win rates are measured against the model "
                    f"of step {trainer.state.global_step}."
                )
            with self.engine.writing() if model is None else self.engine.writing_of(model) as engine:
                found = self._written(engine)
            if trainer.state.is_world_process_zero:
                write_columns(path, {"prompt": self._prompts(), "completion": [_shown(one) for one in found]})
        self.reference = found

    def _kept(self, path: Path) -> list[Any] | None:
        """As texts: a message that was written is shown to judges as a line anyway."""
        if not path.is_file():
            return None
        columns = pyarrow.parquet.read_table(path).to_pydict()
        return columns["completion"] if columns["prompt"] == self._prompts() else None

    def _prompts(self) -> list[str]:
        return [plain_lines(row.prompt) for row in self.rows]

    def _written(self, engine: RolloutEngine) -> list[Any]:
        """An answer to each prompt, each process writing its share; None for one that could not be written."""
        rank, world_size = self.trainer.args.process_index, self.trainer.args.world_size
        mine = range(rank, len(self.rows), world_size)
        found: dict[int, Any] = {}

        def on_finished(index: int, rollout: Any) -> None:
            found[mine[index]] = None if rollout.masked else rollout.completion

        with evaluating(self.trainer.model):
            if mine:
                run_episodes(engine, [self._episode(self.rows[n], n) for n in mine], self.sampling, on_finished)
        every: dict[int, Any] = {}
        for part in of_every_process(found, world_size):
            every |= part
        return [every[number] for number in range(len(self.rows))]

    def _episode(self, row: PromptRow, number: int) -> SingleTurn:
        return SingleTurn(row, Request(number, number, 0), self.decode)

    # ---- the comparison ----------------------------------------------------------------------------------------------

    def _measure(self, state: Any) -> dict[str, float]:
        with self.engine.writing() as engine:
            policy = self._written(engine)
        verdicts = self._judged(policy) if state.is_world_process_zero else []
        verdicts = of_every_process(verdicts, self.trainer.args.world_size)[0]
        if state.is_world_process_zero:
            self._keep(state.global_step, policy, verdicts)
        return win_rates(verdicts, self.soft)

    def _judged(self, policy: list[Any]) -> list[Verdict]:
        """By the main process alone. Whatever the judge does, the run continues."""
        places = [n for n, pair in enumerate(zip(self.reference, policy)) if None not in pair]
        show = (lambda said: said) if self.judge.reads_messages else plain_lines
        prompts = [show(self.rows[n].prompt) for n in places]
        pairs = [[show(self.reference[n]), show(policy[n])] for n in places]
        try:
            answers = self._asked(prompts, pairs) if pairs else []
        except TimeoutError:
            reason = f"it did not answer within {self.judge_timeout:g} s."
            answers = [Verdict(kind=TIMEOUT, reason=reason)] * len(pairs)
        except Exception as error:  # a judge is the user's, or a server's
            answers = [Verdict(kind=ERROR, reason=described(error))] * len(pairs)
        found = [Verdict(kind=ERROR, reason="an answer could not be written.")] * len(policy)
        for place, answer in zip(places, answers):
            found[place] = answer
        if failures := [verdict for verdict in found if verdict.is_failure]:
            logger.warning(
                f"The judge failed in {len(failures)} of {len(found)} comparisons, which are left out of the win rate. The first: "
                f"{failures[0].reason}"
            )
        return found

    def _asked(self, prompts: list[Any], pairs: list[list[Any]]) -> list[Verdict]:
        """On a thread that can be left behind, but for judges that use the device of the run."""
        ask = partial(
            verdicts_of, self.judge, prompts, pairs, self.shuffle_order, self.soft, seconds=self.judge_timeout
        )
        return ask() if self.judge.runs == CALLER else in_background(ask, "judge").result(self.judge_timeout + SPARE)

    def _keep(self, step: int, policy: list[Any], verdicts: list[Verdict]) -> None:
        args = self.trainer.args
        columns = {
            "step": [step] * len(policy),
            "prompt": self._prompts(),
            "reference_model": [_shown(one) for one in self.reference],
            "policy": [_shown(one) for one in policy],
            "winner_index": [float(verdict.winner) for verdict in verdicts],
        }
        write_columns(Path(args.output_dir) / FOLDER / f"step_{step}.parquet", columns)
        rows = [list(row) for row in zip(*columns.values())]
        table_to_trackers(args.report_to, FOLDER, list(columns), rows)
        title, names = f"win rate at step {step}", list(columns)[1:]
        shown = [[cut(str(value), PRINTED_CHARACTERS) for value in row[1:]] for row in rows[:PRINTED_ROWS]]
        lines = [f"{title} (all {len(rows)} comparisons in {FOLDER}/step_{step}.parquet)"]
        for prompt, reference, said, winner in shown:
            lines += [f"  > {prompt!r}", f"    reference: {reference!r}", f"    policy: {said!r} (winner {winner})"]
        show_table(title, names, shown, lines, args.disable_tqdm)


def _shown(completion: Any) -> str | None:
    """The text of an answer, for tables; None where there is none."""
    if completion is None or isinstance(completion, str):
        return completion
    return completion[0]["content"] if len(completion) == 1 else plain_lines(completion)


def win_rates(verdicts: Sequence[Verdict], soft: bool) -> dict[str, float]:
    """Of verdicts whose first is the reference. Failures and ties are in no win rate; without any decision there is none."""
    known = [1 - verdict.first_wins for verdict in verdicts if not verdict.is_failure]
    decided = [chance > TIE for chance in known if chance != TIE]
    found = {
        "eval_win_rate": sum(decided) / len(decided) if decided else math.nan,
        "eval_avg_win_prob": sum(known) / len(known) if known and soft else math.nan,
        "eval_judge_failed": 1 - len(known) / len(verdicts),
        "eval_judge_ties": (len(known) - len(decided)) / len(verdicts),
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def reference_model(trainer: JudgedRun) -> nn.Module | None:
    """A reference that is another model than the trained one as it is now; None: it is that one, or nothing else is there."""
    reference = getattr(trainer, "live", None) or trainer.reference
    if not isinstance(reference, FrozenCopy) or not (reference.is_given or trainer.state.global_step):
        return None
    if not trainer.is_fully_sharded:
        return reference.model
    if reference.is_given:
        raise ValueError(
            "Under FSDP a win rate is measured against the model before training, and this run was given another one as "
            "`ref_model`, which is in pieces. Leave WinRateCallback out, or train without sharding."
        )
    return None


def sampling_of(config: GenerationConfig | None, args: Any, stop_ids: tuple[int, ...]) -> SamplingParams:
    """The same in the words of our engines; what they cannot do is refused."""
    if config is None:
        if hasattr(args, "sampling"):  # an online method
            params = args.sampling(stop_ids)
            return replace(params, seed=params.seed ^ OWN_SEED)
        return SamplingParams(DEFAULT_NEW_TOKENS, temperature=0.0, stop_ids=stop_ids, seed=args.seed)
    given = {name: value for name, value in config.to_diff_dict().items() if name not in IGNORED and value is not None}
    if unknown := given.keys() - READ:
        raise ValueError(
            f"`generation_config` sets {', '.join(sorted(unknown))}; a win rate is measured with {', '.join(sorted(READ))}."
        )
    ends = given.pop("eos_token_id", ())
    stop = given.pop("stop_strings", ())
    samples = given.pop("do_sample", False)
    params = SamplingParams(
        given.pop("max_new_tokens", DEFAULT_NEW_TOKENS),
        stop_ids=(*stop_ids, *([ends] if isinstance(ends, int) else ends)),
        stop=(stop,) if isinstance(stop, str) else stop,
        seed=args.seed,
    )
    return replace(params, **{"top_k": TOP_K, **given}) if samples else replace(params, temperature=0.0)


READ = {
    "do_sample",
    "eos_token_id",
    "max_new_tokens",
    "min_p",
    "repetition_penalty",
    "stop_strings",
    "temperature",
    "top_k",
    "top_p",
}
"""What is read of a GenerationConfig."""
IGNORED = ("transformers_version", "_from_model_config", "pad_token_id", "bos_token_id", "use_cache")
"""What has no meaning for how our engines write."""
