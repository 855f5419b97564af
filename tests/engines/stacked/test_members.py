"""Members of a population end as if each ran alone, and share what they can."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import lamina
from lamina.rounds.plan import Plan
from small_simulations import assert_same, noise, reference, set_chunk, simulation, take_gpu_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "option", "kind"),
    [
        ("fedlamb", "decay", "cnn"),
        ("mimelamb", "decay", "mlp"),
        ("fedlada", "alpha", "mlp"),
        ("scaffold", "scale", "batch_norm"),
        ("fedadam", "server_lr", "mlp"),
    ],
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_member_of_a_population_is_the_run_alone(name, option, kind, chunk):
    grid = [(0.01, 0.05, 3), (0.03, 0.05, 4), (0.01, 0.1, 4), (0.03, 0.1, 3)]  # 4 x 3 clients
    members = []
    for lr, value, seed in grid:
        members.append(simulation(kind, lamina.create(name, **{option: value}), "stacked", lr=lr, seed=seed))
    set_chunk(members[0], chunk)
    lamina.Population(members).run(2)
    for member, (lr, value, seed) in zip(members, grid, strict=True):
        alone = reference(kind, lamina.create(name, **{option: value}), 2, lr=lr, seed=seed)
        assert_same(member.state, alone.state, 1e-9)


@pytest.mark.parametrize("gpu_path", [False, True])
def test_a_member_that_diverges_is_reported_and_the_others_end_as_if_alone(gpu_path):
    rates, decays = (0.01, 1e200, 0.02), (0.0, 0.1, 0.2)
    members = []
    for lr, decay in zip(rates, decays, strict=True):
        members.append(simulation("mlp", lamina.create("fedlamb", decay=decay), "stacked", lr=lr))
    if gpu_path:
        take_gpu_path(members[0])
    population = lamina.Population(members)
    population.run(3)
    assert list(population.diverged) == [1]
    assert population.diverged[1].round == 1
    for i in (0, 2):
        alone = reference("mlp", lamina.create("fedlamb", decay=decays[i]), 3, lr=rates[i])
        assert_same(members[i].state, alone.state, 1e-9)


def test_members_that_differ_in_rates_alone_share_one_plan(monkeypatch):
    plans = []
    plan_round = Plan.round

    def counted(self, number):
        plans.append((self.protocol.seed, number))
        return plan_round(self, number)

    parts = [list(range(i, 48, 6)) for i in range(6)]
    members = [noise(lr=0.1), noise(lr=0.2, schedule="constant"), noise(1, lr=0.1), noise(lr=0.1, clients=parts)]
    alone = [noise(lr=0.1), noise(lr=0.2), noise(1, lr=0.1), noise(lr=0.1, clients=parts)]
    population = lamina.Population(members)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "round", counted)
        population.run(2)
    assert len(plans) == 2 * 3  # the first two share theirs; another seed and other clients have their own
    for member, own in zip(members, alone, strict=True):
        own.run(2)
        assert torch.allclose(member.state.server.x, own.state.server.x, rtol=1e-5, atol=1e-7)


def test_models_that_differ_cannot_be_stacked():
    tanh = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(lamina.BadInput, match="their models differ in their layers"):
        lamina.Population([noise(), noise(net=tanh)])

    class Shifted(nn.Module):
        def __init__(self, shift, frozen):
            super().__init__()
            self.linear = nn.Linear(8, 3)
            self.register_buffer("shift", torch.full((8,), shift))
            self.mixing = nn.Linear(8, 8, bias=False).requires_grad_(False)
            self.mixing.weight.data.fill_(frozen)

        def forward(self, x):
            return self.linear(self.mixing(x) + self.shift)

    for other, what in ((Shifted(2.0, 1.0), "buffers"), (Shifted(1.0, 2.0), "frozen parameters")):
        with pytest.raises(lamina.BadInput, match=f"different {what}"):
            lamina.Population([noise(net=Shifted(1.0, 1.0)), noise(net=other)])


@pytest.fixture
def many_switches_between_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_runs_in_threads_end_as_if_alone(many_switches_between_threads):
    runs = [simulation("mlp", "fedavg", "stacked", seed=seed) for seed in (3, 4)]
    assert runs[0].engine.forward is runs[1].engine.forward  # they are alike, so they share it
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda run: run.run(20), runs))
    for run, seed in zip(runs, (3, 4), strict=True):
        assert_same(run.state, reference("mlp", "fedavg", 20, seed=seed).state, 1e-9)
