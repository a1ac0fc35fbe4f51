"""Jobs with machines that write (`--rollout_nodes`), and jobs of Ray: what `launch` adds to the files of job_files.py.

The machines of a run are one Ray cluster. Those that train are members without GPUs, so that actors are placed on the others alone.
The cluster asks for a token, which lies in a file that only its owner reads; its dashboard listens on the first machine itself.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
from pathlib import Path
from typing import Any

from posttrain.cli.errors import EXIT_CODE, UsageError
from posttrain.cli.options.arguments import RunConfig

RAY_PORT = 6479
"""SkyPilot's machines run a Ray of their own on 6380."""
COMMAND_FILE = "on-each-machine.sh"
CARRIED = ("NCCL_", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_")
START = "ray start --disable-usage-stats --block"
WAIT = 'until (exec 3<>"/dev/tcp/${RAY_ADDRESS%:*}/${RAY_ADDRESS##*:}") 2>/dev/null; do sleep 2; done'
HEAD = f'{START} --head --port="${{RAY_ADDRESS##*:}}" --dashboard-host=127.0.0.1 --num-cpus=0 --num-gpus=0'
MEMBER = f'{START} --address="$RAY_ADDRESS" --num-cpus=0 --num-gpus=0'
WAIT_FOR_RUN = """ &
run=$!
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done  # a signal ends `wait`, not the run
wait "$run\""""
HAS_RAY = (
    "command -v ray >/dev/null || { echo \"Ray is not installed where this job runs: pip install 'posttrain[ray]'.\" >&2; "
    f"exit {EXIT_CODE}; }}"
)


def writer_of(job: argparse.Namespace) -> str:
    """Starts Ray on a machine that writes; ends with the cluster."""
    return f'{START} --address="$RAY_ADDRESS" --num-cpus={job.cpus} --num-gpus={job.gpus} || true'


def carried() -> dict[str, str]:
    """Variables of this environment that say how machines reach each other."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(CARRIED)}


def exports() -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in carried().items())


def with_rollouts(job: argparse.Namespace, words: list[str], config: RunConfig) -> list[str]:
    """The words of a run whose completions are written on `--rollout_nodes` machines."""
    if not job.rollout_nodes:
        return words
    if "rollout_workers" not in config.table.options:
        raise UsageError(f"--rollout_nodes: {config.method} writes no completions; leave it out.")
    for name, wanted in (("async_rollouts", True), ("rollout_workers", "ray"), ("use_vllm", False)):
        if name in config.values and config.values[name] != wanted:
            raise UsageError(
                f"{config.where(name)} is {config.values[name]!r}, and --rollout_nodes needs {wanted!r}: leave it out."
            )
    share = -(-job.nodes // job.rollout_nodes)  # training machines for one that writes
    if idle := job.rollout_nodes % job.nodes if share == 1 else 0:
        print(f"# Of {job.rollout_nodes} machines that write {idle} stay idle: take a multiple of --nodes {job.nodes}.")
    added = {
        "async_rollouts": "true", "rollout_workers": "ray", "ray_workers": str(max(job.rollout_nodes // job.nodes, 1)),
        **({"worker_resources": json.dumps({"GPU": round(1 / share, 4)})} if share > 1 else {}),
    }  # fmt: skip
    return [
        *words,
        *(word for name, value in added.items() if name not in config.values for word in (f"--{name}", value)),
    ]


# ---- Slurm, SkyPilot ------------------------------------------------------------------------------------------------------------


def slurm_part(job: argparse.Namespace, extra: str) -> dict[str, str]:
    """What a heterogeneous job has besides: header, lines before the run, options of srun."""
    if not job.rollout_nodes:
        return {"header": "", "before": exports(), "srun": "srun"}
    header = (
        f"#SBATCH hetjob\n#SBATCH --nodes={job.rollout_nodes}\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node={job.gpus}\n"
        f"#SBATCH --cpus-per-task={job.cpus}\n#SBATCH --time={job.time}\n{extra}"
    )
    before = f"""{exports()}{HAS_RAY}
export RAY_ADDRESS="$ADDRESS_OF_MACHINE_0:$((30000 + SLURM_JOB_ID % 10000))"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.{job.name}-$SLURM_JOB_ID.ray-token"  # which all nodes see
(umask 077; rm -f "$RAY_AUTH_TOKEN_PATH"; head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \\n' >"$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$PID_FILE" "$RAY_AUTH_TOKEN_PATH"' EXIT
# shellcheck disable=SC2016
srun --het-group=0 --overlap --gpus-per-node=0 bash -c '
  if [ "$SLURM_NODEID" -eq 0 ]; then exec {HEAD}; fi
  {WAIT}; exec {MEMBER}' &
# shellcheck disable=SC2016
srun --het-group=1 bash -c '
  {WAIT}; {writer_of(job)}' &
"""
    return {"header": header, "before": before, "srun": "srun --het-group=0"}


def skypilot_part(job: argparse.Namespace, path: Path) -> tuple[str, dict[str, str]]:
    """(lines before the run, files to mount). The token travels as a file beside the job that only its owner reads."""
    if not job.rollout_nodes:
        return "", {}
    token = path.with_name(f"{job.name}.ray-token")
    with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    there = "/tmp/posttrain/ray-token"
    before = f"""{HAS_RAY}
chmod 600 {there}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={there} RAY_ADDRESS="$ADDRESS_OF_MACHINE_0:{RAY_PORT}"
if [ "$SKYPILOT_NODE_RANK" -ge {job.nodes} ]; then
  {WAIT}
  {writer_of(job)}
  exit 0
fi
if [ "$SKYPILOT_NODE_RANK" -eq 0 ]; then {HEAD} & else {WAIT}; {MEMBER} & fi
ray=$!
trap 'kill "$ray"' EXIT
trap 'kill -TERM "$run"' TERM
"""
    return before, {there: str(token)}


# ---- Ray, KubeRay ---------------------------------------------------------------------------------------------------------------


def ranks_of(job: argparse.Namespace, folder: str, command: str) -> str:
    """The command of a job of Ray, which decides who is where."""
    return f"python -m posttrain.cli.running.ray_ranks {job.nodes} {job.gpus} {folder} {command}"


def ray_job(job: argparse.Namespace, command: str, mark: str) -> str:
    runtime = {"env_vars": {**carried(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace)}}
    return f"""#!/bin/bash
{mark}
# Options, code and small data are those of the working directory, which Ray copies; the rest are paths that the machines see.
set -euo pipefail
: "${{RAY_ADDRESS:?is not set: the dashboard of the cluster, such as http://127.0.0.1:8265 after ssh -L 8265:127.0.0.1:8265 HEAD}}"
: "${{RAY_AUTH_TOKEN_PATH:?is not set: the file with the token of the cluster}}"
export RAY_AUTH_MODE=token
[ "$(stat -c %a "$RAY_AUTH_TOKEN_PATH")" = 600 ] || {{ echo "Others can read it: chmod 600 $RAY_AUTH_TOKEN_PATH" >&2; exit 2; }}
{HAS_RAY}
exec ray job submit --no-wait --working-dir . --metadata-json {shlex.quote(json.dumps({"name": job.name}))} \\
  --runtime-env-json {shlex.quote(json.dumps(runtime))} \\
  -- {ranks_of(job, ".", command)}
"""


def kubernetes_rayjob(job: argparse.Namespace, pod: dict[str, Any], folder: str) -> dict[str, Any]:
    """A RayJob of KubeRay 1.5.1 or later, which makes the token a Secret and hands it to every pod. Several shells read its
    entrypoint one after the other, so the command is in a file that the job carries (`COMMAND_FILE`)."""
    if job.setup:
        raise UsageError("--setup: KubeRay starts the pods of a RayJob itself; put posttrain and Ray into --image.")
    worker = {name: value for name, value in pod.items() if name not in ("subdomain", "restartPolicy")}
    container = {name: value for name, value in pod["containers"][0].items() if name not in ("command", "args")}
    container["env"] = [entry for entry in container["env"] if entry["name"] != "ADDRESS_OF_MACHINE_0"]
    worker["containers"] = [container]
    head = {**worker, "containers": [{**container, "resources": {"requests": {"cpu": "2", "memory": "8Gi"}}}]}
    count = job.nodes + job.rollout_nodes
    return {
        "apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": job.name},
        "spec": {
            "entrypoint": ranks_of(job, folder, f"bash {COMMAND_FILE}"),
            "backoffLimit": job.restarts, "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": {"spec": head}},
                "workerGroupSpecs": [{
                    "groupName": "machines", "replicas": count, "minReplicas": count, "maxReplicas": count,
                    "rayStartParams": {"num-gpus": str(job.gpus)}, "template": {"spec": worker},
                }],
            },
        },
    }  # fmt: skip
