"""What `posttrain launch` writes: jobs for Slurm, SkyPilot and Kubernetes, and the files of this machine that they need."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from posttrain.cli.commands import ray_jobs
from posttrain.cli.errors import EXIT_CODE, PACKAGE, UsageError
from posttrain.cli.options.arguments import RunConfig
from posttrain.core import __version__
from posttrain.core.secrets import hidden_text, without_secrets

MARK = "# Written by `posttrain launch`, which will write over it."
PORT = 29500
WHEELS = "/tmp/posttrain"
"""Where a wheel is put on machines that have no posttrain."""
SHIPPED_TO = "/etc/posttrain"
SHIPPED_BYTES = 200_000
"""`kubectl apply` keeps a copy of a ConfigMap in an annotation, which holds 262,144 bytes."""
LOCAL_ONLY = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that each machine has to itself."""
REWARD_OPTIONS = ("reward_funcs", "reward_model_name_or_path")
CODE_OPTIONS = ("reward_funcs", "tools", "environment_factory", "group_filter_func", "rollout_func")
INSTALLED = (
    'command -v posttrain >/dev/null || { echo "posttrain is not installed where this job runs: name a --setup that installs '
    f'or activates it." >&2; exit {EXIT_CODE}; }}'
)


def default_profile(job: argparse.Namespace) -> str:
    return "ddp" if job.nodes * job.gpus > 1 else "single_gpu"


def secret_options(config: RunConfig, origin: str) -> list[str]:
    """Options from `origin` whose values hold a secret."""
    given = [(name, value) for name, value in config.values.items() if config.origin[name] == origin]
    return [name for name, value in given if without_secrets({name: value}) != {name: value}]


def command_of(job: argparse.Namespace, words: list[str], config: RunConfig, port: str | None) -> str:
    """The command on each machine, but for its rank. None: nor does it say where processes meet."""
    meeting = f' --main_process_ip "$ADDRESS_OF_MACHINE_0" --main_process_port {port}' if port else ""
    named = job.profile or (None if config.get("accelerate_config") else default_profile(job))
    profile = ["--accelerate_config", named] if named else []
    counts = ["--num_processes", str(job.nodes * job.gpus), "--num_machines", str(job.nodes)]
    words = ray_jobs.with_rollouts(job, words, config)
    return f"{shlex.join(['posttrain', *words, *profile, *counts])}{meeting}"


def this_package(folder: Path) -> str:
    """What `pip install` takes to install this posttrain elsewhere: its version where it came from an index, else its address, or
    a wheel on this machine. That of a checkout is built in `folder`."""
    source = Path(PACKAGE).parent
    if not (source / "pyproject.toml").is_file():
        origin = json.loads(distribution("posttrain").read_text("direct_url.json") or "{}")
        url = urlsplit(origin.get("url", ""))
        source = Path(url2pathname(url.path))
        if url.scheme != "file" or not source.is_dir():
            return str(source) if url.scheme == "file" else origin.get("url", f"posttrain=={__version__}")
    # Built in place, a wheel would hold what an earlier build has left behind.
    with tempfile.TemporaryDirectory() as clean:
        for part in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(source / part, clean)
        shutil.copytree(source / "posttrain", Path(clean, "posttrain"), ignore=shutil.ignore_patterns("__pycache__"))
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), clean]
        done = subprocess.run([*build, *(["--no-build-isolation"] if find_spec("setuptools") else [])], check=False)
    wheel = folder / f"posttrain-{__version__}-py3-none-any.whl"
    if done.returncode or not wheel.is_file():
        raise UsageError(f"No wheel could be built of {source}; name a --setup that installs posttrain.")
    return str(wheel)


def ship_package(job: argparse.Namespace) -> None:
    """SkyPilot's machines are bare: where no --setup says how posttrain gets there, it is this one."""
    job.wheels = {}
    if job.to == "skypilot" and job.setup is None:
        package = this_package(Path.cwd())
        if Path(package).is_file():
            package, wheel = f"{WHEELS}/{Path(package).name}", package
            job.wheels[package] = wheel
        job.setup = f"pip install {shlex.quote(package)}"


def setup_of(job: argparse.Namespace) -> str:
    """Lines of shell, each with its end. Slurm's machines see the environment in which this command runs."""
    here = f'export PATH={shlex.quote(os.path.dirname(sys.executable))}:"$PATH"' if job.to == "slurm" else ""
    text = textwrap.dedent(here if job.setup is None else job.setup).strip()
    return f"{text}\n" if text else ""


# ---- files that the run needs ---------------------------------------------------------------------------------------------------


def local_files(job: argparse.Namespace, config: RunConfig) -> Iterator[tuple[str, Path]]:
    """(where it is named, path) of what is on this machine and is read by the run, the file of options first."""
    if config.file:
        yield "The file of options", Path(config.file).expanduser()
    if job.profile and Path(job.profile).is_file():
        yield "--profile", Path(job.profile)
    for name, value in config.values.items():
        for text in _texts(value):
            if name in REWARD_OPTIONS:
                text = text.removeprefix("judge:").partition("?")[0]  # options of a process reward or a judge follow
            path = Path(os.path.expanduser(re.sub(r"(\.py):\w+$", r"\1", text)))
            if name in CODE_OPTIONS and path.suffix != ".py" and text.partition(".")[0]:
                package = Path(text.partition(".")[0])
                path = package if package.is_dir() else package.with_suffix(".py")
            is_a_path = name.endswith(("_path", "dataset_name")) or name in CODE_OPTIONS or re.search("[./]", text)
            # os.path: a text that no path can be does not exist, where pathlib raises an OSError
            if name != "output_dir" and is_a_path and os.path.exists(path):
                yield config.where(name), path


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def check_shared(job: argparse.Namespace, config: RunConfig) -> None:
    """Slurm: the nodes read the same files under the same names."""
    named = [("The working directory", Path(job.workdir)), ("`output_dir`", Path(config.get("output_dir") or "."))]
    named += [("The Python environment", Path(sys.prefix))] if job.setup is None else []
    for where, path in [*named, *local_files(job, config)]:
        path = Path(job.workdir, path.expanduser())
        if any(path.is_relative_to(folder) for folder in LOCAL_ONLY):
            raise UsageError(
                f"{where} is {path}, which is on this machine only: the nodes of the cluster do not see it. Move it to a file "
                "system that they share, such as your home folder; --workdir names the folder of the run there."
            )


def check_output(job: argparse.Namespace, config: RunConfig) -> None:
    """Kubernetes, SkyPilot: a machine's own disk is lost with the machine, and the checkpoints with it."""
    given = config.get("output_dir")
    if given is None or not _in_a_volume(job, Path(given)):
        raise UsageError(
            f"{config.where('output_dir')} is {given!r}, which is lost when the machine is: give a path in a --volume, such as "
            f"--output_dir {next(iter(job.mounts))}/{job.name}."
        )


def _in_a_volume(job: argparse.Namespace, path: Path) -> bool:
    return any(path.is_relative_to(mount) for mount in job.mounts)


def path_in_folder(job: argparse.Namespace, where: str, path: Path) -> str | None:
    """Of a local file, relative to the working directory, as which it is found on the other machine. None: in a volume."""
    if _in_a_volume(job, path):
        return None
    relative = os.path.relpath(path)
    if path.is_absolute() or relative.startswith(".."):
        raise UsageError(
            f"{where} is {path}, which is on this machine only. Copy it to a --volume and give its path there, such as "
            f"{next(iter(job.mounts))}/{path.name}, or give a path relative to and inside of the working directory."
        )
    return relative


def shipped_files(job: argparse.Namespace, config: RunConfig) -> dict[str, str]:
    """{path relative to the working directory: text} of what a ConfigMap carries."""
    found: dict[str, str] = {}
    sent = [os.path.normpath(given) for given in job.ship or []]
    for where, path in [*local_files(job, config), *(("--ship", Path(given)) for given in sent)]:
        if not path.exists():
            raise UsageError(f"{where} is {path}, which does not exist.")
        if path_in_folder(job, where, path) is None or (where != "--ship" and str(path) in sent):
            continue
        if path.is_dir() and where != "--ship":
            raise UsageError(
                f"{where} is {path}, a folder of this machine. Copy it to a --volume and give its path there, such as "
                f"{next(iter(job.mounts))}/{path.name}; a folder of code is sent with --ship {path}."
            )
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found[os.path.relpath(file)] = _text_to_ship(where, file)
    size = sum(len(text.encode()) for text in found.values())
    if size > SHIPPED_BYTES:
        raise UsageError(
            f"The files of the run ({', '.join(found)}) have {size:,} bytes, and a ConfigMap that kubectl applies holds "
            f"{SHIPPED_BYTES:,}: copy data to a --volume and give its path there, such as {next(iter(job.mounts))}/rows.jsonl."
        )
    return found


def _text_to_ship(where: str, file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is {file}, which is not a text: copy it to a --volume.") from error
    if hidden_text(text) != text or "token" in where:
        raise UsageError(f"{where} is {file}, which holds a secret, and a ConfigMap is read by others: use a Secret.")
    return text


# ---- files of jobs --------------------------------------------------------------------------------------------------------------


def slurm(job: argparse.Namespace, words: list[str], config: RunConfig) -> str:  # as long as the script that it writes
    check_shared(job, config)
    requested = {name: getattr(job, name) for name in ("partition", "account", "qos")}
    requested["mem"] = job.memory and f"{job.memory}G"
    extra = "".join(f"#SBATCH --{name}={value}\n" for name, value in requested.items() if value)
    command = command_of(job, words, config, '"$PORT_OF_MACHINE_0"')
    ray = ray_jobs.slurm_part(job, extra)
    return f"""#!/bin/bash
{MARK}
#SBATCH --job-name={job.name}
#SBATCH --chdir="{job.workdir}"
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --cpus-per-task={job.cpus}
#SBATCH --time={job.time}
#SBATCH --output={job.name}-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{job.grace}
#SBATCH --requeue
{extra}{ray["header"]}
# Code, options, data and output are those of the working directory above, which all nodes must see.
set -eo pipefail
{setup_of(job)}set -u
{INSTALLED}
hosts=$(scontrol show hostnames "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}")
export ADDRESS_OF_MACHINE_0=${{hosts%%$'\\n'*}}
export PORT_OF_MACHINE_0=$((10000 + SLURM_JOB_ID % 20000))  # jobs that share a node have different ones
export SRUN_CPUS_PER_TASK={job.cpus}  # srun does not take it over from sbatch
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.grace}
PID_FILE=$(mktemp)
export PID_FILE
trap 'rm -f "$PID_FILE"' EXIT
{ray["before"]}
# {job.grace} seconds before the limit Slurm sends USR1 to this script alone. The run on this machine, the first, is asked to stop:
# all processes agree on a step, save and end, the job is requeued, and the same command continues.
# `scancel --batch --signal=USR1 JOB` does it by hand.
again=no
trap 'again=yes; kill -TERM "$(<"$PID_FILE")" || true' USR1
trap : TERM  # scancel: Slurm ends the run itself, and the job is not requeued

# shellcheck disable=SC2016
{ray["srun"]} --kill-on-bad-exit=1 bash -c '
  set -- "$@" --machine_rank "$SLURM_NODEID"
  if [ "$SLURM_NODEID" -eq 0 ]; then echo "$$" >"$PID_FILE"; exec "$@"; fi
  trap : TERM
  "$@" || {{ code=$?; sleep 60; exit "$code"; }}  # time for the first machine to end by itself
' task {command} &
run=$!
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done  # a signal ends `wait`, not the run
code=0
wait "$run" || code=$?
if [ "$again" = yes ] && [ "$code" -eq 143 ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then
    echo "The run has saved and ended; the job is requeued and will continue."
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "The job is not requeued: --restarts is {job.restarts}. Submit it again to continue." >&2
  fi
fi
exit "$code"
"""


def skypilot(job: argparse.Namespace, words: list[str], config: RunConfig) -> str:
    check_output(job, config)
    for where, path in local_files(job, config):
        path_in_folder(job, where, path)
    command = command_of(job, words, config, str(PORT))
    before, token = ray_jobs.skypilot_part(job, Path.cwd())
    run = f"""set -eo pipefail
{INSTALLED}
export ADDRESS_OF_MACHINE_0=${{SKYPILOT_NODE_IPS%%$'\\n'*}}
{before}{"" if before else "exec "}{command} --machine_rank "$SKYPILOT_NODE_RANK"{ray_jobs.WAIT_FOR_RUN if before else ""}
"""
    resources = {
        "accelerators": f"{job.accelerator}:{job.gpus}", "cpus": f"{job.cpus}+",
        **({"memory": f"{job.memory}+"} if job.memory else {}),
        "job_recovery": {"max_restarts_on_errors": job.restarts},
    }  # fmt: skip
    buckets = {mount: {"source": source, "mode": "MOUNT_CACHED"} for mount, source in job.mounts.items()}
    environment = {
        "HF_HOME": f"{next(iter(job.mounts))}/huggingface", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace),
        **ray_jobs.carried(),
    }  # fmt: skip
    task = {
        "name": job.name, "num_nodes": job.nodes + job.rollout_nodes, "resources": resources, "workdir": ".",
        "file_mounts": buckets | job.wheels | token,
        "envs": environment, "setup": setup_of(job), "run": run,
    }  # fmt: skip
    note = "# SkyPilot copies the working directory without what .skyignore, or else .gitignore, names.\n"
    return f"{MARK}\n{note}{_yaml(task)}"


def kubernetes(job: argparse.Namespace, words: list[str], config: RunConfig) -> str:
    check_output(job, config)
    if config.file and (secret := secret_options(config, config.file)):
        raise UsageError(
            f"{config.where(secret[0])} holds a secret, and the file becomes a ConfigMap, which others read: take it out, and put "
            f"it into the Secret {job.name}, whose keys are variables of the job."
        )
    command = command_of(job, words, config, None if job.rollout_nodes else str(PORT))
    files = shipped_files(job, config) | (
        {ray_jobs.COMMAND_FILE: f'exec {command} "$@"\n'} if job.rollout_nodes else {}
    )
    keys = {path: f"{number}-{re.sub(r'[^A-Za-z0-9_.-]', '-', Path(path).name)}" for number, path in enumerate(files)}
    metadata = {"name": job.name}
    shipped = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {keys[path]: files[path] for path in files},
    }
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": metadata,
        # without it the first pod has no name until all of its containers are ready
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name}},
    }  # fmt: skip
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "posttrain", "operator": "In", "values": [EXIT_CODE]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = _pod(job, command)
    pod["volumes"].append({"name": "shipped", "configMap": {"name": job.name, "items": [
        {"key": key, "path": path} for path, key in keys.items()]}})  # fmt: skip
    if job.rollout_nodes:
        whole = ray_jobs.kubernetes_rayjob(job, pod, SHIPPED_TO)
        return f"{MARK}\n" + "---\n".join(_yaml(part) for part in (shipped, whole))
    whole = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": metadata,
        "spec": {
            "completions": job.nodes, "parallelism": job.nodes, "completionMode": "Indexed",
            "backoffLimit": job.restarts * job.nodes,  # where one pod fails, all do
            "podFailurePolicy": {"rules": rules}, "template": {"spec": pod},
        },
    }  # fmt: skip
    return f"{MARK}\n" + "---\n".join(_yaml(part) for part in (shipped, service, whole))


def _pod(job: argparse.Namespace, command: str) -> dict[str, Any]:
    script = f"""trap 'exit 143' TERM
set -eo pipefail
{setup_of(job)}{INSTALLED}
until getent hosts "$ADDRESS_OF_MACHINE_0" >/dev/null; do sleep 1; done
exec {command} --machine_rank "$JOB_COMPLETION_INDEX"
"""
    first = next(iter(job.mounts))
    environment = {
        "ADDRESS_OF_MACHINE_0": f"{job.name}-0.{job.name}", "HF_HOME": f"{first}/huggingface",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace), **ray_jobs.carried(),
    }  # fmt: skip
    mounts = {"shipped": SHIPPED_TO, "shm": "/dev/shm"} | {f"volume-{i}": path for i, path in enumerate(job.mounts)}
    container = {
        "name": "posttrain", "image": job.image, "workingDir": SHIPPED_TO, "command": ["bash", "-c"], "args": [script],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "envFrom": [{"secretRef": {"name": job.name, "optional": True}}],
        "resources": {
            "requests": {"cpu": str(job.cpus), **({"memory": f"{job.memory}Gi"} if job.memory else {})},
            "limits": {"nvidia.com/gpu": str(job.gpus)},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }  # fmt: skip
    claims = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
        for i, claim in enumerate(job.mounts.values())
    ]
    return {
        "subdomain": job.name, "restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims],
    }  # fmt: skip


def _yaml(document: dict[str, Any]) -> str:
    """With texts of several lines as blocks, as a person would write them."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, given: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", given, style="|" if "\n" in given else None)

    Dumper.add_representer(str, text)
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def ray(job: argparse.Namespace, words: list[str], config: RunConfig) -> str:
    """A job of a cluster that runs. Its machines get copies of the working directory, and see the same paths elsewhere."""
    output = Path(config.get("output_dir") or ".")
    if not output.is_absolute() or any(output.is_relative_to(folder) for folder in LOCAL_ONLY):
        raise UsageError(
            f"{config.where('output_dir')} is {output}: give an absolute path that all machines of the cluster see."
        )
    for where, path in local_files(job, config):
        if os.path.relpath(path).startswith("..") and any(path.is_relative_to(folder) for folder in LOCAL_ONLY):
            raise UsageError(f"{where} is {path}, which is on this machine only: move it into the working directory.")
    return ray_jobs.ray_job(job, command_of(job, words, config, None), MARK)


WRITERS: dict[str, Callable[[argparse.Namespace, list[str], RunConfig], str]] = {
    "slurm": slurm,
    "skypilot": skypilot,
    "kubernetes": kubernetes,
    "ray": ray,
}
