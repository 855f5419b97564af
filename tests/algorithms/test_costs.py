"""The columns of a run's history, the bytes on the wire, and the model's buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lamina
import transcriptions as T  # noqa: N812
from lamina.rounds import ledger
from paper_problem import BYTES, CLIENTS, INPUTS, START, TRAIN, close, make, simulate, transcribe


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
    ("fedlamb", {"sync": False}, (1, 1, 2)),
    ("mime", {}, (2, 2, 1)),
    ("mimelamb", {}, (2, 2, 1)),
    ("mime", {"momentum": "restart"}, (2, 2, 0)),
    ("mime", {"momentum": "average"}, (3, 3, 0)),
    ("mime", {"momentum": "server"}, (3, 2, 0)),
    ("mime", {"preset": "mime"}, (4, 3, 0)),
    ("mimelamb", {"control_variate": True}, (3, 3, 1)),
    ("fedlada", {}, (3, 2, 0)),
    ("fedlada", {"amendment": "per_client"}, (3, 3, 0)),
    ("fedlada_lamb", {}, (3, 2, 0)),
    ("fedams", {"preset": "fedlalr"}, (3, 3, 0)),
]


@pytest.mark.parametrize(("name", "given", "units"), UNITS, ids=str)
def test_cost_table(name: str, given: Any, units: Any) -> None:
    """Models per active client and round; a run of float64 sends units * p * 8 bytes to and from each of 3 clients."""
    algorithm = make(name, given)
    assert tuple(ledger.wire_cost(algorithm)) == units
    for row in simulate(algorithm).run(2):
        assert row["bytes_down"] == 3 * units[0] * BYTES
        assert row["bytes_up"] == 3 * units[1] * BYTES


@pytest.mark.parametrize(
    ("name", "numbers", "kept"), [("fednova", (0, 1), 0), ("fedexp", (0, len(T.SHAPES)), 0), ("scaffnew", (1, 0), 2)]
)
def test_models_and_single_numbers(name: str, numbers: Any, kept: int) -> None:
    """One model each way and some numbers: FedNova's a_i, FedExP's norm of every layer, Scaffnew's p."""
    assert tuple(ledger.wire_cost(make(name))) == (1, 1, kept)
    for row in simulate(make(name)).run(2):
        assert row["bytes_down"] == 3 * (BYTES + 8 * numbers[0])
        assert row["bytes_up"] == 3 * (BYTES + 8 * numbers[1])


# Linear(4, 5), BatchNorm and Linear(5, 3) have 25, 10 and 18 parameters; BatchNorm has 10 statistics. The server sends
# x and the statistics, a client its gradient at x; then the server sends v_hat, m, the mean gradient and the statistics
# again, and a client its delta, its gradient again and the statistics.
BOTH_EXCHANGES: list[tuple[dict[str, Any], int, int]] = [
    ({}, 4 * (53 + 10) + 4 * (3 * 53 + 10), 4 * 53 + 4 * (2 * 53 + 10)),
    (
        {"channel": {"codec": "bf16", "down": "bf16"}},  # two bytes a number, but not in the first gradient
        (2 * 53 + 4 * 10) + (2 * 3 * 53 + 4 * 10),
        4 * 53 + (2 * 2 * 53 + 4 * 10),
    ),
    ({"private": ["1.*", "2.*"]}, 4 * 25 + 4 * 3 * 25, 4 * 25 + 4 * 2 * 25),
]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(("settings", "down", "up"), BOTH_EXCHANGES, ids=["plain", "channel", "private"])
def test_both_exchanges_of_a_control_variate_count(settings: Any, down: int, up: int, engine: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    data = torch.randn(20, 4), torch.arange(20) % 3
    algorithm = make("mime", {"preset": "mime"})
    simulation = lamina.Simulation(
        model, data, algorithm, clients=4, participation=0.5, engine=engine, device="cpu", **settings
    )
    for row in simulation.run(2):
        assert (row["clients"], row["bytes_down"], row["bytes_up"]) == (2, 2 * down, 2 * up)


def test_paper_convention() -> None:
    """FedLADA's Table 11: FedAvg, FedProx, FedAdam 1x, all others 2x, FedLADA included although it sends 3 and 2."""
    table = dict.fromkeys(("fedavg", "fedprox", "fedadam"), 1)
    table |= dict.fromkeys(("fedcm", "fedadam_star", "scaffold", "localadam", "fedams", "fedlamb", "fedlada"), 2)
    for name, models in table.items():
        simulation = simulate(make(name))
        assert simulation.run(1)[0]["paper_bytes"] == models * BYTES * 3


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
    settings = {"clients": CLIENTS, "participation": 0.6, "batch_size": 4, "device": "cpu"}
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
