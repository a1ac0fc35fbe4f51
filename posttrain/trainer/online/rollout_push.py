"""RolloutPush: the files of the store of rollouts, on their way to a dataset on the Hub while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import CommitScheduler, HfApi

from posttrain.core import __version__
from posttrain.trainer.report.progress import say

MINUTES = 2
FILES = "*.parquet"  # a file that has this name is complete


class RolloutPush:
    """Pushes what is new every two minutes, and once more at the end. Made by one process, for the files of all of them."""

    def __init__(self, folder: Path, args: Any) -> None:
        """Makes the dataset, so that a token without the right is found before anything is trained."""
        self.repo, self.folder = args.log_completions_hub_repo, folder
        api = HfApi(token=args.hub_token, library_name="posttrain", library_version=__version__)
        self.scheduler = CommitScheduler(
            repo_id=self.repo,
            repo_type="dataset",
            folder_path=folder,
            every=MINUTES,
            private=args.hub_private_repo,
            allow_patterns=FILES,
            hf_api=api,
        )

    def close(self) -> None:
        """Push the rest. A Hub that does not answer costs the copy there, not the run: the files are on disk."""
        try:
            self.scheduler.trigger().result()
        except Exception as error:  # of the network or of the Hub, in any of their kinds; the sentence carries it
            say(f"The rollouts in {self.folder} were not all pushed to {self.repo} ({type(error).__name__}: {error}).")
        finally:
            self.scheduler.stop()
