"""Comparisons and tuning of runs whose clients have models of their own."""

import pytest
import torch
from torch import nn

import lamina
from lamina.experiment.runs.records import find_records, read_record
from lamina.report.build import build

G = torch.Generator().manual_seed(0)
X = torch.randn(300, 6, generator=G)
CLIENTS = [range(50 * i, 50 * (i + 1)) for i in range(6)]
Y = torch.where(torch.arange(300) // 50 % 2 == 0, X[:, 0] > 0, X[:, 0] <= 0).long()
PARTS = [(X[part], Y[part]) for part in map(list, CLIENTS)]
OWN = "client_accuracy_mean"
OPTIONS = {"rounds": 2, "device": "cpu", "progress": False}
BOTH = {"fedavg": "fedavg", "fedper": {"name": "fedavg", "private": ["head.*"]}}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())


def mean(numbers):
    return sum(numbers) / len(numbers)


def test_a_comparison_of_shared_and_own_models_judges_both_by_the_mean_over_clients(tmp_path):
    result = lamina.compare(Network, (X, Y), BOTH, test=(X[:60], Y[:60]), clients=CLIENTS, local_test=0.3, seeds=1,
                            lr=[0.01, 0.5], target=0.6, out=tmp_path / "c", **OPTIONS)  # fmt: skip
    assert {history.metric for histories in result.histories.values() for history in histories} == {OWN}
    table = result.table("fedavg")
    assert f"test {OWN} 60%" in table.title
    for row in table.rows:
        finals = [100 * mean(history.column(OWN)) for history in result.histories[row[0]]]
        assert float(row[4].partition("±")[0]) == pytest.approx(mean(finals), abs=0.05)
    for name, settings in result.settings.items():
        runs = find_records([tmp_path / "c" / "tuning" / name])
        assert settings["lr"] == max(runs, key=lambda run: run.history.final(OWN)).lr
    assert any("30% of every client's training data, held out" in note for note in result.notes)
    report = build([tmp_path / "c"])
    assert report.metric == OWN
    assert {response.metric for response in report.responses} == {OWN}
    assert not any("another first metric" in note for note in report.notes)
    # by itself, the run with one model for all is judged on the shared test data
    assert read_record(tmp_path / "c" / "fedavg" / "seed0").history.metric == "accuracy"
    assert build([tmp_path / "c" / "fedavg"]).metric == "accuracy"


@pytest.mark.parametrize("data", ["local_test", "by client"])
def test_tuning_is_scored_by_the_clients_own_models(tmp_path, data):
    given = ((X, Y), {"clients": CLIENTS, "local_test": 0.3}) if data == "local_test" else (PARTS, {"test": PARTS})
    result = lamina.tune(Network, given[0], "fedavg", grid={"lr": [0.001, 0.5, 3.0]}, private=["head.*"],
                         validation=0.4, out=tmp_path / "t", **given[1], **OPTIONS)  # fmt: skip
    scores = {run.lr: mean(run.history.column(OWN)) for run in find_records([tmp_path / "t"])}
    assert result.best["train.lr"] == max(scores, key=scores.get)
    assert result.score == pytest.approx(max(scores.values()))
    assert f"final_validation_{OWN}" in (tmp_path / "t" / "trials.csv").read_text()
    held_out = "30% of every client's" if data == "local_test" else "40% of the"
    assert f"chosen on {held_out} training data, held out" in result.notes


def test_what_is_private_may_be_tuned():
    result = lamina.tune(Network, (X, Y), "fedavg", grid={"private": [[], ["head.*"]]}, test=(X, Y), clients=CLIENTS,
                         local_test=0.3, lr=0.5, select="test", **{**OPTIONS, "rounds": 5})  # fmt: skip
    assert result.best == {"train.private": ["head.*"]}


def test_own_models_without_own_test_data_are_refused():
    data = {"test": (X[:60], Y[:60]), "clients": CLIENTS}
    expected = r"clients have models of their own, .*give local_test=0.2"
    with pytest.raises(lamina.BadInput, match=expected):
        lamina.compare(Network, (X, Y), BOTH, **data, **OPTIONS)
    with pytest.raises(lamina.BadInput, match=expected):
        lamina.tune(Network, (X, Y), "fedavg", grid={"lr": [0.1]}, private=["head.*"], **data, **OPTIONS)


def test_a_comparison_needs_no_shared_test_data():
    result = lamina.compare(Network, (X, Y), ["fedavg"], clients=CLIENTS, local_test=0.3, seeds=1, lr=[0.01, 0.5],
                            **OPTIONS)  # fmt: skip
    (history,) = result.histories["fedavg"]
    assert history.metric == OWN
    assert "accuracy" not in history.columns


def test_every_run_stops_by_what_it_alone_is_judged_by(tmp_path):
    result = lamina.compare(Network, (X, Y), BOTH, test=(X[:60], Y[:60]), clients=CLIENTS, local_test=0.3, seeds=1,
                            lr=0.3, patience=2, out=tmp_path / "c", **{**OPTIONS, "rounds": 30})  # fmt: skip
    for name, own in {"fedavg": "accuracy", "fedper": OWN}.items():
        (history,) = result.histories[name]
        scores = history.column(own)
        best = scores.index(max(scores))
        assert len(history) == best + 3 < 30
        assert history.metric == OWN
    assert all(record.complete for record in find_records([tmp_path / "c"]))


def test_patterns_of_private_parts_are_checked_before_anything_runs(tmp_path):
    wrong = {**BOTH, "typo": {"name": "fedavg", "private": ["haed.*"]}}
    with pytest.raises(lamina.BadInput, match=r"private = 'haed\.\*' matches no trained parameter"):
        lamina.compare(Network, (X, Y), wrong, clients=CLIENTS, local_test=0.3, out=tmp_path / "c", **OPTIONS)
    assert not list(tmp_path.rglob("metrics.jsonl"))
