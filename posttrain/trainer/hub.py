"""HubTrainer: what of a run folder goes to the Hub. The model does; the machine, the token and the user's rows do not.

transformers pushes the whole folder, and while training a pickle of the options with the token in it
(`_push_from_checkpoint` saves `training_args.bin`). Both pushes are therefore written here.
"""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

import posttrain

KEPT_AT_HOME = (
    "_*",
    ".*",  # the lock, with the name of the machine
    "checkpoint-*",
    "bad_rows_*",  # rows of the user
    "completions/*",  # prompts of the user
    "rollouts/*",
    "training_args.*",  # paths of the machine, and in transformers' pickle the token
)
"""Patterns of what is never pushed from a run folder."""
STATE_OF_A_RUN = (
    "optimizer*", "scheduler*", "scaler*", "rng_state_*", "sums_*", "rollouts_*", "run_state.json", "trainer_state.json",
    "manifest.json", "training_args.*", "bema_state.*", "moved_reference.*",
)  # fmt: skip
"""Files of a checkpoint that are no part of the model."""


class HubTrainer(transformers.Trainer):
    """transformers.Trainer with pushes that publish the model and its card only."""

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card with `kwargs` (`dataset_name`, `tags`, `model_name`, ...), upload both."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:  # `push_to_hub=False`: the repository is made now
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)  # every process has a part in it
        if not self.is_world_process_zero():
            return None
        name = kwargs.pop("model_name", None) or self.hub_model_id.split("/")[-1]
        self.create_model_card(model_name=name, **kwargs)
        self._finish_current_push()
        return self._upload(self.args.output_dir, commit_message, token, not blocking, revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model of a checkpoint, in the background, as `hub_strategy` says."""
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if not args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        copy_model_files(Path(checkpoint_folder), Path(args.output_dir))
        by_steps = args.save_strategy == SaveStrategy.STEPS
        when = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch)}"
        message = f"Training in progress, {when}"
        jobs = [self._upload(args.output_dir, message, args.hub_token, in_background=True)]
        places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        if args.hub_strategy in places:
            place = places[args.hub_strategy]
            message += ", checkpoint"
            jobs.append(self._upload(checkpoint_folder, message, args.hub_token, in_background=True, place=place))
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress(jobs)
        else:
            self.push_in_progress.jobs.extend(jobs)

    def _upload(
        self,
        folder: str,
        message: str | None,
        token: str | None,
        in_background: bool,
        revision: str | None = None,
        place: str | None = None,
    ) -> Any:
        """A checkpoint has a `place` and goes as a whole: its manifest names every file, and a resume asks for all of them."""
        return _api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=folder,
            path_in_repo=place,
            commit_message=message,
            token=token,
            run_as_future=in_background,
            ignore_patterns=list(KEPT_AT_HOME) if place is None else None,
            revision=revision or self.args.hub_revision,
        )


@cache
def _api() -> HfApi:
    """One client for all pushes: uploads in the background then come one after the other, in order."""
    return HfApi(library_name="posttrain", library_version=posttrain.__version__)


def copy_model_files(checkpoint: Path, folder: Path) -> None:
    """Weights, configs and tokenizer of a checkpoint into the run folder, whose card and metrics go with them."""
    for path in checkpoint.iterdir():
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in STATE_OF_A_RUN):
            shutil.copy(path, folder / path.name)
