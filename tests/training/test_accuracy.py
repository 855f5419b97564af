"""Accuracy is right for one logit and absent where it has no meaning; what relies on it falls back to the loss."""

import csv
import json

import pytest
import torch
from torch import nn

import lamina
from flower_grid import LoopGrid
from helpers import call
from lamina.flower import Federation
from lamina.report import figures

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(120, 4, generator=GENERATOR)
BINARY = (X @ torch.tensor([1.0, -2.0, 0.5, 1.0]) > 0).long()
COUNTS = (3 * X[:, 0].abs()).long()  # integers to regress on


def bce(outputs, targets):
    """One loss per sample, for outputs [n] or [n, 1]."""
    return nn.functional.binary_cross_entropy_with_logits(outputs.flatten(), targets.float(), reduction="none")


class Logit(nn.Module):
    """A linear model with outputs [n, 1], or [n]."""

    def __init__(self, flat=False):
        super().__init__()
        self.linear, self.flat = nn.Linear(4, 1), flat

    def forward(self, x):
        return self.linear(x).squeeze(1) if self.flat else self.linear(x)


def simulate(model, targets, **more):
    settings = {"test": (X, targets), "clients": 4, "device": "cpu", "lr": 0.5 if more.get("loss") == bce else 0.05}
    return lamina.Simulation(model, (X, targets), "fedavg", **settings | more)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_the_accuracy_of_one_logit_is_its_sign(flat, engine):
    run = simulate(Logit(flat), BINARY, loss=bce, engine=engine)
    row = run.run(30)[-1]
    with torch.no_grad():
        right = (run.model(X).flatten() > 0) == (BINARY == 1)
    assert row["accuracy"] == pytest.approx(right.double().mean().item())
    assert row["accuracy"] > 0.9
    assert run.history.rounds_to(0.9) is not None


def test_the_accuracy_of_clients_follows_one_logit():
    run = simulate(Logit(), BINARY, loss=bce, client_metrics=True)
    assert run.run(30).last("client_accuracy") > 0.9


@pytest.mark.parametrize("targets", [COUNTS, BINARY])
def test_regression_on_integers_has_no_accuracy(targets):
    run = simulate(Logit(), targets, loss="mse")
    row = run.run(1)[0]
    assert "accuracy" not in row
    assert row["loss"] > 0
    assert run.metric == "loss"
    with pytest.raises(lamina.BadInput, match="no column 'accuracy'"):
        run.history.rounds_to(0.5, "accuracy")


def test_a_regression_loss_of_torchs_has_no_accuracy():
    run = simulate(Logit(flat=True), BINARY, loss=nn.L1Loss(reduction="none"))
    assert "accuracy" not in run.run(1)[0]


@pytest.mark.parametrize(("model", "targets"), [
    (nn.Linear(4, 1), COUNTS),  # one output, more than two classes
    (nn.Linear(4, 2), COUNTS),  # fewer outputs than classes
    (nn.Sequential(nn.Linear(4, 12), nn.Unflatten(1, (2, 6))), BINARY),  # a further axis that labels do not have
])  # fmt: skip
def test_outputs_that_do_not_fit_the_labels_have_no_accuracy(model, targets):
    def loss(outputs, labels):
        return (outputs.flatten(1).mean(1) - labels) ** 2

    run = simulate(model, targets, loss=loss)
    assert "accuracy" not in run.run(1)[0]
    assert "accuracy" not in run.evaluate()


def test_classes_have_the_accuracy_of_the_largest_output():
    run = simulate(nn.Linear(4, 2), BINARY)
    row = run.run(20)[-1]
    with torch.no_grad():
        right = run.model(X).argmax(1) == BINARY
    assert row["accuracy"] == pytest.approx(right.double().mean().item())


def test_client_metrics_without_an_accuracy_are_refused():
    with pytest.raises(lamina.BadInput, match=r"client_metrics.*accuracy") as error:
        simulate(Logit(), COUNTS, loss="mse", client_metrics=True)
    assert "\n" not in str(error.value)


# --- what relies on accuracy --------------------------------------------------------------------------------------

MODEL = """
from torch import nn

def one_output(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
"""
FILE = """
[model]
name = "own:one_output"
[algorithm]
name = "fedavg"
[train]
rounds = 4
lr = 0.01
loss = "mse"
[tune.grid]
"train.lr" = [1e-6, 0.01]
"""


@pytest.fixture
def regression(empty_folder):
    (empty_folder / "own.py").write_text(MODEL)
    (empty_folder / "regression.toml").write_text(FILE)
    return empty_folder


def test_a_run_without_accuracy_keeps_the_model_of_the_smallest_loss(regression, capsys):
    from safetensors import safe_open

    assert call("run", "regression.toml", "--out", "run") == 0
    assert "best loss" in capsys.readouterr().out
    losses = [json.loads(line)["loss"] for line in (regression / "run" / "metrics.jsonl").read_text().splitlines()]
    with safe_open(regression / "run" / "best.safetensors", "pt") as file:
        assert int(file.metadata()["round"]) == 1 + losses.index(min(losses))


def test_tuning_without_accuracy_takes_the_smallest_loss(regression, capsys):
    assert call("tune", "regression.toml", "--out", "tuned") == 0
    assert "final validation loss" in capsys.readouterr().out
    assert "lr = 0.01" in (regression / "tuned" / "best.toml").read_text()


def test_a_comparison_without_accuracy_goes_by_the_loss(regression, capsys):
    more = '[compare]\nalgorithms = ["fedavg", "fedprox"]\nseeds = 1\n[compare.grid]\nfedavg.lr = [1e-6, 0.01]\n'
    with (regression / "regression.toml").open("a") as file:
        file.write(more)
    assert call("compare", "regression.toml", "--out", "compared") == 0
    printed = capsys.readouterr()
    assert "final validation loss" in printed.err
    assert "loss" in printed.out
    assert "acc" not in printed.out
    assert "target" not in printed.out
    with (regression / "compared" / "tuning.csv").open(newline="") as file:
        tried = list(csv.DictReader(file))
    assert [row["chosen"] for row in tried] == ["False", "True"]
    assert float(tried[1]["final_validation_loss"]) < float(tried[0]["final_validation_loss"])
    assert (regression / "compared" / "comparison.png").stat().st_size > 10_000
    assert call("compare", "regression.toml", "--out", "compared", "--set", "compare.target=20") == 0
    assert "target: test loss 20" in capsys.readouterr().out


def test_a_target_accuracy_above_one_is_refused(empty_folder, capsys):
    (empty_folder / "digits.toml").write_text("")
    assert call("compare", "digits.toml", "--set", "compare.target=1.5") == 2
    assert "compare.target = 1.5" in capsys.readouterr().err


def test_a_report_of_losses_marks_the_rate_of_the_smallest_loss(regression, capsys, monkeypatch):
    monkeypatch.setattr(figures, "report_figures", lambda report: [])  # their tables are read
    for lr in ("1e-6", "0.01", "1e-4"):
        assert call("run", "regression.toml", "--set", f"train.lr={lr}", "--out", f"runs/{lr}") == 0
    capsys.readouterr()
    assert call("report", "runs", "--figures", "figures", "--target", "25", "--target", "1e-9") == 0
    assert "best learning rate 0.01" in capsys.readouterr().out
    with (regression / "figures" / "learning-rates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["lr"] for row in rows if row[""] == "best"] == ["0.01"]
    assert "final loss" in rows[0]
    with (regression / "figures" / "cost-to-target.csv").open(newline="") as file:
        costs = {(row["target"], row["curve"]): row for row in csv.DictReader(file)}
    losses = [json.loads(line)["loss"] for line in (regression / "runs/0.01/metrics.jsonl").read_text().splitlines()]
    first = 1 + next(i for i, loss in enumerate(losses) if loss <= 25)
    assert float(costs["25", "FedAvg (Fed-SGD), lr 0.01"]["first touch"]) == first
    means = [sum(losses[: i + 1]) / (i + 1) for i in range(len(losses))]  # four rounds, and a loss that falls
    assert float(costs["25", "FedAvg (Fed-SGD), lr 0.01"]["rounds"]) == 1 + next(i for i in range(4) if means[i] <= 25)
    assert costs["1e-09", "FedAvg (Fed-SGD), lr 0.01"]["rounds"] == ""


@pytest.mark.parametrize(("loss", "targets", "has_accuracy"), [(bce, BINARY, True), ("mse", COUNTS, False)])
def test_a_federation_reports_the_same(loss, targets, has_accuracy, tmp_path):
    parts = [list(range(0, 60)), list(range(60, 120))]

    def own(context):
        indices = parts[context.node_config["partition-id"]]
        return X[indices], targets[indices]

    def model():
        torch.manual_seed(0)
        return Logit()

    settings = {"lr": 0.05, "loss": loss, "device": "cpu"}
    federation = Federation("fedavg", model, own, clients=2, rounds=2, out=tmp_path / "run", poll=0.005,
                            state_dir=tmp_path / "state", test=lambda: (X, targets), evaluate_on="both",
                            **settings)  # fmt: skip
    grid = LoopGrid(federation.client_app(), {i: {"partition-id": i, "num-partitions": 2} for i in (0, 1)})
    federation.server_app()(grid, next(iter(grid.contexts.values())))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    run = lamina.Simulation(model(), (X, targets), "fedavg", test=(X, targets), clients=parts, **settings)
    for row, simulated in zip(rows, run.run(2), strict=True):
        assert row["loss"] == pytest.approx(simulated["loss"])
        assert ("accuracy" in row) == ("node_accuracy" in row) == ("accuracy" in simulated) == has_accuracy
        if has_accuracy:
            assert row["accuracy"] == row["node_accuracy"] == pytest.approx(simulated["accuracy"])


# --- the squared error --------------------------------------------------------------------------------------------


def shaped(*shape):
    return nn.Sequential(nn.Linear(4, int(torch.tensor(shape).prod())), nn.Unflatten(1, shape))


@pytest.mark.parametrize(("model", "targets"), [
    (shaped(2, 3), torch.zeros(120, 3, 2)),
    (shaped(6), torch.zeros(120, 2, 3)),
    (shaped(2), torch.zeros(120)),
    (shaped(1), torch.zeros(120, 2)),
])  # fmt: skip
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_a_squared_error_of_other_shapes_is_refused(model, targets, engine):
    with pytest.raises(lamina.BadInput, match=r"outputs of shape .* targets of shape") as error:
        simulate(model, targets, loss="mse", engine=engine)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("model", "targets"), [
    (shaped(1), X[:, 0]),
    (Logit(flat=True), X[:, :1]),
    (shaped(2, 3), torch.zeros(120, 2, 3)),
    (shaped(1, 1), X[:, 0]),
])  # fmt: skip
def test_a_squared_error_is_the_same_with_and_without_a_last_axis_of_one(model, targets):
    loops, stacked = (simulate(model, targets, loss="mse", engine=engine) for engine in ("loop", "auto"))
    for run in (loops, stacked):
        run.run(2)
    assert torch.allclose(loops.state.server.x, stacked.state.server.x, atol=1e-6)
    with torch.no_grad():
        errors = (loops.model(X).reshape(targets.shape) - targets) ** 2
    assert loops.history[-1]["loss"] == pytest.approx(errors.mean().item(), rel=1e-5)
