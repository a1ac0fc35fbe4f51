"""Offloading, with plain memory in the place of a side stream: what is sent, when it is brought back, and that nothing changes."""

from __future__ import annotations

import pytest
import torch

from posttrain.models.memory.activation_offloading import COPIES_AT_ONCE, STAY, Offloader, offloaded_activations
from tests import tiny

LAYERS = 8


class PlainMemory:
    """A transport whose copies take `delay` further sends to finish. It keeps a diary."""

    def __init__(self, delay=1):
        self.delay, self.clock, self.diary = delay, 0, []

    def can_travel(self, tensor):
        return True

    def send(self, tensor):
        self.clock += 1
        self.diary.append("send")
        return tensor.clone(), self.clock + self.delay

    def bring(self, parcel):
        self.diary.append("bring")
        return parcel.clone(), 0

    def settle(self, ticket):
        pass

    def is_done(self, ticket):
        return self.clock >= ticket

    def discard(self, parcel):
        self.diary.append("discard")


def checkpointed():
    model = tiny.causal_lm(num_hidden_layers=LAYERS).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def gradients(model, offloader=None):
    ids = torch.arange(60).view(2, 30)
    model.zero_grad()
    if offloader is None:
        model(input_ids=ids).logits.square().mean().backward()
    else:
        with offloader.parking():
            model(input_ids=ids).logits.square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("delay", [0, 1, 100])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_are_bit_for_bit_the_same(checkpointing, delay):
    model = checkpointed() if checkpointing else tiny.causal_lm(num_hidden_layers=LAYERS)
    expected = gradients(model)
    offloader = Offloader(PlainMemory(delay), smallest_bytes=1)
    for _ in range(2):
        for found, right in zip(gradients(model, offloader), expected):
            assert torch.equal(found, right)
    assert offloader.parked == offloader.leaving == []


def test_layer_inputs_leave_in_the_forward_and_come_back_one_ahead():
    """2 x 30 x 16 float32 numbers enter each layer; nothing else is as large under checkpointing, but the logits' square."""
    model = checkpointed()
    transport = PlainMemory()
    inputs = 2 * 30 * 16 * 4
    watched = Watched(transport, inputs)
    gradients(model, watched)
    assert transport.diary.count("send") >= LAYERS - STAY
    first = transport.diary.index("bring")
    assert "send" not in transport.diary[first:]  # out in the forward, back in the backward
    assert transport.diary.count("bring") + transport.diary.count("discard") == transport.diary.count("send")
    assert watched.waited == 0  # every layer's input was back before it was asked for


class Watched(Offloader):
    """Counts tensors that were away when the backward asked for them."""

    waited = 0

    def _here(self, parked):
        self.waited += parked.tensor is None
        return super()._here(parked)


def test_tensors_are_let_go_while_the_forward_runs():
    """Never more than the newest, and those under way, are on the device."""
    offloader = Offloader(PlainMemory(delay=100), smallest_bytes=1)
    most = 0
    with offloader.parking():
        x = torch.randn(100, requires_grad=True)
        y = x * 1
        for _ in range(20):
            y = y.sin()
            most = max(most, sum(p.tensor is not None for p in offloader.parked))
        y.sum().backward()
    assert most == STAY + COPIES_AT_ONCE
    expected = torch.autograd.functional.vjp(lambda v: _sines(v), x.detach(), torch.ones(100))[1]
    assert torch.equal(x.grad, expected)


def _sines(x):
    for _ in range(20):
        x = x.sin()
    return x


def test_one_tensor_kept_by_several_operations_travels_once():
    transport = PlainMemory()
    offloader = Offloader(transport, smallest_bytes=1)
    x = torch.randn(50, requires_grad=True)
    with offloader.parking():
        y = x * 2
        total = y.sin() + y.cos() + y.exp().sum() + y.square()
        assert len({id(p) for p in offloader.parked if p.holds(y)}) == 1
        total.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_a_change_in_place_is_noticed():
    offloader = Offloader(PlainMemory(), smallest_bytes=1)
    with offloader.parking():
        x = torch.randn(50, requires_grad=True)
        y = x * 2
        z = y.sin()
        y.add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            z.sum().backward()


def test_small_tensors_and_parameters_stay():
    offloader = Offloader(PlainMemory(), smallest_bytes=1000)
    weight = torch.nn.Parameter(torch.randn(100, 100))
    with offloader.parking():
        (torch.randn(2, 100) @ weight.T).square().sum().backward()
        assert offloader.parked == []


def test_an_exception_in_the_forward_leaves_nothing_behind():
    offloader = Offloader(PlainMemory(), smallest_bytes=1)

    def forward():
        with offloader.parking():
            _sines(torch.randn(50, requires_grad=True))
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        forward()
    assert offloader.parked == offloader.leaving == []


def test_on_a_cpu_nothing_is_parked():
    with offloaded_activations(torch.device("cpu")):
        x = torch.randn(50, requires_grad=True)
        x.sin().sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
