"""The column that a run is judged by: the mean over clients, where clients have models or test data of their own."""

import logging

import matplotlib
import pytest
import torch
from torch import nn

import lamina
from lamina.experiment.runs.folder import round_of
from lamina.experiment.runs.records import find_records
from lamina.training.history import History

matplotlib.use("Agg")
G = torch.Generator().manual_seed(0)
X = torch.randn(300, 6, generator=G)
CLIENTS = [range(50 * i, 50 * (i + 1)) for i in range(6)]
# every second client has the labels the other way round: no head suits all
Y = torch.where(torch.arange(300) // 50 % 2 == 0, X[:, 0] > 0, X[:, 0] <= 0).long()
TEST = (X[:60], Y[:60])
OWN = "client_accuracy_mean"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


def simulation(**more):
    options = {"test": TEST, "clients": CLIENTS, "local_test": 0.3, "lr": 0.3, "device": "cpu", "private": ["head.*"]}
    return lamina.Simulation(Network, (X, Y), "fedavg", **(options | more))


def stop_round(scores, patience):
    """Return the first number of scores of which the last `patience` ones are no better than one before."""
    for count in range(patience + 1, len(scores) + 1):
        if max(scores[: count - patience]) >= max(scores[count - patience : count]):
            return count
    return None


def test_clients_with_models_of_their_own_are_judged_by_them(caplog):
    run = simulation()
    history = run.run(6)
    assert run.metric == history.metric == OWN
    assert history.best() == max(history.column(OWN)) != max(history.column("accuracy"))
    assert history.rounds_to(0.0) == 1
    assert f"best {OWN}" in repr(run)
    assert repr(history).split()[:2] == ["round", OWN]
    assert not caplog.records


def test_patience_and_the_best_model_follow_the_clients_own_models(tmp_path):
    whole = simulation(out=tmp_path / "whole").run(12)
    own, shared = whole.column(OWN), whole.column("accuracy")
    assert stop_round(own, 2) != stop_round(shared, 2)
    short = simulation(patience=2, out=tmp_path / "short")
    assert len(short.run(12)) == stop_round(own, 2) < 12
    assert own.index(max(own)) != shared.index(max(shared))
    assert round_of(tmp_path / "whole" / "best.safetensors")[0] == own.index(max(own)) + 1
    for record in find_records([tmp_path]):
        assert record.complete
        assert record.history.metric == OWN
    assert lamina.load(tmp_path / "short").history.best() == max(own[: len(short.history)])


def test_without_test_data_of_the_clients_nothing_judges_them(caplog):
    with caplog.at_level(logging.WARNING):
        assert simulation(local_test=None).metric == "accuracy"
    assert "the test data see the shared model only" in caplog.text
    for more in ({}, {"test": None, "heldout_clients": [0]}):
        with pytest.raises(lamina.BadInput, match=r"patience: clients have models of their own.*local_test"):
            simulation(local_test=None, patience=2, **more)


def test_one_model_for_all_is_judged_on_the_shared_test_data():
    run = simulation(private=None)
    assert run.run(1).metric == run.metric == "accuracy"


def test_test_data_of_the_clients_alone_judge_any_run():
    run = simulation(private=None, test=None, patience=2)
    history = run.run(20)
    assert run.metric == history.metric == OWN
    assert len(history) == (stop_round(history.column(OWN), 2) or 20)
    assert history.best() == max(history.column(OWN))
    assert history.last() == history[-1][OWN]
    assert OWN in repr(history)
    axes = history.plot()
    assert axes.get_ylabel() == OWN
    assert axes.lines[0].get_ydata().tolist() == history.column(OWN)


@pytest.mark.parametrize(
    ("metrics", "column"), [(["f1", "accuracy"], "client_f1_mean"), (["loss"], "client_loss_mean")]
)
def test_the_first_metric_is_the_one(metrics, column):
    run = simulation(metrics=metrics)
    assert run.run(1).metric == run.metric == column
    alone = simulation(metrics=metrics, private=None, test=None)
    assert History(list(alone.run(2))).metric == alone.metric == column


def test_held_out_clients_alone_judge_a_run():
    run = simulation(private=None, test=None, local_test=None, heldout_clients=[0])
    assert run.run(1).metric == run.metric == "heldout_accuracy"
    assert run.history.best() == run.history[0]["heldout_accuracy"]


def test_an_infinite_loss_on_the_clients_own_data_is_diverged():
    class Huge(Network):
        def forward(self, x):
            return super().forward(x) * (1 if self.training else 1e30)

    run = lamina.Simulation(
        Huge, (X, X[:, :2] * 1e9), "fedavg", clients=CLIENTS, local_test=0.3, loss="mse", lr=1e-30, device="cpu"
    )
    with pytest.raises(lamina.Diverged, match=r"the test loss of the new model \(client_loss_mean\) is inf"):
        run.run(1)
