"""Two-phase updates: whatever goes wrong, one whole version answers."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain.serve.engine.protocol import Accepted
from posttrain.serve.engine.versions import MOVES, Phase, Serving, Versions
from posttrain.serve.errors import Conflict, DeadlinePassed, EngineFailed, NotFound, NotReady, PayloadError, TooLarge
from posttrain.serve.weights.update import UpdateLimits
from posttrain.serve.wire import host_memory
from tests.serve.echo_engine import numbered_weights
from tests.serve.serving import update_of
from tests.waiting import eventually


def serves(rig, version, job_id="probe"):
    """Whether completions come from all tensors of this version, and say so."""
    outcome = rig.completion(f"{job_id}-{random.random()}")
    return outcome.ids == [version] * 8 and outcome.spans == [(0, 8, version)]


@pytest.mark.parametrize("bucket", [5, 16, 24, 1000])
def test_an_update_arrives_whole(rig, bucket):
    one = rig()
    state = one.push(3, bucket=bucket)
    assert state["serving_version"] == 3
    assert state["phase"] == "idle"
    assert len(state["fingerprint"]) == 32
    assert serves(one, 3)


def test_the_fingerprint_does_not_depend_on_the_buckets(rig):
    assert rig().push(3, bucket=5)["fingerprint"] == rig().push(3, bucket=100)["fingerprint"]


@pytest.mark.parametrize("used_again_from", [1 << 20, 1])
def test_interrupted_at_a_random_tensor_50_times_the_old_version_serves(rig, monkeypatch, used_again_from):
    """Interruptions of every kind: silence, abort, a damaged part, a failing engine in the middle of the flip.

    With memory that is used again, too: the engine that fails is given the version before from memory.
    """
    monkeypatch.setattr(host_memory, "SMALL_BYTES", used_again_from)
    rng = random.Random(5)
    fail_at = []

    def on_load(name):
        if fail_at and fail_at[0] == name:
            fail_at.clear()
            raise RuntimeError("the engine could not load this tensor")

    one, serving = rig(on_load=on_load), 0
    for version in range(1, 51):
        manifest, payloads = update_of(version, numbered_weights(version), bucket=8)
        one.updater.begin(manifest, replace=True, rollback=False, adapter=None)
        kind = rng.choice(["silence", "abort", "damage", "engine", "early commit"])
        sent = rng.randrange(len(payloads))
        for payload in payloads[:sent] if kind != "engine" else payloads:
            one.updater.part(payload)
        if kind == "abort":
            one.updater.abort(version)
        elif kind == "damage":
            damaged = bytearray(payloads[sent])
            damaged[rng.randrange(len(damaged))] ^= 4
            with pytest.raises(PayloadError):
                one.updater.part(bytes(damaged))
        elif kind == "early commit":
            with pytest.raises(Conflict, match="parts are missing"):
                one.updater.commit(version, "drain", 5)
        elif kind == "engine":
            fail_at.append(rng.choice("abcd"))
            with pytest.raises(EngineFailed, match=f"Version {serving} serves"):
                one.updater.commit(version, "drain", 5)
        assert serves(one, serving), (version, kind)
        if version % 10 == 0:  # and a whole one still gets through, over what was left behind
            one.updater.begin(manifest, replace=True, rollback=False, adapter=None)
            for payload in payloads:
                one.updater.part(payload)
            one.updater.commit(version, "drain", 5)
            serving = version
            assert serves(one, serving)


def test_if_the_old_weights_cannot_be_put_back_nothing_serves_until_a_whole_version_comes(rig):
    broken = [True]

    def on_load(name):
        if broken[0] and name == "c":
            raise RuntimeError("no")

    one = rig(on_load=on_load)
    with pytest.raises(EngineFailed, match="No version serves"):
        one.push(1)
    outcome = one.completion("x")
    assert outcome.finish_reason == "error"
    assert "No whole version" in outcome.error
    broken[0] = False
    one.push(2)
    assert serves(one, 2)


def test_completions_during_50_updates_never_mix_versions_unless_they_accept_it(rig):
    one = rig(step_seconds=0.0005)
    outcomes, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            outcomes.append(one.completion(f"c{len(outcomes)}", tokens=12))

    asker = threading.Thread(target=ask)
    asker.start()
    for version in range(1, 51):
        one.push(version)
    stop.set()
    asker.join(10)
    assert len(outcomes) > 20
    for outcome in outcomes:
        assert len(set(outcome.ids)) == 1
        assert outcome.spans == [(0, 12, outcome.ids[0])]
    assert len({outcome.ids[0] for outcome in outcomes}) > 5


def test_continue_attributes_every_token_to_the_weights_that_wrote_it(rig):
    one = rig(step_seconds=0.005)
    goes_on = one.submit("goes on", tokens=60)
    only_old = one.submit("only old", tokens=60, accepted=Accepted(0, 0))
    threading.Event().wait(0.05)
    one.push(1, in_flight="continue")
    outcome = goes_on()
    assert [version for _, _, version in outcome.spans] == [0, 1]
    assert len(outcome.ids) == 60
    for begin, end, version in outcome.spans:
        assert outcome.ids[begin:end] == [version] * (end - begin)
    refused = only_old()
    assert refused.finish_reason == "aborted"
    assert set(refused.ids) == {0}
    assert "does not accept" in refused.error


def test_100_000_tokens_under_updates_at_random_instants_all_have_the_right_label(rig):
    """Tokens of the echo engine are the number of the weights that wrote them."""
    one, rng, outcomes = rig(), random.Random(5), []
    asked = [one.submit(f"c{number}", tokens=2_000) for number in range(50)]
    ended = threading.Event()
    waiter = threading.Thread(target=lambda: (outcomes.extend(wait() for wait in asked), ended.set()))
    waiter.start()
    version = 0
    while not ended.wait(rng.random() * 0.02):
        version += 1
        one.push(version, in_flight="continue")
    waiter.join()
    tokens = changes = 0
    for outcome in outcomes:
        ends = [end for _, end, _ in outcome.spans]
        assert [begin for begin, _, _ in outcome.spans] == [0, *ends[:-1]]
        assert ends[-1] == len(outcome.ids) == 2_000
        for begin, end, label in outcome.spans:
            assert outcome.ids[begin:end] == [label] * (end - begin)
        tokens, changes = tokens + len(outcome.ids), changes + len(outcome.spans) - 1
    assert tokens == 100_000
    assert changes >= 100, changes


def test_a_drain_that_takes_too_long_changes_nothing_and_can_be_committed_again(rig):
    one = rig(step_seconds=0.01)
    slow = one.submit("slow", tokens=60)
    with pytest.raises(DeadlinePassed):
        one.push(1, seconds=0.1)
    assert one.versions.phase is Phase.STAGING
    assert one.versions.serving.version == 0
    assert one.updater.commit(1, "drain", 5)["serving_version"] == 1
    assert slow().ids == [0] * 60
    assert serves(one, 1)


def test_requests_name_the_versions_they_accept(rig):
    one = rig()
    assert one.submit("new", accepted=Accepted(1, 9))().stop_reason == 409
    one.push(1)
    assert one.submit("new2", accepted=Accepted(1, 9))().ids == [1] * 8
    assert one.submit("old", accepted=Accepted(0, 0))().stop_reason == 409


def test_parts_twice_are_one_and_contradictions_are_refused(rig):
    one = rig()
    manifest, payloads = update_of(1, numbered_weights(1), bucket=16)
    _, others = update_of(1, numbered_weights(7), bucket=16)
    one.updater.begin(manifest, False, False, None)
    for payload in [payloads[0], *payloads, payloads[-1]]:
        one.updater.part(payload)
    with pytest.raises(PayloadError, match="was received before with other bytes"):
        one.updater.part(others[0])
    assert one.updater.commit(1, "drain", 5)["serving_version"] == 1
    assert one.updater.commit(1, "drain", 5)["serving_version"] == 1  # the answer was lost: asked again
    assert one.updater.committed == 1


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({k: v for k, v in numbered_weights(1).items() if k != "b"}, "b is missing"),
        (numbered_weights(1) | {"z": numbered_weights(1)["a"]}, "no tensor z"),
        (numbered_weights(1, size=5), r"a is float32 \[4\]; the manifest says float32 \[5\]"),
        ({k: v.int() for k, v in numbered_weights(1).items()}, "says int32"),
    ],
)
def test_a_manifest_that_is_not_this_model_is_refused_at_once(rig, weights, sentence):
    manifest, _ = update_of(1, weights)
    with pytest.raises(PayloadError, match=sentence):
        rig().updater.begin(manifest, False, False, None)


def test_swapped_tensors_are_noticed_by_the_manifest(rig):
    one = rig()
    weights = {name: tensor * (i + 1) for i, (name, tensor) in enumerate(numbered_weights(1).items())}
    swapped = weights | {"a": weights["b"], "b": weights["a"]}
    one.updater.begin(update_of(1, weights, bucket=1000)[0], False, False, None)
    payloads = update_of(1, swapped, bucket=1000)[1]
    with pytest.raises(PayloadError, match="does not have the checksum of the manifest"):
        one.updater.part(payloads[0])
    assert serves(one, 0)


def test_memory_is_used_again_but_never_that_of_the_version_to_go_back_to(rig, monkeypatch):
    monkeypatch.setattr(host_memory, "SMALL_BYTES", 1)
    one = rig()
    kept, used = {}, []
    for version in range(1, 9):
        one.push(version)
        before, kept = kept, {name: tensor.data_ptr() for name, tensor in one.updater._loaded()}
        used.append(kept)
        assert not set(before.values()) & set(kept.values())
        assert [float(tensor[0]) for _, tensor in one.updater._loaded()] == [version] * 4
    addresses = {address for one_version in used for address in one_version.values()}
    assert len(addresses) == 8  # two versions of four tensors
    dropping = rig(limits=UpdateLimits(keep_loaded=False))
    dropping.push(1)
    dropping.push(2)
    assert dropping.updater._memory.idle_bytes == 0


def test_parts_that_come_side_by_side_and_twice_are_one_version(rig):
    one = rig()
    for version in range(1, 21):
        manifest, payloads = update_of(version, numbered_weights(version), bucket=5)
        one.updater.begin(manifest, False, False, None)
        order = [*payloads, *payloads]
        random.Random(version).shuffle(order)
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(one.updater.part, order))
        assert min(answer["missing"] for answer in answers) == 0
        one.updater.commit(version, "drain", 5)
        assert serves(one, version)


def test_versions_only_rise_unless_said_and_one_update_at_a_time(rig):
    one = rig()
    one.push(5)
    manifest, payloads = update_of(4, numbered_weights(4))
    with pytest.raises(Conflict, match="not newer"):
        one.updater.begin(manifest, False, False, None)
    one.updater.begin(manifest, False, True, None)
    with pytest.raises(Conflict, match="staging"):
        one.updater.begin(update_of(6, numbered_weights(6))[0], False, False, None)
    with pytest.raises(NotFound):
        one.updater.part(update_of(9, numbered_weights(9))[1][0])
    for payload in payloads:
        one.updater.part(payload)
    one.updater.commit(4, "drain", 5)
    assert serves(one, 4)


def test_a_forgotten_update_is_dropped_and_too_large_ones_are_refused(rig):
    now = [0.0]
    one = rig(limits=UpdateLimits(total_bytes=64, idle_seconds=10), clock=lambda: now[0])
    manifest, payloads = update_of(1, numbered_weights(1))
    one.updater.begin(manifest, False, False, None)
    now[0] = 11.0
    one.updater.tick()
    assert one.updater.staged_version is None
    with pytest.raises(NotFound):
        one.updater.part(payloads[0])
    with pytest.raises(TooLarge):
        one.updater.begin(update_of(2, numbered_weights(2, size=5))[0], False, False, None)


def test_every_move_that_is_not_listed_is_refused():
    for start in Phase:
        for to in Phase:
            versions = Versions(Serving(0))
            versions._phase = start
            if to in MOVES[start]:
                versions.move(to)
                assert versions.phase is to
            else:
                with pytest.raises(Conflict):
                    versions.move(to)


def test_an_engine_that_dies_ends_every_request_with_a_sentence(rig):
    one = rig(step_seconds=0.01)
    running = one.submit("r", tokens=1000)
    threading.Event().wait(0.05)
    one.engine.step = lambda: 1 / 0
    outcome = running()
    assert outcome.finish_reason == "error"
    assert "ZeroDivisionError" in outcome.error
    assert "ZeroDivisionError" in one.thread.failure


def test_whatever_goes_wrong_in_a_flip_the_next_update_can_begin(rig):
    one = rig()
    one.updater._install_adapter = lambda *_: Path("/nonexistent/file").read_text()
    manifest, payloads = update_of(1, numbered_weights(1))
    one.updater.begin(manifest, False, False, {"r": 1})
    for payload in payloads:
        one.updater.part(payload)
    with pytest.raises(EngineFailed, match=r"FileNotFoundError.*Version 0 serves"):
        one.updater.commit(1, "drain", 5)
    assert serves(one, 0)
    one.push(1)
    assert serves(one, 1)


def test_a_stopped_thread_answers_what_comes_late(rig):
    one = rig(step_seconds=0.01)
    waits = [one.submit(f"r{i}", tokens=500) for i in range(3)]
    one.thread.stop()
    assert [wait().finish_reason for wait in waits] == ["error"] * 3
    with pytest.raises(NotReady):
        one.submit("late")
    with pytest.raises(NotReady):
        one.push(1)
    assert one.versions.phase is Phase.IDLE


def test_what_is_sent_while_the_thread_ends_is_refused_and_not_forgotten(rig, monkeypatch):
    """A request passes the check, and comes when the thread has looked at its commands for the last time."""
    one = rig()
    one.thread.stop()
    monkeypatch.setattr(one.thread, "_refuse_if_down", lambda: None)
    late = one.completion("late")
    assert (late.finish_reason, late.stop_reason, late.error) == ("error", 503, "The server is stopping.")
    assert one.thread.in_flight == 0
    with pytest.raises(NotReady, match="stopping"):
        one.thread.call(lambda engine: engine.reset_prefix_cache(False), 60)
    with pytest.raises(NotReady, match="stopping"):
        one.thread.flip(lambda engine: None, 1, "drain", 60)


def test_a_request_that_the_engine_refuses_does_not_end_the_others(rig):
    one = rig(step_seconds=0.005)
    running = one.submit("good", tokens=30)
    eventually(lambda: one.engine.started)
    add = one.engine.add
    one.engine.add = lambda job, adapter: 1 / 0
    outcome = one.completion("bad")
    assert (outcome.finish_reason, outcome.stop_reason) == ("error", 400)
    assert "ZeroDivisionError" in outcome.error
    one.engine.add = add
    assert running().ids == [0] * 30
    assert serves(one, 0)
