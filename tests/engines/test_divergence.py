"""Errors of runs that diverge name the place of the first value that is not finite."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.engines.divergence import diverged, diverged_upload
from lamina.objective.layers import Layers
from small_simulations import simulation


def test_divergence_is_named_as_the_loop_names_it():
    errors = []
    for engine in ("loop", "stacked"):
        run = simulation("cnn", "fedavg", engine, torch.float32, lr=1e15)
        with pytest.raises(lamina.Diverged) as caught:
            run.run(5)
        errors.append(caught.value)
    assert (errors[0].round, errors[0].layer) == (errors[1].round, errors[1].layer)


LAYERS = Layers({"first.weight": (2, 2), "first.bias": (2,), "last.weight": (1, 2)})


class Up(NamedTuple):
    delta: torch.Tensor
    moment: torch.Tensor | None = None


def test_the_first_layer_that_is_not_finite_is_named():
    vector = torch.zeros(LAYERS.size)
    vector[5:] = torch.nan
    error = diverged(LAYERS, vector, 1, 0.5, client=7, step=" (local step 2 of 3)")
    assert (error.round, error.client, error.layer) == (1, 7, "first.bias")
    assert str(error) == (
        "round 1: client 7 (local step 2 of 3) went non-finite, first in 'first.bias'; "
        "lower the learning rate (now 0.5) or clip the gradients"
    )


def test_the_server_has_no_client_and_later_rounds_keep_earlier_ones():
    error = diverged(LAYERS, torch.full((LAYERS.size,), torch.inf), 4, 0.5, client=None)
    assert error.client is None
    assert str(error).startswith("round 4: the server's step went non-finite, first in 'first.weight'")
    assert str(error).endswith(". Earlier rounds are kept")


def test_an_upload_is_named_by_its_field():
    plan, zeros = SimpleNamespace(cohort=np.array([3, 9]), number=2, lr=0.1), torch.zeros(LAYERS.size)
    error = diverged_upload(LAYERS, Up(zeros, zeros + torch.nan), plan, 1)
    assert (error.client, error.layer) == (9, "first.weight")
    assert "client 9 (upload 'moment')" in str(error)
    assert diverged_upload(LAYERS, Up(zeros), plan, 0).layer == "loss or client state"


def test_a_module_whose_output_overflows_is_named():
    """Its parameters and its inputs are finite: only a pass through the model finds it."""

    class Exp(nn.Module):
        def forward(self, x):
            return x.exp()

    model = nn.Sequential(nn.Linear(4, 4), Exp(), nn.Linear(4, 3))
    run = lamina.Simulation(
        model, (torch.full((8, 4), 1e4), torch.arange(8) % 3), "fedavg", clients=2, engine="loop", device="cpu"
    )
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    with pytest.raises(lamina.Diverged, match=r"client \d \(local step 1 of \d+\) went non-finite") as caught:
        run.run(1)
    assert caught.value.layer == "1"
