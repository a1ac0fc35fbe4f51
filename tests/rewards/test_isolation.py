"""Workers are processes of our own: what they may not do to the trainer, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from posttrain.rewards.reward_set import RewardOptions, RewardSet
from posttrain.rewards.runtime.worker_pool import new_number
from tests.forked import Child
from tests.rewards.faulty import acting, group, judged
from tests.waiting import eventually

ROOT = str(Path(__file__).parents[2])


def pid(completions):
    import os

    return [os.getpid()] * len(completions)


def is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def run_script(text: str, tmp_path: Path, *arguments: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, *(arguments or [str(script)])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment, input=script.read_text()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
    import dataclasses, os, sys
    from posttrain.rewards.reward_set import Judged, RewardOptions, RewardSet
    from beside import doubled

    print("the script runs")
    FACTOR = 3

    @dataclasses.dataclass
    class Row:
        number: int

    def helper(text):
        return FACTOR * len(text)

    def reward(completions, row, **kwargs):
        assert "torch" not in sys.modules and "transformers" not in sys.modules
        return [helper(text) + r.number + (os.getpid() == kwargs["parent"][0]) for text, r in zip(completions, row)]

    made = RewardSet([reward, doubled, lambda completions: [helper(text) for text in completions]])
    with made.open() as round:
        round.add([Judged("p", "abc", [], {"row": Row(100), "parent": os.getpid()})])
        print(round.finish().values.tolist(), made.notes)
"""
BESIDE = """
    print("imported", __name__)

    def half(text):
        return len(text)

    def doubled(completions):
        return [2 * half(text) for text in completions]
"""


@pytest.mark.parametrize("arguments", [(), ("-",), ("-i", "-")], ids=["script", "standard input", "interactive"])
def test_script_without_a_main_guard(arguments, tmp_path):
    """Functions, classes and globals of `__main__` go by value: nothing of the user's runs twice. It does not call close."""
    (tmp_path / "beside.py").write_text(textwrap.dedent(BESIDE))
    output = run_script(SCRIPT, tmp_path, *arguments)
    assert output.count("the script runs") == 1
    assert output.count("imported") == 1
    assert "[[109.0, 6.0, 9.0]] []" in output


def test_notebook_cells(tmp_path):
    """A notebook's functions live in a `__main__` that has no file."""
    script = f"""
    import types, sys
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec({textwrap.dedent(SCRIPT)!r}, main.__dict__)
    """
    (tmp_path / "beside.py").write_text(textwrap.dedent(BESIDE))
    assert "[[109.0, 6.0, 9.0]] []" in run_script(script, tmp_path)


def test_a_module_that_shadows_the_standard_library_does_not_reach_workers(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("json.py", "pickle.py"):
        (tmp_path / "sub" / name).write_text("raise SystemExit('the wrong module')")
    script = """
    import os
    os.chdir("sub")
    from posttrain.rewards.reward_set import Judged, RewardSet
    with RewardSet([lambda completions: [1.0]]) as made, made.open() as round:
        round.add([Judged("p", "abc", [])])
        print(round.finish().values.tolist())
    """
    assert "[[1.0]]" in run_script(script, tmp_path)


def test_close_leaves_no_process_behind():
    def with_child(completions):
        import os
        import subprocess
        import sys

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return [float(os.getpid()) if text == "mine" else float(child.pid) for text in completions]

    results, _ = judged([with_child], group("mine", "child"))
    processes = [int(value) for value in results.values[:, 0]]
    assert len(set(processes)) == 2
    assert wait_until(lambda: not any(map(is_alive, processes)))


def test_workers_end_when_the_set_is_forgotten():
    made = RewardSet([pid], options=RewardOptions(workers=1))
    with made.open() as round:
        round.add(group("a"))
        worker = int(round.finish().values[0, 0])
    assert is_alive(worker)
    del made, round
    assert wait_until(lambda: not is_alive(worker))


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy in C"])
def test_workers_die_with_a_killed_parent(busy, tmp_path):
    script = f"""
    import os, time
    from posttrain.rewards.reward_set import Judged, RewardSet

    def work(completions):
        print("worker", os.getpid(), flush=True)
        if {busy}:
            sum(range(10**12))
        return [1.0]

    made = RewardSet([work])
    round = made.open()
    round.add([Judged("p", "abc", [])])
    time.sleep(600)
    """
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    trainer = subprocess.Popen([sys.executable, str(path)], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        worker = int(trainer.stderr.readline().split()[1])
        assert is_alive(worker)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    try:
        assert wait_until(lambda: not is_alive(worker), 5)
    finally:
        if is_alive(worker):
            os.kill(worker, signal.SIGKILL)


def test_prints_and_reads_do_not_reach_the_protocol():
    def noisy(completions):
        import os
        import subprocess
        import sys

        print("x" * 1_000_000)
        sys.stdout.write("y\n")
        os.write(1, b"\0" * 1000)
        subprocess.run(["echo", "hello"])
        assert sys.stdin.read() == ""
        return [len(text) for text in completions]

    results, _ = judged([noisy], *[group("abc", "de") for _ in range(4)])
    assert results.values[:, 0].tolist() == [3, 2] * 4, results.failures


def test_a_forked_child_of_a_reward_does_not_hide_its_death():
    def forking(completions):
        import os
        import time

        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)

    started = time.perf_counter()
    results, _ = judged([forking], group("a"), timeout=30)
    assert results.failures[0].message == "its process ended with exit code 7."
    assert time.perf_counter() - started < 25


def test_a_worker_that_is_killed_between_calls_costs_nothing():
    with RewardSet([pid], options=RewardOptions(workers=1)) as made:
        seen = []
        for _ in range(3):
            with made.open() as round:
                round.add(group("a"))
                results = round.finish()
            assert results.failures == []
            seen.append(int(results.values[0, 0]))
            os.kill(seen[-1], signal.SIGKILL)
            eventually(lambda: has_ended(seen[-1]))  # or it may take the next call, and die of that
    assert len(set(seen)) == 3


def has_ended(number):
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_workers_are_replaced_after_some_calls():
    results, _ = judged([pid], *[group("a") for _ in range(6)], workers=1, worker_calls=2)
    assert len(set(results.values[:, 0])) == 3


def test_workers_that_leak_are_replaced():
    def leaking(completions):
        import os
        import sys

        sys.kept = [*getattr(sys, "kept", []), bytearray(os.urandom(1) * (40 * 2**20))]
        return [float(os.getpid())]

    groups = [group("a") for _ in range(6)]
    results, _ = judged([leaking], *groups, workers=1, worker_memory=100 * 2**20)
    assert 2 <= len(set(results.values[:, 0])) <= 4
    assert results.failures == []


def test_a_worker_starts_without_anything_heavy():
    heavy = ("numpy", "torch", "transformers", "asyncio", "cloudpickle", "datasets")
    check = f"import sys, posttrain.rewards.runtime.worker; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_closed_or_forked_sets_say_so(tmp_path):
    """In a child of its own, since the process that is forked has the threads of the set."""

    def fork_and_close():
        made = RewardSet([pid], options=RewardOptions(workers=1))
        with made.open() as round:
            round.add(group("a"))
            worker = int(round.finish().values[0, 0])
        fork = os.fork()
        if fork == 0:
            try:
                made.open()
            except RuntimeError as error:
                made.close()  # not the fork's to end
                os._exit(7 if "was forked from" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
        assert is_alive(worker)
        made.close()
        made.close()
        assert not is_alive(worker)
        with pytest.raises(RuntimeError, match="was closed"):
            made.open()

    child = Child(fork_and_close, tmp_path / "log")
    assert child.wait() == 0, child.output()


# ------------------------------------------------------------------------------------------------------- in the trainer's process


class Locked:
    def __init__(self):
        self.lock = threading.Lock()
        self.threads = []

    def __call__(self, completions, **kwargs):
        with self.lock:
            self.threads.append(threading.current_thread())
        return acting(completions)


def test_what_cannot_travel_stays_and_says_so():
    reward = Locked()
    results, made = judged([reward], group("abc", "raise"), group("de", "none"))
    assert [str(value) for value in results.values[:, 0]] == ["3.0", "nan", "2.0", "nan"]
    assert [(f.sample, f.kind) for f in results.failures] == [(1, "error")]
    assert len(made.notes) == 1
    assert made.notes[0].startswith(
        "Reward Locked runs in the trainer's process, not in a worker: it cannot be pickled"
    )
    assert len(set(reward.threads)) == 1  # one thread for all calls
    with pytest.raises(ValueError, match="Reward Locked cannot run in a worker process: it cannot be pickled"):
        judged([reward], group("abc"), isolation="process")


def test_a_thread_over_its_time_is_left_behind_and_counted():
    results, made = judged([Locked()], group("abc", "hang"), group("de"), timeout=0.3)
    assert [(f.sample, f.kind) for f in results.failures] == [(1, "timeout")]
    assert "was left behind (2 so far)" in results.failures[0].message
    assert results.values[[0, 2], 0].tolist() == [3, 2]
    assert made._runner.in_process.abandoned == 2


class LoadsHereOnly:
    def __reduce__(self):
        return (_only_here, (os.getpid(),))

    def __call__(self, completions):
        return [1.0] * len(completions)


def _only_here(process):
    assert os.getpid() == process, "not my process"
    return LoadsHereOnly()


def test_what_a_worker_cannot_load_stays():
    results, made = judged([LoadsHereOnly()], group("a"), group("b"))
    assert results.values.tolist() == [[1.0], [1.0]]
    assert len(made.notes) == 1
    assert "a worker cannot load it (AssertionError: not my process" in made.notes[0]
    results, _ = judged([LoadsHereOnly()], group("a"), isolation="process")
    assert 'isolation="process"' in results.failures[0].message


def test_a_column_that_cannot_travel():
    def locked(completions, lock):
        return [float(one.locked()) for one in lock]

    results, made = judged([locked], group("a", lock=[threading.Lock()]))
    assert results.values.tolist() == [[0.0]]
    assert "a column cannot be sent" in made.notes[0]


def test_environments_stay_in_the_process():
    def of_environment(completions, environments):
        return [environment["lock"].locked() + environment["score"] for environment in environments]

    samples = group("a", "b")
    for score, sample in enumerate(samples):
        sample.environment = {"score": score, "lock": threading.Lock()}
    results, made = judged([of_environment, lambda completions, **kwargs: [5] * len(completions)], samples)
    assert results.values.tolist() == [[0, 5], [1, 5]]
    assert "it takes `environments`, which are live objects" in made.notes[0]
    assert len(made.notes) == 1


def test_a_large_table_goes_by_name_or_stays():
    table = bytes(70 * 2**20)

    def large(completions):
        return [len(table)] * len(completions)

    results, made = judged([large], group("a"))
    assert results.values.tolist() == [[70 * 2**20]]
    assert "it carries more than 64 MiB with it" in made.notes[0]


def test_state_of_the_script_is_kept_in_process():
    seen = []

    def collecting(completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    judged([collecting], group("a"), isolation="in_process")
    assert seen == ["a"]
    judged([collecting], group("a"))
    assert seen == ["a"]  # a worker has its own copy


# ------------------------------------------------------------------------------------- code that a completion brings

FORGER = """
import json, os, struct, sys, time

def forged(number):
    text = json.dumps({"call": number, "rss": 0, "values": [99.0], "extras": {}, "metrics": [], "seconds": 0}).encode()
    return struct.pack(">Q", len(text)) + text

worker, near = int(sys.argv[1]), int(sys.argv[2])
everything = b"".join(map(forged, range(max(near - 50, 0), near + 3000)))
mine = {os.readlink(f"/proc/self/fd/{name}") for name in (0, 1, 2)}
reached = 0
try:
    names = os.listdir(f"/proc/{worker}/fd")
except OSError:  # only root may look there
    names = []
for name in names:
    try:
        target = os.readlink(f"/proc/{worker}/fd/{name}")
        if target in mine or not target.startswith(("pipe", "socket")):
            continue
        pipe = os.open(f"/proc/{worker}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK)
        reached += os.write(pipe, everything[:60000])
    except OSError:
        continue
print(reached)
"""


def running_code(completions, **kwargs):
    """A reward that runs each completion as a program, as rewards of coding tasks do, and pays its length."""
    import os
    import subprocess
    import sys

    for code in completions:
        if len(code) > 10:
            done = subprocess.run([sys.executable, "-c", code, str(os.getpid()), "0"], capture_output=True, text=True)
            return [float(done.stdout or -1)]
    return [float(len(text)) for text in completions]


def test_a_program_that_a_reward_runs_reaches_no_answer_of_its_worker():
    """On a pipe of the filesystem (/proc/PID/fd) a child could answer the calls after its own; a socket cannot be opened there."""
    results, _ = judged([running_code], group(FORGER), *[group("ab") for _ in range(20)], workers=1, timeout=60)
    assert results.values[:, 0].tolist() == [0.0] + [2.0] * 20, results.failures


def test_the_numbers_of_calls_cannot_be_guessed_and_a_guess_ends_the_worker():
    def guessing(completions, **kwargs):
        import json
        import os
        import struct

        if completions[0] != "guess":
            return [float(len(text)) for text in completions]
        text = json.dumps({"call": 1, "rss": 0, "values": [99.0], "extras": {}, "metrics": [], "seconds": 0}).encode()
        for descriptor in range(3, 64):  # what code that is run in the worker's own interpreter can do
            try:
                os.write(descriptor, struct.pack(">Q", len(text)) + text)
            except OSError:
                continue
        return [50.0]

    results, _ = judged([guessing], group("guess"), *[group("ab") for _ in range(5)], workers=1, timeout=60)
    assert [(failure.sample, failure.kind) for failure in results.failures] == [(0, "crash")]
    assert "it answered a call that it was not given" in results.failures[0].message
    assert results.values[1:, 0].tolist() == [2.0] * 5


def test_call_numbers_are_not_counted_up():
    numbers = {new_number() for _ in range(1000)}
    assert len(numbers) == 1000
    assert max(numbers).bit_length() > 55
    assert sum(one + 1 in numbers for one in numbers) == 0
