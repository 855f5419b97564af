"""What the newer methods' formulas imply: reductions to other methods, other optimisers, and invariants."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch

import transcriptions as T  # noqa: N812
from given_rounds import ALONE, GRADIENT, history, rounds_of, rounds_of_one_client
from lamina.algorithms.fedlars import LocalMomentum
from paper_problem import (
    DECAYS,
    LAYERS,
    SIZES,
    START,
    close,
    differ,
    first_path,
    infos,
    local_run,
    make,
    simulate,
    trajectory,
    vectors,
)
from quadratics import CENTRES, CURVATURES, OPTIMUM, on_quadratics

# --- momentum and adaptivity on the server ------------------------------------------------------------------------


@pytest.mark.parametrize("damped", [False, True])
def test_fedavgm_without_momentum_is_fedavg(damped: bool) -> None:
    """mu = 0: b = D, also if D is multiplied by 1 - mu."""
    shared = {"server_lr": 0.8, "decay": 0.2}
    fedavg = trajectory("fedavg", shared)
    close(trajectory("fedavgm", {**shared, "mu": 0.0, "damped": damped}), fedavg)
    assert differ(trajectory("fedavgm", {**shared, "mu": 0.5, "damped": damped}), fedavg)


@pytest.mark.parametrize("damped", [False, True])
def test_fedavgm_steps_along_a_constant_displacement(damped: bool) -> None:
    """D constant: b_r = D (1 - mu^r) / (1 - mu), so the step grows to D / (1 - mu); damped, to D."""
    mu, server_lr = 0.6, 0.5
    grads = rounds_of(1.0) * 30
    found = list(history(make("fedavgm", {"mu": mu, "damped": damped, "server_lr": server_lr}), grads))
    gain = 1.0 if damped else 1 / (1 - mu)
    for r, (before, after, D) in enumerate(found, 1):
        close(after.x - before.x, server_lr * gain * (1 - mu**r) * D)
        close(after.b, gain * (1 - mu**r) * D)
    before, after, D = found[-1]
    close(after.x - before.x, server_lr * gain * D, rtol=1e-6)


def test_fedadagrad_without_momentum_divides_by_the_root_of_the_sum_of_squares() -> None:
    """beta1 = 0, eta_g = 1, v_0 = tau = 0: step D_r / sqrt(sum of D^2), which is sign(D) in round 1."""
    squares = torch.zeros(T.SIZE, dtype=torch.float64)
    algorithm = make("fedadagrad", {"beta1": 0.0, "server_lr": 1.0, "v_init": 0.0, "tau": 0.0})
    for r, (before, after, D) in enumerate(history(algorithm, rounds_of(1.0, 3.0, 0.2)), 1):
        squares = squares + D**2
        close(after.x - before.x, D / squares.sqrt())
        close(after.v, squares)
        if r == 1:
            close(after.x - before.x, D.sign())


def test_fedadagrads_second_moment_never_falls() -> None:
    """v+ - v = D^2, also in a round with small D; FedAdam's v falls there."""
    falls = {}
    for name in ("fedadagrad", "fedadam"):
        rounds = history(make(name, {"v_init": 1e-12}), rounds_of(1.0, 1e-3, 1e-3))
        falls[name] = [bool((after.v < before.v).any()) for before, after, _ in rounds]
    assert falls["fedadagrad"] == [False, False, False]
    assert falls["fedadam"][1:] == [True, True]


def test_fedyogi_is_fedadam_where_the_second_moment_is_zero() -> None:
    """v = 0: v+ = (1 - beta2) D^2 in both. From round 2 on they differ."""
    yogi, adam = (list(history(make(n, {"v_init": 0.0}), rounds_of(1.0, 0.5))) for n in ("fedyogi", "fedadam"))
    close(yogi[0][1].v, adam[0][1].v)
    close(yogi[0][1].x, adam[0][1].x)
    assert differ(yogi[1][1].v, adam[1][1].v)


def test_fedyogis_second_moment_changes_by_its_own_amount() -> None:
    """|v+ - v| = (1 - beta2) D^2, towards D^2."""
    signs = set()
    for before, after, D in history(make("fedyogi", {"beta2": 0.7}), rounds_of(1.0, 0.1, 2.0, 0.3)):
        close((after.v - before.v).abs(), 0.3 * D**2, rtol=1e-9)
        towards = (D**2 - before.v).sign()
        assert torch.equal((after.v - before.v).sign(), towards)
        signs |= set(towards.tolist())
    assert signs == {-1.0, 1.0}


def test_without_a_displacement_fedyogi_keeps_the_second_moment() -> None:
    """D = 0: Adam's v decays by beta2."""
    grads = [*rounds_of(1.0), torch.zeros(3, 2, T.SIZE, dtype=torch.float64)]
    for name, factor in (("fedyogi", 1.0), ("fedadam", 0.99)):
        *_, (before, after, D) = history(make(name), grads)
        assert (D == 0).all()
        close(after.v, factor * before.v)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_fedams_on_the_server_is_fedadam_with_a_running_maximum(bias_correction: bool) -> None:
    """With v and v_hat from the same start it is FedAdam's option `amsgrad`."""
    shared = {"tau": 1e-3, "server_lr": 0.01, "bias_correction": bias_correction, "beta2": 0.3, "decay": 0.2}
    start = {"v_init": 1e-4}
    fedadam = trajectory("fedadam", {**shared, **start, "amsgrad": True}, 4)
    close(trajectory("fedams_server", {**shared, **start, "v_hat_init": 1e-4}, 4), fedadam)
    assert differ(trajectory("fedams_server", {**shared, **start, "v_hat_init": 1e-2}, 4), fedadam)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_fedams_on_the_server_is_fedadam_while_the_second_moment_grows(bias_correction: bool) -> None:
    """D grows in every coordinate: v_hat = v, and the maximum is idle. In a round with small D it is not."""
    shared = {"tau": 1e-3, "server_lr": 0.01, "bias_correction": bias_correction, "v_init": 0.0}
    adam, ams = make("fedadam", shared), make("fedams_server", {**shared, "v_hat_init": 1e-30})
    grads = [scale * vectors(3, 2, seed=10) for scale in (1.0, 2.0, 4.0, 0.01)]
    paths = [[after.x for _, after, _ in history(algorithm, grads)] for algorithm in (adam, ams)]
    for x, expected in zip(paths[1][:3], paths[0][:3], strict=True):
        close(x, expected)
    assert differ(paths[1][3] - paths[1][2], paths[0][3] - paths[0][2])


def test_fedams_on_the_server_never_divides_by_less_than_its_start() -> None:
    """v_hat >= v and v_hat_init, and never falls; so option 1 moves no coordinate by more than eta_g |m| / sqrt(eps).

    By default v starts at 0 and v_hat at 1e-3 (C17).
    """
    algorithm = make("fedams_server", {"beta2": 0.5, "server_lr": 0.7})
    assert (algorithm.init(vectors(), LAYERS).v == 0).all()
    is_above_start, falls = [], []
    for before, after, _ in history(algorithm, rounds_of(1.0, 0.01, 3.0)):
        assert (before.v_hat >= 1e-3).all()
        assert (after.v_hat >= before.v_hat).all()
        assert (after.v_hat >= after.v).all()
        assert ((after.x - before.x).abs() <= 0.7 * after.m.abs() / 1e-3**0.5 * (1 + 1e-12)).all()
        close(after.x - before.x, 0.7 * after.m / after.v_hat.sqrt())
        is_above_start.append(bool((after.v_hat > 1e-3).any()))
        falls.append(bool((after.v < before.v).any()))
    assert any(is_above_start)
    assert any(falls)


# --- FedDyn -------------------------------------------------------------------------------------------------------


def test_feddyns_server_holds_the_mean_of_all_clients() -> None:
    """q+ = q + (|S|/N) mean_S delta and q_i+ = q_i + delta_i: always q = (1/N) sum over all N clients of q_i."""
    simulation = simulate(make("feddyn", {"alpha": 0.3, "decay": 0.2}))
    for _ in range(5):
        rests = {i: client.q.clone() for i, client in simulation.state.clients.items()}
        simulation.run(1)
        cohort = simulation.plan.cohort(simulation.state.round).tolist()
        for i, client in simulation.state.clients.items():
            assert i in cohort or torch.equal(client.q, rests[i])
        close(simulation.state.server.q, sum(client.q for client in simulation.state.clients.values()) / len(SIZES))
    assert len(simulation.state.clients) == len(SIZES)
    assert float(simulation.state.server.q.abs().max()) > 1e-3


def test_feddyn_finds_the_optimum_of_all_clients() -> None:
    """Half of the clients are absent in each round, and each has its own optimum: FedAvg ends elsewhere."""
    ends = [
        on_quadratics(make(*each), 0.2, 120, steps=[10] * 4, cohort_size=2)[0]
        for each in (("feddyn", {"alpha": 1.0}), ("fedavg", {}))
    ]
    assert float((ends[0] - OPTIMUM).norm()) < 1e-8
    assert float((ends[1] - OPTIMUM).norm()) > 1e-2


@pytest.mark.parametrize("cohort_size", [4, 2])
def test_feddyn_of_clients_weighted_by_their_examples_needs_all_of_them(cohort_size: int) -> None:
    """It ends at the optimum of the sum of n_i F_i, but with smaller cohorts far from that and from OPTIMUM (C20)."""
    examples = [1.0, 2.0, 5.0, 8.0]
    n = torch.tensor(examples, dtype=torch.float64)[:, None]
    weighted_optimum = (n * CURVATURES * CENTRES).sum(0) / (n * CURVATURES).sum(0)
    x = on_quadratics(
        make("feddyn", {"alpha": 1.0}), 0.2, 200, steps=[10] * 4, cohort_size=cohort_size, weights=examples
    )[0]
    gaps = [float((x - point).norm()) for point in (weighted_optimum, OPTIMUM)]
    if cohort_size == 4:
        assert gaps[0] < 1e-8
        assert gaps[1] > 0.5
    else:
        assert min(gaps) > 0.1


def test_feddyn_warns_of_smaller_cohorts_weighted_by_their_examples(caplog: pytest.LogCaptureFixture) -> None:
    by_examples = {"weighting": "examples"}
    with caplog.at_level(logging.WARNING, "lamina"):
        for settings in ({}, {"participation": 1.0, **by_examples}):
            simulate(make("feddyn"), **settings)
        assert not caplog.messages
        simulate(make("feddyn"), **by_examples)
    start = 'FedDyn with weighting = "examples" needs all clients in every round: with smaller cohorts it diverges, or'
    assert [m for m in caplog.messages if m.startswith(start)]


def test_feddyn_without_alpha_is_not_fedavg() -> None:
    """alpha -> 0: local steps are SGD, but x_R - x_0 = sum_r D_r + sum_r sum_{s <= r} D_s with all clients active."""
    algorithm, total, q = make("feddyn", {"alpha": 1e-14}), 0.0, 0.0
    for r, (_, after, D) in enumerate(history(algorithm, grads := rounds_of(1.0, 2.0, 0.5)), 1):
        close(D, -0.1 * grads[r - 1].sum(1).mean(0))  # the clients': K steps of SGD
        q = q + D
        total = total + D + q
        close(after.x - vectors(seed=3), total)


def test_feddyns_first_local_steps_are_fedprox() -> None:
    """q_i = 0 in a client's first round: g + alpha (y - x) is FedProx's direction."""
    x, grads = vectors(seed=4), vectors(4, seed=6)
    ends = [first_path(make(*a), x, grads)[-1] for a in (("feddyn", {"alpha": 0.7}), ("fedprox", {"mu": 0.7}))]
    close(*ends)


# --- FedLion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_fedlion_uploads_integers(steps: int) -> None:
    """delta / eta_l is a sum of K signs: an integer in [-K, K] with the parity of K; for K = 1, a sign."""
    algorithm = make("fedlion")
    server = algorithm.init(vectors(seed=3), LAYERS)._replace(m=vectors(seed=4))
    client = algorithm.client_init(server.x, LAYERS)
    up, *_ = local_run(algorithm, server, client, vectors(steps, seed=5), infos(2, 0.07, steps))
    count = (up.delta / 0.07).numpy()
    close(count, np.round(count))
    assert (np.round(count) % 2 == steps % 2).all()
    assert np.abs(np.round(count)).max() == steps


def test_fedlion_forgets_the_scale_of_the_gradients() -> None:
    """All gradients times c: m times c, the signs and x unchanged."""
    ends = []
    for scale in (1.0, 64.0):
        *_, (_, end, _) = history(make("fedlion"), [scale * g for g in rounds_of(1.0, 2.0, 0.5)])
        ends.append(end)
    close(ends[1].x, ends[0].x)
    close(ends[1].m, 64.0 * ends[0].m)


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_fedlion_with_one_client_is_lion(decay: float) -> None:
    """x+ = y_K and m+ = m_K: Lion without interruption (Chen et al. 2023)."""
    simulation = simulate(make("fedlion", {"decay": decay, "beta1": 0.8, "beta2": 0.6}), lr=0.01, **ALONE)
    theta, m = START.copy(), np.zeros(T.SIZE)
    for lr, batches in rounds_of_one_client(simulation, 3):
        for batch in batches:
            g = GRADIENT(theta, batch)
            theta = theta - lr * (np.sign(0.8 * m + 0.2 * g) + decay * theta)
            m = 0.6 * m + 0.4 * g
        close(simulation.state.server.x, theta)
        close(simulation.state.server.m, m)


# --- sharpness-aware minimisation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"clip": 0.15, "weighting": "examples"}], ids=str)
def test_fedsam_at_distance_zero_is_fedavg(settings: Any) -> None:
    """rho = 0: both gradients are at y."""
    shared = {"server_lr": 0.8, "decay": 0.2}
    fedavg = trajectory("fedavg", shared, **settings)
    close(trajectory("fedsam", {**shared, "rho": 0.0}, **settings), fedavg)
    assert differ(trajectory("fedsam", {**shared, "rho": 0.5}, **settings), fedavg)


@pytest.mark.parametrize("given", [*DECAYS, {"clip_direction": 0.05, "server_lr": 0.8}], ids=str)
def test_mofedsam_at_distance_zero_is_fedcm(given: Any) -> None:
    """rho = 0: both gradients are at y."""
    fedcm = trajectory("fedcm", {"alpha": 0.3, **given})
    close(trajectory("mofedsam", {"alpha": 0.3, "rho": 0.0, **given}), fedcm)
    assert differ(trajectory("mofedsam", {"alpha": 0.3, "rho": 0.5, **given}), fedcm)


@pytest.mark.parametrize("form", ["l2", "decoupled"])
def test_mofedsam_without_the_global_direction_is_fedsam(form: str) -> None:
    """alpha = 1: nothing is mixed in, and both forms of decay are the same step."""
    shared = {"rho": 0.5, "decay": 0.2, "server_lr": 0.8}
    fedsam = trajectory("fedsam", shared, 2)
    close(trajectory("mofedsam", {**shared, "alpha": 1.0, "decay_form": form}, 2), fedsam)
    assert differ(trajectory("mofedsam", {**shared, "alpha": 0.5, "decay_form": form}, 2), fedsam)


def sam_step(name: str, gradient: Any, rho: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, the second point and the next y of a new client's first step at rate .1, alpha = 1."""
    algorithm = make(name, {"rho": rho} | ({"alpha": 1.0} if name == "mofedsam" else {}))
    server_info, client_info = infos(1, 0.1)
    down = algorithm.broadcast(algorithm.init(vectors(seed=3), LAYERS), server_info)
    local = algorithm.begin(down, algorithm.client_init(down.x, LAYERS), client_info)
    point = algorithm.second_point(local, down, gradient(local.y), 0.1, LAYERS)
    after = algorithm.step(local, down, gradient(local.y), 0.1, LAYERS, gradient(point))
    return local.y, point, after.y


@pytest.mark.parametrize("name", ["fedsam", "mofedsam"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_sharpness_aware_steps_on_a_quadratic(name: str, scale: float) -> None:
    """F = y'Ay / 2 - b'y: the gradient at y + rho g / ||g|| is g + rho A g / ||g||; the distance is rho."""
    A = vectors(T.SIZE, seed=1)
    A, b = scale * (A + A.T), scale * vectors(seed=2)
    y, point, after = sam_step(name, lambda theta: A @ theta - b, 0.3)
    g = A @ y - b
    close(point - y, 0.3 * g / g.norm(), rtol=2e-7 / float(g.norm()))
    assert float((point - y).norm()) == pytest.approx(0.3, rel=2e-7 / float(g.norm()))
    close(y - after, 0.1 * (g + 0.3 * (A @ g) / g.norm()), rtol=1e-5)


@pytest.mark.parametrize("name", ["fedsam", "mofedsam"])
def test_no_perturbation_where_the_gradient_is_zero(name: str) -> None:
    """g = 0: the second point is y, not 0/0."""
    y, point, after = sam_step(name, torch.zeros_like, 0.3)
    assert torch.equal(point, y)
    assert torch.equal(after, y)


# --- Fed-LARS -----------------------------------------------------------------------------------------------------

FEDLARS: list[dict[str, Any]] = [
    {},
    {"decay": 0.2},
    *DECAYS,
    {"zero_norm": "lamb", "phi_max": 0.7, "momentum": "restart"},
    {"zero_norm": "literal", "layers": "module", "decay": 0.2},
    {"phi_min": 3.0, "layers": "model", "server_lr": 0.8},
]


@pytest.mark.parametrize("given", FEDLARS, ids=str)
def test_fedlars_in_the_order_of_lamb_is_fedlamb_without_a_second_moment(given: Any) -> None:
    """v_init = 1 and beta2 = 1 keep v_hat = 1, so psi = m."""
    carried = {"momentum": "carry"} if given.get("momentum", "keep") == "keep" else {}
    fedlamb = trajectory("fedlamb", {"v_init": 1.0, "beta2": 1.0, **given, **carried}, 2, lr=0.03)
    close(trajectory("fedlars", {"order": "lamb", "momentum": "keep", **given}, 2, lr=0.03), fedlamb)
    assert differ(trajectory("fedlars", {"order": "lars", "momentum": "keep", **given}, 2, lr=0.03), fedlamb)


@pytest.mark.parametrize("given", FEDLARS, ids=str)
def test_without_momentum_both_orders_of_fedlars_agree(given: Any) -> None:
    """beta1 = 0: m is what was just added."""
    lars, lamb = (trajectory("fedlars", {**given, "order": o, "beta1": 0.0}, 2, lr=0.03) for o in ("lars", "lamb"))
    close(lars, lamb)


@pytest.mark.parametrize("given", [{}, {"decay": 0.1}, {"phi_max": 2.0}, {"layers": "module"}], ids=str)
@pytest.mark.parametrize("order", [{"order": "lamb"}, {"order": "lars", "beta1": 0.0}], ids=str)
def test_fedlars_step_length(order: Any, given: Any) -> None:
    """||step|| = eta_l phi(||y||) for every layer, phi(z) = min(max(z, .01), phi_max)."""
    algorithm = make("fedlars", {**order, **given})
    x = vectors(seed=4) * torch.from_numpy(T.MATRICES)  # zero biases: phi is .01 there
    for before, after in itertools.pairwise(first_path(algorithm, x, vectors(4, seed=6))):
        for part in T.MODULES if given.get("layers") == "module" else T.TENSORS:
            phi = min(max(float(before[part].norm()), 0.01), given.get("phi_max", np.inf))
            assert float((after - before)[part].norm()) == pytest.approx(0.07 * phi, rel=1e-10)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fedlars_averages_steps_of_length_phi(decay: float) -> None:
    """Order "lars": step_k = beta1 step_{k-1} + (1 - beta1) eta_l phi(||y||) u / ||u||, u = g + lambda y."""
    grads = vectors(5, seed=6)
    path = first_path(make("fedlars", {"order": "lars", "beta1": 0.8, "decay": decay}), vectors(seed=4), grads)
    step = torch.zeros(T.SIZE, dtype=torch.float64)
    for (before, after), g in zip(itertools.pairwise(path), grads, strict=True):
        u = g + decay * before
        for part in T.TENSORS:
            fresh = 0.07 * before[part].norm() * u[part] / u[part].norm()
            step[part] = 0.8 * step[part] - 0.2 * fresh
        close(after - before, step)


@pytest.mark.parametrize("order", ["lars", "lamb"])
def test_fedlars_forgets_the_scale_of_the_gradients(order: str) -> None:
    """At lambda = 0 all gradients times c change nothing, layer by layer; with lambda they do."""
    grads, factors = vectors(4, seed=6), torch.ones(T.SIZE, dtype=torch.float64)
    for part, factor in zip(T.TENSORS, (5.0, 0.3, 1e4, 2.0), strict=True):
        factors[part] = factor
    for decay, is_free in ((0.0, True), (0.1, False)):
        algorithm = make("fedlars", {"order": order, "decay": decay})
        plain, scaled = (first_path(algorithm, vectors(seed=4), c * grads)[-1] for c in (1.0, factors))
        assert differ(scaled, plain) is not is_free
        if is_free:
            close(scaled, plain)


@pytest.mark.parametrize("order", ["lars", "lamb"])
@pytest.mark.parametrize("zero_norm", ["floor", "lamb", "literal"])
def test_no_step_of_fedlars_where_the_direction_is_zero(order: str, zero_norm: str) -> None:
    """A layer with gradient 0 does not move in its first round: 0, not 0/0."""
    x, grads = vectors(seed=4), vectors(3, seed=6)
    grads[:, T.TENSORS[2]] = 0.0
    end = first_path(make("fedlars", {"order": order, "zero_norm": zero_norm}), x, grads)[-1]
    assert torch.isfinite(end).all()
    assert [torch.equal(end[part], x[part]) for part in T.TENSORS] == [False, False, True, False]


@pytest.mark.parametrize("order", ["lars", "lamb"])
def test_fedlars_without_the_trust_ratio_is_sgd_with_momentum(order: str) -> None:
    grads, lr = vectors(4), 0.07
    path = first_path(LocalMomentum(order=order, beta1=0.8), torch.from_numpy(START), grads, lr)
    y, m = torch.from_numpy(START), torch.zeros(T.SIZE, dtype=torch.float64)
    for g, local in zip(grads, path[1:], strict=True):
        m = 0.8 * m + 0.2 * g
        y = y - lr * m
        close(local, y)
