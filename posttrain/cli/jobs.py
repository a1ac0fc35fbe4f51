"""`posttrain launch --to slurm|skypilot|kubernetes METHOD CONFIG ...`: the file of a job, shown, and submitted if asked."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from posttrain.cli.arguments import RunConfig, parse
from posttrain.cli.errors import UsageError
from posttrain.cli.option_table import method_names
from posttrain.cli.words import Parser

SUBMIT = {"slurm": ["sbatch"], "skypilot": ["sky", "launch", "--yes"], "kubernetes": ["kubectl", "apply", "-f"]}
SUFFIX = {"slurm": "sbatch", "skypilot": "yaml", "kubernetes": "yaml"}
PORT = 29500
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


def main(words: list[str]) -> int:
    parser = make_parser()
    job, rest = parser.parse_known_args(words)
    rest = [job.method, *rest]
    if job.method not in method_names():
        raise UsageError(f"there is no method {job.method!r}; there are {', '.join(method_names())}.")
    config = parse(job.method, rest[1:])  # unknown options and values are errors here, not on the cluster
    check(job, config)
    text = WRITERS[job.to](job, command_of(job, rest))
    path = Path(job.write or f"{job.name}.{SUFFIX[job.to]}")
    path.write_text(text, encoding="utf-8")
    print(text)
    submit = [*SUBMIT[job.to], str(path)]
    if not job.submit:
        print(f"# Written to {path}; nothing was submitted. `{shlex.join(submit)}` does it, or --submit here.")
        return 0
    if shutil.which(submit[0]) is None:
        raise UsageError(f"--submit: there is no {submit[0]} on this machine; {path} is written.")
    return subprocess.run(submit, check=False).returncode


def make_parser() -> Parser:
    parser = Parser(
        prog="posttrain launch", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="All other words are those of `posttrain METHOD`: a file of options and --option value.",
    )  # fmt: skip
    parser.add_argument("--to", required=True, choices=sorted(SUBMIT), help="scheduler")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each machine (default: %(default)s)")
    parser.add_argument("--profile", default=None, help="ddp, fsdp2, hsdp, zero2, zero3 or a file (default: ddp)")
    parser.add_argument("--name", default="posttrain", help="name of the job (default: %(default)s)")
    parser.add_argument("--time", default="24:00:00", help="limit, as Slurm writes it (default: %(default)s)")
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument("--accelerator", default="H100", help="kind of GPU, for SkyPilot (default: %(default)s)")
    parser.add_argument(
        "--image", default="pytorch/pytorch:latest", help="container, for Kubernetes (default: %(default)s)"
    )
    parser.add_argument(
        "--setup", default="pip install posttrain", help="command before the run (default: %(default)s)"
    )
    parser.add_argument("--write", help="file to write (default: NAME.sbatch or NAME.yaml)")
    parser.add_argument(
        "--submit", action="store_true", help="hand it to the scheduler; without it only the file is written"
    )
    parser.add_argument("method", help="of the run, such as sft or grpo")
    return parser


def check(job: argparse.Namespace, config: RunConfig) -> None:
    if job.nodes < 1 or job.gpus < 1:
        raise UsageError(f"--nodes is {job.nodes} and --gpus {job.gpus}; both are at least 1.")
    if not NAME.fullmatch(job.name):
        raise UsageError(f"--name is {job.name!r}; schedulers take small letters, digits and dashes.")
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"):
        if name in config.values:
            raise UsageError(f"{config.where(name)}: the scheduler decides it; use --nodes and --gpus.")
    if job.profile == "hsdp" and job.nodes < 2:
        raise UsageError("--profile hsdp keeps a whole copy on each machine, and --nodes is 1: use fsdp2.")


def command_of(job: argparse.Namespace, words: list[str]) -> str:
    """The command on each machine; $RANK_OF_MACHINE and $ADDRESS_OF_MACHINE_0 are filled in there."""
    profile = ["--accelerate_config", job.profile or "ddp"]
    counts = ["--num_processes", str(job.nodes * job.gpus), "--num_machines", str(job.nodes)]
    where = '--machine_rank "$RANK_OF_MACHINE" --main_process_ip "$ADDRESS_OF_MACHINE_0" --main_process_port'
    return f"{shlex.join(['posttrain', *words, *profile, *counts])} {where} {PORT}"


def slurm(job: argparse.Namespace, command: str) -> str:
    partition = f"#SBATCH --partition={job.partition}\n" if job.partition else ""
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --time={job.time}
#SBATCH --output={job.name}-%j.log
#SBATCH --signal=TERM@120
#SBATCH --requeue
{partition}
# Two minutes before the limit the run is told to end: it saves a checkpoint, and the requeued job goes on from there.
export ADDRESS_OF_MACHINE_0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'export RANK_OF_MACHINE=$SLURM_NODEID; exec {_in_quotes(command)}'
"""


def skypilot(job: argparse.Namespace, command: str) -> str:
    return f"""name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: {job.accelerator}:{job.gpus}
  use_spot: false
workdir: .
setup: |
  {job.setup}
run: |
  export RANK_OF_MACHINE=$SKYPILOT_NODE_RANK
  export ADDRESS_OF_MACHINE_0=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  {command}
"""


def kubernetes(job: argparse.Namespace, command: str) -> str:
    return f"""apiVersion: v1
kind: Service
metadata: {{name: {job.name}}}
spec: {{clusterIP: None, selector: {{job-name: {job.name}}}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {job.name}}}
spec:
  completions: {job.nodes}
  parallelism: {job.nodes}
  completionMode: Indexed
  backoffLimit: 3
  template:
    metadata: {{labels: {{job-name: {job.name}}}}}
    spec:
      subdomain: {job.name}
      restartPolicy: Never
      terminationGracePeriodSeconds: 120
      volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
      containers:
      - name: posttrain
        image: {job.image}
        resources: {{limits: {{nvidia.com/gpu: {job.gpus}}}}}
        volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
        env: [{{name: ADDRESS_OF_MACHINE_0, value: {job.name}-0.{job.name}}}]
        command: ["bash", "-c"]
        args:
        - |
          {job.setup}
          export RANK_OF_MACHINE=$JOB_COMPLETION_INDEX
          exec {command}
"""


def _in_quotes(command: str) -> str:
    """Inside of single quotes."""
    return command.replace("'", "'\\''")


WRITERS: dict[str, Callable[[argparse.Namespace, str], str]] = {
    "slurm": slurm,
    "skypilot": skypilot,
    "kubernetes": kubernetes,
}
