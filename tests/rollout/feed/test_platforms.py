"""One suite for threads, child processes and Ray (a head and two nodes on this machine): whoever writes, whoever dies, joins or
leaves, the run is the same to the bit. Ray is optional: where it is not installed its cases are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from transformers import TrainerCallback

from posttrain.rollout.feed import remote
from tests.cli.runs import flags, folder_with_inputs, options_of
from tests.forked_workers import forked_workers  # noqa: F401
from tests.trainer.test_async import odd_sums, trainer, weights, written
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("forked_workers")
HAS_RAY = importlib.util.find_spec("ray") is not None
NEEDS_RAY = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: nothing about its actors was tried")
WITH_RAY = [pytest.mark.slow, NEEDS_RAY]
EXACT = {
    "async_rollouts": True, "async_order": "in_order", "async_lead": 2, "max_steps": 8, "rollout_engine": "native",
    "learning_rate": 0.05, "seed": 7,
}  # fmt: skip
INLINE, PROCESSES = {}, {"rollout_workers": 2}
PLATFORMS = [
    pytest.param("inline", id="inline"),
    pytest.param("processes", id="processes", marks=pytest.mark.slow),
    pytest.param("ray", id="ray", marks=WITH_RAY),
]
REMOTE = PLATFORMS[1:]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Addresses of a head that runs nothing and of nodes with room for one worker each; they ask for a token."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given  # before Ray is imported
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made
    made.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def options(request):
    """Of the platform that a test is for."""

    def of(platform):
        if platform != "ray":
            return {"inline": INLINE, "processes": PROCESSES}[platform]
        address = request.getfixturevalue("cluster").address
        return {"rollout_workers": "ray", "ray_workers": 2, "ray_address": address}

    return of


class Events(TrainerCallback):
    """What happens to the platform at the ends of steps."""

    def __init__(self, events):
        self.events, self.done = events, []

    def on_step_end(self, args, state, control, **kwargs):
        if event := self.events.get(state.global_step):
            event(self.trainer.ahead.platform)
            self.done.append(state.global_step)


def run(folder, events=None, **options):
    callback = Events(events or {})
    made = trainer(folder, odd_sums, **{**EXACT, **options}, callbacks=[callback])
    callback.trainer = made
    try:
        made.train()
    finally:
        made.close()
    assert callback.done == [*callback.events]
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain rollouts"]
    return made


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quiet")
    return weights(run(folder)), written(folder)


def same(made, folder, quiet):
    assert all(torch.equal(left, right) for left, right in zip(quiet[0].values(), weights(made).values()))
    assert written(folder) == quiet[1]


def all_up(platform, count):
    eventually(lambda: len(platform.members()) == count)


def busy_child(platform):
    return next(child for child in platform.children if child.name in platform.members())


# ---- every platform --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", PLATFORMS)
def test_workers_join_and_leave_and_the_run_is_the_same(tmp_path, quiet, options, platform):
    names = []

    def joined(workers):
        names.append(workers.join())
        if platform != "ray":  # both places are taken there: it joins when one leaves
            eventually(lambda: names[0] in workers.members())

    def left(workers):
        first = workers.members()[0]
        workers.leave(first, 20.0)
        assert first not in workers.members()
        eventually(lambda: names[0] in workers.members())

    same(run(tmp_path, {2: joined, 4: left}, **options(platform)), tmp_path, quiet)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_one_that_does_not_leave_in_time_gives_back_what_it_has(tmp_path, quiet, options, platform):
    def left(workers):
        name = workers.join()
        if platform != "ray":
            eventually(lambda: name in workers.members())
        workers.leave(workers.members()[0], 0.0)

    same(run(tmp_path, {3: left}, **options(platform)), tmp_path, quiet)


# ---- those that can die ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", REMOTE)
def test_a_worker_that_is_killed_or_hangs_is_replaced(tmp_path, quiet, options, platform, monkeypatch):
    monkeypatch.setattr(remote, "SILENT_SECONDS", 4.0)
    gone = []

    def killed(workers):
        child = busy_child(workers)
        gone.append(child.process)
        os.kill(child.process, signal.SIGKILL)

    def stopped(workers):
        all_up(workers, 2)
        child = busy_child(workers)
        gone.append(child.process)
        os.kill(child.process, signal.SIGSTOP)
        eventually(lambda: child.process != gone[-1] and child.name in workers.members())

    same(run(tmp_path, {1: killed, 3: stopped}, **options(platform)), tmp_path, quiet)
    eventually(lambda: not any(map(psutil.pid_exists, gone)))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_mistake_in_a_worker_is_shown_where_the_trainer_waits(tmp_path, options, platform):
    def broken(rows, requests, params):
        raise KeyError("a bug of mine")

    made = trainer(tmp_path, odd_sums, **EXACT, **options(platform))
    made.collector.writer.episodes = broken
    told = (
        (KeyError, "a bug of mine") if platform == "inline" else (RuntimeError, r"(?s)worker-\d failed:.*a bug of mine")
    )
    with pytest.raises(told[0], match=told[1]):
        made.train()
    made.close()


@pytest.mark.slow
def test_a_process_leaves_when_it_is_asked_to_by_a_signal(tmp_path, quiet):
    def left(workers):
        all_up(workers, 2)
        child = busy_child(workers)
        os.kill(child.process, signal.SIGTERM)
        eventually(lambda: child.is_gone)
        assert child.ended_with == 0

    same(run(tmp_path, {3: left}, **PROCESSES), tmp_path, quiet)


HELD = """
import sys, time
from pathlib import Path
from tests.rollout.feed.test_platforms import all_up, run

def hold(workers):
    all_up(workers, 2)
    Path(sys.argv[1], "new").write_text(" ".join(str(child.process) for child in workers.children))
    Path(sys.argv[1], "new").rename(Path(sys.argv[1], "workers"))
    time.sleep(300)

run(Path(sys.argv[1], "run"), {2: hold}, **eval(sys.argv[2]))
"""


@pytest.mark.parametrize("platform", REMOTE)
def test_workers_end_with_a_trainer_that_is_killed(tmp_path, options, platform):
    process = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path), repr(options(platform))])
    eventually(lambda: (tmp_path / "workers").exists() or process.poll() is not None)
    process.kill()
    process.wait()
    workers = [int(number) for number in (tmp_path / "workers").read_text().split()]
    assert len(workers) == 2
    eventually(lambda: not any(map(psutil.pid_exists, workers)))


# ---- Ray alone -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", [pytest.param("ray", marks=WITH_RAY)])
def test_a_machine_is_lost_and_another_joins(tmp_path, quiet, options, cluster, platform):
    def lost(workers):
        all_up(workers, 2)
        cluster.remove_node(cluster.workers.pop(), allow_graceful=False)
        all_up(workers, 1)

    def joined(workers):
        cluster.workers.append(cluster.add_node(num_cpus=1))
        all_up(workers, 2)

    same(run(tmp_path, {2: lost, 5: joined}, **options(platform)), tmp_path, quiet)


ON_A_MACHINE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
rank = sys.argv[sys.argv.index("--machine_rank") + 1]
open(f"new-{rank}", "w").write(" ".join(sys.argv[1:]))
os.rename(f"new-{rank}", f"machine-{rank}")
time.sleep(0 if "ends" in sys.argv else 300)
"""


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("platform", [pytest.param("ray", marks=WITH_RAY)])
def test_training_processes_are_placed_by_ray_and_asked_to_end(tmp_path, cluster, platform, ends):
    words = ["2", "0", str(tmp_path), sys.executable, "-c", ON_A_MACHINE, "a word", *(["ends"] if ends else [])]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    process = subprocess.Popen([sys.executable, "-m", "posttrain.cli.running.ray_ranks", *words], env=environment)
    eventually(lambda: len([*tmp_path.glob("machine-*")]) == 2)
    if not ends:
        process.terminate()
    assert process.wait(60) == (0 if ends else 143)
    for rank in range(2):
        told = (tmp_path / f"machine-{rank}").read_text()
        assert told.startswith("a word")
        assert told.endswith(f"--machine_rank {rank}")
        assert "--main_process_ip" in told


@pytest.mark.parametrize("platform", [pytest.param("ray", marks=WITH_RAY)])
def test_a_whole_run_of_the_command_line_lives_in_ray(tmp_path, cluster, platform):
    """One machine trains, the other writes; who is where is Ray's affair."""
    folder = folder_with_inputs(tmp_path)
    own = {"async_rollouts": True, "rollout_workers": "ray", "output_dir": "out", "rollout_engine": "native"}
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "grpo",
        *flags({**options_of("grpo"), **own}),
        "--num_machines",
        "1",
    ]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    words = [sys.executable, "-m", "posttrain.cli.running.ray_ranks", "1", "0", str(folder), *command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in (folder / "out/metrics.jsonl").read_text().splitlines() if "async/taken" in line]) == 2


@NEEDS_RAY
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_cluster_that_others_reach_must_ask_for_a_token(mode, tmp_path):
    code = (
        "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False)\n"
        "from posttrain.rollout.feed.ray_platform import connect; print(connect(None)[1])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": mode, "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if mode == "token":
        assert (done.returncode, done.stdout.strip()) == (0, "False")
    else:
        assert "does not ask for a token, so anyone who reaches it can run any code on it" in done.stderr


def test_ray_is_imported_by_nobody_who_does_not_ask_for_it():
    code = "import sys, posttrain.trainer.online_trainer, posttrain.rollout.feed.ray_platform; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_a_run_says_what_to_install(tmp_path):
    with pytest.raises(ImportError, match=r"needs Ray, which is not installed: pip install 'posttrain\[ray\]'"):
        run(Path(tmp_path), rollout_workers="ray")


def test_a_cluster_of_one_machine_does_not_hand_out_the_gpus_of_the_training(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="would hand out the GPUs that the training has"):
        run(tmp_path, rollout_workers="ray", worker_resources={"GPU": 1})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"rollout_workers": "slurm"},
            r"`rollout_workers` is 'slurm'; it takes a number of processes of 1 or more, or 'ray'",
        ),
        ({"ray_workers": 2}, r"`ray_workers` is set, and `rollout_workers` is not 'ray'"),
        ({"rollout_workers": "ray", "ray_workers": 0}, "ray_workers"),
        ({"rollout_workers": "ray", "worker_resources": '{"GPU": -1}'}, r"worker_resources\['GPU'\]"),
    ],
)
def test_options_that_cannot_be(tmp_path, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer(tmp_path, odd_sums, **EXACT, **given)
