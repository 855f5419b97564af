"""The table of a run: columns that are not there, which way is better, and files that cannot be written."""

import pytest

import lamina
from lamina.training.history import History

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
