"""`python -m posttrain.cli.running.ray_ranks NODES GPUS FOLDER COMMAND ...`: training processes on machines of a Ray cluster.

As many agents as machines, one on each with all of its GPUs, run the command with the rank of their machine. Who asks this program
to end (SIGTERM, `ray job stop`) asks the first of them, which saves with the others and ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

from posttrain.rollout.feed.ray_platform import AUTO, connect


class Agent:
    """An actor, which runs one command in the folder that it is given."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def place(self) -> tuple[str, int]:
        """Address of the machine, and a port that is free there."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, command: list[str], folder: str) -> int:
        import ray

        there = folder if os.path.isdir(folder) else None  # else Ray's copy of the working directory
        # its rollout workers are here, too
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        self.process = subprocess.Popen(command, cwd=there, env=environment)
        return self.process.wait()

    def terminate(self) -> None:
        if self.process is not None:
            self.process.terminate()


def main(words: list[str]) -> int:
    nodes, gpus, folder, command = int(words[0]), int(words[1]), os.path.abspath(words[2]), words[3:]
    ray, _ = connect(os.environ.get("RAY_ADDRESS") or AUTO)
    asked = {"GPU": gpus} if gpus else {"CPU": 1}
    group = ray.util.placement_group([asked] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    agents = [_agent(ray, group, number, asked) for number in range(nodes)]
    address, port = ray.get(agents[0].place.remote())
    command = [*command, "--main_process_ip", address, "--main_process_port", str(port)]
    signal.signal(signal.SIGTERM, lambda *_: agents[0].terminate.remote())
    left = [agent.run.remote([*command, "--machine_rank", str(n)], folder) for n, agent in enumerate(agents)]
    while left:
        done, left = ray.wait(left)
        if code := ray.get(done[0]):
            return code if code > 0 else 128 - code  # the others end with this program
    return 0


def _agent(ray: Any, group: Any, number: int, asked: dict[str, int]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    resources = {"num_cpus": asked.get("CPU", 0), "num_gpus": asked.get("GPU", 0)}
    return ray.remote(Agent).options(**resources, scheduling_strategy=place, max_concurrency=2).remote()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
