"""The reference engine against the papers: numpy transcriptions, reductions, invariants, bytes.

Everything expected here is computed in `transcriptions` or in the test itself; only the round plan is shared.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

import lamina
import lamina.plan
import transcriptions as T  # noqa: N812
from lamina import algorithms, ledger
from lamina.algorithms.contract import ClientInfo, ServerInfo, options

NAMES = tuple(T.ALL)
SIZES = (7, 12, 3, 9, 5)  # ragged: with batches of 4 and 2 epochs, K = 4, 6, 2, 6, 4
CLIENTS = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
INPUTS = np.random.default_rng(7).normal(size=(sum(SIZES), T.INPUTS))
LABELS = np.random.default_rng(8).integers(0, T.CLASSES, sum(SIZES))
TRAIN = (torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
START = T.start_vector()
LR = dict.fromkeys(("fedams", "mime"), 5e-4) | dict.fromkeys(("localadam", "fedlada"), 0.01)
LR |= dict.fromkeys(("fedlamb", "mimelamb", "fedlada_lamb"), 0.03)
WIRE = T.SIZE * 8  # bytes of one float64 vector


def make(name: str, given: dict[str, Any] | None = None) -> Any:
    given = dict(given or {})
    return algorithms.create(name, preset=given.pop("preset", None), **given)


def simulate(algorithm: Any, **settings: Any) -> lamina.Simulation:
    name = algorithm.card.name
    settings = {
        "clients": CLIENTS,
        "participation": 0.6,
        "batch_size": 4,
        "epochs": 2,
        "lr": LR.get(name, 0.1),
        "schedule": lamina.schedules.Exponential(0.9),
        "seed": 3,
        "device": "cpu",
    } | settings
    if "local_steps" in settings:
        del settings["epochs"]
    return lamina.Simulation(T.Network(START), TRAIN, algorithm, **settings)


def transcribe(
    simulation: lamina.Simulation, rounds: int, override: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """The transcription's records over the same plan."""
    algorithm = simulation.algorithm
    chosen = {n: getattr(algorithm, n) for n in options(type(algorithm))} | (override or {})
    gradient = T.Gradient(INPUTS, LABELS, settings.get("clip") or np.inf)
    plans = [simulation.plan.round(r) for r in range(1, rounds + 1)]
    by_examples = settings.get("weighting") == "examples"
    return T.ALL[algorithm.card.name](START, plans, gradient, by_examples=by_examples, **chosen)


def close(got: Any, want: Any, what: str = "", rtol: float = 1e-10) -> None:
    got, want = np.asarray(got, dtype=float), np.asarray(want, dtype=float)
    scale = np.abs(want).max() if want.size else 0.0
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=rtol, atol=rtol * scale, err_msg=what)


def differ(a: Any, b: Any, least: float = 1e-7) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return bool(np.abs(a - b).max() > least * np.abs(b).max())


def trajectory(algorithm: Any, rounds: int = 3, **settings: Any) -> np.ndarray:
    """x after every round, from the library: [rounds, p]."""
    simulation = simulate(algorithm, **settings)
    path = []
    for _ in range(rounds):
        simulation.run(1)
        path.append(simulation.state.server.x.numpy().copy())
    return np.stack(path)


# --- 1. every algorithm and option against its transcription -----------------------------------------------------

DECAY = {"decay": 0.2}  # plain SGD: L2 and decoupled decay are the same step
DECAYS = [{**DECAY, "decay_form": form} for form in ("l2", "decoupled")]
MOMENTS: list[dict[str, Any]] = [  # options that Fed-AMS, Fed-LAMB, Mime and Mime-LAMB share
    {"v_init": 1e-4},
    {"m_init": 0.01},
    {"eps": 1e-3},
    {"beta1": 0.5, "beta2": 0.7},
    {"server_lr": 0.7},
    {"momentum": "restart"},
    {"momentum": "restart", "m_init": 0.01},
    {"momentum": "average"},
    {"momentum": "average", "m_init": 0.01},
    {"bias_correction": True, "decay": 0.2},  # the decay lets the size of m / sqrt(v) matter in the layer-wise methods
    {"bias_correction": True, "decay": 0.2, "momentum": "restart"},
    {"bias_correction": True, "decay": 0.2, "momentum": "average"},
    {"sync_every": 2},
    {"sync_every": 3},
    {"sync_every": 3, "momentum": "average"},
]
FED: list[dict[str, Any]] = [
    *MOMENTS,
    {"second_moment": "running"},
    {"second_moment": "running", "beta2": 0.6},
    {"second_moment": "running", "beta2": 0.6, "v_seed": "client"},
    {"second_moment": "running", "bias_correction": True, "decay": 0.2},
    {"second_moment": "running", "bias_correction": True, "decay": 0.2, "momentum": "average", "v_seed": "client"},
    {"first_round": "running", "bias_correction": True, "decay": 0.2, "v_seed": "client"},
    {"bias_correction": True, "decay": 0.2, "sync_every": 3, "lazy": "accumulate", "beta2": 0.9},
    {"first_round": "running"},
    {"first_round": "running", "v_seed": "client", "eps": 1e-8},
    {"v_seed": "client"},
    {"v_seed": "client", "beta2": 0.7, "sync_every": 2},
    {"sync_every": 2, "lazy": "accumulate", "beta2": 0.9},
    {"sync_every": 3, "lazy": "accumulate", "beta2": 0.9},
    {"sync_every": 3, "lazy": "accumulate", "second_moment": "running", "beta2": 0.9},
    {"preset": "authors"},
]
MIME: list[dict[str, Any]] = [
    *MOMENTS,
    {"amsgrad": False},
    {"amsgrad": False, "beta2": 0.7},
    {"momentum": "server"},
    {"momentum": "server", "m_init": 0.01},
    {"momentum": "server", "sync_every": 2},
    {"control_variate": True},
    {"control_variate": True, "momentum": "average"},
    {"control_variate": True, "momentum": "restart"},
    {"control_variate": True, "decay": 0.2, "decay_form": "l2"},
    {"preset": "mime"},
    {"preset": "mime", "beta2": 0.9},
    {"preset": "mimelite"},
]
LAYERWISE: list[dict[str, Any]] = [
    {"phi_min": 0.0},
    {"phi_min": 0.5},
    {"phi_min": 3.0},
    {"phi_max": 0.7},
    {"zero_norm": "lamb"},
    {"zero_norm": "lamb", "phi_max": 0.7},
    {"zero_norm": "literal"},
    {"layers": "module", "phi_min": 3.0},
    {"layers": "module"},
    {"layers": "module", "decay": 0.2, "decay_on": "matrices"},
    {"decay": 0.2},
    {"decay": 0.2, "decay_on": "matrices"},
    *DECAYS,
    {"trust_ratio": False, "decay": 0.2},
]
ADAM: list[dict[str, Any]] = [
    *[{"preset": p} for p in ("reddi", "fedlamb_paper", "fedlada_paper", "fl_simulator", "authors")],
    {"amsgrad": True, "beta2": 0.3},
    {"bias_correction": True},
    {"bias_correction": True, "amsgrad": True, "beta2": 0.3, "v_init": 0.0},
    {"root_eps": 1e-4, "tau": 0.0},
    {"v_init": 1e-2, "server_lr": 0.3, "beta1": 0.4},
    DECAY,
]
LADA: list[dict[str, Any]] = [{"v_seed": "zero"}, {"v_init": 1e-4}, {"beta1": 0.5, "beta2": 0.7}, {"server_lr": 0.6}]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"server_lr": 0.7}, DECAY, {"preset": "fedlada_paper"}],
    "fedprox": [{"mu": 1.5}, {"mu": 0.5, "server_lr": 0.7}, DECAY],
    "scaffold": [
        {"server_lr": 0.7},
        *[{"scale": s} for s in (0.0, 0.25, 0.5, 0.75, 1.25, 1.5)],
        *[{"scale": s, "control": "literal"} for s in (0.5, 1.5)],
        DECAY,
        {"scale": 0.5, "server_lr": 0.7, "decay": 0.2},
    ],
    "fedcm": [
        {"alpha": 0.5, "server_lr": 0.7},
        {"alpha": 1.0},
        {"clip_mix": 0.05},
        *DECAYS,
        {"preset": "fl_simulator"},
        {"preset": "fl_simulator", "clip_mix": 0.05, "decay": 0.2},
        {"clip_mix": 0.05, "decay": 0.2, "decay_form": "l2"},
    ],
    "fedadam": ADAM,
    "fedadam_star": [*ADAM, *DECAYS, {"alpha": 0.5}],
    "localadam": [
        *LADA,
        *DECAYS,
        *[
            {"sync": s, "amsgrad": a, "v_seed": v, "v_init": 1e-4}
            for s, a, v in itertools.product((True, False), (True, False), ("server", "zero"))
            if a or v == "server"  # otherwise the server's v is never used
        ],
        {"amsgrad": False, "v_seed": "zero"},
        {"sync": False, "v_init": 1e-4},
        {"decay": 0.0},
    ],
    "fedlada": [
        *LADA,
        *DECAYS,
        {"alpha": 0.5},
        {"amendment": "per_client"},
        {"amendment": "per_client", "server_lr": 0.6, "alpha": 0.3, "v_seed": "zero"},
        {"preset": "cifar100"},
        {"decay": 0.0},
    ],
    "fedlada_lamb": [*LADA, *LAYERWISE, {"alpha": 0.5}, {"alpha": 0.5, "decay": 0.2, "layers": "module"}],
    "fedams": [*FED, *DECAYS],
    "fedlamb": [*FED, *LAYERWISE, {"layers": "module", "decay": 0.1, "sync_every": 2, "lazy": "accumulate"}],
    "mime": [*MIME, *DECAYS],
    "mimelamb": [*MIME, *LAYERWISE, {"preset": "mime", "layers": "module", "decay": 0.1}],
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weighting": "examples"},
    {"clip": 0.15},
    {"local_steps": 3},
    {"participation": 1.0},
    {"sampling": "bernoulli", "participation": 0.5},
]
CASES = [(name, {}, settings) for name in NAMES for settings in SETTINGS]
CASES += [(name, given, {}) for name in NAMES for given in OPTIONS[name]]
CASES += [
    ("fedlada", {"amendment": "per_client"}, {"weighting": "examples"}),
    ("fedprox", {"mu": 0.5, "decay": 0.2}, {"clip": 0.15}),
    ("fedcm", {"clip_mix": 0.05, "decay": 0.2}, {"clip": 0.1}),
    ("fedlamb", {"decay": 0.2, "decay_form": "l2"}, {"clip": 0.15}),
    ("mime", {"preset": "mime"}, {"weighting": "examples"}),
]


def label(case: Any) -> str:
    name, given, settings = case
    return "-".join([name, *(f"{k}={v}" for k, v in (given | settings).items())])


def length(given: dict[str, Any]) -> int:
    """Rounds to run: enough for two synchronisations, and for clients to miss one."""
    return 8 if given.get("sync_every", 1) > 1 else 4


@pytest.mark.parametrize("case", CASES, ids=label)
def test_library_follows_the_pseudo_code(case: Any) -> None:
    """Server and client states equal the transcription's after every round."""
    name, given, settings = case
    simulation = simulate(make(name, given), **settings)
    for record in transcribe(simulation, length(given), **settings):
        simulation.run(1)
        at = f"round {simulation.state.round}, "
        for field, want in record.server.items():
            close(getattr(simulation.state.server, field), want, at + field)
        for i, client in record.clients.items():
            for field, want in client.items():
                close(getattr(simulation.state.clients[i], field), want, f"{at}client {i}, {field}")


NO_EFFECT = {  # options that cannot matter in their case
    ("fedcm", "clip_mix", 10.0),  # the preset's ceiling is above every direction here
}


@pytest.mark.parametrize("case", [c for c in CASES if c[1]], ids=label)
def test_every_option_of_a_case_matters(case: Any) -> None:
    """The comparison above can fail: with any one of the case's options left out, the expected x is another one."""
    name, given, settings = case
    rounds, algorithm = length(given), make(name, given)
    simulation = simulate(algorithm, **settings)
    default = make(name)
    *_, last = transcribe(simulation, rounds, **settings)
    changed = [n for n in options(type(algorithm)) if getattr(algorithm, n) != getattr(default, n)]
    assert changed or given == {"preset": "reddi"}
    for option in changed:
        if (name, option, getattr(algorithm, option)) in NO_EFFECT:
            continue
        *_, other = transcribe(simulation, rounds, {option: getattr(default, option)}, **settings)
        assert differ(other.server["x"], last.server["x"], 1e-9), f"{option} has no effect in this case"


def test_the_plan_keeps_the_rules() -> None:
    """K_i = epochs * ceil(n_i / B), every pass holds each sample once, the last short batch is kept; |S| = round(C N).

    n = 7, 12, 3, 9, 5 with B = 4 and 2 epochs: K = 2 * (2, 3, 1, 3, 2).
    """
    plan = simulate(lamina.FedAvg()).plan
    expected = dict(enumerate((4, 6, 2, 6, 4)))
    for r in range(1, 9):
        rnd = plan.round(r)
        assert len(rnd.cohort) == 3
        assert rnd.lr == pytest.approx(0.1 * 0.9 ** (r - 1), rel=1e-14)
        assert rnd.participation == pytest.approx(3 / 5)
        for c, i in enumerate(rnd.cohort):
            assert rnd.steps[c] == expected[i]
            used = [rnd.batch(c, k) for k in range(expected[i])]
            for half in (used[: len(used) // 2], used[len(used) // 2 :]):
                assert sorted(np.concatenate(half)) == list(CLIENTS[i])
    fixed = simulate(lamina.FedAvg(), local_steps=5).plan.round(1)
    assert fixed.steps.tolist() == [5, 5, 5]
    assert [len(simulate(lamina.FedAvg(), participation=p).plan.cohort(1)) for p in (0.01, 0.2, 0.79, 1)] == [
        1,
        1,
        4,
        5,
    ]


def test_every_algorithm_sees_the_same_clients_and_batches() -> None:
    """The plan is a function of (seed, round) only."""
    plans = [simulate(make(name)).plan.round(2) for name in NAMES]
    for plan in plans[1:]:
        assert (plan.cohort == plans[0].cohort).all()
        assert (plan.index == plans[0].index).all()
    assert (simulate(lamina.FedAvg(), seed=4).plan.round(2).index != plans[0].index).any()


# --- 2. reductions --------------------------------------------------------------------------------------------

SGD_SETTINGS: list[dict[str, Any]] = [{}, {"clip": 0.15, "weighting": "examples"}]


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
@pytest.mark.parametrize("decay", [{}, DECAY], ids=str)
@pytest.mark.parametrize(
    ("name", "reduced", "other"),
    [
        ("fedprox", {"mu": 0.0}, {"mu": 0.1}),
        ("fedcm", {"alpha": 1.0}, {"alpha": 0.5}),
        ("scaffold", {"scale": 0.0}, {"scale": 0.5}),
        ("scaffold", {"scale": 0.0, "control": "literal"}, {"scale": 0.5, "control": "literal"}),
    ],
)
def test_reduction_to_fedavg(name: str, reduced: Any, other: Any, decay: Any, settings: Any) -> None:
    """FedProx adds mu (y - x), FedCM mixes in (1 - alpha) Delta, SCAFFOLD adds s (c - c_i): each term vanishes."""
    fedavg = trajectory(lamina.FedAvg(server_lr=0.8, **decay), **settings)
    close(trajectory(make(name, {"server_lr": 0.8} | reduced | decay), **settings), fedavg)
    assert differ(trajectory(make(name, {"server_lr": 0.8} | other | decay), **settings), fedavg)


@pytest.mark.parametrize("given", ADAM, ids=str)
def test_fedadam_star_without_amendment_is_fedadam(given: Any) -> None:
    """alpha = 1: the clients' mix alpha g + (1 - alpha) Delta is g, the servers are the same."""
    fedadam = trajectory(make("fedadam", given))
    close(trajectory(make("fedadam_star", given | {"alpha": 1.0})), fedadam)
    assert differ(trajectory(make("fedadam_star", given | {"alpha": 0.5})), fedadam)


@pytest.mark.parametrize("given", [*LADA, *DECAYS], ids=str)
def test_fedlada_without_amendment_is_localadam(given: Any) -> None:
    """alpha = 1: the step alpha m / sqrt(v_hat) + (1 - alpha) g_a has no g_a."""
    localadam = trajectory(make("localadam", given))
    close(trajectory(make("fedlada", given | {"alpha": 1.0})), localadam)
    assert differ(trajectory(make("fedlada", given | {"alpha": 0.5})), localadam)


@pytest.mark.parametrize("decay", [{"decay": 0.0}, *DECAYS], ids=str)
def test_fedlada_with_identity_preconditioner_is_fedcm(decay: Any) -> None:
    """v_init = 1 and beta2 = 1 keep v = v_hat = 1; beta1 = 0 gives m_k = g_k; so the step is alpha g + (1 - alpha) g_a.

    g_a+ = (x - x+) / (eta_g eta_l K) = -mean Delta / (eta_l K), FedCM's Delta+.
    """
    shared = {"alpha": 0.3, "server_lr": 0.7} | decay
    fedcm = trajectory(make("fedcm", shared), lr=0.1)
    identity = {"beta1": 0.0, "beta2": 1.0, "v_init": 1.0}
    close(trajectory(make("fedlada", shared | identity), lr=0.1), fedcm)
    assert differ(trajectory(make("fedlada", shared | identity | {"v_init": 0.9}), lr=0.1), fedcm)


@pytest.mark.parametrize(
    ("layerwise", "plain", "given"),
    [("fedlamb", "fedams", g) for g in ({}, *FED, *DECAYS)]
    + [("mimelamb", "mime", g) for g in ({}, *MIME, *DECAYS)]
    + [("fedlada_lamb", "fedlada", {"decay": 0.0} | g) for g in ({}, *LADA, *DECAYS)],
    ids=str,
)
def test_trust_ratio_off(layerwise: str, plain: str, given: Any) -> None:
    """Without phi(||y||) / ||u|| the step is eta_l u, and u = m / sqrt(v_hat) at lambda = 0 (or lambda outside u)."""
    expected = trajectory(make(plain, given), 4, lr=LR[plain])
    off = {"trust_ratio": False, "decay_form": "l2"} | given
    close(trajectory(make(layerwise, off), 4, lr=LR[plain]), expected)
    assert differ(trajectory(make(layerwise, off | {"trust_ratio": True}), 1, lr=LR[plain])[0], expected[0])


@pytest.mark.parametrize("name", ["fedams", "fedlamb"])
def test_synchronising_every_round_leaves_nothing_to_accumulate(name: str) -> None:
    """Z = 1: v_hat is new in every round, so v_0 = v_hat under both rules, and both are the every-round algorithm."""
    every = trajectory(make(name, {"beta2": 0.9}), 5)
    close(trajectory(make(name, {"beta2": 0.9, "sync_every": 1, "lazy": "accumulate"}), 5), every, rtol=1e-14)
    assert differ(trajectory(make(name, {"beta2": 0.9, "sync_every": 2, "lazy": "accumulate"}), 5), every)


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
    close(trajectory(lamina.FedLada(alpha=0.1), 1, lr=0.05), trajectory(lamina.LocalAdam(), 1, lr=0.005))
    assert differ(trajectory(lamina.FedLada(alpha=0.1), 2, lr=0.05), trajectory(lamina.LocalAdam(), 2, lr=0.005))


@pytest.mark.parametrize(("name", "frozen"), [("fedlamb", True), ("mimelamb", True), ("fedams", False)])
def test_layerwise_methods_are_scale_free_in_round_one(name: str, frozen: bool) -> None:
    """v_hat = epsilon in round 1: u / ||u|| does not depend on epsilon; Fed-AMS's step is proportional to its -1/2."""
    paths = [trajectory(make(name, {"v_init": v}), 1) for v in (1e-8, 1e-2)]
    assert differ(paths[0], paths[1]) is not frozen


# --- 3. invariants, by calling the seven functions directly ------------------------------------------------------

LAYERS = lamina.Layers(T.SHAPES)
Infos = tuple[ServerInfo, ClientInfo]


def infos(r: int, lr: Any, steps: Any = 1.0, participation: float = 1.0, gradient: Any = None) -> Infos:
    """What the server and a client know about a round in which all clients take the same steps."""
    return ServerInfo(r, lr, LAYERS, participation, steps, gradient), ClientInfo(r, lr, LAYERS, steps, gradient)


def vectors(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(scale * np.random.default_rng(seed).standard_normal((*shape, T.SIZE)))


def local_run(algorithm: Any, server: Any, client: Any, grads: torch.Tensor, info: Infos) -> tuple[Any, Any, list[Any]]:
    """One client's round with given gradients [K, p]: its Up, its new state, all its local models."""
    down = algorithm.broadcast(server, info[0])
    local = algorithm.begin(down, client, info[1])
    path = [local.y]
    for g in grads:
        local = algorithm.step(local, down, g, info[1].lr, LAYERS)
        path.append(local.y)
    up, client = algorithm.finish(local, down, client, info[1])
    return up, client, path


def federate(
    algorithm: Any, server: Any, clients: list[Any], grads: torch.Tensor, info: Infos
) -> tuple[Any, list[Any]]:
    """A round with given gradients [clients, K, p]."""
    done = [local_run(algorithm, server, c, g, info) for c, g in zip(clients, grads, strict=True)]
    ups = [up for up, _, _ in done]
    mean = type(ups[0])(*(None if f[0] is None else torch.stack(f).mean(0) for f in zip(*ups, strict=True)))
    return algorithm.update(server, mean, info[0]), [client for _, client, _ in done]


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
    up, after, path = local_run(algorithm, server, client, grads, infos(2, 0.3, steps=5))
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
        clients = [algorithm.client_init(server.x, LAYERS)] * 3
        new, _ = federate(algorithm, server, clients, grads, infos(r, lr, steps=steps))
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
        clients = [algorithm.client_init(server.x, LAYERS)] * 3
        new, _ = federate(algorithm, server, clients, grads, infos(r, lr, steps=steps))
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
    full = vectors(seed=5)
    server, lr = algorithm.init(x, LAYERS), 0.07
    _, _, path = local_run(
        algorithm, server, algorithm.client_init(x, LAYERS), vectors(4, seed=6), infos(1, lr, 4, 1.0, full)
    )
    for before, after in itertools.pairwise(path):
        for part in groups:
            phi = min(max(float(before[part].norm()), 0.01), given.get("phi_max", np.inf))
            assert float((after - before)[part].norm()) == pytest.approx(lr * phi, rel=1e-10)


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb"])
def test_layerwise_step_forgets_scale(name: str) -> None:
    """At lambda = 0, u / ||u|| is the same for c m (all gradients times c) and for c v_hat; with lambda it is not."""
    x, grads = vectors(seed=4), vectors(4, seed=6)

    def last(factor: float, v_init: float, decay: float) -> torch.Tensor:
        algorithm = make(name, {"v_init": v_init, "decay": decay})
        info = infos(1, 0.07, 4, 1.0, vectors(seed=5))
        return local_run(algorithm, algorithm.init(x, LAYERS), algorithm.client_init(x, LAYERS), factor * grads, info)[
            2
        ][-1]

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
        ("fedlamb", {"sync_every": 2, "lazy": "accumulate"}),
        ("mime", {}),
        ("mimelamb", {}),
    ],
)
def test_second_moment_never_decreases(name: str, given: Any) -> None:
    """v_hat+ = max(v_hat, .) coordinate by coordinate, and it does grow."""
    simulation = simulate(make(name, {"beta2": 0.5} | given))
    before, grown = simulation.state.server.v_hat.clone(), False
    for _ in range(6):
        simulation.run(1)
        after = simulation.state.server.v_hat
        assert (after >= before).all()
        grown, before = grown or bool((after > before).any()), after.clone()
    assert grown


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
    moved = {z: trajectory(make(name, {"zero_norm": z}), 1)[0][bias] for z in ("floor", "lamb", "literal")}
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
    info = infos(1, 0.07, 3, 1.0, vectors(seed=5))
    _, _, path = local_run(algorithm, algorithm.init(x, LAYERS), algorithm.client_init(x, LAYERS), grads, info)
    assert torch.equal(path[-1][dead], x[dead])
    assert torch.isfinite(path[-1]).all()
    assert all(differ(path[-1][part], x[part]) for part in T.TENSORS if part != dead)


def test_authors_preset_has_no_floor() -> None:
    """Their phi is the identity without a floor: a tensor of norm .002 moves by eta_l .002, not by eta_l .01."""
    algorithm = make("fedlamb", {"preset": "authors"})
    x = vectors(seed=4)
    x[T.TENSORS[1]] *= 0.002 / float(x[T.TENSORS[1]].norm())
    _, _, path = local_run(
        algorithm, algorithm.init(x, LAYERS), algorithm.client_init(x, LAYERS), vectors(1, seed=6), infos(1, 0.07)
    )
    assert float((path[1] - path[0])[T.TENSORS[1]].norm()) == pytest.approx(0.07 * 0.002, rel=1e-10)


FEDADAM_PRESETS = {  # v_init, tau, beta1, beta2, eta_g (None: tuned)
    "reddi": (1e-3**2, 1e-3, 0.9, 0.99, None),
    "fedlamb_paper": (1e-6, 0.0, 0.9, 0.999, None),
    "fedlada_paper": (1e-2, 0.0, 0.9, 0.99, 0.1),
    "fl_simulator": (0.0, 1e-2, 0.9, 0.99, 0.1),
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


def test_reddi_is_the_default_preset() -> None:
    """FedAdam's defaults are Reddi et al.'s, with v_0 = tau^2."""
    default, reddi = make("fedadam"), make("fedadam", {"preset": "reddi"})
    assert [getattr(default, n) for n in options(type(default))] == [getattr(reddi, n) for n in options(type(reddi))]
    assert default.v_init == pytest.approx(default.tau**2, rel=1e-12)


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
        assert (fed.momentum, fed.eps, fed.sync_every, fed.bias_correction) == ("carry", 0.0, 1, False)
    assert (lamina.FedLamb().phi_min, lamina.FedLamb().layers, lamina.FedLamb().decay_form) == (1e-2, "tensor", "ratio")
    for name in ("fedams", "fedlamb"):
        authors = make(name, {"preset": "authors"})
        assert (authors.m_init, authors.v_init, authors.eps) == (1e-8, 1e-8, 1e-8)
        assert (authors.first_round, authors.v_seed, authors.second_moment) == ("running", "client", "frozen")


# --- 4. what a run reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadam", "fedlada", "fedlamb"])
def test_consistency_and_update_norm(name: str) -> None:
    """consistency = mean_i ||y_K - x+||^2 and update_norm = ||x+ - x||, from the transcription's displacements."""
    simulation = simulate(make(name, {"server_lr": 0.7}))
    x = START
    for record in transcribe(simulation, 3):
        row = simulation.run(1)[-1]
        after = record.server["x"]
        spread = np.mean([((x + d - after) ** 2).sum() for d in record.deltas])
        assert row["consistency"] == pytest.approx(spread, rel=1e-9)
        assert row["update_norm"] == pytest.approx(np.sqrt(((after - x) ** 2).sum()), rel=1e-9)
        x = after


UNITS: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [  # down, up, client state, in models
    ("fedavg", {}, (1, 1, 0)),
    ("fedprox", {}, (1, 1, 0)),
    ("fedadam", {}, (1, 1, 0)),
    ("fedadam", {"amsgrad": True}, (1, 1, 0)),
    ("fedcm", {}, (2, 1, 0)),
    ("fedadam_star", {}, (2, 1, 0)),
    ("scaffold", {}, (2, 2, 1)),
    ("scaffold", {"scale": 0.5, "control": "literal"}, (2, 2, 1)),
    ("localadam", {}, (2, 2, 0)),
    ("localadam", {"sync": False}, (1, 1, 0)),
    ("fedams", {}, (2, 2, 1)),
    ("fedlamb", {}, (2, 2, 1)),
    ("fedlamb", {"momentum": "restart"}, (2, 2, 0)),
    ("fedlamb", {"momentum": "average"}, (3, 3, 0)),
    ("fedlamb", {"v_seed": "client"}, (2, 2, 2)),
    ("mime", {}, (2, 2, 1)),
    ("mimelamb", {}, (2, 2, 1)),
    ("mime", {"momentum": "restart"}, (2, 2, 0)),
    ("mime", {"momentum": "average"}, (3, 3, 0)),
    ("mime", {"momentum": "server"}, (3, 2, 0)),
    ("mime", {"preset": "mime"}, (4, 2, 0)),
    ("fedlada", {}, (3, 2, 0)),
    ("fedlada", {"amendment": "per_client"}, (3, 3, 0)),
    ("fedlada_lamb", {}, (3, 2, 0)),
]


@pytest.mark.parametrize(("name", "given", "units"), UNITS, ids=str)
def test_cost_table(name: str, given: Any, units: Any) -> None:
    """Models per active client and round; a run of float64 sends units * p * 8 bytes to and from each of 3 clients."""
    algorithm = make(name, given)
    assert tuple(ledger.wire_cost(algorithm)) == units
    for row in simulate(algorithm).run(3):
        assert row["bytes_down"] == 3 * units[0] * WIRE
        assert row["bytes_up"] == 3 * units[1] * WIRE


def test_paper_convention() -> None:
    """FedLADA's Table 11: FedAvg, FedProx, FedAdam 1x, all others 2x, FedLADA included although it sends 3 and 2."""
    table = dict.fromkeys(("fedavg", "fedprox", "fedadam"), 1)
    table |= dict.fromkeys(("fedcm", "fedadam_star", "scaffold", "localadam", "fedams", "fedlamb", "fedlada"), 2)
    for name, models in table.items():
        simulation = simulate(make(name))
        assert simulation.run(1)[0]["paper_bytes"] == models * WIRE * 3


@pytest.mark.parametrize("name", ["fedams", "fedlamb", "mime", "mimelamb"])
@pytest.mark.parametrize("every", [2, 3])
def test_lazy_synchronisation_bytes(name: str, every: int) -> None:
    """Up: x always, v (or G) in rounds divisible by Z. Down: x always, v_hat to those who hold another version (A16).

    Before round r the server has updated v_hat floor((r - 1) / Z) times; that count is the version.
    """
    simulation = simulate(make(name, {"sync_every": every}))
    history, held, late = simulation.run(10), {}, 0
    for r, row in enumerate(history, 1):
        cohort = simulation.plan.cohort(r).tolist()
        version = (r - 1) // every
        stale = [i for i in cohort if held.get(i) != version]
        late += sum(i in held for i in stale) if (r - 1) % every else 0
        held |= dict.fromkeys(cohort, version)
        assert row["bytes_down"] == (len(cohort) + len(stale)) * WIRE
        assert row["bytes_up"] == (len(cohort) + len(cohort) * (r % every == 0)) * WIRE
    assert late > 0, "no client was late to a synchronisation: the case tests nothing"


@pytest.mark.parametrize("name", ["fedams", "fedlamb", "mime", "mimelamb"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_lazy_synchronisation_cost_at_best(name: str, every: int) -> None:
    """A client always active receives v_hat once and sends v once in Z rounds: 1 + 1/Z each way."""
    cost = ledger.wire_cost(make(name, {"sync_every": every}))
    assert (cost.down, cost.up) == pytest.approx((1 + 1 / every, 1 + 1 / every), rel=1e-12)


class Counting(T.Network):
    """The network with a float buffer (a running mean of the inputs) and an integer one (calls in training)."""

    def __init__(self) -> None:
        super().__init__(START)
        self.register_buffer("running", torch.ones(T.INPUTS, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running.mul_(0.8).add_(0.2 * x.mean(0))
            self.calls.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("weighting", ["clients", "examples"])
def test_float_buffers_are_averaged_and_integer_buffers_kept(weighting: str) -> None:
    """running <- .8 running + .2 mean(batch) at each of K_i steps, then the mean over clients; calls stays 0."""
    settings = {"clients": CLIENTS, "participation": 0.6, "batch_size": 4, "epochs": 2, "device": "cpu"}
    simulation = lamina.Simulation(Counting(), TRAIN, lamina.FedAvg(), weighting=weighting, **settings)
    running = np.ones(T.INPUTS)
    for r in range(1, 4):
        simulation.run(1)
        rnd, local = simulation.plan.round(r), []
        for c in range(len(rnd.cohort)):
            local.append(running)
            for batch in T.batches(rnd, c):
                local[c] = 0.8 * local[c] + 0.2 * INPUTS[batch].mean(0)
        running = T.averager(rnd, weighting == "examples")(local)
        close(simulation.state.buffers["running"], running)
        assert int(simulation.state.buffers["calls"]) == 0


# --- 5. no hidden dependence ----------------------------------------------------------------------------------

EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in NAMES],
    ("scaffold", {"scale": 0.5, "control": "literal", "decay": 0.1}),
    ("fedcm", {"clip_mix": 0.5, "decay": 0.1, "decay_form": "decoupled"}),
    ("fedadam", {"amsgrad": True, "bias_correction": True, "decay": 0.1}),
    ("fedadam_star", {"amsgrad": True, "root_eps": 1e-4}),
    ("localadam", {"sync": False, "amsgrad": False, "v_seed": "zero"}),
    ("fedlada", {"v_seed": "zero", "amendment": "per_client", "decay_form": "decoupled"}),
    ("fedlada_lamb", {"v_seed": "zero", "layers": "module", "decay": 0.1, "zero_norm": "lamb"}),
    ("fedams", {"momentum": "average", "second_moment": "running", "bias_correction": True}),
    ("fedams", {"momentum": "restart", "v_seed": "client", "first_round": "running", "decay": 0.1}),
    ("fedlamb", {"sync_every": 2, "lazy": "accumulate", "decay": 0.1, "decay_on": "matrices"}),
    ("fedlamb", {"bias_correction": True, "zero_norm": "literal", "layers": "module", "phi_max": 2.0}),
    ("fedlamb", {"preset": "authors"}),
    ("mime", {"preset": "mime"}),
    ("mime", {"momentum": "average", "sync_every": 2, "bias_correction": True}),
    ("mimelamb", {"preset": "mime", "decay": 0.1, "decay_form": "decoupled"}),
    ("mimelamb", {"preset": "mimelite", "layers": "module"}),
]
every_algorithm = pytest.mark.parametrize(("name", "given"), EVERYTHING, ids=str)


def tensors(state: Any) -> dict[str, torch.Tensor]:
    return {f: v for f, v in zip(state._fields, state, strict=True) if v is not None}


@every_algorithm
def test_order_of_the_cohort_changes_nothing(name: str, given: Any) -> None:
    """The server sees a mean: running the same clients of a round in another order gives the same states."""
    straight, shuffled = simulate(make(name, given)), simulate(make(name, given))
    for r in range(1, 5):
        straight.run(1)
        plan = straight.plan.round(r)
        order = np.array([2, 0, 1])
        permuted = dataclasses.replace(
            plan,
            cohort=plan.cohort[order],
            samples=[plan.samples[c] for c in order],
            index=plan.index[order],
            filled=plan.filled[order],
            streams=plan.streams[order],
        )
        shuffled.state, _ = shuffled.engine.run_round(shuffled.state, permuted)
        for field, value in tensors(straight.state.server).items():
            close(getattr(shuffled.state.server, field), value, field, rtol=1e-9)
        for i, client in straight.state.clients.items():
            for field, value in tensors(client).items():
                close(getattr(shuffled.state.clients[i], field), value, field, rtol=1e-9)


@every_algorithm
def test_names_of_the_clients_change_nothing(name: str, given: Any) -> None:
    """With all clients active and full batches a client's number decides nothing: renumber them, and x stays."""
    settings = {"participation": 1.0, "batch_size": 64, "epochs": 3}
    order = [3, 0, 4, 2, 1]
    first = trajectory(make(name, given), **settings)
    second = trajectory(make(name, given), clients=[CLIENTS[i] for i in order], **settings)
    close(second, first, rtol=1e-8)
    other_split = trajectory(make(name, given), clients=np.array_split(np.arange(sum(SIZES)), 5), **settings)
    assert differ(other_split, first)


@every_algorithm
def test_absent_clients_keep_their_state(name: str, given: Any) -> None:
    """A round touches the state of its cohort only; a client never active is as `client_init` made it."""
    algorithm = make(name, given)
    simulation = simulate(algorithm, participation=0.4)
    fresh = algorithm.client_init(torch.from_numpy(START), LAYERS)
    for r in range(1, 5):
        before = {i: tensors(c) for i, c in simulation.state.clients.items()}
        before = {i: {f: v.clone() for f, v in c.items()} for i, c in before.items()}
        simulation.run(1)
        cohort = set(simulation.plan.cohort(r).tolist())
        assert len(cohort) == 2
        for i, client in simulation.state.clients.items():
            if i not in cohort:
                expected = before.get(i, tensors(fresh))
                assert all(torch.equal(v, expected[f]) for f, v in tensors(client).items())


def drive(algorithm: Any, lr: Any, steps: Any, row: Any = ..., check: Any = None) -> list[torch.Tensor]:
    """Three rounds of one client through the seven functions with fixed gradients; every tensor they produce.

    All inputs are [3, p], or one row of that. `check` sees each call's arguments and copies of them made before it.
    """
    out: list[torch.Tensor] = []

    def call(function: Any, *arguments: Any) -> Any:
        copies = [copy(a) for a in arguments]
        result = function(*arguments)
        if check is not None:
            check(function, arguments, copies)
        for state in result if type(result) is tuple else (result,):
            out.extend(tensors(state).values())
        return result

    x = START3[row]
    server, client = call(algorithm.init, x, LAYERS), call(algorithm.client_init, x, LAYERS)
    for r in range(1, 4):
        needs = algorithm.needs(r)
        wanted = needs.full_gradient or needs.control_variate
        server_info, info = infos(r, lr, steps, 0.4, vectors(3, seed=100 + r)[row] if wanted else None)
        down = call(algorithm.broadcast, server, server_info)
        local = call(algorithm.begin, down, client, info)
        for k in range(3):
            grad = vectors(3, seed=10 * r + k, scale=0.5)[row]
            local = call(algorithm.step, local, down, grad, lr, LAYERS)
        up, client = call(algorithm.finish, local, down, client, info)
        server = call(algorithm.update, server, up, server_info)
    return out


def copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy(v) for v in value))
    return value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or a == b


START3 = vectors(3, seed=50) * torch.from_numpy(T.MATRICES)  # zero biases


@every_algorithm
def test_no_argument_is_written_to(name: str, given: Any) -> None:
    """The broadcast, the states, the gradient: after every call of the seven functions all arguments are as before."""
    calls = 0

    def check(function: Any, arguments: Any, copies: Any) -> None:
        nonlocal calls
        calls += 1
        for a, c in zip(arguments, copies, strict=True):
            assert same(a, c), f"{function.__name__} changed an argument"

    drive(make(name, given), 0.1, 3.0, check=check)
    assert calls == 2 + 3 * (1 + 1 + 3 + 1 + 1)


def compare_rows(name: str, stacked: Any, single: list[Any], lr: Any, steps: Any) -> None:
    """All tensors of a stacked drive, row by row, against drives of single rows."""
    together = drive(stacked, lr, steps)
    for row, algorithm in enumerate(single):
        one = drive(algorithm, *(v if isinstance(v, float) else float(v[row]) for v in (lr, steps)), row=row)
        assert len(one) == len(together)
        for a, b in zip(together, one, strict=True):
            a = a.expand(3, *a.shape[-1:]) if a.dim() < 2 else a
            close(a[row], b, f"{name}, row {row}", rtol=1e-12)


@every_algorithm
def test_leading_axes(name: str, given: Any) -> None:
    """Functions on [3, p] are three functions on [p], also when the rate and K_i differ per row ([3, 1])."""
    algorithm = make(name, given)
    compare_rows(name, algorithm, [algorithm] * 3, 0.1, 3.0)
    rates, steps = torch.tensor([[0.1], [0.03], [0.2]]).double(), torch.tensor([[3.0], [4.0], [5.0]]).double()
    compare_rows(name, algorithm, [algorithm] * 3, rates, steps)


GRID = {  # three values for every numeric option
    "alpha": (0.1, 0.5, 1.0),
    "beta1": (0.9, 0.5, 0.0),
    "beta2": (0.99, 0.7, 0.999),
    "v_init": (1e-6, 1e-4, 1e-2),
    "m_init": (0.0, 0.01, -0.1),
    "eps": (0.0, 1e-3, 1e-8),
    "tau": (1e-3, 0.0, 0.1),
    "root_eps": (0.0, 1e-4, 1e-8),
    "server_lr": (1.0, 0.5, 0.1),
    "decay": (0.0, 0.1, 0.3),
    "mu": (0.0, 0.1, 1.0),
    "scale": (0.0, 0.5, 1.5),
    "clip_mix": (0.5, 2.0, np.inf),
    "phi_min": (0.0, 0.01, 1.0),
    "phi_max": (2.0, 1.5, np.inf),
}


@every_algorithm
def test_hyper_parameters_may_be_tensors(name: str, given: Any) -> None:
    """Every numeric option as a tensor [3, 1], one at a time and all together, is three runs with numbers."""
    cls = algorithms.registry()[name]
    hints = get_type_hints(cls)
    numeric = [n for n in options(cls) if hints[n] not in (bool, int) and n in GRID]
    assert all(n in GRID for n in options(cls) if isinstance(options(cls)[n].default, float))
    for chosen in (*([n] for n in numeric), numeric):
        grid = {n: torch.tensor(GRID[n], dtype=torch.float64)[:, None] for n in chosen}
        rows = [make(name, given | {n: GRID[n][row] for n in chosen}) for row in range(3)]
        compare_rows(f"{name} {chosen}", make(name, given | grid), rows, 0.1, 3.0)
