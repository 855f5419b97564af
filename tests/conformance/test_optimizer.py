"""Optimizers of torch as halves: their steps, their states by lamina's names, and when they are created anew."""

import pytest
import torch

import lamina


def test_the_moments_of_adam_are_compared_with_ours():
    result = lamina.conform(
        lamina.create("fedadam", "torch", amsgrad=True), torch.optim.Adam, options={"amsgrad": True}
    )
    assert (result.same, result.quantities, result.others) == (True, ("x", "m", "v", "v_hat"), ())


def test_a_momentum_buffer_is_compared_with_the_sum_of_displacements():
    result = lamina.conform("fedavgm", torch.optim.SGD, options={"momentum": 0.9})
    assert (result.same, result.quantities, result.others) == (True, ("x", "b"), ())


@pytest.mark.parametrize("preset", ["flower", "google"])
def test_adagrad_is_our_fedadagrad_from_zero(preset):
    result = lamina.conform(lamina.create("fedadagrad", preset), torch.optim.Adagrad, options={"eps": 1e-3}, steps=20)
    assert (result.same, result.quantities) == (True, ("x", "v"))
    assert not lamina.conform("fedadagrad", torch.optim.Adagrad, options={"eps": 1e-3}, steps=1).same


def test_an_optimizer_gets_our_rate_unless_it_has_one():
    assert lamina.conform("fedavg", torch.optim.SGD, lr=0.3, steps=2).same
    assert not lamina.conform("fedavg", torch.optim.SGD, lr=0.3, options={"lr": 0.2}, steps=2).same
    assert lamina.conform(lamina.FedAvg(server_lr=0.4), torch.optim.SGD, half="server", steps=2).same


DILOCO = {"betas": (0.9, 0.95), "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("ours", "options"),
    [("localadamw", {}), ("diloco", DILOCO), (lamina.DiLoCo(inner_state="restart"), DILOCO)],
)
def test_it_is_created_anew_in_each_round_unless_local_training_continues(ours, options):
    """DiLoCo's clients keep their moments in all cases, and by default begin a round with them."""
    assert lamina.conform(ours, torch.optim.AdamW, options=options, steps=6, local_steps=2).same


def test_an_optimizer_that_fails_is_named():
    class Broken(torch.optim.SGD):
        def step(self):
            raise ZeroDivisionError("no step")

    with pytest.raises(lamina.BadInput, match="Broken fails: ZeroDivisionError: no step"):
        lamina.conform("fedavg", Broken)


def test_a_method_that_broadcasts_more_than_a_model_needs_a_function():
    result = lamina.conform("fedlada", torch.optim.Adam)
    assert result.notes[-1] == ("an optimizer does not get v, g_a, which our clients receive: give a function of them")
