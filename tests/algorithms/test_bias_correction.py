"""Bias correction: with constant gradients every corrected moment is the gradient, for every client in every round."""

import pytest
import torch
from torch import nn

import lamina
from flower_setup import Setup
from lamina import algorithms
from lamina.base.errors import BadInput

SIZES = (7, 12, 3, 9, 5)  # with batches of 4: K = 2, 3, 1, 3, 2
PARTS = [list(range(sum(SIZES[:i]), sum(SIZES[: i + 1]))) for i in range(len(SIZES))]
LR = 0.25


def simulate(algorithm, engine="loop", **settings):
    """A run whose gradient is 1 in every coordinate: inputs of 1, and the sum of the outputs as loss."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    data = (torch.ones(sum(SIZES), 3, dtype=torch.float64), torch.zeros(sum(SIZES), 2, dtype=torch.float64))
    given = {"clients": PARTS, "participation": 0.4, "batch_size": 4, "lr": LR, "seed": 1, "device": "cpu"} | settings
    return lamina.Simulation(model, data, algorithm, loss=lambda outputs, _: outputs.sum(1), engine=engine, **given)


def assert_unit_steps(algorithm, rounds=7, **settings):
    """m / sqrt(v) is 1 at every step, so a client moves by lr * K_i; the cohort changes, and new clients come late."""
    run = simulate(algorithm, **settings)
    seen = set()
    for r in range(1, rounds + 1):
        before = run.state.server.x
        row = run.run(1)[-1]
        plan = run.plan.round(r)
        steps = torch.as_tensor(plan.steps, dtype=torch.float64)
        torch.testing.assert_close(before - run.state.server.x, torch.full_like(before, LR * float(steps.mean())))
        spread = len(before) * LR**2 * float(((steps - steps.mean()) ** 2).mean())  # each by its own lr * K_i
        assert row["consistency"] == pytest.approx(spread, rel=1e-6, abs=1e-9)
        new = set(plan.cohort.tolist()) - seen
        seen |= new
    assert seen == set(range(5))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("alpha", [0.1, 0.7])
def test_fedladas_momentum_and_amendment(alpha, engine):
    """v = 1: the corrected m is 1 in every step, and g_a, corrected too, is 1 after every round."""
    options = {"beta2": 1.0, "v_init": 1.0, "decay": 0.0}
    assert_unit_steps(lamina.FedLada(alpha=alpha, moment_correction="m", ga_correction=True, **options), engine=engine)


def test_the_first_round_alone():
    """Both moments of round 1 are corrected. In round 2, m starts afresh and v continues, uncorrected."""
    algorithm = lamina.LocalAdam(moment_correction="first_round", amsgrad=False, v_init=0.0, decay=0.0)
    run = simulate(algorithm, local_steps=2)
    before = run.state.server.x
    run.run(1)
    first = run.state.server.x
    torch.testing.assert_close(before - first, torch.full_like(before, 2 * LR))
    run.run(1)
    steps = sum((1 - 0.9**k) / (1 - 0.99 ** (2 + k)) ** 0.5 for k in (1, 2))
    torch.testing.assert_close(first - run.state.server.x, torch.full_like(before, steps * LR))


@pytest.mark.parametrize("name", ["fedadam", "fedadam_star"])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_adam_on_the_server(name, amsgrad):
    """A constant mean displacement: Adam's direction is its sign, in every round."""
    options = {"alpha": 1.0} if name == "fedadam_star" else {}
    algorithm = algorithms.create(
        name, bias_correction=True, amsgrad=amsgrad, tau=0.0, v_init=0.0, server_lr=0.5, **options
    )
    run = simulate(algorithm, local_steps=2)
    for _ in range(5):
        before = run.state.server.x
        run.run(1)
        torch.testing.assert_close(before - run.state.server.x, torch.full_like(before, 0.5))


@pytest.mark.parametrize(
    "algorithm",
    [
        lamina.FedLada(moment_correction="m", ga_correction=True, amsgrad=False, eps=1e-4),
        lamina.create("fedlada", "fedadamw_vision", v_init=1e-6),
    ],
    ids=lambda algorithm: algorithm.card.name,
)
def test_the_same_in_a_federation(tmp_path, algorithm):
    """Nodes count FedLADA's steps and rounds themselves."""
    setup = Setup(tmp_path, algorithm, weighting="examples")
    setup.run()
    alone = setup.simulation()
    alone.run(setup.rounds)
    for row, row_alone in zip(setup.rows, alone.history, strict=True):
        for name in ("loss", "update_norm", "consistency", "bytes_down", "bytes_up"):
            assert row[name] == pytest.approx(row_alone[name], rel=1e-4), name


@pytest.mark.parametrize("name", ["fedadam", "fedadam_star"])
def test_a_second_moment_that_cannot_be_corrected_is_refused(name):
    with pytest.raises(BadInput, match=r"bias_correction divides by 1 - beta2\^t, which is 0 for beta2 = 1"):
        algorithms.create(name, beta2=1.0, bias_correction=True)
    with pytest.raises(BadInput, match="two forms of the same correction: choose one"):
        algorithms.create(name, rate_correction="round", bias_correction=True)
    algorithms.create(name, beta2=1.0)  # v = v_init for ever: a fixed preconditioner


@pytest.mark.parametrize("name", ["fedadam", "fedadam_star", "fedyogi"])
def test_a_rate_that_would_be_corrected_to_zero_is_refused(name):
    with pytest.raises(BadInput, match=r"rate_correction multiplies by sqrt\(1 - beta2\^t\), which is 0 for beta2 = 1"):
        algorithms.create(name, beta2=1.0, rate_correction="next_round")
