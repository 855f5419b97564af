"""Invariants of single algorithms, most of them by calling the seven functions directly."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import lamina
import transcriptions as T  # noqa: N812
from paper_problem import (
    INPUTS,
    LABELS,
    LAYERS,
    SIZES,
    START,
    close,
    differ,
    federate,
    first_path,
    infos,
    local_run,
    make,
    simulate,
    trajectory,
    transcribe,
    vectors,
)


@pytest.mark.parametrize("scale", [0.0, 0.25, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("control", ["mean_gradient", "literal"])
def test_scaffold_control_is_the_mean_raw_gradient(scale: float, control: str) -> None:
    """x - y_K = eta_l sum_k (g_k + s (c - c_i)), so (x - y_K) / (K eta_l) = g_bar + s (c - c_i).

    c_i+ = that - s (c - c_i) = g_bar for any c and c_i. As printed (unscaled) it is g_bar + (s - 1)(c - c_i) (B15).
    """
    algorithm = lamina.Scaffold(scale=scale, control=control)
    x, c, c_i = vectors(3, seed=1)
    grads = vectors(5, seed=2)
    server = algorithm.init(x, LAYERS)._replace(c=c)
    client = algorithm.client_init(x, LAYERS)._replace(c=c_i)
    up, after, path = local_run(algorithm, server, client, grads, infos(2, 0.3, 5))
    expected = grads.mean(0) + ((scale - 1) * (c - c_i) if control == "literal" else 0)
    close(after.c, expected)
    close(up.delta, -5 * 0.3 * (grads.mean(0) + scale * (c - c_i)))
    close(path[-1] - x, up.delta)


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_scaffold_server_control_is_the_mean_of_all_clients(scale: float) -> None:
    """c+ = c + (|S|/N) mean_S Delta c_i = c + (1/N) sum_S Delta c_i, and all start at 0: always c = (1/N) sum_i c_i."""
    simulation = simulate(lamina.Scaffold(scale=scale))
    for _ in range(6):
        simulation.run(1)
        controls = sum(client.c for client in simulation.state.clients.values())
        close(simulation.state.server.c, controls / len(SIZES))
    assert len(simulation.state.clients) == len(SIZES)
    assert float(simulation.state.server.c.abs().max()) > 1e-3


def amsgrad_directions(grads: np.ndarray, v0: np.ndarray, beta1: float, beta2: float) -> tuple[np.ndarray, np.ndarray]:
    """m_k / sqrt(v_hat_k) for every step from m_0 = 0, v_0 = v_hat_0 = v0, and the last v_hat."""
    m, v, v_hat, out = np.zeros_like(v0), v0, v0, []
    for g in grads:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        v_hat = np.maximum(v_hat, v)
        out.append(m / np.sqrt(v_hat))
    return np.stack(out), v_hat


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_fedlada_amendment_is_an_exponential_average(server_lr: float) -> None:
    """g_a+ = alpha P + (1 - alpha) g_a with P = mean_{i,k} m_k / sqrt(v_hat_k) (eq. 4).

    Per client x - y_K = eta_l (alpha sum_k p_k + K (1 - alpha) g_a); its mean over i, divided by eta_l K, is that.
    And with z = x/alpha - (1 - alpha)/alpha x_prev: alpha z+ = x+ - (1 - alpha) x, where x+ = x - eta_g eta_l K g_a+
    and eta_g eta_l K g_a = x_prev - x, so z+ = z - eta_g eta_l K P. In round 1 g_a = 0, hence x_prev = x.
    v+ = mean v_hat_K >= v.
    """
    alpha, lr, steps = 0.2, 0.05, 4
    algorithm = lamina.FedLada(alpha=alpha, server_lr=server_lr, decay=0.0)
    server, x_prev = algorithm.init(vectors(seed=3), LAYERS), vectors(seed=3)
    for r in range(1, 5):
        grads = vectors(3, steps, seed=10 + r)
        new = federate(algorithm, server, grads, infos(r, lr, steps))
        found = [amsgrad_directions(g.numpy(), server.v.numpy(), 0.9, 0.99) for g in grads]
        P = np.mean([p for p, _ in found], axis=(0, 1))
        close(new.g_a, alpha * P + (1 - alpha) * server.g_a.numpy())
        close(new.v, np.mean([v for _, v in found], axis=0))
        z = server.x / alpha - (1 - alpha) / alpha * x_prev
        z_next = new.x / alpha - (1 - alpha) / alpha * server.x
        close(z_next, z - server_lr * lr * steps * torch.from_numpy(P))
        assert (new.v >= server.v).all()
        server, x_prev = new, server.x


def test_fedlada_amendment_under_unequal_steps() -> None:
    """With K_bar = mean K_i: sum_i (x - y_K) / (|S| eta_l K_bar) pools all (i, k), so eq. 4 stays exact (B9).

    Its option averages the clients' own means instead: mean_i of (x - y_K) / (eta_l K_i).
    """
    for amendment in ("mean_steps", "per_client"):
        simulation = simulate(lamina.FedLada(alpha=0.2, decay=0.0, amendment=amendment))
        before = np.zeros(T.SIZE)
        for r, record in enumerate(transcribe(simulation, 4), 1):
            simulation.run(1)
            steps = simulation.plan.round(r).steps
            assert len(set(steps.tolist())) > 1 or r > 1
            per_client = np.split(np.stack(record.directions), np.cumsum(steps)[:-1])
            pooled = np.concatenate(per_client).mean(0)
            balanced = np.mean([p.mean(0) for p in per_client], axis=0)
            P = pooled if amendment == "mean_steps" else balanced
            close(simulation.state.server.g_a, 0.2 * P + 0.8 * before)
            before = simulation.state.server.g_a.numpy()


def test_fedcm_momentum_is_an_exponential_average() -> None:
    """Delta+ = alpha mean_{i,k} g + (1 - alpha) Delta and z+ = z - eta_g eta_l K mean g: FedLADA's derivation above."""
    alpha, lr, steps, server_lr = 0.2, 0.05, 4, 0.6
    algorithm = lamina.FedCM(alpha=alpha, server_lr=server_lr)
    server, x_prev = algorithm.init(vectors(seed=3), LAYERS), vectors(seed=3)
    for r in range(1, 5):
        grads = vectors(3, steps, seed=10 + r)
        new = federate(algorithm, server, grads, infos(r, lr, steps))
        G = grads.mean((0, 1))
        close(new.momentum, alpha * G + (1 - alpha) * server.momentum)
        z = server.x / alpha - (1 - alpha) / alpha * x_prev
        close(new.x / alpha - (1 - alpha) / alpha * server.x, z - server_lr * lr * steps * G)
        server, x_prev = new, server.x


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb"])
@pytest.mark.parametrize("given", [{}, {"decay": 0.1}, {"phi_max": 2.0}, {"layers": "module"}], ids=str)
def test_layerwise_step_length(name: str, given: Any) -> None:
    """||eta_l phi(||y||) u / ||u|| || = eta_l phi(||y||) for every layer, phi(z) = min(max(z, .01), phi_max)."""
    algorithm = make(name, given)
    groups = T.MODULES if given.get("layers") == "module" else T.TENSORS
    x = vectors(seed=4) * torch.from_numpy(T.MATRICES)  # zero biases: phi is .01 there
    lr = 0.07
    for before, after in itertools.pairwise(first_path(algorithm, x, vectors(4, seed=6), lr)):
        for part in groups:
            phi = min(max(float(before[part].norm()), 0.01), given.get("phi_max", np.inf))
            assert float((after - before)[part].norm()) == pytest.approx(lr * phi, rel=1e-10)


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb"])
def test_layerwise_step_forgets_scale(name: str) -> None:
    """At lambda = 0, u / ||u|| is the same for c m (all gradients times c) and for c v_hat; with lambda it is not."""
    x, grads = vectors(seed=4), vectors(4, seed=6)

    def last(factor: float, v_init: float, decay: float) -> torch.Tensor:
        return first_path(make(name, {"v_init": v_init, "decay": decay}), x, factor * grads)[-1]

    plain = last(1.0, 1e-6, 0.0)
    close(last(5.0, 1e-6, 0.0), plain)
    close(last(1.0, 7e-6, 0.0), plain)
    decayed = last(1.0, 1.0, 0.1)
    assert differ(last(5.0, 1.0, 0.1), decayed)
    assert differ(last(1.0, 7.0, 0.1), decayed)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fedams", {}),
        ("fedams", {"second_moment": "running"}),
        ("fedams", {"v_seed": "client"}),
        ("fedlamb", {}),
        ("fedlamb", {"sync_every": 2}),
        ("mime", {}),
        ("mimelamb", {}),
    ],
)
def test_second_moment_never_decreases(name: str, given: Any) -> None:
    """v_hat+ = max(v_hat, .) coordinate by coordinate, and it does grow."""
    simulation = simulate(make(name, {"beta2": 0.5} | given))
    before, has_grown = simulation.state.server.v_hat.clone(), False
    for _ in range(6):
        simulation.run(1)
        after = simulation.state.server.v_hat
        assert (after >= before).all()
        has_grown, before = has_grown or bool((after > before).any()), after.clone()
    assert has_grown


def amsgrad(simulation: lamina.Simulation, rounds: int, beta2: float) -> list[np.ndarray]:
    """AMSGrad without bias correction or epsilon on the one client's batches; the model after every round."""
    gradient, y, out = T.Gradient(INPUTS, LABELS), START.copy(), []
    m = v = v_hat = np.zeros(T.SIZE)
    for r in range(1, rounds + 1):
        rnd = simulation.plan.round(r)
        for k in range(int(rnd.steps[0])):
            g = gradient(y, rnd.batch(0, k))
            m = 0.9 * m + 0.1 * g
            v = beta2 * v + (1 - beta2) * g * g
            v_hat = np.maximum(v_hat, v)
            y = y - rnd.lr * m / np.sqrt(v_hat)
        out.append(y)
    return out


@pytest.mark.parametrize("beta2", [0.6, 0.999])
def test_fedams_with_one_client_is_amsgrad_within_a_round(beta2: float) -> None:
    """v_0 = v_hat_0 = 0, m_0 = 0, x+ = y_K: one round of `running` is K steps of AMSGrad."""
    algorithm = lamina.FedAms(v_init=0.0, second_moment="running", beta2=beta2)
    simulation = simulate(algorithm, clients=[np.arange(20)], participation=1.0, lr=0.05)
    simulation.run(1)
    (expected,) = amsgrad(simulation, 1, beta2)
    close(simulation.state.server.x, expected)
    assert differ(expected, START)


@pytest.mark.parametrize("beta2", [0.6, 0.999])
def test_fedams_with_one_client_is_amsgrad_over_rounds(beta2: float) -> None:
    """With v_seed = "client" and carried m the recursion runs on over rounds, so it is AMSGrad throughout.

    AMSGrad divides by the maximum of every v_k so far. The server must therefore learn the client's running maximum:
    with max(v_hat, v_K) alone, a peak of v inside a round (g large, then small) would be forgotten.
    """
    algorithm = lamina.FedAms(v_init=0.0, second_moment="running", v_seed="client", beta2=beta2)
    simulation = simulate(algorithm, clients=[np.arange(20)], participation=1.0, lr=0.05)
    for expected in amsgrad(simulation, 4, beta2):
        simulation.run(1)
        close(simulation.state.server.x, expected, f"round {simulation.state.round}")


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb", "fedlada_lamb"])
def test_a_zero_tensor(name: str) -> None:
    """A bias that starts at 0: floored phi moves it by phi_min at each step, "literal" never, "lamb" by u itself."""
    bias = T.TENSORS[1]
    moved = {z: trajectory(name, {"zero_norm": z}, 1)[0][bias] for z in ("floor", "lamb", "literal")}
    assert (moved["literal"] == 0).all()
    assert np.linalg.norm(moved["floor"]) > 0
    assert np.linalg.norm(moved["lamb"]) > 0
    assert differ(moved["lamb"], moved["floor"])


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb", "fedlada_lamb"])
@pytest.mark.parametrize("zero_norm", ["floor", "lamb", "literal"])
def test_no_step_where_the_direction_is_zero(name: str, zero_norm: str) -> None:
    """u = 0 on a layer (gradient 0, m_0 = 0, lambda = 0): its step is 0, not 0/0; the other layers move."""
    algorithm = make(name, {"zero_norm": zero_norm})
    x, grads = vectors(seed=4), vectors(3, seed=6)
    dead = T.TENSORS[2]
    grads[:, dead] = 0.0
    path = first_path(algorithm, x, grads)
    assert torch.equal(path[-1][dead], x[dead])
    assert torch.isfinite(path[-1]).all()
    assert all(differ(path[-1][part], x[part]) for part in T.TENSORS if part != dead)


def test_authors_preset_has_no_floor() -> None:
    """Their phi is the identity without a floor: a tensor of norm .002 moves by eta_l .002, not by eta_l .01."""
    algorithm = make("fedlamb", {"preset": "authors"})
    x = vectors(seed=4)
    x[T.TENSORS[1]] *= 0.002 / float(x[T.TENSORS[1]].norm())
    path = first_path(algorithm, x, vectors(1, seed=6))
    assert float((path[1] - path[0])[T.TENSORS[1]].norm()) == pytest.approx(0.07 * 0.002, rel=1e-10)
