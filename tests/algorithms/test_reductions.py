"""Reductions: with one option set, an algorithm is another one. Both trajectories come from the library."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.algorithms.fedlamb import Layerwise
from paper_problem import CLIENTS, DECAYS, LADA, LR, close, differ, make, simulate, trajectory


@pytest.mark.parametrize(
    ("name", "reduced", "other"),
    [
        ("fedprox", {"mu": 0.0}, {"mu": 0.1}),
        ("fedcm", {"alpha": 1.0}, {"alpha": 0.5}),
        ("scaffold", {"scale": 0.0}, {"scale": 0.5}),
        ("scaffold", {"scale": 0.0, "control": "literal"}, {"scale": 0.5, "control": "literal"}),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"clip": 0.15, "weighting": "examples"}], ids=str)
def test_reduction_to_fedavg(name: str, reduced: Any, other: Any, settings: Any) -> None:
    """FedProx adds mu (y - x), FedCM mixes in (1 - alpha) Delta, SCAFFOLD adds s (c - c_i): each term vanishes."""
    shared = {"server_lr": 0.8, "decay": 0.2 if settings else 0.0}
    fedavg = trajectory("fedavg", shared, **settings)
    close(trajectory(name, shared | reduced, **settings), fedavg)
    assert differ(trajectory(name, shared | other, **settings), fedavg)


ADAM: list[dict[str, Any]] = [{}, {"preset": "authors"}, {"bias_correction": True, "amsgrad": True, "decay": 0.2}]


@pytest.mark.parametrize("given", ADAM, ids=str)
def test_fedadam_star_without_amendment_is_fedadam(given: Any) -> None:
    """alpha = 1: the clients' mix alpha g + (1 - alpha) Delta is g, the servers are the same."""
    fedadam = trajectory("fedadam", given)
    close(trajectory("fedadam_star", given | {"alpha": 1.0}), fedadam)
    assert differ(trajectory("fedadam_star", given | {"alpha": 0.5}), fedadam)


CODES: list[dict[str, Any]] = [
    {"amsgrad": False, "eps": 1e-3, "moment_correction": "m"},
    {"moment_correction": "first_round"},
]


@pytest.mark.parametrize("given", [*LADA, *DECAYS, *CODES], ids=str)
def test_fedlada_without_amendment_is_localadam(given: Any) -> None:
    """alpha = 1: the step alpha m / sqrt(v_hat) + (1 - alpha) g_a has no g_a, and g_a's start needs no correction."""
    localadam = trajectory("localadam", given)
    close(trajectory("fedlada", given | {"alpha": 1.0}), localadam)
    close(trajectory("fedlada", given | {"alpha": 1.0, "ga_correction": True}), localadam)
    assert differ(trajectory("fedlada", given | {"alpha": 0.5}), localadam)


@pytest.mark.parametrize("decay", [{"decay": 0.0}, *DECAYS], ids=str)
def test_fedlada_with_identity_preconditioner_is_fedcm(decay: Any) -> None:
    """v_init = 1 and beta2 = 1 keep v = v_hat = 1; beta1 = 0 gives m_k = g_k; so the step is alpha g + (1 - alpha) g_a.

    g_a+ = (x - x+) / (eta_g eta_l K) = -mean Delta / (eta_l K), FedCM's Delta+.
    """
    shared = {"alpha": 0.3, "server_lr": 0.7} | decay
    fedcm = trajectory("fedcm", shared, lr=0.1)
    identity = {"beta1": 0.0, "beta2": 1.0, "v_init": 1.0}
    close(trajectory("fedlada", shared | identity, lr=0.1), fedcm)
    assert differ(trajectory("fedlada", shared | identity | {"v_init": 0.9}, lr=0.1), fedcm)


FED: list[dict[str, Any]] = [
    {"preset": "authors"},
    {"sync_every": 2, "beta2": 0.9, "momentum": "average"},
    {"second_moment": "running", "v_seed": "client"},
]
MIME: list[dict[str, Any]] = [{"preset": "mime"}, {"sync_every": 2, "momentum": "restart"}]


@pytest.mark.parametrize(
    ("layerwise", "plain", "given"),
    [("fedlamb", "fedams", g) for g in ({}, *FED, *DECAYS)]
    + [("mimelamb", "mime", g) for g in ({}, *MIME, *DECAYS)]
    + [("fedlada_lamb", "fedlada", {"decay": 0.0} | g) for g in (*LADA, *DECAYS, *CODES)],
    ids=str,
)
def test_without_the_trust_ratio(layerwise: str, plain: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without phi(||y||) / ||u|| the step is eta_l u, and u = m / sqrt(v_hat) at lambda = 0 (or lambda outside u)."""
    expected = trajectory(plain, given, lr=LR[plain])
    algorithm = make(layerwise, {"decay_form": "l2"} | given)
    scaled = simulate(algorithm, lr=LR[plain])
    scaled.run(1)
    assert differ(scaled.state.server.x, expected[0])
    monkeypatch.setattr(Layerwise, "rescale", lambda self, psi, y, layers: (psi, self.ratios(y, psi, layers)))
    unscaled = simulate(algorithm, lr=LR[plain])
    for x in expected:
        unscaled.run(1)
        close(unscaled.state.server.x, x)


@pytest.mark.parametrize("given", [{}, {"second_moment": "running"}, {"v_seed": "client"}], ids=str)
def test_a_single_client_shares_its_second_moment_with_nobody(given: Any) -> None:
    """N = 1: the mean of the clients' v_K is the client's own, so v_hat_i = v_hat (A17)."""
    settings = {"clients": CLIENTS[1:2], "participation": 1.0}
    shared, separate = (trajectory("fedlamb", given | {"sync": sync}, 4, **settings) for sync in (True, False))
    close(separate, shared)
    assert differ(trajectory("fedlamb", given | {"sync": False}, 4), trajectory("fedlamb", given, 4))


@pytest.mark.parametrize("name", ["fedams", "fedlamb", "mime", "mimelamb"])
def test_lazy_second_moment_changes_only_at_synchronisation(name: str) -> None:
    """Z = 3: after rounds 1 and 2, v_hat = v_init; after round 3 it is the mean or max of that round; then it rests."""
    simulation = simulate(make(name, {"sync_every": 3}))
    seen = []
    for _ in range(7):
        simulation.run(1)
        seen.append(simulation.state.server.v_hat.numpy().copy())
    assert (seen[0] == 1e-6).all()
    assert (seen[1] == 1e-6).all()
    assert (seen[2] > 1e-6).any()
    assert (seen[3] == seen[2]).all()
    assert (seen[4] == seen[2]).all()
    assert (seen[5] > seen[4]).any()
    assert (seen[6] == seen[5]).all()


def test_fedlada_round_one_is_localadam_at_a_smaller_rate() -> None:
    """g_a = 0 in round 1, so its step is (alpha eta_l) m / sqrt(v_hat): with alpha = .1, eta_l = .05 a rate of .005."""
    close(trajectory("fedlada", {"alpha": 0.1}, 1, lr=0.05), trajectory("localadam", {}, 1, lr=0.005))
    assert differ(trajectory("fedlada", {"alpha": 0.1}, 2, lr=0.05), trajectory("localadam", {}, 2, lr=0.005))


def test_with_its_start_corrected_fedladas_round_one_is_localadams() -> None:
    """alpha_1 = alpha / (1 - (1 - alpha)) = 1, also for an alpha that 1 - alpha would round away."""
    localadam = trajectory("localadam", {}, 1, lr=0.05)
    for alpha in (0.1, 1e-20):
        close(trajectory("fedlada", {"alpha": alpha, "ga_correction": True}, 1, lr=0.05), localadam)
    assert differ(trajectory("fedlada", {"alpha": 0.1}, 1, lr=0.05), localadam)


def test_a_corrected_momentum_after_one_step_is_the_gradient() -> None:
    """K = 1: m / (1 - beta1) = g, as with beta1 = 0. With more steps m also holds the earlier gradients."""
    corrected = {"moment_correction": "m"}
    close(trajectory("fedlada", corrected, batch_size=64), trajectory("fedlada", {"beta1": 0.0}, batch_size=64))
    assert differ(trajectory("fedlada", corrected), trajectory("fedlada", {"beta1": 0.0}))
    close(trajectory("fedlada", corrected | {"beta1": 0.0}), trajectory("fedlada", {"beta1": 0.0}))


def test_a_correction_of_the_first_round_changes_the_first_round_only() -> None:
    """From the same server's state, round 2 is that of plain FedLADA."""
    plain, corrected = (simulate(make("fedlada", given)) for given in ({}, {"moment_correction": "first_round"}))
    plain.run(1)
    corrected.run(1)
    assert differ(corrected.state.server.x, plain.state.server.x)
    corrected.state = plain.state
    plain.run(1)
    corrected.run(1)
    close(corrected.state.server.x, plain.state.server.x)


def test_without_the_running_maximum_a_fixed_second_moment_is_the_same() -> None:
    """beta2 = 1: v = v_hat = v_init for ever."""
    fixed = {"beta2": 1.0, "v_init": 1e-2}
    close(trajectory("fedlada", fixed | {"amsgrad": False}), trajectory("fedlada", fixed))
    falling = {"beta2": 0.5, "v_init": 1e-2}
    assert differ(trajectory("fedlada", falling | {"amsgrad": False}), trajectory("fedlada", falling))


@pytest.mark.parametrize(("name", "frozen"), [("fedlamb", True), ("mimelamb", True), ("fedams", False)])
def test_layerwise_methods_are_scale_free_in_round_one(name: str, frozen: bool) -> None:
    """v_hat = epsilon in round 1: u / ||u|| does not depend on epsilon; Fed-AMS's step is proportional to its -1/2."""
    paths = [trajectory(name, {"v_init": v}, 1) for v in (1e-8, 1e-2)]
    assert differ(paths[0], paths[1]) is not frozen
