"""No hidden dependence: the order and the numbers of the clients, and absent clients, change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from paper_problem import CLIENTS, LAYERS, NAMES, SIZES, START, close, differ, make, simulate, trajectory

EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in NAMES],
    ("scaffold", {"scale": 0.5, "control": "literal", "decay": 0.1}),
    ("scaffold", {"clip_direction": 0.1, "decay": 0.1}),
    ("fedcm", {"clip_direction": 0.5, "decay": 0.1, "decay_form": "decoupled"}),
    ("fedadam", {"amsgrad": True, "bias_correction": True, "decay": 0.1}),
    ("fedadam_star", {"amsgrad": True, "root_eps": 1e-4}),
    ("localadam", {"sync": False, "amsgrad": False, "v_seed": "zero"}),
    ("fedlada", {"v_seed": "zero", "amendment": "per_client", "decay_form": "decoupled"}),
    ("fedlada", {"amsgrad": False, "moment_correction": "m", "ga_correction": True, "eps": 1e-3}),
    ("fedlada_lamb", {"v_seed": "zero", "layers": "module", "decay": 0.1, "zero_norm": "lamb"}),
    ("fedams", {"momentum": "average", "second_moment": "running"}),
    ("fedams", {"momentum": "restart", "v_seed": "client", "first_round": "running", "decay": 0.1}),
    ("fedlamb", {"sync_every": 2, "decay": 0.1}),
    ("fedlamb", {"zero_norm": "literal", "layers": "module", "phi_max": 2.0}),
    ("fedlamb", {"preset": "authors"}),
    ("mime", {"preset": "mime"}),
    ("mime", {"momentum": "average", "sync_every": 2}),
    ("mimelamb", {"preset": "mime", "decay": 0.1, "decay_form": "decoupled"}),
    ("mimelamb", {"preset": "mimelite", "layers": "module"}),
]
every_algorithm = pytest.mark.parametrize(("name", "given"), EVERYTHING, ids=str)


def tensors(state: Any) -> dict[str, torch.Tensor]:
    return {f: v for f, v in zip(state._fields, state, strict=True) if v is not None}


@every_algorithm
def test_order_of_the_cohort_changes_nothing(name: str, given: Any) -> None:
    """The server sees a mean: running the same clients of a round in another order gives the same states."""
    straight = simulate(make(name, given), engine="stacked")
    shuffled = simulate(make(name, given), engine="stacked")
    for r in range(1, 4):
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
    settings = {"participation": 1.0, "batch_size": 64, "epochs": 2}
    order = [3, 0, 4, 2, 1]
    first = trajectory(name, given, **settings)
    second = trajectory(name, given, clients=[CLIENTS[i] for i in order], **settings)
    close(second, first, rtol=1e-8)
    other_split = trajectory(name, given, rounds=1, clients=np.array_split(np.arange(sum(SIZES)), 5), **settings)
    assert differ(other_split, first[:1])


@pytest.mark.long
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
