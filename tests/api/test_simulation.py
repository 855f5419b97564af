"""The Python API: training, continuing, metrics, and one clear line for bad input."""

import math
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lamina
import two_classes
from lamina import algorithms
from lamina.data import Augment, Classes, Dirichlet, Reallocate
from lamina.rounds.plan import Plan
from lamina.rounds.schedules import Cosine, Exponential, Milestones
from lamina.rounds.settings import TrainSettings


def blobs(n=240, classes=3, features=4, seed=0):
    """Three well-separated clouds of points."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = 3 * torch.randn(classes, features, generator=generator)
    return centres[y] + torch.randn(n, features, generator=generator), y


def net(seed=0, features=4, classes=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes))


def simulate(algorithm="fedlamb", model=None, data=None, **more):
    data = blobs() if data is None else data
    settings = {"test": data, "clients": 6, "partition": Classes(2), "participation": 0.5, "batch_size": 16,
                "device": "cpu", "seed": 7}  # fmt: skip
    settings |= more
    if not isinstance(settings["clients"], int | None):  # lists of samples, which no partition deals
        del settings["partition"]
    return lamina.Simulation(net() if model is None else model, data, algorithm, **settings)


def weights(simulation):
    return simulation.state.server.x


@pytest.mark.parametrize("name", lamina.registry())
def test_every_algorithm_learns(name):
    # their defaults are for long runs of deep networks
    rates = {"fedlada": 0.03} | dict.fromkeys(("localadam", "localadamw", "fedadamw"), 0.01)
    participation = 1.0 if lamina.create(name).all_clients else 0.5
    simulation = simulate(name, lr=rates.get(name), participation=participation)
    simulation.run(25)
    assert simulation.history.best("accuracy") > 0.8
    assert simulation.history[-1]["train_loss"] < simulation.history[0]["train_loss"]


def test_the_readme_ten_lines():
    x, y = blobs()
    simulation = lamina.Simulation(net(), (x.numpy(), y.numpy()), lamina.FedLamb(decay=0.01), test=(x, y),
                                   clients=10, partition=Dirichlet(0.3), participation=0.5, lr=0.03)  # fmt: skip
    history = simulation.run(5)
    simulation.run(5)  # continue
    assert [row["round"] for row in history] == list(range(1, 11))
    assert simulation.model(x).shape == (240, 3)
    assert list(history.to_pandas()["round"]) == list(range(1, 11))


def test_the_model_given_is_copied_not_changed():
    model = net()
    before = [p.clone() for p in model.parameters()]
    simulation = simulate(model=model)
    simulation.run(2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    trained = dict(simulation.model.named_parameters())
    assert not torch.equal(trained["0.weight"], model[0].weight)
    assert torch.equal(torch.cat([p.flatten() for p in trained.values()]), weights(simulation))


@pytest.mark.parametrize("name", ["fedlamb", "scaffold", "mimelamb", "fedlada"])
def test_continuing_is_the_same_as_running_at_once(name):
    at_once, in_parts = simulate(name), simulate(name)
    at_once.run(6)
    for _ in range(3):
        in_parts.run(2)
    assert torch.equal(weights(at_once), weights(in_parts))
    assert at_once.history.column("train_loss") == in_parts.history.column("train_loss")


def test_same_seed_same_run_whatever_the_global_generators_do():
    model = nn.Sequential(net(), nn.Dropout(0.0))
    model.insert(1, nn.Dropout(0.5))
    first = simulate(model=model)
    first.run(3)
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002
    before = torch.get_rng_state()
    second = simulate(model=model)
    second.run(3)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(weights(first), weights(second))
    other = simulate(model=model, seed=8)
    other.run(3)
    assert not torch.equal(weights(first), weights(other))


def test_dropout_differs_between_steps():
    """With identical batches and no learning to speak of, only the dropout mask can change the loss."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    x, y = blobs(8)
    simulation = simulate("fedavg", model=model, data=(x, y), clients=[range(8)], batch_size=8, lr=1e-12, epochs=1)
    simulation.run(5)
    assert len(set(simulation.history.column("train_loss"))) == 5


def test_metrics_of_a_round():
    x, y = blobs()
    simulation = simulate("fedavg", data=(x, y), client_metrics=True, clients=20, partition="iid")
    row = simulation.run(3)[-1]
    model = simulation.model
    with torch.no_grad():
        logits = model(x)
    assert row["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert row["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)
    own = np.sort(
        [
            float((logits[p].argmax(1) == y[p]).double().mean())
            for p in map(torch.from_numpy, simulation.plan.clients.parts)
        ]
    )
    assert row["client_accuracy"] == pytest.approx(own.mean())
    assert row["client_accuracy_worst10"] == pytest.approx(own[:2].mean())  # 10 % of 20 clients
    assert row["clients"] == 10
    d = sum(p.numel() for p in model.parameters())
    assert row["bytes_down"] == row["bytes_up"] == 10 * 4 * d
    assert row["paper_bytes"] == 10 * 4 * d
    assert row["seconds"] > 0


def test_trust_ratios_are_reported_by_layer_on_request():
    row = simulate("fedlamb", trust_ratios=True).run(1)[0]
    assert {k for k in row if k.startswith("trust_ratio/")} == {
        "trust_ratio/0.weight", "trust_ratio/0.bias", "trust_ratio/2.weight", "trust_ratio/2.bias"}  # fmt: skip
    assert all(v > 0 for k, v in row.items() if k.startswith("trust_ratio/"))
    for name in ("mimelamb", "fedlada_lamb"):
        assert sum(k.startswith("trust_ratio/") for k in simulate(name, trust_ratios=True).run(1)[0]) == 4
    row = simulate(lamina.FedLamb(layers="module"), trust_ratios=True).run(1)[0]
    assert {k for k in row if k.startswith("trust_ratio/")} == {"trust_ratio/0", "trust_ratio/2"}
    assert not any(k.startswith("trust_ratio/") for k in simulate("fedavg", trust_ratios=True).run(1)[0])


def test_evaluate_every():
    history = simulate(evaluate_every=3).run(5)
    assert [math.isnan(v) for v in history.column("accuracy")] == [True, True, False, True, False]


def test_floating_buffers_are_averaged_and_integer_ones_kept():
    """BatchNorm after one local step: running mean = 0.9 * 0 + 0.1 * batch mean, averaged over clients."""
    x, y = blobs(60)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    parts = [range(20), range(20, 60)]
    simulation = simulate("fedavg", model=model, data=(x, y), clients=parts, participation=1.0, batch_size=40)
    row = simulation.run(1)[0]
    expected = 0.1 * (x[:20].mean(0) + x[20:].mean(0)) / 2
    assert torch.allclose(simulation.state.buffers["0.running_mean"], expected, atol=1e-6)
    assert simulation.state.buffers["0.num_batches_tracked"] == 0
    d = sum(p.numel() for p in model.parameters())
    assert row["bytes_down"] == 2 * 4 * (d + 8)  # the statistics travel too
    weighted = simulate("fedavg", model=model, data=(x, y), clients=parts, participation=1.0, batch_size=40,
                        weighting="examples")  # fmt: skip
    weighted.run(1)
    expected = 0.1 * (20 * x[:20].mean(0) + 40 * x[20:].mean(0)) / 60
    assert torch.allclose(weighted.state.buffers["0.running_mean"], expected, atol=1e-6)


def test_frozen_parameters_stay_and_cost_nothing():
    model = net()
    model[0].weight.requires_grad_(False)
    simulation = simulate("fedavg", model=model)
    row = simulation.run(2)[-1]
    assert torch.equal(simulation.model[0].weight, model[0].weight)
    assert row["bytes_up"] == 3 * 4 * (8 + 8 * 3 + 3)


def test_tied_weights_are_one_vector():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    simulation = simulate("fedavg", model=Tied())
    simulation.run(2)
    assert weights(simulation).numel() == 16 + 4 + 4
    assert torch.equal(simulation.model.a.weight, simulation.model.b.weight)


def test_reallocation_deals_everything_to_the_active_clients_every_round():
    simulation = simulate("fedavg", clients=10, partition=Reallocate(Classes(1)), participation=0.3)
    rounds = [simulation.plan.round(r) for r in (1, 2)]
    for plan in rounds:
        assert len(plan.cohort) == 3
        assert sorted(np.concatenate(plan.samples)) == list(range(240))
    assert not all(np.array_equal(a, b) for a, b in zip(rounds[0].samples, rounds[1].samples, strict=True))
    simulation.run(2)


def test_regression_with_squared_error():
    x, _ = blobs()
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0])
    simulation = lamina.Simulation(nn.Linear(4, 1), (x, y), "fedavg", test=(x, y), loss="mse", lr=0.02, device="cpu")
    history = simulation.run(150)
    assert history[-1]["loss"] < 0.05
    assert "accuracy" not in history[-1]


def test_augmentation_is_reproducible_and_changes_the_run():
    images = torch.randint(0, 256, (60, 1, 6, 6), dtype=torch.uint8)
    data = (images, torch.arange(60) % 3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    runs = []
    for augmentation in (None, Augment(2), Augment(2)):
        simulation = simulate("fedavg", model=model, data=data, augmentation=augmentation)
        simulation.run(2)
        runs.append(weights(simulation))
    assert torch.equal(runs[1], runs[2])
    assert not torch.equal(runs[0], runs[1])


def test_schedule_and_clip_reach_the_steps():
    simulation = simulate(
        "fedavg", schedule=Exponential(0.5), clip=1e-3, lr=1.0, clients=[range(16)], participation=1.0
    )
    history = simulation.run(3)
    assert history.column("lr") == [1.0, 0.5, 0.25]
    # one step of clipped norm 1e-3 at each rate
    assert history.column("update_norm") == pytest.approx([1e-3, 5e-4, 2.5e-4], rel=1e-4)


# --- what can go wrong ------------------------------------------------------------------------------------------


def test_divergence_stops_with_round_client_and_layer_and_keeps_the_records():
    class Exploding(nn.Module):
        def __init__(self):
            super().__init__()
            self.fine, self.wild = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.fine(x) + self.wild(x) ** 9

    simulation = simulate("fedavg", model=Exploding(), lr=0.02, clip=None)
    protocol = TrainSettings(0.02, schedule=Exponential(40.0), participation=0.5, batch_size=16, seed=7)
    simulation.plan = Plan(simulation.plan.clients, protocol)
    with pytest.raises(
        lamina.Diverged, match=r"round \d+: client \d+ \(local step \d+ of \d+\) went non-finite"
    ) as caught:
        simulation.run(30)
    error = caught.value
    assert len(simulation.history) == error.round - 1 == simulation.state.round
    assert error.client in simulation.plan.cohort(error.round)
    assert error.layer in ("fine.weight", "fine.bias", "wild.weight", "wild.bias")
    assert torch.isfinite(weights(simulation)).all()


def test_a_non_finite_server_step_is_named():
    simulation = simulate(lamina.FedAdam(server_lr=3e38, beta1=0.0))
    with pytest.raises(lamina.Diverged, match="the server's step went non-finite") as caught:
        simulation.run(50)
    assert caught.value.client is None


class Growing(NamedTuple):
    number: torch.Tensor


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@mock.patch.dict(algorithms.registry())  # without the test's algorithm afterwards
def test_a_client_record_that_overflows_is_reported(engine):
    @lamina.algorithm("growing", title="Growing", reference="-", lr=0.1)
    class GrowingRecord(lamina.FedAvg):
        def client_init(self, x, layers):
            return Growing(torch.ones_like(x))

        def finish(self, local, down, client, info):
            return super().finish(local, down, client, info)[0], Growing(client.number * 1e30)

    simulation = simulate(GrowingRecord(), engine=engine, participation=1.0)
    with pytest.raises(lamina.Diverged, match="first in 'loss or client state'") as caught:
        simulation.run(3)
    assert (caught.value.round, len(simulation.history)) == (2, 1)


def test_masks_are_clients_and_a_huge_batch_is_the_whole_client():
    simulation = simulate("fedavg", clients=[Y == 0, Y == 1], participation=1.0, batch_size=10**12)
    assert [len(s) for s in simulation.plan.round(1).samples] == [80, 80]
    assert simulation.run(1)[0]["steps"] == 2


def test_the_model_returned_is_not_changed_by_later_rounds():
    simulation = simulate()
    simulation.run(1)
    early = simulation.model
    before = early[0].weight.clone()
    simulation.run(2)
    assert torch.equal(before, early[0].weight)
    assert not early.training


def test_a_layer_in_evaluation_mode_stays_there():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[0].eval()
    for engine in ("loop", "stacked"):
        simulation = simulate("fedavg", model=model, engine=engine)
        simulation.run(2)
        assert torch.equal(simulation.state.buffers["0.running_mean"], torch.zeros(4))


class NanGradient(nn.Module):
    """A finite loss with a NaN gradient in `b`: the root of zero."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.a(x) + torch.sqrt((self.b * self.b).sum())


@pytest.mark.parametrize("engine", ["loop", "captured"])
@pytest.mark.parametrize(
    "algorithm",
    [lamina.LocalAdam(sync=False), lamina.FedLamb(second_moment="running", sync_every=5), lamina.FedAms(sync_every=5)],
    ids=str,
)
def test_a_nan_gradient_is_never_swallowed(algorithm, engine):
    with pytest.raises(lamina.Diverged) as caught:
        simulate(algorithm, model=NanGradient(), engine=engine).run(3)
    assert (caught.value.round, caught.value.layer) == (1, "b")


def test_an_overflow_in_the_forward_pass_names_the_layer():
    model = net()
    with torch.no_grad():
        model[2].weight.mul_(1e38)
    with pytest.raises(lamina.Diverged) as caught:
        simulate("fedams", model=model, data=(X * 1e3, Y), engine="loop", clients=[range(9)]).run(3)
    assert caught.value.layer in ("2", "2.weight", "loss")


def test_a_test_loss_that_is_not_finite_stops_the_run():
    test = (X.clone(), Y)
    test[0][:] = 3e38
    simulation = simulate("fedavg", test=test, model=nn.Linear(4, 3), lr=1.0)
    with pytest.raises(lamina.Diverged, match="test loss"):
        simulation.run(3)
    assert len(simulation.history) >= 1


def test_clients_with_one_sample_work():
    simulation = simulate("fedlamb", clients=[[0], [1], [2, 3]], participation=1.0)
    assert simulation.run(2)[-1]["steps"] == 3


X, Y = blobs()
NAN = X.clone()
NAN[17, 2] = float("nan")


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: simulate(clients=[[0, 1], []]), "client 1 has no samples"),
        (lambda: simulate(clients=241, partition="iid"), "240"),
        (lambda: simulate(data=(NAN, Y)), "17"),
        (lambda: simulate(data=(X, Y - 1)), "the label of sample 0 is not one of 0, 1, 2"),
        (lambda: simulate(data=(X[:5], Y)), "240"),
        (lambda: simulate(model=net(classes=2)), "it needs 3"),
        (lambda: simulate(model=net(features=5)), r"the model cannot take the train data, samples of shape \(4,\)"),
        (lambda: simulate(model=nn.Identity()), "no trainable parameter"),
        (lambda: simulate("fedlam"), "did you mean 'fedlamb'"),
        (lambda: simulate(partition="dirichle"), "did you mean 'dirichlet'"),
        (lambda: simulate(device="cudo"), "cudo"),
        (lambda: simulate(clients=[Y == 0, (Y == 1)[:9]]), "mask has shape"),
        (lambda: simulate(clients=[[0.5, 1.7]]), "whole sample numbers"),
        (lambda: simulate(clients=[[-1, 0], [2]]), "sample -1"),
        (lambda: simulate(clients="ten"), "clients = 'ten'"),
        (lambda: simulate(lamina.FedLamb), "the class FedLamb"),
        (lambda: lamina.Simulation(net(), X, Y), r"pass the data as a pair, Simulation\(model, \(x, y\), algorithm\)"),
        (
            lambda: simulate(data=(X, nn.functional.one_hot(Y, 3)), partition="iid"),
            r"one-hot labels as class numbers, y.argmax\(1\)",
        ),
        (
            lambda: simulate(data=(X, nn.functional.one_hot(Y, 3)), partition="dirichlet", clients=4),
            r"one class per sample.*y.argmax\(1\)",
        ),
        (lambda: simulate(data=(X, Y[:, None]), partition="iid"), r"leave the axis of 1 out: y.squeeze\(1\)"),
        (lambda: lamina.Dataset(X, Y, num_classes=3), "Dataset has no option 'num_classes'; did you mean 'classes'"),
        (lambda: lamina.data.Augment(pads=3), "Augment has no option 'pads'; did you mean 'pad'"),
        (lambda: Cosine(round=3), "Cosine has no option 'round'; did you mean 'rounds'"),
        (lambda: lamina.aggregation.TrimmedMean(0.1, shares=3), "did you mean 'share'"),
        (lambda: Reallocate(Classes(1), k=3), r"Reallocate has no option 'k' \(its options: base\)"),
        (lambda: simulate(data=DataLoader(TensorDataset(X, Y))), "give its data set, loader.dataset"),
        (lambda: simulate().run(1)["loss"], r"history.array\('loss'\) returns a column"),
        (lambda: lamina.Population(simulate()), "a population needs a list of simulations"),
        (lambda: simulate(model=3), "model is 3"),
        (lambda: simulate(model="mpl"), "unknown model 'mpl'; did you mean 'mlp'"),
        (lambda: simulate(schedule=None), "schedule"),
        (lambda: simulate(partition=("dirichlet", 0.1)), "partition"),
        (lambda: simulate(loss=None), "loss"),
        (lambda: simulate(seed=1.5), "seed"),
        (lambda: simulate(lr="x"), "lr"),
        (lambda: simulate(participation="half"), "participation"),
        (lambda: simulate().run(1.5), "run"),
        (lambda: simulate().run(-1), "run"),
        (lambda: simulate(loss="mse"), "the loss cannot compare"),
        (lambda: simulate(model=nn.Sequential(net(), nn.Flatten(0))), "outputs have shape"),
        (lambda: simulate(sampling="bernoulli", participation=1e-9).run(1), "draws no client"),
        (
            lambda: simulate(partition=Reallocate(Classes(1)), clients=20, participation=0.1),
            "round 1 has 2 active clients",
        ),
        (lambda: simulate(schedule=Cosine(2)).run(3), "learning rate 0"),
        (lambda: Exponential(-1.0), "gamma"),
        (lambda: Exponential("x"), "gamma"),
        (lambda: Milestones(5), "at = 5"),
        (lambda: Cosine(3, floor=3), "floor"),
        (lambda: simulate(loss="cross_entrop"), "did you mean 'cross_entropy'"),
        (lambda: simulate(loss=nn.CrossEntropyLoss()).run(1), "one value per sample"),
        (lambda: simulate(data=(X, Y.float())), r"data\.task = 'classification'.*for regression, use loss='mse'"),
        (lambda: simulate(weighting="example"), "did you mean 'examples'"),
        (lambda: simulate(clip=0.0), "clip"),
        (lambda: simulate(evaluate_every=0), "evaluate_every"),
        (lambda: simulate(lr=-0.1), "lr"),
        (lambda: simulate(lr=1e39), "more than a float32 can hold"),
        (lambda: simulate(clients=0, partition="iid"), "client"),
        (lambda: simulate(clients=0, partition="reallocate"), "client"),
        (lambda: simulate(client_metrics=True, partition="reallocate"), "client_metrics"),
        (
            lambda: simulate(model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), clients=[range(17)]),
            "BatchNorm cannot train on a batch of one sample",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(call, text):
    with pytest.raises(lamina.BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_on_round_with_other_arguments_is_refused_before_the_first_round():
    run = simulate(test=(X, Y))
    for given in (lambda: None, lambda row, more: None):
        with pytest.raises(
            lamina.BadInput, match=r"on_round is called with \(row\), which it does not take: "
        ) as caught:
            run.run(2, given)
        assert "\n" not in str(caught.value)
    assert not len(run.history)
    with pytest.raises(lamina.BadInput, match=r"with \(member, row\)"):
        lamina.Population([run]).run(2, lambda row: None)
    assert len(run.run(1, print)) == 1


@pytest.mark.parametrize("has_folder", [False, True])
def test_stop_iteration_of_on_round_ends_the_run_after_its_round(tmp_path, has_folder):
    def stop_at_2(row):
        if row["round"] == 2:
            raise StopIteration

    def create():
        return simulate(test=(X, Y), out=tmp_path / "run" if has_folder else None)

    stopped, whole = create(), simulate(test=(X, Y))
    history = stopped.run(4, stop_at_2)
    assert history.column("round") == [1, 2]
    assert whole.run(3).column("loss")[:2] == history.column("loss")
    if has_folder:
        assert "stopped after round 2" in (tmp_path / "run" / "log.txt").read_text()
        again = create()  # resumes the folder, whose rounds count
        assert len(again.history) == 2
        again.run(3)
    else:
        again = stopped
        again.run(1)
    assert again.history.column("loss") == whole.history.column("loss")


def test_history_table(tmp_path):
    history = simulate().run(3)
    history.to_csv(tmp_path / "h.csv")
    lines = (tmp_path / "h.csv").read_text().splitlines()
    assert len(lines) == 4
    assert lines[0].split(",") == history.columns
    assert history[1:][0] is history[1]
    assert history.rounds_to(2.0) is None
    assert history.total("bytes_up") == sum(row["bytes_up"] for row in history)
    with pytest.raises(lamina.BadInput, match="no column 'no such column'"):
        history.best("no such column")
    assert str(history).count("\n") == 3


def test_deterministic_holds_during_rounds_and_not_after(monkeypatch):
    seen = []
    net, data = torch.nn.Linear(4, 2), (torch.randn(20, 4), torch.arange(20) % 2)
    run = lamina.Simulation(net, data, "fedavg", clients=2, deterministic=True, device="cpu")
    usual = run.engine.run_round
    monkeypatch.setattr(
        run.engine,
        "run_round",
        lambda *a, **more: (seen.append(torch.are_deterministic_algorithms_enabled()), usual(*a, **more))[1],
    )
    run.run(1)
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_names_and_factories_give_weights_by_seed():
    data = lamina.data.load("digits")
    first, same, other = (lamina.Simulation("mlp", data, device="cpu", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.objective.start, same.objective.start)
    assert not torch.equal(first.objective.start, other.objective.start)
    starts = [
        lamina.Simulation(two_classes.net, two_classes.DATA, device="cpu", seed=seed).objective.start
        for seed in (0, 0, 1)
    ]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert first.test_data is not None
