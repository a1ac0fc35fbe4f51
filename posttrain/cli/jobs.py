"""`posttrain launch --to slurm|skypilot|kubernetes METHOD CONFIG ...`: the file of a job, shown, and submitted if asked."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

from posttrain.cli.arguments import RunConfig, known_name, parse
from posttrain.cli.errors import UsageError
from posttrain.cli.launch import PROFILE_ALIASES, config_file
from posttrain.cli.option_table import method_names
from posttrain.cli.output import ready_to_write
from posttrain.cli.words import Parser
from posttrain.core.secrets import hidden_text, named_secret, without_secrets

SUBMIT = {"slurm": ["sbatch"], "skypilot": ["sky", "launch", "--yes"], "kubernetes": ["kubectl", "apply", "-f"]}
SUFFIX = {"slurm": "sbatch", "skypilot": "sky.yaml", "kubernetes": "k8s.yaml"}
"""Never .yaml alone: `--name sft sft sft.yaml` is a job named sft, of the options in sft.yaml."""
SETUP = {"slurm": "", "skypilot": "pip install posttrain", "kubernetes": "pip install posttrain"}
"""Slurm's machines have an environment already; the others begin bare."""
MARK = "# Written by `posttrain launch`, which will write over it."
PORT = 29500
FIELDS = {
    "name": (r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", "small letters, digits and dashes"),
    "time": (r"\d+(-\d+)?(:\d+){0,2}", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "partition": (r"[\w.,-]+", "letters, digits, dots, dashes and commas"),
    "accelerator": (r"[\w.-]+", "the name of a GPU"),
    "image": (r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", "the name of a container image"),
}
"""What is written into a job as it stands: (pattern, in words). Anything else could end its line and begin another."""
TOKEN_OPTION, TOKEN_VARIABLE = "hub_token", "HF_TOKEN"
TOKEN_FROM = {
    "slurm": f"`export {TOKEN_VARIABLE}` before `sbatch`, which hands the environment on.",
    "skypilot": f"`export {TOKEN_VARIABLE}`, then `sky launch --secret {TOKEN_VARIABLE}`.",
    "kubernetes": f"`kubectl create secret generic {{name}} --from-literal={TOKEN_VARIABLE}=...` makes it known to the job.",
}
ASSIGNMENT = re.compile(r"(\w+)=['\"]?([^\s'\"$;][^\s'\";]*)")
"""`NAME=value` in a shell, unless the value is that of another variable."""


def main(words: list[str]) -> int:
    parser = make_parser()
    job, rest = parser.parse_known_args(words)
    rest = [job.method, *rest]
    if job.method not in method_names():
        raise UsageError(f"there is no method {job.method!r}; there are {', '.join(method_names())}.")
    config = parse(job.method, rest[1:])  # unknown options and values are errors here, not on the cluster
    check(job, config)
    path = Path(job.write or f"{job.name}.{SUFFIX[job.to]}").expanduser()
    refuse_to_lose(path, config)
    rest = without_token(rest, job, config)
    text = WRITERS[job.to](job, command_of(job, rest, config))
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
    parser.add_argument(
        "--profile",
        default=None,
        help="ddp, fsdp2, hsdp, zero2, zero3 or a file (default: `accelerate_config` of the options, or ddp)",
    )
    parser.add_argument("--name", default="posttrain", help="name of the job (default: %(default)s)")
    parser.add_argument("--time", default="24:00:00", help="limit, as Slurm writes it (default: %(default)s)")
    parser.add_argument("--partition", help="of Slurm")
    parser.add_argument("--accelerator", default="H100", help="kind of GPU, for SkyPilot (default: %(default)s)")
    parser.add_argument(
        "--image", default="pytorch/pytorch:latest", help="container, for Kubernetes (default: %(default)s)"
    )
    parser.add_argument("--setup", help="commands before the run (default: pip install posttrain; nothing for Slurm)")
    parser.add_argument("--write", help="file to write (default: NAME.sbatch, NAME.sky.yaml or NAME.k8s.yaml)")
    parser.add_argument(
        "--submit", action="store_true", help="hand it to the scheduler; without it only the file is written"
    )
    parser.add_argument("method", help="of the run, such as sft or grpo")
    return parser


def check(job: argparse.Namespace, config: RunConfig) -> None:
    if job.nodes < 1 or job.gpus < 1:
        raise UsageError(f"--nodes is {job.nodes} and --gpus {job.gpus}; both are at least 1.")
    for name, (pattern, words) in FIELDS.items():
        given = getattr(job, name)
        if given is not None and not re.fullmatch(pattern, given, re.ASCII):
            raise UsageError(f"--{name} is {given!r}; it takes {words}.")
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"):
        if name in config.values:
            raise UsageError(f"{config.where(name)}: the scheduler decides it; use --nodes and --gpus.")
    given = config.get("accelerate_config")
    if job.profile and given and config.origin["accelerate_config"] != config.file:
        raise UsageError(f"--profile {job.profile} and --accelerate_config {given} say the same thing; leave one out.")
    where = "--profile" if job.profile else config.where("accelerate_config")
    profile = job.profile or given or "ddp"
    config_file(profile, where)  # neither a profile nor a file is an error here
    profile = PROFILE_ALIASES.get(profile, profile)
    if profile == "hsdp" and job.nodes < 2:
        raise UsageError(f"{where} hsdp keeps a whole copy on each machine, and --nodes is 1: use fsdp2.")
    if profile == "single_gpu" and job.nodes * job.gpus > 1:
        raise UsageError(f"{where} single_gpu is for one process; the job has {job.nodes} x {job.gpus} GPUs: use ddp.")


def without_token(words: list[str], job: argparse.Namespace, config: RunConfig) -> list[str]:
    """The words of the run without `--hub_token X`: a job is read by others, so the token comes from the job's environment."""
    for word in words:
        if not word.isprintable():
            raise UsageError(f"{word!r} has a line break or another control character, which a job cannot hold.")
    told = config.values.items()
    secret = [
        name
        for name, value in told
        if config.origin[name] != config.file and without_secrets({name: value}) != {name: value}
    ]
    if others := [name for name in secret if name != TOKEN_OPTION]:
        raise UsageError(
            f"--{others[0]} holds a secret, and a job is a file that others read. Put it into a file of options that only you can "
            "read, or into the environment of the job."
        )
    setup = job.setup or ""
    if hidden_text(setup) != setup or any(named_secret(*found) for found in ASSIGNMENT.findall(setup)):
        raise UsageError(
            "--setup holds a secret, and a job is a file that others read: set it in the environment of the job."
        )
    if TOKEN_OPTION not in secret:
        return words
    job.setup = f'{setup_of(job)}: "${{{TOKEN_VARIABLE}:?is not set in the environment of the job}}"'
    print(f"# --{TOKEN_OPTION} is not written into the job: {TOKEN_FROM[job.to].format(name=job.name)}")
    kept: list[str] = []
    flag = ""
    for word in words:
        flag = known_name(word[2:].partition("=")[0]) if word.startswith("--") else flag
        if flag != TOKEN_OPTION:
            kept.append(word)
    return kept


def refuse_to_lose(path: Path, config: RunConfig) -> None:
    """Only what this command has written is written over."""
    if config.file and path.exists() and path.samefile(Path(config.file).expanduser()):
        raise UsageError(f"The job would be written over {config.file}, the options of the run; name another --write.")
    ready_to_write(str(path), "--write")
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace").splitlines()[:2]:
        raise UsageError(
            f"{path} exists, and `posttrain launch` did not write it; name another file with --write, or move it away."
        )


def command_of(job: argparse.Namespace, words: list[str], config: RunConfig) -> str:
    """The command on each machine; $RANK_OF_MACHINE and $ADDRESS_OF_MACHINE_0 are filled in there."""
    named = job.profile or (None if config.get("accelerate_config") else "ddp")
    profile = ["--accelerate_config", named] if named else []
    counts = ["--num_processes", str(job.nodes * job.gpus), "--num_machines", str(job.nodes)]
    where = '--machine_rank "$RANK_OF_MACHINE" --main_process_ip "$ADDRESS_OF_MACHINE_0" --main_process_port'
    return f"{shlex.join(['posttrain', *words, *profile, *counts])} {where} {PORT}"


def setup_of(job: argparse.Namespace) -> str:
    """Lines of shell, each with its end."""
    given = SETUP[job.to] if job.setup is None else job.setup
    text = textwrap.dedent(given).strip()
    return f"{text}\n" if text else ""


def _block(text: str, blanks: int) -> str:
    """Lines as they stand in a block of YAML."""
    return textwrap.indent(text, " " * blanks)


def slurm(job: argparse.Namespace, command: str) -> str:
    partition = f"#SBATCH --partition={job.partition}\n" if job.partition else ""
    return f"""#!/bin/bash
{MARK}
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
{setup_of(job)}export ADDRESS_OF_MACHINE_0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'export RANK_OF_MACHINE=$SLURM_NODEID; exec {_in_quotes(command)}'
"""


def skypilot(job: argparse.Namespace, command: str) -> str:
    setup = setup_of(job)
    return f"""{MARK}
name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: {job.accelerator}:{job.gpus}
  use_spot: false
workdir: .
{f"setup: |{chr(10)}{_block(setup, 2)}" if setup else ""}run: |
  export RANK_OF_MACHINE=$SKYPILOT_NODE_RANK
  export ADDRESS_OF_MACHINE_0=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
{_block(command, 2)}
"""


def kubernetes(job: argparse.Namespace, command: str) -> str:
    return f"""{MARK}
apiVersion: v1
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
        envFrom: [{{secretRef: {{name: {job.name}, optional: true}}}}]
        command: ["bash", "-c"]
        args:
        - |
{_block(setup_of(job), 10)}          export RANK_OF_MACHINE=$JOB_COMPLETION_INDEX
{_block(f"exec {command}", 10)}
"""


def _in_quotes(command: str) -> str:
    """Inside of single quotes."""
    return command.replace("'", "'\\''")


WRITERS: dict[str, Callable[[argparse.Namespace, str], str]] = {
    "slurm": slurm,
    "skypilot": skypilot,
    "kubernetes": kubernetes,
}
