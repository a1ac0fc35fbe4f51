"""`posttrain launch`: jobs as their schedulers' own validators read them, and Slurm's script run by a real bash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from posttrain.cli.commands import job_files
from posttrain.core import __version__
from tests.cli.runs import posttrain
from tests.cli.test_child_process import until

RUN = ["sft", "--model_name_or_path", "my model", "--dataset_name", "rows.jsonl", "--output_dir", "/data/out"]
TO = {
    "slurm": ["--to", "slurm"],
    "skypilot": [
        "--to",
        "skypilot",
        "--accelerator",
        "H100",
        "--volume",
        "s3://mine:/data",
        "--setup",
        "pip install -e .",
    ],
    "kubernetes": ["--to", "kubernetes", "--image", "mine/posttrain:1", "--volume", "claim:/data"],
}
"""What each scheduler must be told."""
SCHEDULERS = sorted(TO)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_files, "LOCAL_ONLY", ("/local-only",))  # pytest's folders are in /tmp
    return tmp_path


def launched(folder, scheduler, *words, name="mine"):
    """The text of a job."""
    assert posttrain("launch", *TO[scheduler], "--name", name, *words) == 0
    return next(folder.glob(f"{name}.*")).read_text()


def kubernetes_parts(text):
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def container_of(text):
    return kubernetes_parts(text)["Job"]["spec"]["template"]["spec"]["containers"][0]


def check_shell(text, folder):
    """bash reads it, and shellcheck, where it is installed, finds nothing."""
    (folder / "script").write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    subprocess.run(["bash", "-n", "script"], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", "script"], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_job_is_written_and_not_submitted(folder, capsys, scheduler):
    text = launched(folder, scheduler, "--nodes", "4", "--gpus", "8", "--profile", "hsdp", *RUN)
    shown = capsys.readouterr().out
    assert text in shown
    assert "nothing was submitted" in shown
    for part in ("--num_processes 32", "--num_machines 4", "--accelerate_config hsdp", "--machine_rank", "rows.jsonl"):
        assert part in text
    if scheduler == "slurm":
        check_shell(text, folder)
    elif scheduler == "skypilot":
        check_shell(yaml.safe_load(text)["run"], folder)
    else:
        check_shell(container_of(text)["args"][0], folder)


# ---- Slurm ----------------------------------------------------------------------------------------------------------------------

POSTTRAIN = """#!{python}
import os, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *given: heard.append("TERM"))
open("started.new", "w").write(" ".join(sys.argv[1:]))
os.rename("started.new", "started")
end = time.monotonic() + 120  # where the test has failed
while not heard and time.monotonic() < end and {waits}:
    time.sleep(0.02)
open("saved", "w").write(" ".join(heard))
sys.exit({code})
"""


def slurm_script(folder, *words, code=143, waits=True, second=None, environment=None, run=RUN, **programs_given):
    """The job's script at work, with srun, scontrol and posttrain of this test in front of PATH."""
    programs = folder / "bin"
    programs.mkdir()
    texts = {
        "srun": '#!/bin/bash\nshift\nexport SLURM_NODEID=0\necho "$SRUN_CPUS_PER_TASK" >cpus\n"$@"\n',
        "scontrol": '#!/bin/bash\n[ "$1" = show ] && printf "%s\\n" node7 node8\necho "$*" >>scontrol.log\n',
        "posttrain": POSTTRAIN.format(python=sys.executable, code=code, waits=waits),
    }
    if second:
        texts |= {"posttrain-first": texts["posttrain"], "posttrain": second}
    for name, text in {**texts, **programs_given}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    launched(folder, "slurm", "--setup", f'export PATH="{programs}:$PATH"', *words, *run)
    given = {
        **os.environ,
        "PATH": path,
        "SLURM_JOB_ID": "40007",
        "SLURM_JOB_NODELIST": "node[7-8]",
        **(environment or {}),
    }
    return subprocess.Popen(
        ["bash", "mine.sbatch"], env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process):
    """(exit code, output, what scontrol was asked for besides the names of the nodes)."""
    told = process.communicate(timeout=90)[0]
    asked = Path("scontrol.log").read_text().splitlines()
    return process.returncode, told, [words for words in asked if not words.startswith("show")]


def test_usr1_lets_the_run_save_and_requeues_the_job(folder):
    process = slurm_script(folder, "--gpus", "2", "--cpus", "6")
    until(lambda: (folder / "started").exists() or process.poll() is not None)
    process.send_signal(signal.SIGUSR1)
    code, told, asked = ended(process)
    assert (folder / "saved").read_text() == "TERM", told  # once, and waited for
    assert asked == ["requeue 40007"], told
    assert "requeued and will continue" in told
    assert code == 143  # what sacct shows where the requeue fails
    words = (folder / "started").read_text()
    assert "--main_process_ip node7 --main_process_port 10007 --machine_rank 0" in words
    assert (folder / "cpus").read_text() == "6\n"


SECOND = """#!/bin/bash
# the second machine ends by agreement, with an exit code of its own; the first one gets the signal
if [[ "$*" == *"--machine_rank 0" ]]; then exec posttrain-first "$@"; fi
for _ in {1..2400}; do [ -e saved ] && break; read -rt 0.05 <> <(:); done
echo "$@" >second
exit 1
"""


def test_of_two_machines_the_first_is_signalled_and_the_second_does_not_cut_it_short(folder):
    process = slurm_script(
        folder, "--nodes", "2", "--gpus", "1",
        srun='#!/bin/bash\nshift\nSLURM_NODEID=1 "$@" &\nSLURM_NODEID=0 "$@"\ncode=$?\nwait\nexit "$code"\n',
        sleep='#!/bin/bash\necho "$*" >slept\n', second=SECOND,
    )  # fmt: skip
    until(lambda: (folder / "started").exists() or process.poll() is not None)
    process.send_signal(signal.SIGUSR1)
    code, told, asked = ended(process)
    assert (code, asked) == (143, ["requeue 40007"]), told
    assert "--machine_rank 0" in (folder / "started").read_text()
    assert "--main_process_ip node7 --main_process_port 10007 --machine_rank 1" in (folder / "second").read_text()
    assert (folder / "slept").read_text() == "60\n"  # before srun sees its exit code and kills the others


@pytest.mark.parametrize(
    ("number", "code", "restarted", "wanted"),
    [
        (signal.SIGUSR1, 0, "0", 0),  # it was done by then
        (signal.SIGUSR1, 1, "0", 1),  # it failed
        (signal.SIGUSR1, 143, "3", 143),  # --restarts 3
    ],
)
def test_a_job_that_has_ended_or_failed_or_was_restarted_enough_is_not_requeued(
    folder, number, code, restarted, wanted
):
    process = slurm_script(folder, "--restarts", "3", code=code, environment={"SLURM_RESTART_COUNT": restarted})
    until(lambda: (folder / "started").exists() or process.poll() is not None)
    process.send_signal(number)
    got, told, asked = ended(process)
    assert (got, asked) == (wanted, []), told
    assert ("--restarts is 3" in told) == (code == 143)


def test_a_cancelled_job_is_not_requeued_and_its_script_waits_for_the_run(folder):
    process = slurm_script(folder)
    until(lambda: (folder / "started").exists() or process.poll() is not None)
    pid = int(Path(next(iter(pid_files(process)))).read_text())
    process.send_signal(signal.SIGTERM)  # Slurm sends it to all
    assert process.poll() is None
    os.kill(pid, signal.SIGTERM)
    code, told, asked = ended(process)
    assert (code, asked) == (143, []), told
    assert (folder / "saved").read_text() == "TERM"


def pid_files(process):
    """PID_FILE of the processes below a script."""
    import psutil

    for below in psutil.Process(process.pid).children(recursive=True):
        if "PID_FILE" in below.environ():
            yield below.environ()["PID_FILE"]


def test_exit_codes_reach_slurm(folder):
    assert ended(slurm_script(folder, code=7, waits=False))[0] == 7


def test_slurms_directives_name_the_folder_and_resources(folder):
    spaced = folder / "a folder"
    spaced.mkdir()
    os.chdir(spaced)
    words = [
        "--gpus",
        "2",
        "--memory",
        "90",
        "--account",
        "lab",
        "--qos",
        "high",
        "--partition",
        "a,b",
        "--time",
        "1-0",
        "--grace",
        "300",
    ]
    text = launched(spaced, "slurm", *words, *RUN)
    given = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert given == {
        "job-name=mine", f'chdir="{spaced}"', "nodes=1", "ntasks-per-node=1", "gpus-per-node=2", "cpus-per-task=8", "time=1-0",
        "output=mine-%j.log", "open-mode=append", "signal=B:USR1@300", "requeue",
        "partition=a,b", "account=lab", "qos=high", "mem=90G",
    }  # fmt: skip
    assert f'export PATH={os.path.dirname(sys.executable)}:"$PATH"' in text


def test_slurm_takes_the_job(folder):
    if not shutil.which("sbatch") or subprocess.run(["timeout", "20", "sinfo"], capture_output=True).returncode:
        pytest.skip("no Slurm is running here")
    launched(folder, "slurm", "--gpus", "1", "--cpus", "1", *RUN)
    told = subprocess.run(["sbatch", "--test-only", "mine.sbatch"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "to start at" in told.stderr


def test_what_nodes_cannot_see_is_refused(folder, capsys, monkeypatch):
    (folder / "rows.jsonl").write_text("{}")
    monkeypatch.setattr(job_files, "LOCAL_ONLY", (str(folder / "local"),))
    local = folder / "local"
    local.mkdir()
    (local / "rows.jsonl").write_text("{}")
    for words in (
        ["--dataset_name", str(local / "rows.jsonl")],
        ["--dataset_name", "local/rows.jsonl"],
        ["--output_dir", "local/out"],
    ):
        assert posttrain("launch", "--to", "slurm", *RUN[:3], *words) == 2
        shown = capsys.readouterr().err
        assert str(local) in shown
        assert "on this machine only" in shown
    os.chdir(local)
    assert posttrain("launch", "--to", "slurm", *RUN) == 2
    assert "The working directory is" in capsys.readouterr().err
    assert '#SBATCH --chdir="/home/me/a b"' in launched(local, "slurm", "--workdir", "/home/me/a b", *RUN)


# ---- Kubernetes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("nodes", ["1", "3"])
def test_kubernetes_own_schema_takes_every_document(folder, version, nodes):
    validate = pytest.importorskip("kubernetes_validate")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    text = launched(folder, "kubernetes", "--nodes", nodes, "--memory", "64", "--volume", "other:/cache", *RUN)
    kinds = []
    for part in yaml.safe_load_all(text):
        validate.validate(part, version, strict=True)
        kinds.append(part["kind"])
    assert kinds == ["ConfigMap", "Service", "Job"]


def test_a_pod_finds_its_files_where_the_command_looks_for_them(folder):
    """The ConfigMap, written as kubelet would, is the working directory."""
    (folder / "code").mkdir()
    (folder / "code" / "rewards.py").write_text("def length(completions, **columns):\n    return [1.0]  \n")
    (folder / "helpers").mkdir()
    (folder / "helpers" / "deep.py").write_text("x = 'a: {b}'\n")
    (folder / "rows.jsonl").write_text('{"prompt": "\\u00e4"}\r\n')
    (folder / "grpo.yaml").write_text(
        "dataset_name: rows.jsonl\nreward_funcs: [code/rewards.py:length, helpers.deep.x]\nmodel_name_or_path: m\n"
    )
    words = ["--ship", "helpers", "grpo", "grpo.yaml", "--output_dir", "/data/out"]
    parts = kubernetes_parts(launched(folder, "kubernetes", *words))
    pod = parts["Job"]["spec"]["template"]["spec"]
    items = next(volume for volume in pod["volumes"] if volume["name"] == "shipped")["configMap"]["items"]
    shipped = {item["path"]: parts["ConfigMap"]["data"][item["key"]] for item in items}
    assert shipped == {
        path: (folder / path).read_text(encoding="utf-8")
        for path in ("grpo.yaml", "code/rewards.py", "rows.jsonl", "helpers/deep.py")
    }
    container = pod["containers"][0]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shipped": container["workingDir"], "shm": "/dev/shm", "volume-0": "/data"}
    assert "exec posttrain grpo grpo.yaml --output_dir /data/out" in container["args"][0]


def test_texts_that_are_not_paths_are_let_be(folder):
    for text in ("It is long. " * 50, "~nobody/here.", "\u00e4" * 5000 + "/"):
        assert kubernetes_parts(launched(folder, "kubernetes", *RUN, "--run_name", text))["ConfigMap"]["data"] == {}


def test_a_preempted_pod_is_started_again_and_a_wrong_command_is_not(folder):
    spec = kubernetes_parts(launched(folder, "kubernetes", "--nodes", "2", "--restarts", "5", "--grace", "240", *RUN))[
        "Job"
    ]["spec"]
    assert spec["backoffLimit"] == 10
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"containerName": "posttrain", "operator": "In", "values": [2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 240)
    environment = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
    assert environment["ADDRESS_OF_MACHINE_0"] == "mine-0.mine"
    assert environment["HF_HOME"] == "/data/huggingface"


def test_a_skypilot_job_keeps_its_output_in_a_bucket(folder):
    task = yaml.safe_load(launched(folder, "skypilot", "--gpus", "4", *RUN))
    assert task["file_mounts"] == {"/data": {"source": "s3://mine", "mode": "MOUNT_CACHED"}}
    assert task["resources"] == {
        "accelerators": "H100:4",
        "cpus": "16+",
        "job_recovery": {"max_restarts_on_errors": 20},
    }
    assert (task["workdir"], task["setup"]) == (".", "pip install -e .\n")


BARE = ["--to", "skypilot", "--accelerator", "H100", "--volume", "s3://mine:/data", "--name", "mine"]


def test_a_skypilot_job_brings_the_wheel_of_this_checkout(folder):
    assert posttrain("launch", *BARE, *RUN, "--hub_token", "hf_" + "a" * 34) == 0
    task = yaml.safe_load(next(folder.glob("mine.*")).read_text())
    wheel = f"posttrain-{__version__}-py3-none-any.whl"
    assert task["file_mounts"][f"/tmp/posttrain/{wheel}"] == str(folder / wheel)
    assert task["setup"].startswith(f"pip install /tmp/posttrain/{wheel}\n")
    with zipfile.ZipFile(folder / wheel) as found:
        assert {"posttrain/__init__.py", "posttrain/constraints.txt", "posttrain/cli/options.json"} <= set(
            found.namelist()
        )


@pytest.mark.parametrize(
    ("origin", "installs"),
    [
        (None, f"posttrain=={__version__}"),
        ({"url": "https://example.org/posttrain.whl", "archive_info": {}}, "https://example.org/posttrain.whl"),
        ({"url": "file:///home/me/my%20wheels/posttrain.whl", "archive_info": {}}, "/home/me/my wheels/posttrain.whl"),
    ],
)
def test_a_package_is_installed_elsewhere_from_where_it_came(folder, monkeypatch, origin, installs):
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(job_files, "PACKAGE", str(folder / "site-packages" / "posttrain"))
    monkeypatch.setattr(job_files, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert job_files.this_package(folder) == installs


# ---- all of them ----------------------------------------------------------------------------------------------------------------


def options_file(folder, **options):
    text = yaml.safe_dump(
        {"model_name_or_path": "m", "dataset_name": "rows.jsonl", "output_dir": "/data/out", **options}
    )
    (folder / "sft.yaml").write_text(text)
    return text


@pytest.mark.parametrize(
    ("scheduler", "file"), [("slurm", "sft.sbatch"), ("skypilot", "sft.sky.yaml"), ("kubernetes", "sft.k8s.yaml")]
)
def test_a_job_is_written_over_nothing_but_a_job(folder, capsys, scheduler, file):
    """The example of docs/command-line.md: a job named as its options are."""
    before = options_file(folder)
    words = ["launch", *TO[scheduler], "--name", "sft"]
    for _ in range(2):
        assert posttrain(*words, "sft", "sft.yaml") == 0
    assert (folder / "sft.yaml").read_text() == before
    assert (folder / file).exists()
    for taken in ("sft.yaml", "./sft.yaml", "notes.txt"):
        (folder / "notes.txt").write_text("mine")
        assert posttrain(*words, "--write", taken, "sft", "sft.yaml") == 2
        assert taken.removeprefix("./") in capsys.readouterr().err
    assert (folder / "sft.yaml").read_text() == before
    assert (folder / "notes.txt").read_text() == "mine"
    assert posttrain(*words, "--write", "jobs/of/mine", "sft", "sft.yaml") == 0
    assert (folder / "jobs/of/mine").exists()


def test_the_profile_is_that_of_the_options_unless_one_is_given(folder, capsys):
    options_file(folder, accelerate_config="fsdp2")
    assert posttrain("launch", "--to", "slurm", "sft", "sft.yaml") == 0
    assert "--accelerate_config" not in capsys.readouterr().out
    assert posttrain("launch", "--to", "slurm", "--profile", "zero2", "sft", "sft.yaml") == 0
    assert "--accelerate_config zero2" in capsys.readouterr().out
    options_file(folder)
    assert posttrain("launch", "--to", "slurm", "sft", "sft.yaml") == 0
    assert "--accelerate_config ddp" in capsys.readouterr().out


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_setup_may_have_several_lines(folder, capsys, scheduler):
    setup = "cd /data\n\nif true; then\n  source env/bin/activate\nfi"
    text = launched(folder, scheduler, "--setup", setup, *RUN)
    if scheduler == "slurm":
        subprocess.run(["bash", "-n", str(folder / "mine.sbatch")], check=True)
        assert f"set -eo pipefail\n{setup}\nset -u" in text
    elif scheduler == "skypilot":
        assert yaml.safe_load(text)["setup"] == f"{setup}\n"
    else:
        assert f"set -eo pipefail\n{setup}\ncommand -v posttrain" in container_of(text)["args"][0]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--to", "slurm", "--profile", "fdsp2", *RUN], ["--profile", "fdsp2", "'fsdp2'"]),
        (["--to", "slurm", *RUN, "--accelerate_config", "hsdp"], ["hsdp", "fsdp2"]),
        (["--to", "slurm", "--profile", "ddp", *RUN, "--accelerate_config", "fsdp2"], ["--profile", "leave one out"]),
        (["--to", "slurm", "--profile", "single_gpu", *RUN], ["single_gpu", "ddp"]),
        (["--to", "slurm", *RUN, "--lerning_rate", "1"], ["lerning_rate"]),
        (["--to", "slurm", *RUN, "--num_processes", "4"], ["num_processes", "--gpus"]),
        (["--to", "slurm", "--profile", "hsdp", *RUN], ["hsdp", "fsdp2"]),
        (["--to", "slurm", "--name", "A job", *RUN], ["A job"]),
        (["--to", "slurm", "stf"], ["stf"]),
        ([*TO["kubernetes"], "--image", "a/b\n        env: []", *RUN], ["--image", "container image"]),
        ([*TO["kubernetes"], "--image", "a: {b: c}", *RUN], ["--image", "container image"]),
        (["--to", "slurm", "--time", "1:00\n#SBATCH --account=x", *RUN], ["--time", "minutes"]),
        (["--to", "slurm", "--partition", "a\nb", *RUN], ["--partition"]),
        ([*TO["skypilot"], "--accelerator", "H100\nrun: x", *RUN], ["--accelerator", "GPU"]),
        (["--to", "slurm", *RUN, "--run_name", "a\nb"], ["'a\\nb'", "line break"]),
        (["--to", "slurm", *RUN, "--model_init_kwargs", '{"token": "abc"}'], ["--model_init_kwargs", "secret"]),
        (["--to", "slurm", "--setup", f"export WANDB_API_KEY={'a' * 40}", *RUN], ["--setup", "secret"]),
        ([*TO["skypilot"], "--submit", *RUN], ["sky"]),
        (["--to", "slurm", "--image", "a", *RUN], ["--image", "kubernetes", "slurm"]),
        (["--to", "kubernetes", "--time", "5", *RUN], ["--time", "slurm"]),
        (["--to", "kubernetes", "--image", "a", *RUN], ["--volume", "PersistentVolumeClaim", "my-claim:/data"]),
        (["--to", "kubernetes", *RUN], ["--image", "container image"]),
        (["--to", "skypilot", *RUN], ["--accelerator"]),
        ([*TO["kubernetes"], "--volume", "claim", *RUN], ["'claim'", "my-claim:/data"]),
        ([*TO["kubernetes"], "--volume", "other:/data", *RUN], ["'other:/data'", "once"]),
        ([*TO["skypilot"], "--volume", "claim:/x", *RUN], ["'claim:/x'", "s3://my-bucket:/data"]),
        ([*TO["kubernetes"], *RUN, "--output_dir", "out"], ["'out'", "--output_dir /data/posttrain"]),
        ([*TO["skypilot"], *RUN[:5]], ["`output_dir`", "--output_dir /data/posttrain"]),
        ([*TO["kubernetes"], *RUN, "--model_name_or_path", "folder"], ["model_name_or_path", "/data/folder"]),
        ([*TO["kubernetes"], *RUN, "--dataset_name", "big.jsonl"], ["big.jsonl", "200,000"]),
        ([*TO["kubernetes"], *RUN, "--dataset_name", "bytes.jsonl"], ["bytes.jsonl", "not a text"]),
        ([*TO["kubernetes"], *RUN, "--dataset_name", "/etc/hostname"], ["/etc/hostname", "this machine only"]),
        ([*TO["skypilot"], *RUN, "--dataset_name", "/etc/hostname"], ["/etc/hostname", "this machine only"]),
        ([*TO["kubernetes"], "sft", "secret.yaml", *RUN[1:]], ["hub_token", "ConfigMap", "Secret posttrain"]),
        ([*TO["kubernetes"], *RUN, "--dataset_name", "token.jsonl"], ["token.jsonl", "secret"]),
        ([*TO["kubernetes"], "grpo", *RUN[1:], "--reward_funcs", "folder.code.f"], ["reward_funcs", "--ship folder"]),
        ([*TO["kubernetes"], "--ship", "missing.py", *RUN], ["--ship", "missing.py", "does not exist"]),
        (["--to", "slurm", *RUN, "--fresh"], ["fresh", "started again", "output_dir"]),
        (["--to", "slurm", *RUN, "--resume_from_checkpoint", "none"], ["resume_from_checkpoint", "leave it out"]),
        (["--to", "slurm", *RUN, "--resume_from_checkpoint", "x/checkpoint-5"], ["x/checkpoint-5", "leave it out"]),
        (["--to", "slurm", *RUN, "--save_strategy", "no"], ["save_strategy", "steps"]),
        (["--to", "slurm", "--time", "10", *RUN], ["--time 10", "600 seconds"]),
        (["--to", "slurm", "--time", "10:00", *RUN], ["--time 10:00", "600 seconds"]),
        (["--to", "slurm", "--grace", "0", *RUN], ["--grace is 0"]),
        (["--to", "slurm", "--workdir", "project", *RUN], ["'project'", "absolute path"]),
        (["--to", "slurm", "--workdir", '/a"\n#SBATCH --x="', *RUN], ["--workdir", "line breaks"]),
    ],
)
def test_what_cannot_be_launched_is_said(folder, capsys, words, wanted):
    (folder / "folder").mkdir()
    (folder / "big.jsonl").write_text("x" * 200_001)
    (folder / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    (folder / "token.jsonl").write_text("hf_" + "Planted" * 5)
    (folder / "secret.yaml").write_text("hub_token: planted-token\n")
    assert posttrain("launch", *words) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in wanted), shown


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_job_asks_for_the_token_and_does_not_hold_it(folder, capsys, scheduler):
    token = "hf_" + "Planted" * 5
    for words in (["--hub_token", token], [f"--hub-token={token}"]):
        text = launched(folder, scheduler, *RUN, *words, "--push_to_hub")
        shown = capsys.readouterr().out
        assert token not in shown + text
        assert "hub_token is not written into the job" in shown
        assert ': "${HF_TOKEN:?is not set in the environment of the job}"' in text
        assert "--push_to_hub" in text
        assert "hub_token" not in text
        assert "hub-token" not in text


# ---- machines that write, and jobs of Ray ---------------------------------------------------------------------------------------

ONLINE = ["grpo", *RUN[1:], "--reward_funcs", "accuracy_reward"]
SAFE = ("RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH")


def with_writers(folder, scheduler, *words, run=ONLINE):
    return launched(folder, scheduler, "--nodes", "2", "--rollout_nodes", "6", "--gpus", "8", *words, *run)


def check_run(command):
    """What the training processes are asked for."""
    for part in (
        "--num_processes 16",
        "--num_machines 2",
        "--async_rollouts true",
        "--rollout_workers ray",
        "--ray_workers 3",
    ):
        assert part in command
    assert "'my model'" in command


def test_slurm_gets_a_heterogeneous_job(folder, monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0,mlx5_1; x")
    text = with_writers(folder, "slurm", "--partition", "a100")
    check_shell(text, folder)
    check_run(text)
    first, second = text.split("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=2\n" in first
    assert "#SBATCH --nodes=6\n" in second
    assert first.count("--partition=a100") == second.count("--partition=a100") == 1
    assert "export NCCL_IB_HCA='mlx5_0,mlx5_1; x'\n" in text
    assert all(part in text for part in (*SAFE, "umask 077", "--dashboard-host=127.0.0.1"))
    assert text.count("--num-gpus=0") == 2  # nobody writes where the training is


SRUN = """#!/bin/bash
echo "$1 $RAY_ADDRESS $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(wc -c <"$RAY_AUTH_TOKEN_PATH")" >>srun.log
group=$1
while [ "$1" != bash ]; do shift; done
export SLURM_NODEID=0
if [ "$group" = --het-group=1 ]; then exit 0; fi
exec "$@"
"""


def test_slurms_ray_has_a_token_that_only_the_owner_reads(folder):
    """The script at work: two steps start Ray, one trains, and the token goes with the job."""
    process = slurm_script(
        folder, "--rollout_nodes", "1", "--gpus", "1", code=0, waits="not os.path.exists('ray.log')", run=ONLINE,
        srun=SRUN, ray='#!/bin/bash\necho "$@" >ray.log\n',
    )  # fmt: skip
    code, told, _ = ended(process)
    assert code == 0, told
    steps = sorted((folder / "srun.log").read_text().splitlines())
    assert steps == ["--het-group=0 node7:30007 600 64"] * 2 + ["--het-group=1 node7:30007 600 64"]
    assert "--head --port=30007 --dashboard-host=127.0.0.1" in (folder / "ray.log").read_text()
    assert not [path for path in folder.rglob("*") if "token" in path.name]


def test_skypilot_starts_ray_on_all_machines(folder, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    task = yaml.safe_load(with_writers(folder, "skypilot"))
    check_shell(task["run"], folder)
    check_run(task["run"])
    assert task["num_nodes"] == 8
    assert task["envs"]["NCCL_DEBUG"] == "WARN"
    token = Path(task["file_mounts"]["/tmp/posttrain/ray-token"])
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert token.read_text() not in yaml.safe_dump(task)


def test_kubernetes_gets_a_rayjob(folder):
    parts = kubernetes_parts(with_writers(folder, "kubernetes"))
    job = parts["RayJob"]["spec"]
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 8
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "limits" not in head["resources"]
    assert not {"command", "args"} & head.keys()
    assert job["entrypoint"].split()[1:] == [
        "-m", "posttrain.cli.running.ray_ranks", "2", "8", "/etc/posttrain", "bash", "on-each-machine.sh",
    ]  # fmt: skip
    (script,) = [text for key, text in parts["ConfigMap"]["data"].items() if key.endswith("on-each-machine.sh")]
    check_shell(script, folder)
    check_run(script)


def test_a_job_of_ray_is_a_script_that_submits_it(folder, monkeypatch):
    monkeypatch.setitem(TO, "ray", ["--to", "ray"])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    text = with_writers(folder, "ray")
    check_shell(text, folder)
    check_run(text)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ray").write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('given', 'w'))\n"
    )
    (programs / "ray").chmod(0o755)
    (folder / "token").write_text("t")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "RAY_ADDRESS": "x", "RAY_AUTH_TOKEN_PATH": "token"}
    for mode, wanted in ((0o644, 2), (0o600, 0)):
        (folder / "token").chmod(mode)
        assert subprocess.run(["bash", "mine.ray.sh"], env=environment, check=False).returncode == wanted
    given = json.loads((folder / "given").read_text())
    assert json.loads(given[given.index("--runtime-env-json") + 1])["env_vars"]["NCCL_SOCKET_IFNAME"] == "eth0"
    command = given[given.index("--") + 1 :]
    assert command[:6] == ["python", "-m", "posttrain.cli.running.ray_ranks", "2", "8", "."]
    assert "my model" in command


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([*TO["slurm"], "--rollout_nodes", "1", *RUN], ["--rollout_nodes", "sft writes no completions"]),
        ([*TO["slurm"], "--rollout_nodes", "1", *ONLINE, "--use_vllm", "true"], ["use_vllm", "--rollout_nodes"]),
        ([*TO["slurm"], "--rollout_nodes", "-1", *ONLINE], ["--rollout_nodes", "at least 0"]),
        (["--to", "ray", *ONLINE, "--output_dir", "out"], ["output_dir", "absolute path"]),
        ([*TO["kubernetes"], "--rollout_nodes", "1", "--setup", "pip install x", *ONLINE], ["--setup", "--image"]),
    ],
)
def test_machines_that_write_where_nothing_is_written(folder, capsys, words, wanted):
    assert posttrain("launch", *words) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in wanted), told


def test_fewer_machines_that_write_than_train_share_their_gpus(folder):
    text = launched(folder, "slurm", "--nodes", "4", "--rollout_nodes", "2", *ONLINE)
    assert """--ray_workers 1 --worker_resources '{"GPU": 0.5}'""" in text
