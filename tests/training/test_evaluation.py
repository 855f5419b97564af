"""The evaluation of a model on clients' samples: held-out clients, and the clients' own test splits."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.experiment.config import parse


def simulation(y=None, *, outputs=3, loss="cross_entropy", **given):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator, dtype=torch.float64)
    y = torch.arange(120) % 3 if y is None else y
    torch.manual_seed(0)
    model = nn.Linear(4, outputs).double()
    return lamina.Simulation(model, (x, y), "fedavg", **{"test": (x, y), "lr": 0.1, "loss": loss} | given)


REGRESSION = {"y": torch.rand(120, generator=torch.Generator().manual_seed(1)).double(), "outputs": 1, "loss": "mse"}


def test_heldout_clients_never_train_and_local_tests_are_not_trained_on():
    given = {"clients": 8, "heldout_clients": [2, 5], "local_test": 0.2, "metrics": ["f1", "accuracy"]}
    runs = [simulation(engine=engine, **given) for engine in ("loop", "stacked")]
    rows = [run.run(2)[-1] for run in runs]
    for name, value in rows[0].items():
        if "seconds" not in name:
            assert rows[1][name] == pytest.approx(value, rel=1e-9), name
    run, row = runs[0], rows[0]
    assert run.plan.clients.count == 6
    assert run.reserved.dealt == 8
    everything = simulation(clients=8).plan.clients.parts
    assert [part.tolist() for part in run.reserved.heldout] == [everything[2].tolist(), everything[5].tolist()]
    trained = set(run.plan.clients.parts.samples.tolist())
    reserved = [*run.reserved.heldout.samples, *run.reserved.local_tests.samples]
    assert trained.isdisjoint(reserved)
    assert len(trained) + len(reserved) == 120

    hits = (run.model(run.train_data.x).argmax(1) == run.train_data.y).numpy()
    local = np.sort([hits[part].mean() for part in run.reserved.local_tests])
    held = np.sort([hits[part].mean() for part in run.reserved.heldout])
    assert row["client_accuracy_mean"] == pytest.approx(local.mean())
    assert row["client_accuracy_worst10"] == pytest.approx(local[0])
    assert row["client_accuracy_std"] == pytest.approx(local.std())
    assert row["heldout_accuracy"] == pytest.approx(hits[run.reserved.heldout.samples].mean())
    assert row["heldout_accuracy_worst10"] == pytest.approx(held[0])
    assert run.history.metric == "f1"


def test_heldout_clients_are_named_as_in_their_column():
    site = np.array([10, 9, 8])[np.arange(120) % 3]
    data = lamina.Dataset(torch.randn(120, 4), torch.arange(120) % 2, columns={"site": site})
    options = {"clients": None, "partition": lamina.data.ByColumn("site"), "device": "cpu"}

    def heldout(given):
        run = lamina.Simulation(nn.Linear(4, 2), data, "fedavg", heldout_clients=given, **options)
        return [set(site[part].tolist()) for part in run.reserved.heldout]

    assert heldout(["9"]) == [{9}]
    assert heldout(["10", "8"]) == [{8}, {10}]
    assert heldout([0]) == [{8}]  # a number is a place in sorted order
    with pytest.raises(lamina.BadInput, match=r"there is no client '11' \(clients: 8, 9, 10\)"):
        heldout(["11"])
    section = {"name": "m:f", "client": "site", "heldout_clients": ["9", "10"]}
    assert parse({"data": section}).data.heldout_clients == ["9", "10"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heldout_clients": ["north"]}, "no column names the clients; give numbers"),
        ({"heldout_clients": 1.5}, "heldout_clients = 1.5"),
        ({"heldout_clients": [9]}, "numbered 0 to 3"),
        ({"heldout_clients": [-1]}, "numbered 0 to 3"),
        ({"heldout_clients": ["9", 10]}, "must be a fraction"),
        ({"heldout_clients": []}, "must be a fraction"),
        ({"heldout_clients": 1}, "must be a fraction"),
        ({"heldout_clients": "some"}, "must be a fraction"),
        ({"heldout_clients": [0, 1, 2, 3]}, "leave at least one"),
        ({"local_test": 0}, "local_test = 0"),
        ({"local_test": 0.5, "client_metrics": True}, "give one"),
        ({"local_test": 0.5, "partition": "reallocate"}, "keep their data"),
    ],
)
def test_wrong_reservations_are_refused(given, message):
    with pytest.raises(lamina.BadInput, match=message):
        simulation(clients=4, **given)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_clients_accuracy_is_that_of_its_labels(engine):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 3, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0.5).long()
    y[0, 1:] = y[4:6] = y[8:] = -100  # the last client has no label
    model, parts = nn.Conv2d(1, 2, 1).double(), [range(4), range(4, 8), range(8, 12)]
    run = lamina.Simulation(
        model, (x, y), "fedavg", clients=[list(part) for part in parts], client_metrics=True, engine=engine,
        metrics=["accuracy", "loss"], test=(x, y),
    )  # fmt: skip
    row = run.run(1)[0]
    right, kept = (run.model(x).argmax(1) == y).numpy(), (y >= 0).numpy()
    each = [right[part][kept[part]].mean() for part in parts[:2]]
    assert row["accuracy"] == pytest.approx(right[kept].mean())
    assert row["client_accuracy"] == pytest.approx(np.mean(each))
    assert row["client_accuracy_std"] == pytest.approx(np.std(each))
    entropy = nn.functional.cross_entropy(run.model(x), y, reduction="none").detach().numpy()
    losses = [np.mean([entropy[i][kept[i]].mean() for i in part if kept[i].any()]) for part in parts[:2]]
    assert row["client_loss"] == pytest.approx(np.mean(losses))
    with pytest.raises(lamina.BadInput, match="all targets of the test data are -100"):
        lamina.Simulation(model, (x, y), "fedavg", clients=2, test=(x[8:], y[8:]))


def test_a_smaller_is_better_metric_has_its_worst_clients_at_the_top():
    run = simulation(**REGRESSION, clients=4, local_test=0.3, metrics=["mae"])
    row = run.run(1)[0]
    errors = (run.model(run.train_data.x)[:, 0] - run.train_data.y).abs().detach().numpy()
    each = [errors[part].mean() for part in run.reserved.local_tests]
    assert row["client_mae_worst10"] == pytest.approx(max(each))


class Recurrent(nn.Module):
    """The scores of the last step, and the hidden state [layers, n, units]."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        out, (hidden, _) = self.lstm(x)
        return self.head(out[:, -1]), {"hidden": hidden, "scale": self.head.weight.norm()}


def test_a_metric_of_the_users_gets_all_that_the_model_returns_over_several_batches():
    """The test data are more than one batch of an evaluation."""
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(1030, 5, 3)
    y = {"kind": torch.arange(1030) % 3, "size": torch.randn(1030)}

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs[0], targets["kind"], reduction="none")

    def together(outputs, targets):
        scores, rest = outputs
        right = (scores.argmax(1) == targets["kind"]).float().mean()
        return right + (rest["hidden"][-1].sum(1) - targets["size"]).abs().mean() + rest["scale"]

    run = lamina.Simulation(
        model, (x[:40], {name: values[:40] for name, values in y.items()}), "fedavg", test=(x, y), clients=2, loss=loss,
        metrics=[together], device="cpu",
    )  # fmt: skip
    measured = run.run(1)[-1]["together"]
    with torch.no_grad():
        assert measured == pytest.approx(float(together(run.model(x), y)), rel=1e-5)


@pytest.mark.parametrize(("private", "sizes"), [(None, [1, 1]), (["head.*"], [2, 3]), (["head.*"], [1, 1])], ids=str)
def test_a_hidden_state_of_as_many_layers_as_test_samples_is_split_by_samples(private, sizes):
    """The LSTM has two layers, and two test samples are one client's, or those of two clients."""
    torch.manual_seed(0)
    bounds = [0, 4 * sizes[0], 4 * sum(sizes)]
    x, y = torch.randn(bounds[-1], 5, 3), torch.arange(bounds[-1]) % 3

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs[0], targets, reduction="none")

    def state(outputs, targets):
        first, last = outputs[1]["hidden"]
        return (first * last).sum(1).square().mean() + first.sum(1).mean() * targets.float().mean()

    run = lamina.Simulation(
        Recurrent(), (x, y), "fedavg", clients=[range(*bounds[:2]), range(*bounds[1:])], local_test=0.25,
        private=private, loss=loss, metrics=[state], device="cpu",
    )  # fmt: skip
    row = run.run(1)[-1]
    tests = run.reserved.local_tests
    assert [len(test) for test in tests] == sizes
    with torch.no_grad():
        own = [float(state(run.client_model(i)(x[test]), y[test])) for i, test in enumerate(tests)]
    assert row["client_state_mean"] == pytest.approx(np.mean(own), rel=1e-5)
    assert row["client_state_std"] == pytest.approx(np.std(own), rel=1e-4, abs=1e-6)


def test_outputs_that_do_not_fit_together_need_a_metric_that_keeps_less():
    class Pairs(nn.Linear):
        def forward(self, x):
            return {"scores": super().forward(x), "pairs": x @ x.T}

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs["scores"], targets, reduction="none")

    def largest(outputs, targets):
        return outputs["pairs"].max()

    x, y = torch.randn(1030, 4), torch.arange(1030) % 3
    given = {"clients": 2, "loss": loss, "device": "cpu", "test": (x, y)}
    with pytest.raises(
        lamina.BadInput, match=r"metric 'largest' needs all outputs together, .*give lamina\.Metric\(…, keep=…"
    ):
        lamina.Simulation(Pairs(4, 3), (x[:40], y[:40]), "fedavg", metrics=[largest], **given)
    metric = lamina.Metric("largest", torch.max, keep=lambda batch: (batch.outputs["pairs"].amax(1),))
    run = lamina.Simulation(Pairs(4, 3), (x[:40], y[:40]), "fedavg", metrics=[metric], **given)
    blocks = [x[rows] @ x[rows].T for rows in (slice(1000), slice(1000, None))]
    assert run.run(1)[-1]["largest"] == pytest.approx(float(max(block.max() for block in blocks)))


def test_lamina_has_no_metric_for_several_targets_but_the_loss():
    run = simulation({"a": torch.arange(120) % 3, "b": torch.arange(120)}, loss=lambda o, t: o[:, 0] * t["a"])
    assert run.metric == "loss"
    with pytest.raises(lamina.BadInput, match=r"metric 'accuracy' needs one tensor of targets, not y\['a'\], y\['b'\]"):
        simulation(run.train_data.y, loss=lambda o, t: o[:, 0] * t["a"], metrics=["accuracy"])


def test_metrics_over_clients_of_outputs_and_targets_that_are_several():
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3

    def right(outputs, targets):
        return (outputs["scores"].argmax(1) == targets["kind"]).float().mean()

    class Named(torch.nn.Linear):
        def forward(self, x):
            return {"scores": super().forward(x)}

    run = lamina.Simulation(
        Named(4, 3), (x, {"kind": y}), "fedavg", clients=4, local_test=0.3, heldout_clients=[3], metrics=[right],
        loss=lambda outputs, targets: torch.nn.functional.cross_entropy(
            outputs["scores"], targets["kind"], reduction="none"
        ),
    )  # fmt: skip
    row = run.run(1)[-1]
    tests = run.reserved.local_tests
    scores = [float((run.model(x[part])["scores"].argmax(1) == y[part]).float().mean()) for part in tests]
    assert row["client_right_mean"] == pytest.approx(sum(scores) / 3)
    assert row["client_right_worst10"] == pytest.approx(min(scores)) != pytest.approx(sum(scores) / 3)
    assert row["client_right_std"] == pytest.approx(np.std(scores))
    (heldout,) = run.reserved.heldout
    expected = float((run.model(x[heldout])["scores"].argmax(1) == y[heldout]).float().mean())
    assert row["heldout_right"] == pytest.approx(expected)
