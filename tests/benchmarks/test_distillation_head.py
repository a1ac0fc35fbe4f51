"""The benchmark of two heads compares what it says: one gradient whatever the path, and every way in its table."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import distillation_head as measured
from posttrain.losses.distributions import Divergence


def test_ways_compute_what_they_are_called():
    heads = measured.made(tokens=6, width=8, vocabulary=50, device="cpu")
    ours = heads.student(heads.hidden).log_softmax(-1)
    theirs = heads.teacher.lm_head(heads.taught).log_softmax(-1)
    for name, what in (("forward KL", Divergence(0)), ("reverse KL", Divergence(1))):
        assert measured.WAYS[name](heads).item() == pytest.approx(what(ours, theirs).sum().item(), rel=1e-4)
    nll = -ours.gather(-1, heads.targets[:, None]).sum().item()
    assert [measured.log_probs(heads).item(), measured.summed(heads).item()] == pytest.approx([nll, nll], rel=1e-5)


def test_a_line_for_each_way(monkeypatch, capsys):
    words = ["--tokens", "8", "--width", "8", "--vocabulary", "50", "--device", "cpu", "--repeats", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["distillation_head", *words])
    assert measured.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["way"] for line in lines] == list(measured.WAYS)
    assert all(line["milliseconds"] > 0 and torch.tensor(line["loss"]).isfinite() for line in lines)
    assert lines[0]["times"] == 1
