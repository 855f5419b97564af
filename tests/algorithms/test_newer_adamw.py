"""AdamW on the clients (DiLoCo, Local AdamW, FedAdamW): PyTorch's optimisers as oracles, reductions, invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

import transcriptions as T  # noqa: N812
from given_rounds import ALONE, GRADIENT, history, rounds_of, rounds_of_one_client
from paper_problem import (
    SIZES,
    START,
    close,
    differ,
    federate,
    infos,
    make,
    simulate,
    trajectory,
    vectors,
)

ADAMW: dict[str, Any] = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "decay": 0.2}


class TorchAdamW:
    """PyTorch's AdamW with the options above. (Its class would import PyTorch's compiler, which takes seconds.)"""

    def __init__(self) -> None:
        self.theta = torch.from_numpy(START.copy())
        self.forget()

    def forget(self) -> None:
        """Start again from zero moments."""
        self.m, self.v, self.count = torch.zeros_like(self.theta), torch.zeros_like(self.theta), torch.tensor(0.0)

    def take_steps(self, lr: float, batches: list[np.ndarray]) -> None:
        """Take a step on each of these batches."""
        for batch in batches:
            g = torch.from_numpy(GRADIENT(self.theta.numpy(), batch))
            state = ([self.theta], [g], [self.m], [self.v], [], [self.count])
            numbers = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.2}
            adamw(*state, lr=lr, foreach=False, amsgrad=False, maximize=False, **numbers)


@pytest.mark.parametrize("settings", [{"batch_size": 20}, {"batch_size": 8}, {"local_steps": 7}], ids=str)
def test_diloco_with_one_client_is_adamw(settings: Any) -> None:
    """mu = 0, eta_g = 1: x+ = y_K, and the moments and their step count go on in the next round."""
    given = {**ADAMW, "mu": 0.0, "server_lr": 1.0}
    simulation = simulate(make("diloco", given), lr=0.02, **ALONE, **settings)
    oracle, taken = TorchAdamW(), 0
    for lr, batches in rounds_of_one_client(simulation, 4):
        oracle.take_steps(lr, batches)
        taken += len(batches)
        (client,) = simulation.state.clients.values()
        close(simulation.state.server.x, oracle.theta)
        close(client.m, oracle.m)
        close(client.v, oracle.v)
        close(client.m_weight, [1 - 0.8**taken])
        close(client.v_weight, [1 - 0.95**taken])


@pytest.mark.parametrize(("name", "more"), [("localadamw", {}), ("diloco", {"inner_state": "restart", "mu": 0.0})])
def test_a_round_of_local_adamw_is_adamw(name: str, more: Any) -> None:
    """Every round is a new AdamW from zero moments, corrected by its own step count."""
    simulation = simulate(make(name, {**ADAMW, "server_lr": 1.0, **more}), lr=0.02, **ALONE)
    oracle = TorchAdamW()
    for lr, batches in rounds_of_one_client(simulation, 3):
        oracle.forget()
        oracle.take_steps(lr, batches)
        close(simulation.state.server.x, oracle.theta)


def test_diloco_without_its_clients_memory_is_local_adamw() -> None:
    """Stateless clients, mu = 0: AdamW from zero in each round, then the mean. Clients with memory differ."""
    shared, plain = {**ADAMW, "server_lr": 0.8}, {"rounds": 2, "lr": 0.02}
    localadamw = trajectory("localadamw", shared, **plain)
    close(trajectory("diloco", {**shared, "mu": 0.0, "inner_state": "restart"}, **plain), localadamw)
    assert differ(trajectory("diloco", {**shared, "mu": 0.0, "inner_state": "keep"}, **plain), localadamw)


def test_dilocos_server_is_sgd_with_nesterov_momentum() -> None:
    """On the gradient -D: b+ = mu b + D, x+ = x + eta_g (D + mu b+)."""
    theta, buffers = vectors(seed=3), [None]
    numbers = {"lr": 0.7, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0, "dampening": 0.0, "maximize": False}
    for _, after, D in history(make("diloco", {"mu": 0.9, "server_lr": 0.7}), rounds_of(1.0, 3.0, 0.2, 1.0)):
        sgd([theta], [-D], buffers, foreach=False, **numbers)
        close(after.x, theta)
        close(after.b, -buffers[0])


def test_diloco_steps_along_a_constant_displacement() -> None:
    """D constant: the step grows to eta_g D / (1 - mu), 7 D with mu = .9 and eta_g = .7."""
    grads = rounds_of(1.0) * 100
    *_, (before, after, D) = history(make("diloco", {"mu": 0.9, "server_lr": 0.7, "decay": 0.0}), grads)
    close(after.x - before.x, 7 * D * (1 - 0.9**101))


def test_absent_clients_of_diloco_keep_their_state() -> None:
    """Nothing of a client changes in a round without it; its step count is that of its own rounds."""
    simulation, taken = simulate(make("diloco"), lr=0.01), dict.fromkeys(range(len(SIZES)), 0)
    for r in range(1, 5):
        before = dict(simulation.state.clients.items())
        simulation.run(1)
        rnd = simulation.plan.round(r)
        for i, steps in zip(rnd.cohort.tolist(), rnd.steps.tolist(), strict=True):
            taken[i] += steps
        for i, client in simulation.state.clients.items():
            close(client.m_weight, [1 - 0.9 ** taken[i]])
            close(client.v_weight, [1 - 0.95 ** taken[i]])
            if i not in rnd.cohort:
                assert torch.equal(client.m, before[i].m)
                assert torch.equal(client.v, before[i].v)


# --- FedAdamW -----------------------------------------------------------------------------------------------------


def test_fedadamw_without_what_it_adds_is_local_adamw() -> None:
    """alpha = 0 and no second moment sent: AdamW from zero in each round."""
    shared, plain = {**ADAMW, "server_lr": 0.8}, {"rounds": 2, "lr": 0.02}
    localadamw = trajectory("localadamw", shared, **plain)
    for weight in ("one", "complement"):
        given = {**shared, "alpha": 0.0, "v_sync": "none", "local_weight": weight}
        close(trajectory("fedadamw", given, **plain), localadamw)
        assert differ(trajectory("fedadamw", {**given, "alpha": 0.5}, **plain), localadamw)
    assert differ(trajectory("fedadamw", {**shared, "alpha": 0.0}, **plain), localadamw)


@pytest.mark.parametrize("weight", ["one", "complement"])
@pytest.mark.parametrize("v_sync", ["full", "layer"])
def test_fedadamws_direction_has_a_gain(weight: str, v_sync: str) -> None:
    """g_a+ = A + alpha g_a, A the clients' mean step: with A constant, A (1 - alpha^r) / (1 - alpha).

    Here |g| = 2 in all coordinates and steps, so both moments, corrected, give A = sign(g), also as block means.
    The weight 1 - alpha makes it A (1 - alpha^r).
    """
    alpha, signs = 0.6, vectors(seed=9).sign()
    algorithm = make("fedadamw", {"alpha": alpha, "v_sync": v_sync, "local_weight": weight, "decay": 0.0, "eps": 1e-30})
    gain = 1 / (1 - alpha) if weight == "one" else 1.0
    for r, (_, after, D) in enumerate(history(algorithm, [(2 * signs).expand(3, 2, -1)] * 6), 1):
        close(after.g_a, gain * (1 - alpha**r) * signs)
        close(D, -0.1 * 2 * after.g_a)
        close(after.steps, [2.0 * r])
        close(after.v, 4 * (1 - 0.999 ** (2 * r)), rtol=1e-9)  # uncorrected


@pytest.mark.parametrize("given", [{}, {"v_sync": "full"}, {"v_sync": "none"}, {"m_correction": "global"}], ids=str)
def test_fedadamws_direction_is_a_recursion(given: Any) -> None:
    """At lambda = 0 the clients' own steps do not depend on g_a: with and without it, g_a+ differs by alpha g_a."""
    algorithm, g_a = make("fedadamw", {"alpha": 0.3, "decay": 0.0, **given}), vectors(seed=8)
    *_, (_, server, _) = history(algorithm, rounds_of(1.0, 2.0))
    ends = [
        federate(algorithm, server._replace(g_a=g), vectors(3, 2, seed=5), infos(3, 0.1, 2)).g_a
        for g in (g_a, torch.zeros_like(g_a))
    ]
    close(ends[0] - ends[1], 0.3 * g_a)


@pytest.mark.parametrize(
    ("layers", "parts"), [("tensor", T.TENSORS), ("module", T.MODULES), ("model", [slice(None)])], ids=str
)
def test_fedadamws_second_moment_of_a_layer_is_a_mean(layers: str, parts: Any) -> None:
    """After round 1, which starts at v = 0: n_l v_l is the sum of the full v over the layer."""
    full, short = (
        next(history(make("fedadamw", {"v_sync": sync, "layers": layers}), rounds_of(1.0)))[1].v
        for sync in ("full", "layer")
    )
    close(short, [full[part].mean() for part in parts])


def test_fedadamw_counts_steps_since_round_one() -> None:
    """Round 1 knows no earlier steps, so the global counter of m equals the round's; not in round 2 (C4)."""
    own, total = ([a for _, a, _ in history(make("fedadamw", {"m_correction": c}), rounds_of(1.0, 2.0))]
                  for c in ("round", "global"))  # fmt: skip
    close(total[0].x, own[0].x)
    assert differ(total[1].x, own[1].x)
