"""The reference loop, against the formulas that it stands for."""

import itertools

import torch
from torch import nn

import lamina

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(20) % 3
CLIENTS = [range(5), range(5, 20)]


def simulation(model=None, algorithm="fedavg", **more):
    torch.manual_seed(0)
    model = nn.Linear(4, 3) if model is None else model
    settings = {"clients": CLIENTS, "batch_size": None, "lr": 0.1, "device": "cpu", "engine": "loop"}
    return lamina.Simulation(model.double(), (X, Y), algorithm, **settings | more)


def gradient(x, samples):
    """Return the gradient of the mean loss over some samples, by torch alone."""
    model = nn.Linear(4, 3).double()
    torch.nn.utils.vector_to_parameters(x, model.parameters())
    loss = nn.functional.cross_entropy(model(X[samples]), Y[samples])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_a_round_of_fedavg_is_the_mean_of_gradient_steps():
    run = simulation(epochs=2)
    x, ends = run.state.server.x.clone(), []
    for samples in CLIENTS:
        y = x
        for _ in range(2):
            y = y - 0.1 * gradient(y, list(samples))
        ends.append(y)
    run.run(1)
    torch.testing.assert_close(run.state.server.x, sum(ends) / 2, rtol=1e-12, atol=1e-14)


def test_clients_may_be_weighted_by_their_examples():
    run = simulation(weighting="examples")
    x = run.state.server.x.clone()
    run.run(1)
    mean = gradient(x, list(range(20)))  # of all samples: 5 / 20 and 15 / 20 of the clients' own
    torch.testing.assert_close(run.state.server.x, x - 0.1 * mean, rtol=1e-12, atol=1e-14)


def test_a_long_gradient_is_clipped():
    run = simulation(clip=1e-3)
    x = run.state.server.x.clone()
    steps = [gradient(x, list(samples)) for samples in CLIENTS]
    assert all(step.norm() > 1e-3 for step in steps)
    run.run(1)
    expected = x - 0.1 * 1e-3 * sum(step / step.norm() for step in steps) / 2
    torch.testing.assert_close(run.state.server.x, expected, rtol=1e-12, atol=1e-14)


def test_a_full_gradient_is_the_same_in_pieces(monkeypatch):
    run = simulation()
    plan, x = run.plan.round(1), run.state.server.x
    monkeypatch.setattr("lamina.engines.loop.FULL_GRADIENT_CHUNK", 4)  # three whole pieces and a part of one
    actual = run.engine.full_gradient(x, run.state.buffers, plan, 1)
    torch.testing.assert_close(actual, gradient(x, list(CLIENTS[1])), rtol=1e-12, atol=1e-14)


def test_every_step_can_be_watched():
    run = simulation(epochs=3)
    plan, server, steps = run.plan.round(1), run.state.server, []
    info = lamina.algorithms.contract.ServerInfo(1, 0.1, run.objective.layers)
    down = run.algorithm.broadcast(server, info)
    client = run.algorithm.client_init(server.x, run.objective.layers)
    info = lamina.algorithms.contract.ClientInfo(1, 0.1, run.objective.layers, 3.0)
    local, losses = run.engine.train_client(
        down, client, {}, info, plan, 0, lambda k, loss, grad, before, after: steps.append((k, loss, before, after))
    )
    assert [k for k, *_ in steps] == [0, 1, 2]
    assert torch.equal(losses, torch.stack([loss for _, loss, *_ in steps]))
    assert torch.equal(steps[0][2].y, server.x)
    assert all(torch.equal(one[3].y, other[2].y) for one, other in itertools.pairwise(steps))
    assert torch.equal(steps[-1][3].y, local.y)


def test_the_callers_random_numbers_are_untouched():
    run = simulation(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    before = torch.get_rng_state()
    run.run(1)
    assert torch.equal(torch.get_rng_state(), before)
