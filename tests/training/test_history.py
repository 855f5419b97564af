"""The table of a run: columns that are not there, which way is better, and files that cannot be written."""

import pytest
import torch

import lamina
from lamina.training.history import History

RISE_AND_FALL = [0.1, 0.6, 0.9, 0.8, 0.9, *[0.3, 0.2, 0.4, 0.1, 0.2]]
ROWS = [
    {"round": 1, "loss": 2.0, "accuracy": 0.5, "consistency": 3.0, "bytes_up": 8, "bytes_down": 8},
    {"round": 2, "bytes_up": 8, "bytes_down": 8},
    {"round": 3, "loss": 0.5, "accuracy": 0.9, "consistency": 1.0, "bytes_up": 8, "bytes_down": 8},
    {"round": 4, "loss": 1.0, "accuracy": 0.7, "consistency": 2.0, "bytes_up": 8, "bytes_down": 8},
]


@pytest.mark.parametrize("read", [
    lambda history, name: history.column(name), lambda history, name: history.best(name),
    lambda history, name: history.last(name), lambda history, name: history.total(name),
    lambda history, name: history.rounds_to(0.5, name),
])  # fmt: skip
def test_a_misspelt_column_is_refused_with_the_nearest_name(read):
    with pytest.raises(lamina.BadInput, match="no column 'byte_up'; did you mean 'bytes_up'") as error:
        read(History(ROWS), "byte_up")
    assert "\n" not in str(error.value)


def test_a_total_of_a_name_that_is_only_the_start_of_columns_is_no_zero():
    with pytest.raises(lamina.BadInput, match=r"did you mean 'bytes_up'\? \(columns: round, loss"):
        History(ROWS).total("bytes")


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_a_metric_of_rounds_that_were_not_evaluated_says_how_to_get_it(name):
    with pytest.raises(lamina.BadInput, match="pass test data"):
        History([{"round": 1}]).best(name)


def test_a_history_without_rounds_has_no_names_to_refuse():
    assert History().column("accuracy") == []
    assert History().total("bytes_up") == 0
    assert History().rounds_to(0.5) is None


def test_the_best_loss_is_the_smallest():
    history = History(ROWS)
    assert history.best("loss") == 0.5
    assert history.best("consistency") == 1.0
    assert history.best("accuracy") == history.best() == 0.9


def test_rounds_to_a_loss_is_the_first_round_at_or_below_it():
    history = History(ROWS)
    assert history.rounds_to(1.0, "loss") == 3
    assert history.rounds_to(2.0, "loss") == 1
    assert history.rounds_to(0.1, "loss") is None
    assert history.rounds_to(0.8) == 3


def test_a_csv_that_cannot_be_written_is_one_line(tmp_path):
    for path in (tmp_path / "no" / "such" / "folder.csv", tmp_path, "a\0b.csv"):
        with pytest.raises(lamina.BadInput, match="cannot write the history to") as error:
            History(ROWS).to_csv(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "values", "warning"), [
    ("accuracy", RISE_AND_FALL, "the last accuracy, 0.2, is far worse than the best, 0.9 in round 4: lower"),
    ("loss", [1.1 - v for v in RISE_AND_FALL], "the last loss, 0.9, is far worse than the best, 0.2 in round 4"),
    ("loss", [0.7] + 9 * [5e6], "the last loss, 5e+06, is far worse than the best, 0.7 in round 0: "),
    ("accuracy", RISE_AND_FALL[:9], ""),  # too few values to tell
    ("accuracy", [*RISE_AND_FALL[:-1], 0.7], ""),  # noise
    ("accuracy", 5 * [0.9, 0.95] + 5 * [0.89], ""),  # less than it gained, but little of the best
    ("loss", [100.0] + 5 * [1.0] + 5 * [2.0], ""),  # twice the best, but still far below the first
    ("accuracy", 10 * [float("nan")], ""),
])  # fmt: skip
def test_a_run_that_ends_far_worse_than_its_best_round_is_reported(name, values, warning):
    rows = [{"round": 2 * i, name: value} for i, value in enumerate(values)] + [{"round": 99}]
    message = History(rows, metric=name).collapse()
    assert message.startswith(warning)
    assert bool(message) == bool(warning)


def test_a_simulation_warns_once_of_a_collapse(caplog):
    x, y = torch.zeros(12, 2), torch.arange(12) % 3  # nothing to learn: one class of three at best
    run = lamina.Simulation(torch.nn.Linear(2, 3), (x, y), "fedavg", test=(x, y), clients=2, device="cpu")
    run.history = History([{"round": i, "accuracy": 0.9} for i in range(5)], metric=run.metric)
    run.run(4)
    assert "far worse" not in caplog.text  # that takes five values
    run.run(1)
    run.run(1)
    assert caplog.text.count("is far worse than the best, 0.9 in round 0") == 1


def test_a_round_without_an_evaluation_does_not_read_the_whole_history(monkeypatch):
    """A script may call run(1) for every round: a look at all rows would take longer and longer."""
    run = lamina.Simulation(torch.nn.Linear(2, 3), (torch.zeros(12, 2), torch.arange(12) % 3), "fedavg", clients=2)
    monkeypatch.setattr(History, "collapse", lambda history: pytest.fail("looked"))
    run.run(1)
    assert len(run.history.rows) == 1
