"""One of several processes of a run: `-m tests.trainer.two_process_run FOLDER METHOD ROWS [--kill-after N] [--resume]`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from tests.trainer import resumable_run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("method")
    parser.add_argument("rows", type=int)
    parser.add_argument("--kill-after", type=int)
    parser.add_argument("--resume", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    resumable_run.main(
        words.method,
        words.folder,
        resume=words.resume,
        rows=11,  # 4 + 4 + 3: the last window is uneven over two processes
        callbacks=[resumable_run.KillAfter(words.kill_after)] if words.kill_after else None,
        per_device_train_batch_size=words.rows,
        dataset_cache_dir=str(words.folder) + "-cache",
        max_steps=6,
        logging_steps=1,
        disable_dropout=True,  # two processes draw other masks than one
        **({"epsilon": 2e-3} if words.method.startswith("grpo") else {}),  # so little that some tokens are clipped
    )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["ACCELERATE_USE_CPU"] = "true"
    main()
