"""A run's clock: the same in every engine, in populations and after a restart."""

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms import registry
from lamina.channel.channel import OPEN
from lamina.training.timing import demand_of
from small_linear import X, Y, simulate

SLOW = {"step_seconds": {"median": 1.0, "sigma": 1.0}, "upload": {"median": 0.01, "sigma": 1.0}, "latency": 0.1}
CHOOSING = SLOW | {"deadline": 3.0, "over_select": 1.5}
SETTINGS = {"clients": 9, "participation": 0.6, "batch_size": 2, "partition": {"name": "dirichlet", "alpha": 0.5}}


def column(history, name="clock_seconds"):
    return history.column(name)


def test_the_column_is_what_a_round_takes():
    # 15 numbers of 4 bytes down and up: 60 * 8 / 1e6 s each at 1 Mbit/s; three clients of ten samples, five steps of 2
    simulation = simulate("fedavg", clock={"download": 1, "upload": 2, "step_seconds": 0.5, "latency": 1}, batch_size=2)
    a_round = 480 / 1e6 + 480 / 2e6 + 5 * 0.5 + 1
    assert column(simulation.run(3)) == pytest.approx([a_round, 2 * a_round, 3 * a_round])


MIME = lamina.create("mime", "mime")  # the original, of two exchanges


def test_both_exchanges_of_the_original_mime_take_time():
    # vectors of 480 bits: x down and a gradient up; then three down and two up. Gradients of five batches, then of five
    # steps at two points each
    clock = {"download": 0.001, "upload": 0.002, "step_seconds": 0.5, "latency": 1}
    simulation = simulate(MIME, clock=clock, batch_size=2)
    first = 480 / 1e3 + 480 / 2e3 + 5 * 0.5 + 1
    second = 3 * 480 / 1e3 + 2 * 480 / 2e3 + 5 * 2 * 0.5 + 1
    assert column(simulation.run(2)) == pytest.approx([first + second, 2 * (first + second)])


@pytest.mark.parametrize(("deadline", "clients"), [(17.9, 2), (18.1, 3)])
def test_a_deadline_is_for_both_exchanges(deadline, clients):
    # a client sends three vectors of 480 bits; one of them at 80 bits a second
    clock = {"upload": [80e-6, 1.0, 1.0], "deadline": deadline}
    assert column(simulate(MIME, clock=clock).run(1), "clients") == [clients]


@pytest.mark.parametrize("algorithm", ["fedlamb", "mimelamb", MIME], ids=str)
def test_all_engines_drop_the_same_clients(algorithm):
    runs = [simulate(algorithm, clock=CHOOSING, engine=engine, **SETTINGS) for engine in ("loop", "stacked")]
    loop, stacked = (run.run(4) for run in runs)
    for name in ("clients", "steps", "bytes_up", "clock_seconds"):
        assert column(loop, name) == column(stacked, name)
    assert column(loop, "train_loss") == pytest.approx(column(stacked, "train_loss"), rel=1e-4)
    assert min(column(loop, "clients")) < max(column(simulate(algorithm, **SETTINGS).run(4), "clients"))


def test_members_of_a_population_may_have_other_clocks():
    clocks = [None, SLOW, CHOOSING, CHOOSING | {"deadline": 2.5}]
    make = [lambda clock=clock: simulate("fedavg", clock=clock, engine="stacked", **SETTINGS) for clock in clocks]
    together = lamina.Population([one() for one in make]).run(3)
    for history, alone in zip(together, (one().run(3) for one in make), strict=True):
        assert history.columns == alone.columns
        for name in set(history.columns) & {"clients", "steps", "clock_seconds"}:
            assert column(history, name) == column(alone, name)
        assert column(history, "train_loss") == pytest.approx(column(alone, "train_loss"), rel=1e-4)


@pytest.mark.parametrize("clock", [SLOW, CHOOSING], ids=["measured", "choosing"])
def test_a_resumed_run_continues_its_clock(tmp_path, clock):
    lazy = lamina.FedLamb(sync_every=3)
    whole = simulate(lazy, clock=clock, **SETTINGS).run(6)
    simulate(lazy, clock=clock, out=tmp_path / "run", **SETTINGS).run(4)
    resumed = simulate(lazy, clock=clock, out=tmp_path / "run", **SETTINGS).run(6)
    assert column(resumed) == column(whole)
    assert column(resumed, "train_loss") == column(whole, "train_loss")
    with pytest.raises(lamina.BadInput, match=r"clock.latency = 0.1 \(now 0.2\)"):
        simulate(lazy, clock=clock | {"latency": 0.2}, out=tmp_path / "run", **SETTINGS).run(7)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [*sorted(registry()), MIME], ids=str)
def test_what_a_round_demands_is_known_before_the_first(algorithm):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    simulation = lamina.Simulation(model, (X, Y), algorithm, clients=3, device="cpu")
    demand = demand_of(simulation.algorithm, simulation.objective, OPEN)
    row = simulation.run(1)[0]
    assert (3 * demand.down, 3 * demand.up) == (row["bytes_down"], row["bytes_up"])


def test_flops_are_counted_on_a_batch():
    # forward and the gradient of the weights: 2 * 10 samples * 12 weights each; nothing is propagated to the inputs
    simulation = simulate("fedavg", clock={"flops_per_second": 1e3}, batch_size=64)
    assert simulation.protocol.clock == lamina.Clock(step_seconds=0.48)
    assert column(simulation.run(2)) == pytest.approx([0.48, 0.96])
    for batch_size in (10, None):  # clients whose samples are dealt anew in every round
        settings = {"partition": {"name": "reallocate"}, "batch_size": batch_size}
        again = simulate("fedavg", clock={"flops_per_second": 1e3}, **settings)
        assert again.protocol.clock == lamina.Clock(step_seconds=0.48)


class Scale(nn.Module):
    """A model without matrix products."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.weight)[:, :3]


def test_clocks_that_do_not_fit_the_run_are_refused_before_it():
    with pytest.raises(lamina.BadInput, match="torch counts no FLOPs in this model: give step_seconds"):
        lamina.Simulation(Scale(), (X, Y), "fedavg", clients=3, device="cpu", clock={"flops_per_second": 1e3})
    with pytest.raises(lamina.BadInput, match=r"clock.upload lists 2 clients, and there are 3"):
        simulate(clock={"upload": [1, 2]})
    with pytest.raises(lamina.BadInput, match=r"clock.deadline = 0.1 s: even the fastest client needs 1 s"):
        simulate(clock={"step_seconds": 1, "deadline": 0.1})
    with pytest.raises(lamina.BadInput, match=r"dealt anew.*give local_steps"):
        simulate(clock={"step_seconds": 1, "deadline": 9}, partition={"name": "reallocate"})
