"""Metrics that the outputs, the loss or the targets do not allow are refused before training."""

import pytest
import torch
from torch import nn

import lamina


def worst_error(outputs, targets):
    return (outputs.flatten() - targets).abs().max()


def simulation(y=None, *, outputs=3, loss="cross_entropy", **given):
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(120) % 3 if y is None else y
    model = nn.Linear(4, outputs).double()
    return lamina.Simulation(model, (x, y), "fedavg", **{"test": (x, y), "lr": 0.1, "loss": loss} | given)


REGRESSION = {"y": torch.rand(120, generator=torch.Generator().manual_seed(1)).double(), "outputs": 1, "loss": "mse"}
BINARY = {"y": (torch.arange(120) % 2).double()[:, None], "outputs": 1, "loss": "mse"}


@pytest.mark.parametrize(
    ("metrics", "given", "message"),
    [
        (["acuracy"], {}, "did you mean 'accuracy'"),
        (["top5_accuracy"], {}, "'top5_accuracy' needs class labels and more than five outputs"),
        (["auroc"], {"y": torch.zeros(120, dtype=torch.int64)}, "'auroc' needs two classes"),
        (["auroc"], REGRESSION, "'auroc' needs class labels"),
        (["f1"], REGRESSION, "'f1' needs class labels"),
        (["r2"], REGRESSION | {"y": torch.ones(120).double()}, "'r2' needs targets that differ"),
        (["f1"], BINARY, "'f1' takes an output above 0 for a yes"),
        (["rmse"], {}, "'rmse' needs one output for every target number"),
        (["perplexity"], REGRESSION, "'perplexity' is the exponential"),
        (["f1", "f1"], {}, "two of the name 'f1'"),
        ([lambda outputs, targets: outputs[:, 0]], {}, r"'metric' .* one number, not a tensor of shape \[120\]"),
        ([lambda outputs, targets: None], {}, "'metric' must return one number, not a NoneType"),
        ([lambda outputs, targets: 1 / 0], {}, r"'metric' fails .* ZeroDivisionError: .* \(test_metrics.py:\d+\)"),
        ([], {}, "give a list of at least one"),
        (["nowhere:metric"], {}, "cannot load the metric 'nowhere:metric'"),
        ([lamina.Metric("accuracy", worst_error)], {}, "give yours another name"),
    ],
)  # fmt: skip
def test_a_metric_that_lacks_what_it_needs_is_refused_before_training(metrics, given, message):
    with pytest.raises(lamina.BadInput, match=message):
        simulation(metrics=metrics, **given)


def test_float_labels_may_be_missing_with_bce():
    y = (torch.arange(360).reshape(120, 3) % 2).double()
    y[::4, 1] = y[5] = -100
    torch.manual_seed(0)
    run = simulation(y, loss="bce", metrics=["auroc", "f1"])
    torch.manual_seed(0)
    integers = simulation(y.long(), loss="bce", metrics=["auroc", "f1"])
    assert run.run(1)[0]["loss"] == pytest.approx(integers.run(1)[0]["loss"], rel=1e-12)
    with pytest.raises(lamina.BadInput, match="'auroc' needs two classes"):
        simulation(torch.where(y == 0, -100.0, y), loss="bce", metrics=["auroc"])


def test_a_metric_of_labels_needs_logits():
    x, y = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)).double(), (torch.arange(120) % 2).double()
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0)).double()
    with pytest.raises(lamina.BadInput, match="'f1' takes an output above 0 for a yes"):
        lamina.Simulation(model, (x, y), "fedavg", test=(x, y), loss=nn.BCELoss(reduction="none"), metrics=["f1"])


@pytest.mark.parametrize(("metric", "is_warned_of"), [
    (lambda outputs, targets: (outputs - targets).abs().mean(), True),
    (lambda outputs, targets: (outputs.flatten() - targets.flatten()).abs().mean(), False),
    (lambda outputs, targets: outputs[:, 0].mean(), False),
    (lambda outputs, targets: ((outputs - targets[:, None]) ** 2).mean(), False),
])  # fmt: skip
def test_an_own_metric_that_broadcasts_is_warned_of(metric, is_warned_of, caplog):
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    lamina.Simulation(
        nn.Linear(3, 1),
        (x, x[:, 0]),
        "fedavg",
        test=(x, x[:, 0]),
        clients=2,
        loss="mse",
        metrics=[lamina.Metric("own", metric)],
    )
    assert ("broadcast to [n, n]" in caplog.text) is is_warned_of
