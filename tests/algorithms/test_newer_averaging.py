"""FedNova, FedExP, Scaffnew and FedLALR: reductions to other methods, limits on quadratics, and invariants."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.sgd import sgd

import lamina
import transcriptions as T  # noqa: N812
from given_rounds import ALONE, GRADIENT, history, rounds_of, rounds_of_one_client
from lamina import BadInput
from lamina.algorithms.contract import LocalModel, Model
from paper_problem import (
    CLIENTS,
    INPUTS,
    LABELS,
    LAYERS,
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
    vectors,
)
from quadratics import CENTRES, CURVATURES, OPTIMUM, STEPS, fixed_point, on_quadratics

EVERYONE: dict[str, Any] = {"participation": 1.0}
PRIVACY = {"bound": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}


# --- FedNova ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"weighting": "examples"}], ids=str)
def test_fednova_is_fedavg_if_all_clients_take_the_same_steps(settings: Any) -> None:
    """a_i = K: tau mean(delta_i / K) = mean delta_i."""
    shared = {"server_lr": 0.8, "decay": 0.2}
    fedavg = trajectory("fedavg", shared, local_steps=3, **settings)
    close(trajectory("fednova", shared, local_steps=3, **settings), fedavg)
    assert differ(trajectory("fednova", shared, **settings), trajectory("fedavg", shared, **settings))


def test_fednova_with_momentum_averages_if_all_clients_take_the_same_steps() -> None:
    """x+ - x = mean delta_i, and delta_i is that of torch's SGD with momentum."""
    algorithm, x = make("fednova", {"momentum": 0.8, "decay": 0.1}), vectors(seed=3)
    grads, info = vectors(3, 4, seed=6), infos(1, 0.07, 4.0)
    after = federate(algorithm, algorithm.init(x, LAYERS), grads, info)
    ends: list[Tensor] = []
    for given in grads:
        y, buffer = x.clone(), [None]
        for g in given:
            sgd([y], [g], buffer, weight_decay=0.1, momentum=0.8, lr=0.07, dampening=0, nesterov=False, maximize=False)
        ends.append(y)
    close(after.x, torch.stack(ends).mean(0))


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("given", [{}, {"momentum": 0.8}, {"mu": 0.5}], ids=str)
def test_fednovas_a_is_the_papers(given: Any, steps: int) -> None:
    """a = K; [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho); [1 - (1 - eta mu)^K] / (eta mu). And a d = y_K - x."""
    algorithm, lr = make("fednova", given), 0.07
    rho, shrink = given.get("momentum", 0.0), lr * given.get("mu", 0.0)
    expected = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    expected = (1 - (1 - shrink) ** steps) / shrink if shrink else expected
    server = algorithm.init(vectors(seed=3), LAYERS)
    client = algorithm.client_init(server.x, LAYERS)
    up, _, path = local_run(algorithm, server, client, vectors(steps, seed=6), infos(1, lr, steps))
    close(up.a, [expected])
    assert up.delta is None
    close(algorithm.displacement(up), path[-1] - server.x)
    if steps == 1:  # one step of SGD
        close(path[-1], server.x - lr * vectors(1, seed=6)[0])


def test_fednovas_a_is_the_weight_of_the_gradients() -> None:
    """With gradients g = 1 everywhere and no decay, x - y_K = eta a."""
    for given in ({}, {"momentum": 0.8}, {"mu": 0.5}):
        algorithm = make("fednova", given)
        server = algorithm.init(vectors(seed=3), LAYERS)
        up, _, path = local_run(algorithm, server, (), torch.ones(5, T.SIZE, dtype=torch.float64), infos(1, 0.07, 5))
        close(server.x - path[-1], 0.07 * up.a.expand(T.SIZE))
        close(up.d, np.full(T.SIZE, -0.07))


def test_fednovas_step_with_the_proximal_term_has_the_mean_number_of_steps() -> None:
    """tau = mean K_i, not mean a_i: with equal K_i, x+ - x = (K / a) mean delta_i."""
    grads, info, x = vectors(3, 4, seed=6), infos(1, 0.07, 4.0), vectors(seed=3)
    nova, prox = (make(*each) for each in (("fednova", {"mu": 2.0}), ("fedprox", {"mu": 2.0})))
    shrink = 0.07 * 2.0
    a = (1 - (1 - shrink) ** 4) / shrink
    moved = [federate(one, one.init(x, LAYERS), grads, info).x - x for one in (nova, prox)]
    close(moved[0], 4 / a * moved[1])


@pytest.mark.parametrize("given", [{}, {"momentum": 0.5}], ids=str)
def test_fednova_finds_the_optimum_of_clients_with_unequal_steps(given: Any) -> None:
    """As eta -> 0 its limit tends to the optimum, linearly; FedAvg's, where clients count K_i times, does not."""
    gaps = [float((fixed_point(make("fednova", given), lr) - OPTIMUM).norm()) for lr in (1e-3, 1e-4)]
    assert gaps[1] < 1e-3
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.05)
    x = fixed_point(make("fedavg"), 1e-5)
    weights = torch.tensor(STEPS, dtype=torch.float64)[:, None] * CURVATURES
    close(x, (weights * CENTRES).sum(0) / weights.sum(0), rtol=1e-3)
    assert float((x - OPTIMUM).norm()) > 0.4


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("settings", [{}, {"weighting": "examples"}, {"aggregation": "median"}], ids=str)
def test_fednova_measures_displacements_that_it_does_not_send(engine: str, settings: Any) -> None:
    """In round 1 clients move as FedAvg's do: mean ||y_K - x+||^2 = spread + ||D - (x+ - x)||^2, and D is FedAvg's."""
    runs = [simulate(make(name), engine, **settings) for name in ("fednova", "fedavg")]
    rows = [run.run(1)[-1] for run in runs]
    ends = [run.state.server.x for run in runs]
    if not settings.get("aggregation"):
        gap = float((ends[0] - ends[1]).square().sum())
        assert gap > 1e-6
        assert rows[0]["consistency"] == pytest.approx(rows[1]["consistency"] + gap, rel=1e-10)
    assert rows[0]["bytes_up"] == 3 * 8 * (T.SIZE + 1)
    assert rows[0]["bytes_down"] == 3 * 8 * T.SIZE


@pytest.mark.parametrize("settings", [{"weighting": "examples"}, {"aggregation": "median"}], ids=str)
def test_fednova_in_both_engines_with_other_means(settings: Any) -> None:
    runs = [simulate(make("fednova", {"momentum": 0.5}), engine, **settings) for engine in ("loop", "stacked")]
    rows = [run.run(3)[-1] for run in runs]
    close(runs[1].state.server.x, runs[0].state.server.x)
    assert rows[1]["consistency"] == pytest.approx(rows[0]["consistency"], rel=1e-9)


def test_fednova_with_and_without_momentum_and_the_proximal_term_side_by_side() -> None:
    """A population computes with one option of each kind per member; each ends as if it ran alone."""
    given: list[dict[str, Any]] = [{}, {"momentum": 0.9}, {"mu": 0.3, "decay": 0.1}]
    together = lamina.Population([simulate(make("fednova", one), "stacked", seed=4) for one in given])
    together.run(2)
    for one, member in zip(given, together.simulations, strict=True):
        alone = simulate(make("fednova", one), seed=4)
        row = alone.run(2)[-1]
        close(member.state.server.x, alone.state.server.x)
        assert member.history[-1]["consistency"] == pytest.approx(row["consistency"], rel=1e-9)


def test_fednova_refuses_what_it_does_not_define() -> None:
    with pytest.raises(BadInput, match=r"^privacy: a bound is for displacements y_K - x, which FedNova does"):
        simulate(make("fednova"), local_steps=2, privacy=PRIVACY)


# --- FedExP -------------------------------------------------------------------------------------------------------


def fedexp_step(deltas: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Return x+ - x for displacements [clients, p], and their mean."""
    algorithm, info = make("fedexp", given), infos(2, 0.1)
    after = federate(algorithm, algorithm.init(vectors(seed=3), LAYERS), -10 * deltas.unsqueeze(1), info)
    return after.x - vectors(seed=3), deltas.mean(0)


def test_fedexp_is_fedavg_where_clients_agree() -> None:
    """One client, or the same displacement of all: mean ||delta_i||^2 = ||D||^2, so eta_g = max(1, 1/2) = 1."""
    shared = {"decay": 0.2}
    close(trajectory("fedexp", shared, **ALONE), trajectory("fedavg", shared, **ALONE))
    moved, mean = fedexp_step(vectors(seed=6).expand(3, -1))
    close(moved, mean)


@pytest.mark.parametrize("clients", [2, 4, 6])
def test_fedexp_steps_further_where_clients_are_orthogonal(clients: int) -> None:
    """M orthonormal displacements: mean ||delta_i||^2 = 1 and ||D||^2 = 1 / M, so eta_g = M / 2 at epsilon = 0."""
    deltas = torch.linalg.qr(vectors(clients, seed=6).T)[0].T
    moved, mean = fedexp_step(deltas, eps=0.0)
    close(moved, clients / 2 * mean)
    moved, mean = fedexp_step(deltas, eps=0.3, eps_decay=0.5)  # in round 2
    close(moved, max(1.0, 1 / (2 * (1 / clients + 0.3 / 4))) * mean)


def test_fedexp_at_epsilon_zero_forgets_the_scale() -> None:
    deltas = vectors(4, seed=6)
    close(fedexp_step(1e3 * deltas, eps=0.0)[0], 1e3 * fedexp_step(deltas, eps=0.0)[0])
    assert differ(fedexp_step(deltas, eps=1.0)[0], fedexp_step(deltas, eps=0.0)[0])


@pytest.mark.parametrize("preset", [None, "authors"])
def test_fedexp_never_steps_less_far_than_fedavg(preset: str | None) -> None:
    algorithm = make("fedexp", {"preset": preset} if preset else {})
    for before, after, D in history(algorithm, rounds_of(1.0, 3.0, 0.2)):
        eta = (after.x - before.x) / D
        assert float(eta.min()) >= 1 - 1e-12
        close(eta, eta.mean().expand(T.SIZE), rtol=1e-9)


def test_fedexps_preset_has_the_codes_epsilon() -> None:
    """5 clients * 1e-3 * (0.998 * 0.998)^r in round r (C27)."""
    algorithm = make("fedexp", {"preset": "authors"})
    assert algorithm.eps * algorithm.eps_decay**3 == pytest.approx(5 * 1e-3 * 0.998**6, rel=1e-14)


def test_fedexp_stays_where_nobody_moves() -> None:
    """0 / 0 at epsilon = 0; and D = 0 of clients that move: no NaN."""
    moved, _ = fedexp_step(torch.zeros(2, T.SIZE, dtype=torch.float64), eps=0.0)
    assert (moved == 0).all()
    algorithm, nobody = make("fedexp", {"eps": 0.0}), torch.zeros(T.SIZE, dtype=torch.float64)
    server, (_, info) = algorithm.init(vectors(seed=3), LAYERS), infos(2, 0.1)
    opposite = algorithm.finish(LocalModel(nobody + 1), Model(nobody), (), info)[0]._replace(delta=nobody)
    assert torch.equal(algorithm.update(server, opposite, infos(2, 0.1)[0]).x, server.x)


def test_fedexp_trains_and_evaluates_two_models() -> None:
    """Evaluated, saved and returned is the mean of the last two models; clients train from the last one (C29)."""
    simulation = simulate(make("fedexp"), test=(torch.from_numpy(INPUTS), torch.from_numpy(LABELS)))
    start = {name: value.clone() for name, value in simulation.model.state_dict().items()}
    close(LAYERS.flatten(start), START)
    before = simulation.state.server.x
    for _ in range(2):
        row = simulation.run(1)[-1]
        x = simulation.state.server.x
        mean = (before + x) / 2
        close(LAYERS.flatten(simulation.model.state_dict()), mean)
        assert simulation.evaluate()["loss"] == row["loss"]
        with torch.no_grad():
            outputs = simulation.model(torch.from_numpy(INPUTS))
        loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(LABELS))
        assert row["loss"] == pytest.approx(float(loss))
        assert differ(mean, x)
        before = x


def test_fedexp_ignores_private_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """eta_g follows from the shared parameters alone, however far private ones move."""
    run = simulate(make("fedexp", {"eps": 0.0}), private=["fc2.*"])
    means, update = [], lamina.FedExp.update

    def noting(self: Any, server: Any, up: Any, info: Any) -> Any:
        means.append(up)
        return update(self, server, up, info)

    monkeypatch.setattr(lamina.FedExp, "update", noting)
    before = run.state.server.x
    run.run(1)
    up = means[-1]  # after those of the clients' private parts
    assert up.squared_norm.shape == (2,)
    assert up.delta.shape == before.shape
    eta = max(1.0, float(up.squared_norm.sum()) / (2 * float((up.delta**2).sum())))
    assert eta > 1
    close(run.state.server.x - before, eta * up.delta)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("channel", {"channel": "qsgd"}),
        ("channel", {"channel": {"down": "bf16"}}),
        ("aggregation", {"aggregation": "median"}),
        ("privacy", {"privacy": PRIVACY, "local_steps": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["fedexp", "scaffnew"])
def test_methods_that_need_the_mean_of_what_clients_computed(algorithm: str, name: str, more: Any) -> None:
    text = rf"^{name}: \w+ needs the mean of the uploads as they were computed: leave {name} out"
    with pytest.raises(BadInput, match=text):
        simulate(make(algorithm), **more)


# --- FedDyn -------------------------------------------------------------------------------------------------------


def test_feddyn_evaluates_the_mean_of_the_rounds_local_models_if_asked_to() -> None:
    """x+ - q+ = x + mean delta; the trajectory is the same (C21)."""
    runs = [simulate(make("feddyn", {"evaluate": which})) for which in ("server", "clients")]
    for run in runs:
        run.run(1)
    before = runs[1].state.server
    for run in runs:
        run.run(1)
    after = runs[1].state.server
    assert torch.equal(runs[0].state.server.x, after.x)
    displacement = after.x - before.x - after.q
    trained = [LAYERS.flatten(run.model.state_dict()) for run in runs]
    close(trained[0], after.x)
    close(trained[1], before.x + displacement)
    assert differ(*trained)


# --- Scaffnew -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"weighting": "examples"}, {"local_steps": 2}], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_scaffnews_control_variates_sum_to_zero(p: float, settings: Any) -> None:
    """After every broadcast sum_i w_i h_i = sum_i w_i (h_i + p / eta (x - y_i)) = 0, also for unequal K_i."""
    simulation = simulate(make("scaffnew", {"p": p, "decay": 0.1}), **EVERYONE, **settings)
    by_examples = settings.get("weighting") == "examples"
    for _ in range(4):
        row = simulation.run(1)[-1]
        server, clients = simulation.state.server, simulation.state.clients
        assert p in (0.0, float(server.p))
        h = [c.h + server.p * c.inverse_lr * (server.x - c.y) for c in (clients[i] for i in range(len(CLIENTS)))]
        close(clients[0].inverse_lr, [1 / row["lr"]])
        weights = [len(part) if by_examples else 1.0 for part in CLIENTS]
        total = sum(w * one for w, one in zip(weights, h, strict=True))
        largest = max(float(one.abs().max()) for one in h)
        assert largest > 1e-3
        assert float(torch.as_tensor(total).abs().max()) < 1e-10 * largest


def test_scaffnews_p_is_one_by_the_mean_number_of_steps() -> None:
    """K_i = 2, 3, 1, 3, 2: their mean is 2.2."""
    simulation = simulate(make("scaffnew"), **EVERYONE)
    assert float(simulation.state.server.p) == 0.0
    simulation.run(1)
    close(simulation.state.server.p, [1 / 2.2])


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_scaffnew_is_scaffold_at_half_the_messages(decay: float) -> None:
    """All clients, K_i = K and p = 1 / K: h_i = c_i - c, so x is the same in every round; also with a schedule."""
    settings = {"local_steps": 3, **EVERYONE}
    scaffold = trajectory("scaffold", {"decay": decay}, 5, **settings)
    close(trajectory("scaffnew", {"decay": decay}, 5, **settings), scaffold)
    assert differ(trajectory("scaffnew", {"decay": decay, "p": 0.1}, 5, **settings), scaffold)
    rows = [simulate(make(name), **settings).run(1)[-1] for name in ("scaffnew", "scaffold")]
    assert rows[0]["bytes_up"] * 2 == rows[1]["bytes_up"]


def test_scaffnew_with_one_step_is_sgd() -> None:
    """K = 1 and p = 1: x+ = x - eta mean g_i, because the h_i sum to 0. So is round 1 FedAvg, with any K_i."""
    one_step = {"local_steps": 1, **EVERYONE}
    close(trajectory("scaffnew", {}, 4, **one_step), trajectory("fedavg", {}, 4, **one_step))
    new, avg = (trajectory(name, {}, 2, **EVERYONE) for name in ("scaffnew", "fedavg"))
    close(new[0], avg[0])
    assert differ(new[1], avg[1])


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_scaffnew_finds_the_optimum_of_clients_with_unequal_steps(p: float) -> None:
    """And h_i = grad F_i(x*): a common p, whatever K_i are (C62). FedAvg ends elsewhere."""
    algorithm = make("scaffnew", {"p": p})
    x, clients = on_quadratics(algorithm, 0.3, 80)
    assert float((x - OPTIMUM).norm()) < 1e-6
    for client, a, c in zip(clients, CURVATURES, CENTRES, strict=True):
        close(client.h, a * (OPTIMUM - c), rtol=1e-5)
    assert float((fixed_point(make("fedavg"), 0.3) - OPTIMUM).norm()) > 1e-2


def test_scaffnew_with_one_client_is_sgd_without_interruption() -> None:
    """x+ = y_K, so h = 0 for ever."""
    simulation = simulate(make("scaffnew", {"decay": 0.1}), **ALONE)
    theta = START.copy()
    for lr, batches in rounds_of_one_client(simulation, 3):
        for batch in batches:
            theta = theta - lr * (GRADIENT(theta, batch) + 0.1 * theta)
        close(simulation.state.server.x, theta)
        assert float(simulation.state.clients[0].h.abs().max()) < 1e-12


def test_scaffnew_warns_of_smaller_cohorts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lamina"):
        simulate(make("scaffnew"), **EVERYONE)
        assert not caplog.messages
        simulate(make("scaffnew"))
    assert [m for m in caplog.messages if m.startswith("Scaffnew needs all clients in every round")]


# --- FedLALR ------------------------------------------------------------------------------------------------------


def test_fedlalr_starts_rounds_where_fedlada_without_a_global_direction_does() -> None:
    """FedLADA with alpha = 1 restarts m in every round: the same in round 1, another method from round 2 on."""
    shared = {"v_init": 1e-16, "beta2": 0.995, "decay": 0.0}
    x, grads = vectors(seed=4), vectors(4, seed=6)
    paths = [
        first_path(make(*each), x, grads)[-1]
        for each in (("fedams", {"preset": "fedlalr"}), ("fedlada", {"alpha": 1.0, **shared}))
    ]
    close(*paths)
    found = [trajectory(n, g, 2) for n, g in (("fedams", {"preset": "fedlalr"}), ("fedlada", {"alpha": 1.0, **shared}))]
    assert differ(*found)
