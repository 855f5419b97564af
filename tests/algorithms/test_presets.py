"""Presets and defaults are those of the papers and of public code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lamina
import transcriptions as T  # noqa: N812
from given_rounds import history, rounds_of
from lamina.algorithms.declaration import options
from paper_problem import LAYERS, close, federate, infos, local_run, make, vectors

FEDADAM_PRESETS = {  # v_init, tau, beta1, beta2, eta_g (None: tuned)
    "reddi": (1e-3**2, 1e-3, 0.9, 0.99, None),
    "fedlamb_paper": (1e-6, 0.0, 0.9, 0.999, None),
    "fedlada_paper": (1e-2, 0.0, 0.9, 0.99, 0.1),
    "fl_simulator": (0.0, 1e-2, 0.9, 0.99, 0.1),
}
SERVER_CODES = {  # v_init, epsilon, beta_2, and t - r in the correction of the rate (None: no correction)
    ("fedadam", "google"): (0.0, 1e-3, 0.999, 0),
    ("fedadam", "tff"): (0.0, 1e-7, 0.999, 0),
    ("fedadam", "flower"): (0.0, 1e-3, 0.99, 1),
    ("fedyogi", "google"): (0.0, 1e-3, 0.999, 0),
    ("fedyogi", "tff"): (1e-6, 1e-3, 0.999, 0),
    ("fedyogi", "flower"): (0.0, 1e-3, 0.99, None),
}


@pytest.mark.parametrize("name", ["fedadam", "fedadam_star"])
@pytest.mark.parametrize("preset", FEDADAM_PRESETS)
def test_fedadam_presets(name: str, preset: str) -> None:
    """The table of presets, and the first server step they imply: D = .5 moves x by eta_g m / (sqrt(v) + tau).

    m = (1 - beta1) .5, v = beta2 v_init + (1 - beta2) .25; no bias correction.
    """
    v_init, tau, beta1, beta2, server_lr = FEDADAM_PRESETS[preset]
    algorithm = make(name, {"preset": preset})
    assert (algorithm.v_init, algorithm.tau) == pytest.approx((v_init, tau), rel=1e-15)
    assert (algorithm.beta1, algorithm.beta2) == (beta1, beta2)
    assert server_lr is None or algorithm.server_lr == server_lr
    x = vectors(seed=1)
    server = algorithm.init(x, LAYERS)
    up = local_run(algorithm, server, algorithm.client_init(x, LAYERS), vectors(1), infos(1, 0.1))[0]
    after = algorithm.update(server, up._replace(delta=torch.full_like(x, 0.5)), infos(1, 0.1)[0])
    step = algorithm.server_lr * (1 - beta1) * 0.5 / (np.sqrt(beta2 * v_init + (1 - beta2) * 0.25) + tau)
    close(after.x - x, np.full(T.SIZE, step), rtol=1e-9)


@pytest.mark.parametrize(("name", "preset"), SERVER_CODES)
def test_presets_of_adaptive_servers_are_the_codes_formulas(name: str, preset: str) -> None:
    """x + eta sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + epsilon), as Keras, TFF and Flower write it (C68)."""
    start, eps, beta2, shift = SERVER_CODES[name, preset]
    m, v = 0.0, torch.tensor(start)
    algorithm = make(name, {"preset": preset, "server_lr": 0.3})
    for r, (before, after, D) in enumerate(history(algorithm, rounds_of(1.0, 2.0, 0.5)), 1):
        m, square = m + (D - m) * (1 - 0.9), D**2
        v = v + (1 - beta2) * (square - v) if name == "fedadam" else v + (1 - beta2) * (square - v).sign() * square
        factor = 1.0 if shift is None else np.sqrt(1 - beta2 ** (r + shift)) / (1 - 0.9 ** (r + shift))
        close(after.x - before.x, 0.3 * factor * m / (v.sqrt() + eps), rtol=1e-9)


@pytest.mark.parametrize(("preset", "start", "eps"), [("google", 0.0, 1e-3), ("flower", 0.0, 1e-3), ("tff", 0.1, 1e-7)])
def test_presets_of_fedadagrad_are_the_codes_formulas(preset: str, start: float, eps: float) -> None:
    """TFF's and optax's epsilon is under the root, the others' beside it."""
    v = torch.tensor(start)
    for before, after, D in history(make("fedadagrad", {"preset": preset}), rounds_of(1.0, 2.0, 0.5)):
        v = v + D**2
        close(after.x - before.x, 0.1 * D / ((v + eps).sqrt() if preset == "tff" else v.sqrt() + eps), rtol=1e-7)


@pytest.mark.parametrize(("name", "preset"), [("fedadam", "reddi"), ("diloco", "opendiloco")])
def test_presets_that_are_the_defaults(name: str, preset: str) -> None:
    """FedAdam's defaults are Reddi et al.'s, with v_0 = tau^2; DiLoCo's are OpenDiLoCo's."""
    default, chosen = make(name), make(name, {"preset": preset})
    assert [getattr(default, n) for n in options(type(default))] == [getattr(chosen, n) for n in options(type(chosen))]
    assert name == "diloco" or default.v_init == pytest.approx(default.tau**2, rel=1e-12)


def test_defaults_of_the_cards() -> None:
    """Defaults as the cards give them."""
    assert lamina.FedProx().mu == 0.1
    assert lamina.FedCM().alpha == 0.1
    assert lamina.FedAvg().server_lr == 1.0
    assert make("fedavg", {"preset": "fedlada_paper"}).decay == 1e-3
    lada = lamina.FedLada()
    assert (lada.alpha, lada.beta1, lada.beta2, lada.server_lr) == (0.1, 0.9, 0.99, 1.0)
    assert (lada.v_init, lada.decay, lada.decay_form) == (pytest.approx(1e-16), 1e-2, "l2")
    assert (lada.card.lr, lamina.FedAvg().card.lr) == (1e-3, 0.1)
    assert [make("fedlada", {"preset": p}).alpha for p in ("cifar10", "cifar100", "tinyimagenet")] == [0.1, 0.05, 0.05]
    for fed in (lamina.FedAms(), lamina.FedLamb(), lamina.Mime(), lamina.MimeLamb()):
        assert (fed.beta1, fed.beta2, fed.v_init, fed.decay) == (0.9, 0.999, 1e-6, 0.0)
        assert (fed.momentum, fed.eps, fed.sync_every) == ("carry", 0.0, 1)
    assert (lamina.FedLamb().phi_min, lamina.FedLamb().layers, lamina.FedLamb().decay_form) == (1e-2, "tensor", "ratio")
    for name in ("fedams", "fedlamb"):
        authors = make(name, {"preset": "authors"})
        assert (authors.m_init, authors.v_init, authors.eps) == (1e-8, 1e-8, 1e-8)
        assert (authors.first_round, authors.v_seed, authors.second_moment) == ("running", "client", "frozen")


def test_fedadamw_vision_is_torchs_adam_with_a_counter_of_a_million() -> None:
    """Adam at rate .1 lr restarts each round from the mean v; every step adds .9 lr / K of the last mean displacement.

    No state is set in round 1, so that Adam corrects its moments there.
    """
    lr, steps = 0.05, 4
    algorithm = make("fedlada", {"preset": "fedadamw_vision"})
    server = algorithm.init(vectors(seed=3), LAYERS)
    x, v, last = vectors(seed=3), None, torch.zeros(T.SIZE)
    for r in range(1, 4):
        grads = vectors(2, steps, seed=10 + r)
        ends, moments = [], []
        for client_grads in grads:
            y = torch.nn.Parameter(x.clone())
            adam = torch.optim.Adam([y], lr=0.1 * lr, weight_decay=1e-3)
            if v is not None:
                start = {"exp_avg": torch.zeros_like(x), "exp_avg_sq": v.clone()}
                adam.state[y] = {"step": torch.tensor(1e6), **start}
            for g in client_grads:
                y.grad = g.clone()
                adam.step()
                y.data += 0.9 * lr / steps * last
            ends.append(y.detach())
            moments.append(adam.state[y]["exp_avg_sq"])
        v = torch.stack(moments).mean(0)
        x, last = torch.stack(ends).mean(0), (torch.stack(ends).mean(0) - x) / lr
        server = federate(algorithm, server, grads, infos(r, lr, steps))
        close(server.x, x)
        close(server.v, v)
