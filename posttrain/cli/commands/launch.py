"""`posttrain launch --to slurm|skypilot|kubernetes|ray METHOD CONFIG ...`: the file of a job, shown, and submitted if asked."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from posttrain.cli.commands.job_files import MARK, WRITERS, default_profile, secret_options, setup_of, ship_package
from posttrain.cli.errors import UsageError
from posttrain.cli.options.arguments import RunConfig, known_name, parse
from posttrain.cli.options.table import method_names
from posttrain.cli.options.words import Parser
from posttrain.cli.running.output import ready_to_write
from posttrain.cli.running.processes import PROFILE_ALIASES, SECONDS_TO_SAVE, config_file
from posttrain.core.options import resume_request
from posttrain.core.secrets import hidden_text, named_secret

SUBMIT = {
    "slurm": ["sbatch"],
    "skypilot": ["sky", "jobs", "launch", "--yes"],
    "kubernetes": ["kubectl", "apply", "-f"],
    "ray": ["bash"],
}
SUFFIX = {"slurm": "sbatch", "skypilot": "sky.yaml", "kubernetes": "k8s.yaml", "ray": "ray.sh"}
"""Never .yaml alone: `--name sft sft sft.yaml` is a job named sft, of the options in sft.yaml."""
FIELDS = {
    "name": (r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", "small letters, digits and dashes, beginning with a letter"),
    "time": (r"\d+(-\d+)?(:\d+){0,2}", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "workdir": (r"/[^\"\\\x00-\x1f\x7f]*", "an absolute path without quotes and line breaks"),
    "partition": (r"[\w.,-]+", "letters, digits, dots, dashes and commas"),
    "account": (r"[\w.-]+", "letters, digits, dots and dashes"),
    "qos": (r"[\w.-]+", "letters, digits, dots and dashes"),
    "accelerator": (r"[\w.-]+", "the name of a GPU"),
    "image": (r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", "the name of a container image"),
}
"""What is written into a job as it stands: (pattern, in words). Anything else could end its line and begin another."""
ONLY_OF = {
    "workdir": ("slurm",), "time": ("slurm",), "partition": ("slurm",), "account": ("slurm",), "qos": ("slurm",),
    "accelerator": ("skypilot",), "image": ("kubernetes",), "ship": ("kubernetes",), "volume": ("kubernetes", "skypilot"),
}  # fmt: skip
NEEDED = {
    "slurm": {},
    "ray": {},
    "skypilot": {
        "accelerator": "the kind of GPU, such as H100",
        "volume": "the bucket that outlives the machines, and where it is mounted, such as s3://my-bucket:/data",
    },
    "kubernetes": {
        "image": "a container image with posttrain in it (or --setup that installs it)",
        "volume": "the PersistentVolumeClaim that outlives the pods, and where it is mounted, such as my-claim:/data",
    },
}
VOLUME = {"skypilot": r"([a-z0-9]+://[\w./-]+):((?:/[\w.-]+)+)", "kubernetes": r"([a-z0-9][a-z0-9.-]*):((?:/[\w.-]+)+)"}
TOKEN_OPTION, TOKEN_VARIABLE = "hub_token", "HF_TOKEN"
TOKEN_FROM = {
    "slurm": f"`export {TOKEN_VARIABLE}` before `sbatch`, which hands the environment on.",
    "skypilot": f"`export {TOKEN_VARIABLE}`, then `sky jobs launch --secret {TOKEN_VARIABLE}`.",
    "ray": f"`export {TOKEN_VARIABLE}` where Ray was started, on every machine.",
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
    check_restart(config)
    path = Path(job.write or f"{job.name}.{SUFFIX[job.to]}").expanduser()
    refuse_to_overwrite(path, config)
    ship_package(job)
    rest = without_token(rest, job, config)
    text = WRITERS[job.to](job, rest, config)
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
    add = parser.add_argument
    add("--to", required=True, choices=sorted(SUBMIT), help="scheduler")
    add("--nodes", type=int, default=1, help="machines (default: %(default)s)")
    add(
        "--rollout_nodes",
        type=int,
        default=0,
        help="machines besides, whose GPUs write completions (online methods, by Ray)",
    )
    add("--gpus", type=int, default=8, help="GPUs of each machine (default: %(default)s)")
    add("--cpus", type=int, help="CPU cores of each machine (default: 4 for each GPU)")
    add("--memory", type=int, help="gigabytes of memory of each machine (default: what the scheduler gives)")
    profiles = "ddp, fsdp2, hsdp, zero2, zero3 or a file"
    add("--profile", help=f"{profiles} (default: `accelerate_config` of the options, or ddp; single_gpu for one GPU)")
    add("--name", default="posttrain", help="name of the job (default: %(default)s)")
    grace = "seconds that a run has to save between the request to stop and its end (default: %(default)s)"
    add("--grace", type=int, default=int(SECONDS_TO_SAVE), help=grace)
    add("--restarts", type=int, default=20, help="how often an interrupted job is started again (default: %(default)s)")
    add("--time", help="Slurm: time limit, after which the job is requeued and continues (default: 24:00:00)")
    add("--workdir", help="Slurm: folder of the run on the nodes, as an absolute path (default: the working directory)")
    add("--partition", help="Slurm: partition")
    add("--account", help="Slurm: account that is charged")
    add("--qos", help="Slurm: quality of service")
    add("--accelerator", help="SkyPilot: kind of GPU, such as H100")
    add("--image", help="Kubernetes: container image with posttrain in it")
    volume = "Kubernetes: CLAIM:/path, a PersistentVolumeClaim (ReadWriteMany for several nodes); SkyPilot: s3://BUCKET:/path"
    add("--volume", action="append", help=f"where data and output lie; may be repeated. {volume}")
    ship = (
        "Kubernetes: a file or folder of code that the job needs besides those that its options name; may be repeated"
    )
    add("--ship", action="append", help=ship)
    setup = "Slurm: this Python environment; SkyPilot: this posttrain is installed; Kubernetes: nothing"
    add("--setup", help=f"commands before the run (default for {setup})")
    add("--write", help="file to write (default: NAME.sbatch, NAME.sky.yaml, NAME.k8s.yaml or NAME.ray.sh)")
    add("--submit", action="store_true", help="hand it to the scheduler; without it only the file is written")
    add("method", help="of the run, such as sft or grpo")
    return parser


def check(job: argparse.Namespace, config: RunConfig) -> None:
    check_options(job)
    for name in ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"):
        if name in config.values:
            raise UsageError(f"{config.where(name)}: the scheduler decides it; use --nodes and --gpus.")
    given = config.get("accelerate_config")
    if job.profile and given and config.origin["accelerate_config"] != config.file:
        raise UsageError(f"--profile {job.profile} and --accelerate_config {given} say the same thing; leave one out.")
    where = "--profile" if job.profile else config.where("accelerate_config")
    profile = job.profile or given or default_profile(job)
    config_file(profile, where)  # neither a profile nor a file is an error here
    profile = PROFILE_ALIASES.get(profile, profile)
    if profile == "hsdp" and job.nodes < 2:
        raise UsageError(f"{where} hsdp keeps a whole copy on each machine, and --nodes is 1: use fsdp2.")
    if profile == "single_gpu" and job.nodes * job.gpus > 1:
        raise UsageError(f"{where} single_gpu is for one process; the job has {job.nodes} x {job.gpus} GPUs: use ddp.")


def check_options(job: argparse.Namespace) -> None:
    """Those of `launch` itself, and defaults that depend on others."""
    if job.to == "slurm":
        job.time, job.workdir = job.time or "24:00:00", job.workdir or str(Path.cwd())
    least_of = {"nodes": 1, "rollout_nodes": 0, "gpus": 1, "cpus": 1, "memory": 1, "grace": 1, "restarts": 0}
    for name, least in least_of.items():
        given = getattr(job, name)
        if given is not None and given < least:
            raise UsageError(f"--{name} is {given}; it is at least {least}.")
    for name, (pattern, words) in FIELDS.items():
        given = getattr(job, name)
        if given is not None and not re.fullmatch(pattern, given, re.ASCII):
            raise UsageError(f"--{name} is {given!r}; it takes {words}.")
    for name, schedulers in ONLY_OF.items():
        if getattr(job, name) is not None and job.to not in schedulers:
            raise UsageError(f"--{name} is an option of {' and '.join(schedulers)}; the job is for {job.to}.")
    for name, words in NEEDED[job.to].items():
        if getattr(job, name) is None:
            raise UsageError(f"--to {job.to} needs --{name}: {words}.")
    job.cpus = job.cpus or 4 * job.gpus
    if job.to == "slurm" and seconds_of(job.time) <= job.grace:
        raise UsageError(
            f"--time {job.time} is not longer than the {job.grace} seconds of --grace, which are for saving."
        )
    job.mounts = {}
    for given in job.volume or []:
        found = re.fullmatch(VOLUME[job.to], given, re.ASCII)
        if found is None or found[2] in job.mounts:
            example = NEEDED[job.to]["volume"].rpartition(" ")[2]
            raise UsageError(f"--volume is {given!r}; it takes SOURCE:/path, such as {example}, and each path once.")
        job.mounts[found[2]] = found[1]


def seconds_of(time: str) -> int:
    """Of a limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    parts = [0, *parts] if not dash and len(parts) < 3 else parts
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_restart(config: RunConfig) -> None:
    """An interrupted job is started again with the same command, which must continue and not start over."""
    again = "An interrupted job is started again with the same command"
    if config.get("fresh"):
        raise UsageError(
            f"{config.where('fresh')}: {again}, which would throw its steps away. Name a new `output_dir` instead."
        )
    given = config.get("resume_from_checkpoint")
    if "resume_from_checkpoint" in config.values and resume_request(given) is not True:
        where = config.where("resume_from_checkpoint")
        raise UsageError(
            f"{where} is {given!r}. {again}, which would not continue from its own newest checkpoint; leave it out."
        )
    if config.get("save_strategy") == "no":
        where = config.where("save_strategy")
        raise UsageError(f"{where} is 'no'. {again} and could only begin at the start: use steps or epoch.")


def without_token(words: list[str], job: argparse.Namespace, config: RunConfig) -> list[str]:
    """The words of the run without `--hub_token X`: a job is read by others, so the token comes from the job's environment."""
    for word in words:
        if not word.isprintable():
            raise UsageError(f"{word!r} has a line break or another control character, which a job cannot hold.")
    secret = secret_options(config, "The command line")
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


def refuse_to_overwrite(path: Path, config: RunConfig) -> None:
    """Only what this command has written is written over."""
    if config.file and path.exists() and path.samefile(Path(config.file).expanduser()):
        raise UsageError(f"The job would be written over {config.file}, the options of the run; name another --write.")
    ready_to_write(str(path), "--write")
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace").splitlines()[:2]:
        raise UsageError(
            f"{path} exists, and `posttrain launch` did not write it; name another file with --write, or move it away."
        )
