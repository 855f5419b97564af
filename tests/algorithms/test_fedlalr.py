"""FedLALR is Fed-AMS with other options; here its own pseudo-code is the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import more_transcriptions
import transcriptions as T  # noqa: N812
from paper_problem import INPUTS, LABELS, START, close, differ, make, simulate

FEDLALR = {"second_moment": "running", "momentum": "average", "v_init": 1e-16, "beta2": 0.995}


@pytest.mark.parametrize("settings", [{}, {"weighting": "examples", "epochs": 2}, {"clip": 0.15}], ids=str)
def test_fedams_follows_fedlalrs_pseudo_code(settings: Any) -> None:
    """v_hat_K >= v_hat, so Fed-AMS's max(v_hat, mean v_hat_K) is the mean, and both second moments start at v_hat."""
    simulation = simulate(make("fedams", {"preset": "fedlalr"}), **settings)
    plans = [simulation.plan.round(r) for r in range(1, 5)]
    o = SimpleNamespace(beta1=0.9, beta2=0.995, eps=1e-8, by_examples="weighting" in settings)
    gradient = T.Gradient(INPUTS, LABELS, settings.get("clip", float("inf")))
    for record in more_transcriptions.fedlalr(START, plans, gradient, o):
        before = simulation.state.server.v_hat
        simulation.run(1)
        for field, expected in record.server.items():
            close(getattr(simulation.state.server, field), expected, f"round {simulation.state.round}, {field}")
        assert differ(simulation.state.server.v_hat, before)


@pytest.mark.parametrize("option", FEDLALR)
def test_every_option_of_fedlalr_matters(option: str) -> None:
    """With any one of its options left out, Fed-AMS is another method."""
    changed = simulate(make("fedams", {name: value for name, value in FEDLALR.items() if name != option}))
    fedlalr = simulate(make("fedams", {"preset": "fedlalr"}))
    for simulation in (changed, fedlalr):
        simulation.run(3)
    assert differ(changed.state.server.x, fedlalr.state.server.x)
