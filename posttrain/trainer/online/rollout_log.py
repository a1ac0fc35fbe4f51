"""RolloutLog: every rollout is kept, some are shown, and what looks wrong about their rewards is reported."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from accelerate import PartialState
from huggingface_hub import CommitScheduler, HfApi
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

from posttrain.core import __version__
from posttrain.core.console import say
from posttrain.rewards.reward_set import RewardSet
from posttrain.rewards.runtime.statistics import RewardWatch
from posttrain.rollout.collector import Collected
from posttrain.rollout.rollout import Rollout
from posttrain.rollout.store import RolloutStore, record_of
from posttrain.rollout.thumbnails import small_pictures
from posttrain.trainer.checkpoints.background_save import CheckpointNotSaved
from posttrain.trainer.checkpoints.saving import Checkpoints
from posttrain.trainer.online.rollout_metrics import as_tensors
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.report.progress import cut, number, show_table
from posttrain.trainer.report.trackers import pictures_to_tensorboard, table_to_trackers
from posttrain.trainer.step.metrics import MetricStore

SHOWN_CHARACTERS = 400
PUSH_MINUTES = 2
PUSHED_FILES = "*.parquet"  # a file that has this name is complete


class LoggedRun(Protocol):
    """Where the log of rollouts finds what it writes down; a trainer has all of it."""

    args: OnlineConfig
    state: TrainerState
    metrics: MetricStore
    rewards: RewardSet
    checkpoints: Checkpoints
    callback_handler: CallbackHandler


class RolloutPush:
    """Pushes new files of the store to a dataset on the Hub every two minutes, and once more at the end. Made by one process, for
    the files of all of them."""

    def __init__(self, folder: Path, args: Any) -> None:
        """Makes the dataset, so that a token without the right is found before anything is trained."""
        self.repo, self.folder = args.log_completions_hub_repo, folder
        api = HfApi(token=args.hub_token, library_name="posttrain", library_version=__version__)
        self.scheduler = CommitScheduler(
            repo_id=self.repo,
            repo_type="dataset",
            folder_path=folder,
            every=PUSH_MINUTES,
            private=args.hub_private_repo,
            allow_patterns=PUSHED_FILES,
            hf_api=api,
        )

    def close(self) -> None:
        """Push the rest. A Hub that does not answer costs the copy there, not the run: the files are on disk."""
        try:
            self.scheduler.trigger().result()
        except Exception as error:  # of the network or of the Hub, in any of their kinds; the sentence carries it
            say(
                f"The rollouts in {self.folder} were not all pushed to {self.repo} ({type(error).__name__}: {error}).",
                always=True,
            )
        finally:
            self.scheduler.stop()


class RolloutLog(TrainerCallback):
    """Is given every collection; writes to the store from the beginning of training to its end."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run
        self.store: RolloutStore | None = None
        self.push: RolloutPush | None = None
        self.watch = RewardWatch()
        self.latest: list[Rollout] = []
        self._step_began = 0.0
        self._failed: set[tuple[str, str]] = set()  # rewards whose failure was reported, and its kind

    # ---- the run -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began = time.perf_counter()
        if args.keep_rollouts:
            self.store = RolloutStore(args.output_dir, args.process_index, args.log_multimodal)
            if state.is_world_process_zero:  # a resumed run makes later ones again; a new one begins with none
                self.store.forget_after(state.global_step)
                if args.log_completions_hub_repo is not None:
                    self.push = RolloutPush(self.store.folder, args)
            PartialState().wait_for_everyone()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.run.metrics.add("train", as_tensors({"step_time": now - self._step_began}))
        self._step_began = now

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_store()
        PartialState().wait_for_everyone()  # what is pushed are the files of all processes
        self.close()

    def _close_store(self) -> None:
        if self.store is not None:
            store, self.store = self.store, None
            try:
                store.close()
            except OSError as error:
                self.run.checkpoints.report_unwritten(f"{error.strerror} ({error.filename}).")

    def close(self) -> None:
        self._close_store()
        if self.push is not None:
            self.push.close()
            self.push = None

    def on_collected(self, collected: Collected) -> None:
        """Keep a collection that will be trained on, under the number of the step that it is made for."""
        state = self.run.state
        self.latest = collected.rollouts
        if self.store is not None:
            records = [record_of(r, state.epoch or 0.0) for r in collected.rollouts]
            try:
                self.store.write(state.global_step + 1, records, pictures_of(collected.rollouts))
            except OSError as error:
                raise CheckpointNotSaved(f"{error.strerror} ({error.filename}).") from error
        self._report_failures(collected)
        if self.run.args.alerts and self.run.state.is_world_process_zero:
            table = collected.table
            values = table.rewards.masked_fill(table.masked[:, None], float("nan")).numpy()
            for sentence in self.watch.look(self.run.rewards.names, values, table.lengths.numpy()):
                say(f"alert  {sentence}", always=True)

    def _report_failures(self, collected: Collected) -> None:
        """The first of each kind; how many there are, the log says."""
        for failure in collected.results.failures:
            if (failure.reward, failure.kind) not in self._failed:
                self._failed.add((failure.reward, failure.kind))
                policy = self.run.args.reward_on_error
                shown = " ".join(failure.message.split())
                say(
                    f"alert  reward {failure.reward} failed ({failure.kind}): {shown} (reward_on_error={policy!r})",
                    always=True,
                )

    # ---- what is shown -----------------------------------------------------------------------------------------------

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if args.log_completions and state.is_world_process_zero and self.latest and logs and "rollouts/masked" in logs:
            listed = one_of_each_prompt(self.latest) if args.log_unique_prompts else self.latest
            shown = listed[: args.num_completions_to_print]
            show(shown, self.run.rewards.names, state.global_step, args.disable_tqdm)
            if args.report_to:
                self._to_trackers(listed, state.global_step)

    def _to_trackers(self, rollouts: list[Rollout], step: int) -> None:
        """Where rollouts show images and `log_multimodal` is on, with small pictures of them."""
        names, extra, args = self.run.rewards.names, extra_columns(rollouts), self.run.args
        pictures = small_pictures(pictures_of(rollouts)) if args.log_multimodal else {}
        columns = ["step", *(["images"] if pictures else []), "prompt", "completion", *names, "advantage", *extra]
        rows, seen = [], []
        for rollout in rollouts:
            shown = [pictures[span.key] for span in rollout.sample.images if span.key in pictures]
            texts = [clipped(rollout.prompt), clipped(rollout.completion)]
            values = [*numbers_of(rollout, names).values(), *extras_of(rollout, extra).values()]
            rows.append([step, *([shown] if pictures else []), *texts, *values])
            seen.append(("\n\n".join(texts), shown))
        table_to_trackers(args.report_to, "completions", columns, rows)
        pictures_to_tensorboard(self.run.callback_handler.callbacks, "completions", seen, step)


def pictures_of(rollouts: list[Rollout]) -> dict[bytes, Any]:
    """What the model was shown, by key."""
    shown = [(rollout.pictures, span.key) for rollout in rollouts for span in rollout.sample.images]
    return {key: pictures[key] for pictures, key in shown if key in pictures}


def one_of_each_prompt(rollouts: list[Rollout]) -> list[Rollout]:
    """The first completion of each."""
    return list({rollout.group: rollout for rollout in reversed(rollouts)}.values())[::-1]


def show(rollouts: list[Rollout], names: list[str], step: int, disable_tqdm: bool) -> None:
    """The store has all of them."""
    extra = extra_columns(rollouts)
    title = f"completions at step {step}"
    lines, rows = [title], []
    for rollout in rollouts:
        prompt, completion, numbers = clipped(rollout.prompt), clipped(rollout.completion), numbers_of(rollout, names)
        shown = [f"{name} {number(value)}" for name, value in numbers.items()]
        shown += [f"{name} {text}" for name, text in extras_of(rollout, list(rollout.extras)).items()]
        lines += [f"  > {prompt!r}", f"    {completion!r}  ({', '.join(shown)})"]
        values = [number(value) if np.isfinite(value) else "-" for value in numbers.values()]
        rows.append([prompt, completion, *values, *extras_of(rollout, extra).values()])
    show_table(title, ("prompt", "completion", *names, "advantage", *extra), rows, lines, disable_tqdm)


def numbers_of(rollout: Rollout, names: list[str]) -> dict[str, float]:
    rewards = {name: rollout.rewards.get(name, float("nan")) for name in names}
    return {**rewards, "advantage": rollout.advantage}


def extra_columns(rollouts: list[Rollout]) -> list[str]:
    """Names that rewards gave to `log_extra`, in the order in which they came."""
    return list(dict.fromkeys(name for rollout in rollouts for name in rollout.extras))


def extras_of(rollout: Rollout, columns: list[str]) -> dict[str, str]:
    """As texts; an empty one where nothing was logged."""
    return {name: clipped(str(rollout.extras.get(name, ""))) for name in columns}


def clipped(text: str | list[dict[str, Any]]) -> str:
    """Text, or the messages of a conversation one after the other, of a bounded length."""
    if not isinstance(text, str):
        text = "\n".join(f"{message.get('role')}: {_message_text(message)}" for message in text)
    return cut(text, SHOWN_CHARACTERS)


def _message_text(message: dict[str, Any]) -> str:
    """What a message says, and the tools that it calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "[image]")) for part in content)
    parts = [str(content), *(f"{call.get('name')}({_arguments(call)})" for call in calls)]
    return " ".join(filter(None, parts))


def _arguments(call: dict[str, Any]) -> str:
    given = call.get("arguments")
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False, default=str)
