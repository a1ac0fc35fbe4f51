"""Adapters that are pushed: their folders belong to one server each, and go with it."""

import os
import time

import pytest
import torch
from safetensors import safe_open

from posttrain.serve.engine.versions import Serving, Versions
from posttrain.serve.errors import FieldError
from posttrain.serve.weights import adapters
from posttrain.serve.weights.adapters import LOCK, WEIGHTS, Adapters, PushedAdapters
from tests.forked import Child
from tests.serve.echo_engine import EchoEngine, numbered_weights

NAME = "m.q_proj.lora_A.weight"


def tensor_names(path):
    with safe_open(path, "pt") as file:
        return list(file.keys())


class OneServer:
    """The adapters of one server, without its thread and routes."""

    def __init__(self, folder, in_use=frozenset()):
        self.engine, self.versions = EchoEngine(numbered_weights(0)), Versions(Serving(0))
        self.adapters = Adapters(self.versions, folder, lambda: set(in_use))

    def push(self, version, digest="d" * 32):
        tensors = [(NAME, torch.full((4,), float(version)))]
        self.adapters.install(self.engine, version, {"r": 1}, tensors, digest)
        return self.serving

    @property
    def serving(self):
        return self.versions.serving.adapter


def folders(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_servers_with_one_folder_leave_each_other_alone(tmp_path):
    one, other = OneServer(tmp_path), OneServer(tmp_path)
    for version in range(1, 6):
        mine, its = one.push(version), other.push(version)  # the same version with the same bytes
        assert mine.path != its.path
        for adapter in (mine, its):
            assert tensor_names(tmp_path / adapter.path / WEIGHTS) == [NAME]
        assert len(folders(tmp_path)) == 2
        other.push(version + 10)
        assert tensor_names(tmp_path / mine.path / WEIGHTS) == [NAME]
        other.versions.serve(Serving(0))
    later = OneServer(tmp_path)  # a third that starts sweeps nothing that is in use
    assert len(folders(tmp_path)) == 2
    for server in (one, other, later):
        server.adapters.close()
    assert folders(tmp_path) == []


def test_what_a_killed_server_left_is_removed_at_the_next_start(tmp_path, tmp_path_factory):
    lives = OneServer(tmp_path)
    kept = lives.push(1)
    (tmp_path / "pushed-by-a-user").mkdir()
    marks = tmp_path_factory.mktemp("marks")

    def server():
        PushedAdapters(tmp_path).write(3, {"r": 1}, {NAME: torch.ones(4)})
        (marks / "written").touch()
        time.sleep(600)

    process = Child(server, marks / "log")
    process.wait_until((marks / "written").exists, "its adapter was written")
    PushedAdapters(tmp_path)
    assert len(folders(tmp_path)) == 3  # both servers live
    process.end()
    PushedAdapters(tmp_path)
    assert folders(tmp_path) == sorted([os.path.basename(kept.path), "pushed-by-a-user"])


def test_a_folder_that_is_being_written_is_swept_only_when_it_is_old(tmp_path):
    begun = tmp_path / f".pushed-{'0' * 16}-1-1"
    begun.mkdir()
    PushedAdapters(tmp_path)
    assert begun.exists()
    (begun / LOCK).touch()
    old = time.time() - adapters.UNLOCKED_SECONDS - 1
    os.utime(begun, (old, old))
    PushedAdapters(tmp_path)
    assert folders(tmp_path) == []


def test_an_adapter_that_cannot_be_written_or_loaded_leaves_nothing(tmp_path, monkeypatch):
    one = OneServer(tmp_path)
    monkeypatch.setattr(adapters.json, "dumps", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.push(1)
    monkeypatch.undo()
    assert folders(tmp_path) == []
    with pytest.raises(FieldError, match="takes lora_A and lora_B"):
        one.adapters.install(one.engine, 1, {"r": 1}, [("lm_head.weight", torch.ones(1))], "d")
    assert folders(tmp_path) == []
    assert one.push(1).version == 1


def test_the_new_adapter_serves_on_where_the_old_one_cannot_be_removed(tmp_path):
    one = OneServer(tmp_path)
    first = one.push(1)
    removed, refuses = [], [True]

    def remove(adapter):
        if refuses[0]:
            raise RuntimeError("no")
        removed.append(adapter.version)

    one.engine.remove_adapter = remove
    second = one.push(2)
    assert (one.versions.serving.version, second.version) == (2, 2)
    assert tensor_names(tmp_path / second.path / WEIGHTS) == [NAME]
    assert "did not remove the adapter pushed-1 of version 1 (RuntimeError: no)" in one.adapters.notes[0]
    refuses[0] = False
    third = one.push(3)
    assert (sorted(removed), one.adapters.notes) == ([1, 2], ())
    assert folders(tmp_path) == [os.path.basename(third.path)]
    assert not os.path.exists(first.path)
