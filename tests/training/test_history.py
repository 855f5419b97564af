"""The table of a run: columns that are not there, which way is better, and files that cannot be written."""

import math
import sys

import matplotlib.pyplot as plt
import numpy as np
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
    lambda history, name: history.rounds_to(0.5, name), lambda history, name: history.final(name),
    lambda history, name: history.settling_round(0.5, name),
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


def of(*accuracies):
    """Return a history of accuracies; None is a round that was not evaluated."""
    numbered = enumerate(accuracies, 1)
    return History([{"round": i, **({} if value is None else {"accuracy": value})} for i, value in numbered])


def test_the_final_value_is_the_mean_of_the_last_ten_rounds():
    assert of(*[0.0] * 5, *[0.4] * 5, *[0.6] * 5).final() == pytest.approx(0.5)
    assert of(0.2, 0.4).final() == pytest.approx(0.3)  # of a shorter run: all rounds
    assert math.isnan(History().final())
    assert History(ROWS).final("loss") == pytest.approx((2.0 + 0.5 + 1.0) / 3)


def test_of_the_last_ten_rounds_the_evaluated_ones_count():
    every_fourth = of(*[None, None, None, 0.1] * 2, *[None, None, None, 0.5], *[None, None, None, 0.7])
    assert every_fourth.final() == pytest.approx((0.1 + 0.5 + 0.7) / 3)
    assert of(0.3, 0.4, *[None] * 12).final() == 0.4  # none of them: the newest value


def test_a_run_settles_where_the_mean_of_five_rounds_stays_at_the_target():
    # trailing means: .9, .6, .5, .5, .5, then (.3+.3+.5+.5+.8)/5 = .48, (.3+.5+.5+.8+.9)/5 = .6, .7
    run = of(0.9, 0.3, 0.3, 0.5, 0.5, 0.8, 0.9, 0.8)
    assert run.rounds_to(0.6) == 1
    assert run.settling_round(0.6) == 7
    assert run.settling_round(0.45) == 1  # it is never below 0.45
    assert run.settling_round(0.7) == 8
    assert run.settling_round(0.71) is None
    assert History().settling_round(0.5) is None


def test_a_run_that_falls_at_its_end_has_not_settled():
    run = of(*[0.9] * 8, 0.1, 0.1)
    assert run.rounds_to(0.8) == 1
    assert run.settling_round(0.8) is None


def test_a_run_settles_in_a_round_that_was_evaluated():
    run = of(None, 0.2, None, 0.8, None, 0.8, None, 0.9)  # means: .2, .5, .6, .675
    assert run.settling_round(0.6) == 6


def test_a_loss_settles_below_its_target():
    history = History([{"round": i, "loss": loss} for i, loss in enumerate([0.1, 3.0, 1.0, 0.5, 0.4], 1)])
    # means: .1, 1.55, 1.37, 1.15, 1.0
    assert history.settling_round(1.2, "loss") == 4
    assert history.settling_round(1.0, "loss") == 5


@pytest.mark.parametrize("value", [0.07, 0.0003, 0.57, math.inf])
def test_a_constant_value_is_its_own_mean(value):
    assert of(*[value] * 7).settling_round(value) == 1


def test_settling_agrees_with_its_definition_written_as_loops():
    accuracies = np.random.default_rng(0).random(60)
    accuracies[np.random.default_rng(1).random(60) < 0.3] = math.nan
    measured = [(i, value) for i, value in enumerate(accuracies, 1) if not math.isnan(value)]
    means = [(r, np.mean([v for _, v in measured[max(0, k - 4) : k + 1]])) for k, (r, _) in enumerate(measured)]
    run = History([{"round": i, "accuracy": value} for i, value in enumerate(accuracies, 1)])
    for target in np.linspace(0.2, 0.8, 25):
        settled = [r for r, _ in means if all(mean >= target for s, mean in means if s >= r)]
        assert run.settling_round(target) == (settled[0] if settled else None)


def test_a_plot_has_a_line_for_every_column_and_leaves_out_rounds_without_a_value():
    axes = History(ROWS).plot()
    (line,) = axes.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 3, 4], [0.5, 0.9, 0.7])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_legend()) == ("round", "accuracy", None)
    same = History(ROWS[:1]).plot("loss", ax=axes, label="short", color="red")
    assert same is axes
    assert [each.get_label() for each in axes.lines] == ["accuracy", "short"]
    assert (axes.lines[1].get_color(), axes.lines[1].get_marker()) == ("red", "o")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["accuracy", "short"]
    assert len(History(ROWS).plot("loss", "consistency").lines) == 2
    plt.close("all")


def test_a_plot_names_a_wrong_column_and_a_missing_package(monkeypatch):
    with pytest.raises(lamina.BadInput, match="did you mean 'accuracy'"):
        History(ROWS).plot("acuracy")
    with pytest.raises(lamina.BadInput, match=r"takes names, such as plot\('loss', 'accuracy'\), not \['loss'\]"):
        History(ROWS).plot(["loss"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(lamina.MissingExtra, match=r"history.plot\(\) needs matplotlib: pip install matplotlib"):
        History(ROWS).plot()
