"""Two long-lived processes joined by gloo, which compute the two-process cells of the gradient matrix.

    python -m tests.trainer.gradient_workers RANK PORT FOLDER

Each reads cell numbers from its standard input and answers with a file of gradients (the first process only).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class WorkerPair:
    """Starts the two processes, asks them for gradients, ends them."""

    def __enter__(self) -> WorkerPair:
        self.folder = Path(tempfile.mkdtemp())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [self._start(rank, port) for rank in range(2)]
        return self

    def _start(self, rank: int, port: int) -> subprocess.Popen:
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.gradient_workers", str(self.folder)],
            env={**os.environ, **world, **address},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def gradient(self, cell: Any) -> dict[str, torch.Tensor]:
        from tests.trainer import gradient_cells as cells

        number = cells.two_processes().index(cell)
        for process in self.processes:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        for process in self.processes:
            line = process.stdout.readline()
            while line and not line.startswith("done"):
                line = process.stdout.readline()
            assert line, f"a worker died at {cell}"
        return load_file(self.folder / f"{number}.safetensors")

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    from tests.trainer import gradient_cells as cells

    rank = int(os.environ["RANK"])
    for line in sys.stdin:
        cell = cells.two_processes()[int(line)]
        made = cells.trainer(cell.method, cell.loss, cell.lora, cell.dtype)
        if made.model_wrapped is made.model:  # Trainer wraps for DDP when training begins; do it once for each trainer
            made.model_wrapped = torch.nn.parallel.DistributedDataParallel(made.model)
        found = cells.gradient(cell, rank, 2)
        if rank == 0:
            save_file({name: g.contiguous() for name, g in found.items()}, f"{folder}/{int(line)}.safetensors")
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
