"""The diagnostics of a run, against float64 numpy and the identities of the papers' proofs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import lamina
import transcriptions as T  # noqa: N812
from lamina.training.metrics import DIAGNOSTICS, smaller_is_better
from paper_problem import CLIENTS, INPUTS, LABELS, NAMES, START, close, make, simulate, transcribe

ALL = list(DIAGNOSTICS)
COLUMNS = [column for columns in DIAGNOSTICS.values() for column in columns]
GRADIENT = T.Gradient(INPUTS, LABELS)
SECOND_MOMENT = {"fedadam": "v", "fedadam_star": "v", "localadam": "v", "fedlada": "v", "fedlada_lamb": "v"}
SECOND_MOMENT |= dict.fromkeys(("fedyogi", "fedadagrad"), "v")
SECOND_MOMENT |= dict.fromkeys(("fedams", "fedlamb", "mime", "mimelamb", "fedams_server"), "v_hat")
AMENDMENT = {"fedlada": "g_a", "fedlada_lamb": "g_a", "fedcm": "momentum", "fedadam_star": "momentum", "scaffold": "c"}
AMENDMENT |= {"mofedsam": "momentum", "fedlion": "m", "fedadamw": "g_a", "fedmuon": "g_a"}
EXTRAPOLATED = ("fedlada", "fedlada_lamb", "fedcm", "mofedsam")


def full_gradient(x: np.ndarray, by_examples: bool = False) -> np.ndarray:
    """Return the gradient of the mean of the clients' losses, by hand."""
    weights = np.array([len(part) if by_examples else 1.0 for part in CLIENTS])
    return np.average([GRADIENT(x, part) for part in CLIENTS], axis=0, weights=weights)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("weighting", ["clients", "examples"])
@pytest.mark.parametrize("name", NAMES)
def test_diagnostics_are_those_of_the_transcription(name: str, weighting: str) -> None:
    """Every column but the drift follows from the transcription's states before and after the round."""
    simulation = simulate(make(name), diagnostics=ALL, weighting=weighting)
    by_examples = weighting == "examples"
    before: Any = None
    for number, record in enumerate(transcribe(simulation, 3), 1):
        row, plan = simulation.run(1)[-1], simulation.plan.round(number)
        x = START if before is None else before["x"]
        after = record.server
        point = after["x"]
        if name in EXTRAPOLATED:
            alpha = simulation.algorithm.alpha
            point = after["x"] / alpha - (1 - alpha) / alpha * x
            close(row["extrapolation"], ((point - after["x"]) ** 2).sum())
        gradient = full_gradient(point, by_examples)
        close(row["gradient_squared_norm"], (gradient**2).sum())
        weights = plan.examples if by_examples else np.ones(len(plan.cohort))
        pseudo = -np.average(record.deltas, axis=0, weights=weights) / (
            plan.lr * np.average(plan.steps, weights=weights)
        )
        full = full_gradient(x, by_examples)
        close(row["pseudo_gradient_gap"], np.sqrt(((pseudo - full) ** 2).sum()))
        close(row["pseudo_gradient_cosine"], cosine(pseudo, full))
        if name in SECOND_MOMENT:
            v = after[SECOND_MOMENT[name]]
            close(row["scaled_gradient_squared_norm"], ((gradient / v**0.25) ** 2).sum(), rtol=1e-8)
            close(row["second_moment_mean"], v.mean())
            close(row["second_moment_variance"], ((v - v.mean()) ** 2).mean())
            if before is not None:
                close(row["second_moment_growth"], v.sum() - before[SECOND_MOMENT[name]].sum(), rtol=1e-8)
        if name in AMENDMENT and before is not None:
            close(row["amendment_cosine"], cosine(after[AMENDMENT[name]], before[AMENDMENT[name]]))
        before = after
    has = {column for column in COLUMNS if column in row}
    assert ("second_moment_mean" in has) == (name in SECOND_MOMENT)
    assert ("amendment_cosine" in has) == (name in AMENDMENT)
    assert ("extrapolation" in has) == (name in EXTRAPOLATED)


def test_drift_of_local_sgd_by_hand() -> None:
    """drift is the mean over the active clients and their steps of ||y_k - x||^2."""
    simulation = simulate(make("fedavg"), diagnostics=["drift"])
    x = START
    for number, record in enumerate(transcribe(simulation, 3), 1):
        row, plan = simulation.run(1)[-1], simulation.plan.round(number)
        drifts = []
        for c in range(len(plan.cohort)):
            y, squares = x, []
            for k in range(plan.steps[c]):
                y = y - plan.lr * GRADIENT(y, plan.batch(c, k))
                squares.append(((y - x) ** 2).sum())
            drifts.append(np.mean(squares))
        close(row["drift"], np.mean(drifts))
        x = record.server["x"]


@pytest.mark.parametrize("name", ["fedlamb", "scaffold", "mime"])
def test_drift_after_one_step_is_the_length_of_the_displacements(name: str) -> None:
    """With one local step the drift is mean_i ||delta_i||^2, also of clients with a state of their own."""
    simulation = simulate(make(name), diagnostics=["drift"], epochs=None, local_steps=1)
    for record in transcribe(simulation, 4):
        row = simulation.run(1)[-1]
        close(row["drift"], np.mean([(delta**2).sum() for delta in record.deltas]))


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_point_of_the_bound_moves_by_the_mean_adaptive_step(server_lr: float) -> None:
    """At constant rates z+ = z - eta_g eta_l K mean(m / sqrt(v_hat)): Lemma B.8 of the FedLADA paper."""
    lr, steps = 0.02, 3
    algorithm = lamina.FedLada(alpha=0.2, decay=0.0, server_lr=server_lr)
    settings: Any = {"schedule": "constant", "lr": lr, "epochs": None, "local_steps": steps}
    simulation = simulate(algorithm, **settings)
    previous, z = simulation.state.server, START
    for record in transcribe(simulation, 4):
        simulation.run(1)
        server = simulation.state.server
        point = algorithm.analysis(server, previous).point.numpy()
        close(point, z - server_lr * lr * steps * np.mean(record.directions, axis=0))
        previous, z = server, point


def same(one: Any, other: Any, columns: Any, rtol: float) -> None:
    for a, b in zip(one, other, strict=True):
        for column in columns:
            assert (column in a) == (column in b), column
            assert a.get(column, 0.0) == pytest.approx(b.get(column, 0.0), rel=rtol, abs=1e-300), column


@pytest.mark.parametrize("name", ["fedlada", "fedlamb", "scaffold"])
def test_diagnostics_change_no_number_and_agree_in_all_engines(name: str) -> None:
    plain = simulate(make(name)).run(3)
    by_loop = simulate(make(name), diagnostics=ALL).run(3)
    same(plain, by_loop, [column for column in plain.columns if not column.endswith("seconds")], rtol=0.0)
    same(simulate(make(name), engine="stacked", diagnostics=ALL).run(3), by_loop, COLUMNS, rtol=1e-9)
    members = [simulate(make(name), engine="stacked", diagnostics=ALL, lr=lr) for lr in (0.01, 0.03)]
    for history, lr in zip(lamina.Population(members).run(3), (0.01, 0.03), strict=True):
        same(history, simulate(make(name), diagnostics=ALL, lr=lr).run(3), COLUMNS, rtol=1e-9)


def test_resumed_runs_and_rounds_without_evaluation(tmp_path: Any) -> None:
    whole = simulate(make("fedlamb"), diagnostics=ALL, evaluate_every=2).run(5)
    assert ["drift" in row for row in whole] == [False, True, False, True, True]
    folder = tmp_path / "run"
    for rounds in (3, 5):
        simulation = simulate(make("fedlamb"), diagnostics=ALL, evaluate_every=2, out=folder)
        resumed = simulation.run(rounds)
    same([whole[1], whole[3], whole[4]], [resumed[1], resumed[3], resumed[4]], COLUMNS, rtol=0.0)
    assert "drift" in (folder / "metrics.jsonl").read_text()


def test_reallocated_data_have_one_loss() -> None:
    """Clients without fixed samples: F is the mean over all samples."""
    simulation = simulate(make("fedavg"), clients=4, partition="reallocate", diagnostics=["gradient"])
    row = simulation.run(1)[0]
    gradient = GRADIENT(simulation.state.server.x.numpy(), np.arange(len(LABELS)))
    close(row["gradient_squared_norm"], (gradient**2).sum())


def test_names_and_directions() -> None:
    with pytest.raises(lamina.BadInput, match=r"diagnostic 'gradent'.*gradient"):
        simulate(make("fedavg"), diagnostics=["gradent"])
    with pytest.raises(lamina.BadInput, match="list of names"):
        simulate(make("fedavg"), diagnostics="gradient")
    assert smaller_is_better("gradient_squared_norm")
    assert not smaller_is_better("amendment_cosine")
    first = simulate(make("fedlada"), diagnostics=["amendment"]).run(1)[0]
    assert "amendment_cosine" not in first  # g_a is zero before round 1
    assert not any(math.isnan(value) for value in first.values())
