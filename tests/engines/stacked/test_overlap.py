"""Which layers may take the step early; on a GPU, gpu/test_overlap.py compares runs with and without it."""

import contextlib

import pytest
import torch

from lamina.engines.stacked import overlap
from lamina.engines.stacked.overlap import Overlap, Watched
from lamina.objective.layers import Layers

LAYERS = Layers({"a.weight": (4, 6), "a.bias": (4,), "b.weight": (3, 4)})
ROWS, PITCH = 2, 48


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    monkeypatch.setattr(overlap, "LARGE", 1)


def watched_pass(uses, gradients, pieces=None):
    """Return the layers that may step early after a pass that saves the named weights and computes the gradients."""
    vector = torch.zeros(ROWS, PITCH)[:, : LAYERS.size]
    weights = LAYERS.unflatten(vector)
    watched = Watched(LAYERS, [vector])
    for name in uses:
        watched.save(weights[name])
        watched.save(torch.zeros(3))  # an activation
    arrived = {name: torch.zeros(ROWS, size) for name, size in zip(LAYERS.names, LAYERS.sizes, strict=True)}
    for name in gradients:
        watched.arrived(name, arrived[name], None)
    watched.finish(arrived | (pieces or {}))
    return watched.early


def test_a_layer_steps_when_its_gradient_has_arrived_as_often_as_its_weights_are_read():
    assert watched_pass(["a.weight", "b.weight"], ["b.weight", "a.weight"]) == {"a.weight": 1, "b.weight": 1}
    assert watched_pass(["b.weight", "b.weight"], ["b.weight", "b.weight"]) == {"b.weight": 2}


def test_a_layer_waits_whose_weights_are_read_again():
    assert watched_pass(["a.weight", "b.weight", "b.weight"], ["b.weight", "a.weight"]) == {"a.weight": 1}


def test_a_layer_waits_whose_gradient_has_another_part():
    """Autograd computed one, too, or the gradient was changed: the step reads other memory."""
    assert watched_pass(["b.weight"], ["b.weight"], {"b.weight": torch.zeros(ROWS, 12)}) == {}


def test_small_layers_wait(monkeypatch):
    monkeypatch.setattr(overlap, "LARGE", 2 * 24)
    assert watched_pass(["a.weight", "b.weight"], ["b.weight", "a.weight"]) == {"a.weight": 1}


class Stream:
    def wait_stream(self, other):
        pass


class FusedStep:
    """Remembers which layers took the step."""

    names = LAYERS.names

    def __init__(self):
        self.taken = []

    def blocks_of(self, names):
        return list(names)

    def run(self, rows, active, addresses, blocks, *, is_last):
        assert not is_last
        self.taken.append((rows, active, blocks))


@pytest.fixture
def _no_streams(monkeypatch):
    monkeypatch.setattr(overlap, "_stream_of", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)


def overlapped(expected, gradients, pieces=None):
    step = FusedStep()
    run = Overlap(step, ROWS, torch.zeros(1), expected)
    arrived = {name: torch.zeros(ROWS, 3) for name in LAYERS.names}
    with run.of_pass("active"):
        for name in gradients:
            run.arrived(name, arrived[name], Stream())
    return step.taken, run.finish(arrived | (pieces or {})), run.is_right


@pytest.mark.usefixtures("_no_streams")
def test_layers_take_the_step_once_and_the_others_are_left():
    taken, late, is_right = overlapped({"b.weight": 2}, ["b.weight", "a.bias", "b.weight", "a.weight"])
    assert taken == [(ROWS, "active", ["b.weight"])]
    assert late == ["a.weight", "a.bias"]
    assert is_right


@pytest.mark.usefixtures("_no_streams")
@pytest.mark.parametrize("gradients", [["b.weight"], [], ["b.weight"] * 3])
def test_a_pass_with_other_gradients_is_not_right(gradients):
    *_, is_right = overlapped({"b.weight": 2}, gradients)
    assert not is_right


@pytest.mark.usefixtures("_no_streams")
def test_a_pass_whose_gradients_lie_elsewhere_is_not_right():
    *_, is_right = overlapped({"b.weight": 1}, ["b.weight"], {"b.weight": torch.zeros(ROWS, 3)})
    assert not is_right
