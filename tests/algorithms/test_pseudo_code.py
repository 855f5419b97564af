"""Every algorithm and option against its numpy transcription, to 1e-10, after every round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lamina
from lamina.algorithms.declaration import options
from paper_problem import CLIENTS, DECAYS, LADA, NAMES, close, differ, make, simulate, transcribe

# Independent options share a case; `test_every_option_of_a_case_matters` makes sure that none hides another.
DECAY = {"decay": 0.2}  # plain SGD: L2 and decoupled decay are the same step
NUMBERS = {"v_init": 1e-4, "eps": 1e-3, "beta1": 0.5, "beta2": 0.7, "server_lr": 0.7}
MOMENTS: list[dict[str, Any]] = [  # options that Fed-AMS, Fed-LAMB, Mime and Mime-LAMB share
    {**NUMBERS, "m_init": 0.01},
    {"momentum": "restart", "m_init": 0.01},
    {"momentum": "average", "m_init": 0.01},
    {"sync_every": 2},
    {"sync_every": 3, "momentum": "average"},
]
FED: list[dict[str, Any]] = [
    *MOMENTS,
    {"second_moment": "running", "beta2": 0.6},
    {"second_moment": "running", "beta2": 0.6, "v_seed": "client"},
    {"first_round": "running"},
    {"v_seed": "client", "beta2": 0.7, "sync_every": 2},
    {"sync_every": 3, "second_moment": "running", "beta2": 0.9},
    {"sync": False, "beta2": 0.7},
    {"sync": False, "beta2": 0.7, "v_seed": "client", "momentum": "average"},
    {"sync": False, "beta2": 0.6, "second_moment": "running"},
    {"preset": "authors"},
]
MIME: list[dict[str, Any]] = [
    *MOMENTS,
    {"amsgrad": False, "beta2": 0.7},
    {"momentum": "server", "m_init": 0.01},
    {"momentum": "server", "sync_every": 2},
    {"control_variate": True, "momentum": "average"},
    {"control_variate": True, "momentum": "restart"},
    {"control_variate": True, "decay": 0.2, "decay_form": "l2"},
    {"preset": "mime", "beta2": 0.9},
    {"preset": "mimelite"},
]
LAYERWISE: list[dict[str, Any]] = [
    {"phi_min": 0.0},
    {"phi_min": 3.0},
    {"phi_max": 0.7},
    {"zero_norm": "lamb", "phi_max": 0.7},
    {"zero_norm": "literal"},
    {"layers": "module", "phi_min": 3.0},
    {"layers": "module", "decay": 0.2},
    {"decay": 0.2},
    *DECAYS,
]
ADAM: list[dict[str, Any]] = [
    *[{"preset": p} for p in ("reddi", "fedlamb_paper", "fedlada_paper", "fl_simulator", "authors")],
    *[{"preset": p} for p in ("google", "flower", "torch")],
    {"amsgrad": True, "beta2": 0.3},
    {"bias_correction": True},
    {"bias_correction": True, "amsgrad": True, "beta2": 0.3, "v_init": 0.0},
    {"root_eps": 1e-4, "tau": 0.0},
    {"v_init": 1e-2, "server_lr": 0.3, "beta1": 0.4, **DECAY},
]
CODES: list[dict[str, Any]] = [  # what public codes of FedLADA do differently (B19 to B21)
    {"amsgrad": False, "beta2": 0.7},
    {"amsgrad": False, "beta2": 0.7, "v_seed": "zero"},
    {"eps": 1e-2},
    {"moment_correction": "m"},
    {"moment_correction": "first_round"},
    {"moment_correction": "first_round", "amsgrad": False, "v_init": 1e-4},
]
SERVER = {"v_init": 1e-2, "server_lr": 0.3, "beta1": 0.4, "tau": 0.1, **DECAY}
ADAMW = {"beta1": 0.5, "beta2": 0.7, "eps": 1e-2, "decay": 0.3, "server_lr": 0.6}
ALL_CODES = {**NUMBERS, "amsgrad": False, "moment_correction": "m", "decay": 0.2, "decay_form": "decoupled"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{"server_lr": 0.7, **DECAY}, {"preset": "fedlada_paper"}],
    "fedprox": [{"mu": 1.5}, {"mu": 0.5, "server_lr": 0.7, **DECAY}],
    "scaffold": [
        {"scale": 0.0},
        {"scale": 1.5},
        *[{"scale": s, "control": "literal"} for s in (0.5, 1.5)],
        {"scale": 0.5, "server_lr": 0.7, **DECAY},
        {"preset": "fl_simulator"},
        {"clip_direction": 0.05, "decay": 0.2},
        {"clip_direction": 0.05, "scale": 0.5, "control": "literal", "server_lr": 0.7},
    ],
    "fedcm": [
        {"alpha": 0.5, "server_lr": 0.7},
        {"alpha": 1.0},
        *DECAYS,
        {"preset": "fl_simulator"},
        {"preset": "fl_simulator", "clip_direction": 0.05, "decay": 0.2},
        {"clip_direction": 0.05, "decay": 0.2, "decay_form": "l2"},
    ],
    "fedadam": ADAM,
    "fedadam_star": [*ADAM, *DECAYS, {"alpha": 0.5}, {"clip_direction": 0.05, "decay": 0.2, "decay_form": "decoupled"}],
    "localadam": [
        *LADA,
        *DECAYS,
        {"decay": 0.0},
        {"sync": False, "v_init": 1e-4},
        {"sync": False, "v_init": 1e-4, "v_seed": "zero"},
        {"sync": False, "v_init": 1e-4, "amsgrad": False},
        {"amsgrad": False, "v_init": 1e-4},
        {"amsgrad": False, "v_seed": "zero"},
        *CODES,
        {"sync": False, "v_init": 1e-4, "moment_correction": "first_round"},
    ],
    "fedlada": [
        *LADA,
        *DECAYS,
        *CODES,
        *[{"ga_correction": True, **more} for more in ({}, {"alpha": 0.3}, *DECAYS)],
        {"ga_correction": True, "amendment": "per_client", "server_lr": 0.6},
        {**ALL_CODES, "ga_correction": True, "alpha": 0.3, "amendment": "per_client"},
        {"preset": "fedbrew"},
        {"preset": "fedadamw_vision"},
        {"amendment": "per_client"},
        {"amendment": "per_client", "server_lr": 0.6, "alpha": 0.3, "v_seed": "zero"},
        {"preset": "cifar100"},
        {"decay": 0.0},
    ],
    "fedlada_lamb": [
        *LADA,
        *LAYERWISE,
        {"alpha": 0.5, "decay": 0.2, "layers": "module"},
        *[{**given, "decay": 0.2} for given in CODES],
        {**ALL_CODES, "ga_correction": True, "decay_form": "ratio"},  # elsewhere the size of m would not matter
        {"amendment": "per_client", "alpha": 0.3},
    ],
    "fedams": [*FED, *DECAYS],
    "fedlamb": [
        *FED,
        *LAYERWISE,
        {"layers": "module", "decay": 0.1, "sync_every": 2},
        {"layers": "model", "decay": 0.1},
    ],
    "mime": [*MIME, *DECAYS],
    "mimelamb": [
        *MIME,
        *LAYERWISE,
        {"preset": "mime", "layers": "module", "decay": 0.1},
        {"layers": "model"},
    ],
    "fedavgm": [{"mu": 0.5, "server_lr": 0.7, **DECAY}, {"damped": True}],
    "fedyogi": [{"preset": "flower"}, {"preset": "google"}, SERVER | {"beta2": 0.7}],
    "fedadagrad": [{"preset": "flower"}, {"preset": "tff"}, SERVER],
    "fedams_server": [
        {"preset": "option2"},
        {"preset": "authors"},
        {"bias_correction": True, "beta2": 0.3},
        SERVER | {"beta2": 0.3},
        {"v_hat_init": 0.05},
    ],
    "feddyn": [{"alpha": 0.5, "evaluate": "clients"}, {"preset": "authors"}, {"preset": "fl_simulator"}],
    "fedsam": [{"rho": 0.5, "server_lr": 0.7, **DECAY}, {"preset": "fl_simulator"}],
    "mofedsam": [
        {"rho": 0.5, "alpha": 0.5, "server_lr": 0.7},
        *DECAYS,
        {"preset": "fl_simulator"},
        {"preset": "fl_simulator", "clip_direction": 0.05, "decay": 0.2},
    ],
    "fedlion": [{"preset": "authors"}, {"beta1": 0.5, "beta2": 0.7, "server_lr": 0.7, **DECAY}],
    "localadamw": [ADAMW],
    "fedadamw": [
        ADAMW | {"alpha": 0.2},
        *[{"v_sync": "full", **more} for more in ({}, {"beta2": 0.7}, {"m_correction": "global"})],
        {"v_sync": "none", "local_weight": "complement"},
        {"layers": "module", "beta2": 0.7},
        {"layers": "model", "beta2": 0.7},
        {"preset": "vision"},
        {"preset": "language"},
    ],
    "localmuon": [ADAMW | {"beta": 0.8, "muon_scale": 2.0}, {"nesterov": False}],
    "fedmuon": [ADAMW | {"beta": 0.8, "muon_scale": 2.0, "alpha": 0.2}, {"nesterov": False}, {"preset": "deit_tiny"}],
    "deltasgd": [
        {"gamma": 0.3, "delta": 0.5, "theta_init": 0.3, "server_lr": 0.7, **DECAY},
        {"gradients": "consecutive"},
        {"gradients": "consecutive", "gamma": 0.3, "eps": 0.05, **DECAY},
        {"preset": "authors"},
    ],
    "fedsps": [{"c": 3.0, "lower_bound": 0.2, "eps": 0.1, "server_lr": 0.7, **DECAY}],
    "diloco": [ADAMW | {"mu": 0.5}, {"inner_state": "restart"}],
    "fedlars": [
        *LAYERWISE,
        {"order": "lamb"},
        *[{"order": "lamb", **decay} for decay in DECAYS],
        {"order": "lamb", "decay": 0.2, "momentum": "restart"},
        {"momentum": "restart", "beta1": 0.5, "server_lr": 0.7},
        {"layers": "model"},
    ],
    "fednova": [{"momentum": 0.6, "server_lr": 0.7, **DECAY}, {"mu": 0.5, **DECAY}, {"preset": "authors"}],
    "fedexp": [],  # below, with all clients: few agree so much that the server's rate is 1
    "scaffnew": [{"p": 0.4, **DECAY}],
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"weighting": "examples", "epochs": 2},
    {"clip": 0.15},
    {"local_steps": 3, "participation": 1.0},
    {"sampling": "bernoulli", "participation": 0.5},
]
CASES = [(name, {}, settings) for name in NAMES for settings in SETTINGS]
CASES += [(name, given, {}) for name in NAMES for given in OPTIONS[name]]
CASES += [
    ("fedlada", {"amendment": "per_client"}, {"weighting": "examples"}),
    ("fedprox", {"mu": 0.5, "decay": 0.2}, {"clip": 0.15}),
    ("fedcm", {"clip_direction": 0.05, "decay": 0.2}, {"clip": 0.1}),  # the gradient is not clipped here
    ("scaffold", {"clip_direction": 0.05, "decay": 0.2}, {"clip": 0.02}),
    ("fedadam_star", {"clip_direction": 0.05}, {"clip": 0.02}),
    ("fedlamb", {"decay": 0.2, "decay_form": "l2"}, {"clip": 0.15}),
    ("mime", {"preset": "mime"}, {"weighting": "examples"}),
    ("fedexp", {"eps": 1e-2, "eps_decay": 0.5, "decay": 0.02}, {"participation": 1.0}),
    ("fedexp", {"preset": "authors"}, {"participation": 1.0}),
]


def label(case: Any) -> str:
    name, given, settings = case
    return "-".join([name, *(f"{k}={v}" for k, v in (given | settings).items())])


def length(given: dict[str, Any]) -> int:
    """Return the rounds to run: enough for two synchronisations, for clients to miss one, and a round after it."""
    every = given.get("sync_every", 1)
    if not given.get("sync", True):
        return 5  # a client's own v_hat needs three of its rounds to act on x
    return 2 * every + 1 if every > 1 else 3


@pytest.mark.parametrize("case", CASES, ids=label)
def test_library_follows_the_pseudo_code(case: Any) -> None:
    """Server and client states equal the transcription's after every round."""
    name, given, settings = case
    simulation = simulate(make(name, given), **settings)
    for record in transcribe(simulation, length(given)):
        simulation.run(1)
        at = f"round {simulation.state.round}, "
        for field, expected in record.server.items():
            close(getattr(simulation.state.server, field), expected, at + field)
        for i, client in record.clients.items():
            for field, expected in client.items():
                close(getattr(simulation.state.clients[i], field), expected, f"{at}client {i}, {field}")


NO_EFFECT = {  # options that cannot matter in their case
    ("feddyn", "evaluate", "clients"),  # it chooses another model to evaluate
    ("fedcm", "clip_direction", 10.0),
    ("mofedsam", "clip_direction", 10.0),
    ("scaffold", "clip_direction", 10.0),  # the presets' ceiling is above every direction here
    ("fedlars", "decay_form", "l2"),  # in the order "lars", "ratio" adds the decay to the gradient, too
    ("fedlada", "v_init", 0.0),  # nothing but rounding is left of the default, 1e-16, after a step
}


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in CASES if c[1]], ids=label)
def test_every_option_of_a_case_matters(case: Any) -> None:
    """The comparison above can fail: with any one of the case's options left out, the expected x is another one."""
    name, given, settings = case
    rounds, algorithm = length(given), make(name, given)
    simulation = simulate(algorithm, **settings)
    default = make(name)
    *_, last = transcribe(simulation, rounds)
    changed = [n for n in options(type(algorithm)) if getattr(algorithm, n) != getattr(default, n)]
    assert changed or given == {"preset": "reddi"}
    for option in changed:
        if (name, option, getattr(algorithm, option)) in NO_EFFECT:
            continue
        *_, other = transcribe(simulation, rounds, {option: getattr(default, option)})
        assert differ(other.server["x"], last.server["x"], 1e-9), f"{option} has no effect in this case"


ELSEWHERE = {"conv_scale", "muon_on", "arithmetic"}  # of no effect on this network, or rounding: test_muon.py


def test_every_option_is_in_a_case() -> None:
    """Each option of each algorithm takes a value other than its default in at least one case."""
    for name in NAMES:
        default = make(name)
        cases = [make(name, given) for other, given, _ in CASES if other == name]
        named = [n for n in options(type(default)) if n not in ELSEWHERE]
        unused = [n for n in named if all(getattr(c, n) == getattr(default, n) for c in cases)]
        assert not unused, f"{name}: no case sets {unused}"


def test_the_plan_keeps_the_rules() -> None:
    """K_i = epochs * ceil(n_i / B), every pass holds each sample once, the last short batch is kept; |S| = round(C N).

    n = 7, 12, 3, 9, 5 with B = 4 and 2 epochs: K = 2 * (2, 3, 1, 3, 2).
    """
    plan = simulate(lamina.FedAvg(), epochs=2).plan
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
    shares = (0.01, 0.2, 0.79, 1)
    assert [len(simulate(lamina.FedAvg(), participation=p).plan.cohort(1)) for p in shares] == [1, 1, 4, 5]


def test_every_algorithm_sees_the_same_clients_and_batches() -> None:
    """The plan is a function of (seed, round) only."""
    plans = [simulate(make(name)).plan.round(2) for name in NAMES]
    for plan in plans[1:]:
        assert (plan.cohort == plans[0].cohort).all()
        assert (plan.index == plans[0].index).all()
    other = simulate(lamina.FedAvg(), seed=4).plan.round(2)
    assert (other.cohort != plans[0].cohort).any() or (other.index != plans[0].index).any()
