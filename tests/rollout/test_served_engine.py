"""Server mode against real server processes: every prompt once, whole versions only, whatever happens to a server."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from urllib.request import Request, urlopen

import numpy as np
import pytest

from posttrain.core.sample import ImageSpan
from posttrain.core.transport import ServerError, ServerGone, ServerRefused, ServerSlow
from posttrain.rollout.engines.protocol import ERROR, LENGTH, STOP, Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm import fleet
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines
from tests.forked import Child
from tests.rollout.served import (
    INTERRUPTIONS,
    PYTHON,
    QUICK,
    CuttingProxy,
    EchoProcess,
    echo_process,
    needs_uvicorn,
    numbered,
    prompts,
)
from tests.waiting import eventually

pytestmark = needs_uvicorn
OPTIONS = ServedOptions(QUICK, watch_seconds=0.3)
SLOW_STEPS = ("--engine-args", '{"step_seconds": 0.02}')


@pytest.fixture
def start(tmp_path):
    """Makes engines over new server processes, and closes them."""
    made = []

    def make(*arguments, count=1, options=OPTIONS):
        servers = [
            echo_process(tmp_path, *arguments, name=f"echo-{i}", deadlines=options.deadlines) for i in range(count)
        ]
        made.append(ServedVLLM(servers, options=options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two servers that no test harms."""
    folder = tmp_path_factory.mktemp("shared")
    made = [echo_process(folder, name=f"shared-{i}") for i in range(2)]
    for process in made:
        process.start()
    for process in made:
        process.wait_until_healthy()
    yield made
    for process in made:
        process.close()


@pytest.fixture
def attach(processes):
    """Makes engines over the two servers, and closes them; the servers stay."""
    made = []

    def make(count=1, options=OPTIONS, **more):
        clients = [ServerClient(process.client.name, process._token, QUICK) for process in processes[:count]]
        made.append(ServedVLLM(clients, options=options, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def process_of(engine, index=0):
    return engine.fleet.members[index].process


def metric(process, name):
    headers = {"Authorization": f"Bearer {process._token}"}
    with urlopen(Request(f"{process.client.name}/metrics", headers=headers), timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"posttrain_{name} "))


def assert_whole(completion, prompt, version):
    assert completion.error is None
    assert (completion.finish_reason, completion.version) == (LENGTH, version)
    assert completion.ids.tolist() == [version] * prompt.max_tokens
    assert completion.sampling_logps.tolist() == [-0.5] * prompt.max_tokens


SHOWN = ImageSpan(0, 1, bytes(16), (8, 8), (1,))


def test_completions_versions_and_errors_of_single_prompts(attach):
    engine = attach(count=2)
    assert (engine.context, engine.vocabulary, engine.version) == (4096, 100_000, 0)
    asked = prompts(100, random.Random(0))
    for version in (3, 4, 9):
        engine.load_weights(numbered(version), version)
        for completion, prompt in zip(generate(engine, asked, SamplingParams(50)), asked):
            assert_whole(completion, prompt, version)
    bad = [Prompt([]), Prompt(np.ones(4096)), Prompt([100_000]), Prompt([1, 1], images=(SHOWN,)), Prompt([5])]
    *failed, good = generate(engine, bad, SamplingParams(3, stop_ids=(9,)))
    assert [one.finish_reason for one in failed] == [ERROR] * 4
    assert "no room in a context of 4096" in failed[1].error
    assert (good.ids.tolist(), good.finish_reason) == ([9], STOP)
    (long,) = generate(engine, [Prompt(np.ones(4090))], SamplingParams(50))
    assert len(long.ids) == 6


def test_greedy_and_truncated_log_probs_follow_what_vllm_knows(attach):
    engine = attach()
    (greedy,) = generate(engine, [Prompt([1])], SamplingParams(2, temperature=0))
    assert greedy.sampling_logps.tolist() == [0, 0]
    assert greedy.policy_logps.tolist() == [-0.5, -0.5]
    (cut,) = generate(engine, [Prompt([1])], SamplingParams(2, top_p=0.9))
    assert cut.sampling_logps.tolist() == [-0.5, -0.5]
    assert np.isnan(cut.policy_logps).all()


def test_prompts_are_spread_and_groups_stay_together(start):
    engine, homes = start(*SLOW_STEPS, count=2), {}
    take = engine.fleet.take

    def watched(prompt, *more):
        if (found := take(prompt, *more)) is not None:
            homes.setdefault(prompt.key, []).append(found[0].name)
        return found

    engine.fleet.take = watched
    generate(engine, [Prompt([1], key=i // 4, sample=i % 4) for i in range(40)], SamplingParams(8))
    assert [(len(names), len(set(names))) for names in homes.values()] == [(4, 1)] * 10
    assert len({names[0] for names in homes.values()}) == 2
    assert [(load.in_flight, load.work) for load in engine.fleet.balancer.loads.values()] == [(0, 0.0)] * 2


def test_the_same_version_again_is_not_sent_twice_and_changed_weights_are(attach):
    engine = attach()
    engine.load_weights(numbered(1), 1)
    first = engine.target
    engine.load_weights(numbered(1), 1)
    assert engine.target is first
    engine.load_weights(numbered(2), 1)  # another model under the same number: the fingerprint tells
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(8))
    assert completion.ids.tolist() == [2] * 8


def test_weights_may_change_after_they_were_sent(start):
    engine = start()
    weights = numbered(5)
    engine.load_weights(weights, 5)
    for _, tensor in weights:
        tensor.fill_(6)  # the trainer's next step, in place
    process_of(engine).kill()
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(8))
    assert completion.ids.tolist() == [5] * 8
    assert process_of(engine).starts == 2


# ---- faults ----------------------------------------------------------------------------------------------------------------


def test_one_of_two_servers_killed_the_other_goes_on(start):
    engine = start(*SLOW_STEPS, count=2)
    engine.load_weights(numbered(1), 1)
    asked = prompts(60, random.Random(2))
    threading.Timer(0.3, lambda: process_of(engine, 1).kill()).start()
    for completion, prompt in zip(generate(engine, asked, SamplingParams(64)), asked):
        assert_whole(completion, prompt, 1)
    engine.load_weights(numbered(2), 2)  # the second may be down still; it is given version 2 when it is back
    eventually(lambda: len(engine.fleet.up()) == 2)
    assert {member.client.info().version for member in engine.fleet.members} == {engine.target.version}


@pytest.mark.slow
def test_a_stopped_server_is_noticed_and_restarted(start):
    engine = start(*SLOW_STEPS, options=ServedOptions(Deadlines(completion=600, start=60, back=60)))
    engine.load_weights(numbered(1), 1)
    asked = prompts(20, random.Random(3), most=60)
    stopped = []

    def stop():
        os.kill(process_of(engine).pid, signal.SIGSTOP)
        stopped.append(time.monotonic())
        eventually(lambda: not engine.fleet.up())
        stopped.append(time.monotonic())

    threading.Timer(0.4, stop).start()
    for completion, prompt in zip(generate(engine, asked, SamplingParams(64)), asked):
        assert_whole(completion, prompt, 1)
    assert stopped[1] - stopped[0] < 120
    assert process_of(engine).starts == 2


def test_a_stopped_server_that_is_not_ours_is_waited_for(start):
    owner = start(*SLOW_STEPS, options=ServedOptions(QUICK, watch_seconds=1000))  # somebody else's, who looks away
    process = process_of(owner)
    deadlines = Deadlines(connect=1, health=0.5, completion=600, start=60, back=60)
    with ServedVLLM(
        [ServerClient(process.client.name, process._token, deadlines)],
        options=ServedOptions(deadlines, watch_seconds=0.1),
    ) as engine:
        engine.load_weights(numbered(7), 7)
        asked = prompts(20, random.Random(4), most=60)
        stopped = threading.Timer(0.3, stop_until_it_is_noticed, (process, engine))
        stopped.start()
        for completion, prompt in zip(generate(engine, asked, SamplingParams(64)), asked):
            assert_whole(completion, prompt, 7)
        stopped.join()
        assert (engine.fleet.recoveries, process.starts) == (1, 1)
        # It wrote nothing twice: prompts that were sent again joined those that ran.
        assert metric(process, "generated_tokens_total") == sum(prompt.max_tokens for prompt in asked)
        assert metric(process, "joined_requests_total") > 0


def stop_until_it_is_noticed(process, engine):
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: not engine.fleet.up())
    os.kill(process.pid, signal.SIGCONT)


def test_a_server_that_does_not_come_back_is_a_sentence_within_the_deadline(start, tmp_path):
    process = echo_process(tmp_path)
    process.start()
    process.wait_until_healthy()
    deadlines = Deadlines(connect=1, health=1, completion=600, start=60, back=0.5)
    with ServedVLLM(
        [ServerClient(process.client.name, process._token, deadlines)], options=ServedOptions(deadlines)
    ) as engine:
        engine.fleet.members[0].client.shutdown(0.1)
        process._process.wait(20)
        began = time.monotonic()
        with pytest.raises(ServerGone, match=r"No server has been up for 0.5 s\. http://127"):
            generate(engine, [Prompt([1])], SamplingParams(4))
        assert time.monotonic() - began < 60


def test_a_server_that_cannot_start_any_more_is_a_sentence_with_its_log(start, monkeypatch):
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.05)
    engine = start()
    process_of(engine).python = "/bin/echo"  # writes its arguments, and ends
    process_of(engine).kill()
    with pytest.raises(ServerGone, match=r"ended at its start \(status 0\)(.|\n)*--model echo"):
        generate(engine, [Prompt([1])], SamplingParams(4))


def test_a_server_restarted_by_others_with_weights_of_its_own_is_given_the_right_ones(start, tmp_path):
    """The number of the version is the same, the connection was idle: only the servers' own count can tell."""
    process = echo_process(tmp_path, token="the-same-at-every-start")
    process.start()
    process.wait_until_healthy()
    client = ServerClient(process.client.name, "the-same-at-every-start", QUICK)
    with ServedVLLM([client], options=ServedOptions(QUICK, watch_seconds=1000)) as engine:
        engine.load_weights(numbered(0 + 8), 0)
        generate(engine, [Prompt([1])], SamplingParams(4))
        process.restart()  # serves its folder's version 0 now
        (completion,) = generate(engine, [Prompt([1])], SamplingParams(4))
        assert completion.ids.tolist() == [8] * 4
    process.close()


def test_a_completion_over_its_time_is_a_sentence(start):
    slow = ServedOptions(Deadlines(completion=1.0, start=60))
    engine = start("--engine-args", '{"step_seconds": 0.5}', options=slow)
    with pytest.raises(ServerSlow, match="prompt 3 took more than 1 s"):
        generate(engine, [Prompt([1], key=3)], SamplingParams(50))
    engine.load_weights(numbered(1), 1)  # what was left behind does not hold up the update


def test_a_wrong_token_ends_the_run_at_once(processes):
    with pytest.raises(ServerRefused, match="requires its token"):
        ServedVLLM([ServerClient(processes[0].client.name, "not-the-right-token", QUICK)], options=OPTIONS)


# ---- updates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", INTERRUPTIONS)
def test_an_update_interrupted_at_random_bytes_leaves_one_whole_version(processes, attempts):
    """The connection is cut, on the way there or back; the server stays. What serves then is all old or all new."""
    process = processes[0]
    proxy = CuttingProxy(process.port)
    client = ServerClient(proxy.url, process._token, QUICK, "http")  # the other ways: test_weight_transports
    rng, outcomes = random.Random(5), []
    with ServedVLLM([client], options=ServedOptions(QUICK, watch_seconds=1000, bucket_bytes=8)) as engine:
        sizes = []
        for version in (1, 2, 3):  # a question about health may pass by in between
            before = list(proxy.passed)
            engine.load_weights(numbered(2), version)
            sizes.append([now - then for now, then in zip(proxy.passed, before)])
        # Answers have times in them, of a few digits more or less.
        whole = [min(column) - 30 for column in zip(*sizes[1:])]
        for attempt in range(3, 3 + attempts):
            way = attempt % 2
            proxy.allowed[way] = proxy.passed[way] + rng.randint(0, whole[way] - 1)
            kept = engine._kept(numbered(attempt))
            version = engine.fleet._next_version = engine.fleet._next_version + 1
            serving = process.client.info().version
            with pytest.raises(ServerError):
                client.push(kept, version, 8)
            proxy.allowed = [math.inf, math.inf]
            body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 12}}
            said = process.client._post("/generate", body, 10)["completions"][0][0]
            assert len(set(said["ids"])) == 1, said
            assert said["version"] in (serving, version)
            assert said["ids"][0] == (attempt if said["version"] == version else previous(outcomes))
            outcomes.append(said["ids"][0])
        assert len(set(outcomes)) > 1, "no answer to a commit was lost: not all cases were met"
        engine.load_weights(numbered(99), 99)
        (completion,) = generate(engine, [Prompt([1])], SamplingParams(12))
        assert completion.ids.tolist() == [99] * 12
    proxy.close()


def previous(outcomes):
    return outcomes[-1] if outcomes else 2


def test_a_run_goes_on_through_updates_that_are_cut(processes, monkeypatch):
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.05)
    proxy = CuttingProxy(processes[0].port)
    client = ServerClient(proxy.url, processes[0]._token, QUICK)
    rng = random.Random(6)
    with ServedVLLM([client], options=ServedOptions(QUICK, watch_seconds=0.3, bucket_bytes=8)) as engine:
        for version in range(1, 9):
            way = version % 2
            proxy.allowed[way] = proxy.passed[way] + rng.randint(0, (8000, 2500)[way])
            threading.Timer(0.1, lambda: setattr(proxy, "allowed", [math.inf, math.inf])).start()
            engine.load_weights(numbered(version), version)
            asked = prompts(5, rng)
            for completion, prompt in zip(generate(engine, asked, SamplingParams(50)), asked):
                assert_whole(completion, prompt, version)
    proxy.close()


def test_an_export_that_breaks_leaves_the_old_version(attach):
    engine = attach()
    engine.load_weights(numbered(1), 1)

    def breaks():
        yield from numbered(2)[:2]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.load_weights(breaks(), 2)
    assert engine.version == 1
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(8))
    assert (completion.ids.tolist(), completion.version) == ([1] * 8, 1)


def test_weights_that_do_not_fit_are_refused_on_all_servers(attach):
    engine = attach(count=2)
    engine.load_weights(numbered(1), 1)
    with pytest.raises(ServerRefused, match="d is missing from the manifest"):
        engine.load_weights(numbered(2)[:3], 2)
    with pytest.raises(ValueError, match="a was exported twice"):
        engine.load_weights([*numbered(2), *numbered(2)], 2)
    asked = prompts(30, random.Random(7))
    for completion, prompt in zip(generate(engine, asked, SamplingParams(50)), asked):
        assert_whole(completion, prompt, 1)


def test_servers_without_weights_wait_for_the_first_version(start, tmp_path):
    engine = start("--random-weights")
    with pytest.raises(RuntimeError, match="call load_weights first"), engine.session(SamplingParams(4)):
        pass
    engine.load_weights(numbered(3), 3)
    process_of(engine).kill()
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(4))
    assert completion.ids.tolist() == [3] * 4


def test_sleep_level_2_and_wake_bring_the_weights_back(start):
    engine = start(options=ServedOptions(QUICK, watch_seconds=0.3, sleep_level=2))
    engine.load_weights(numbered(4), 4)
    engine.sleep()
    assert process_of(engine).client.info().version is None
    with pytest.raises(RuntimeError, match="call wake"), engine.session(SamplingParams(4)):
        pass
    engine.wake()
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(4))
    assert completion.ids.tolist() == [4] * 4


def test_another_process_of_the_run_follows_the_version_that_was_sent(attach):
    engine, second = attach(), attach()
    for version in (1, 2):
        engine.load_weights(numbered(version), version)
        second.follow(engine.target)
        (completion,) = generate(second, [Prompt([1])], SamplingParams(4))
        assert (completion.ids.tolist(), completion.version) == ([version] * 4, version)


def test_scores_of_every_server(attach):
    engine = attach(count=2)
    engine.load_weights(numbered(6), 6)
    scores = engine.scores_by_server([[1, 2, 3], [4, 5]])
    assert [[one.tolist() for one in found] for found in scores.values()] == [[[-6.0, -6.0], [-6.0]]] * 2


def test_tensors_that_differ_from_those_sent_are_named(attach):
    weights = numbered(1)
    engine = attach(export=lambda: weights)
    engine.load_weights(None, 1)
    assert engine.differing_tensors() == []
    weights[2][1][3] += 2**-20
    weights[3] = ("d", weights[3][1].double())
    assert (engine.differing_tensors(), engine.differing_tensors(5)) == (["c"], ["c", "d"])
    engine.load_weights(numbered(2), 2)
    weights[:] = numbered(2)[:3]  # one tensor less than the servers hold
    assert engine.differing_tensors(5) == ["d"]


# ---- the process ---------------------------------------------------------------------------------------------------------


def test_the_server_ends_with_a_trainer_that_is_killed(tmp_path):
    def trainer():
        process = EchoProcess(["--model", "echo"], tmp_path / "echo.log", PYTHON, deadlines=QUICK)
        process.start()
        process.wait_until_healthy()
        (tmp_path / "pid.new").write_text(str(process.pid))
        (tmp_path / "pid.new").rename(tmp_path / "pid")
        time.sleep(600)

    child = Child(trainer, tmp_path / "trainer.log")
    child.wait_until((tmp_path / "pid").exists, "its server was up")
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    child.end()
    eventually(lambda: not is_alive(pid))


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
