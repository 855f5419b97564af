"""Settings to try: their ranges and combinations, and how they are written."""

import pytest

from lamina import BadInput
from lamina.base.limits import MOST_POINTS
from lamina.experiment.trials.settings import Range, folder_name, neighbours, points, written


def test_a_grid_of_too_many_combinations_is_refused():
    values = list(range(int(MOST_POINTS**0.5) + 1))
    with pytest.raises(BadInput, match=f"the grid has {len(values) ** 2} combinations: give at most {MOST_POINTS}"):
        points({"a": values, "b": values})
    assert len(points({"a": [1] * (MOST_POINTS + 1)})) == 1  # each once


def test_no_value_is_tried_beyond_the_bounds_of_an_option():
    decays, rates = Range(choices=(0.0, 0.01, 0.1)), Range(choices=(0.01, 0.1))
    assert [decays.way_beyond(value, "fedlamb", "algorithm.decay") for value in decays.choices] == ["", "", "larger"]
    assert [rates.way_beyond(value, "fedlamb", "train.lr") for value in rates.choices] == ["smaller", "larger"]
    line = "the best train.lr = 0.1 lies on the edge of those tried: try larger values"
    assert rates.edge_warning(0.1, "fedlamb", "train.lr") == line
    assert decays.edge_warning(0.0, "fedlamb", "algorithm.decay") == ""


def test_a_range_asks_for_numbers_of_its_own_kind():
    class Asked:
        def __getattr__(self, name):
            return lambda key, *given, **more: (name, key, *given)

    assert Range(1, 8).suggest(Asked(), "k") == ("suggest_int", "k", 1, 8)
    assert Range(0.1, 8).suggest(Asked(), "k") == ("suggest_float", "k", 0.1, 8)
    assert Range(choices=("a", "b")).suggest(Asked(), "k") == ("suggest_categorical", "k", ("a", "b"))


def test_names_of_folders_are_safe_and_values_are_readable():
    settings = {"train.schedule": "a/b c", "train.lr": 1e-05, "model.wide": True}
    assert folder_name(settings) == "schedule-a_b_c-lr1e-05-wide-true"
    assert written({**settings, "train.lr": 0.123456}) == "schedule a/b c, lr 0.1235, wide true"


def test_the_ends_of_a_range_lie_on_its_scale():
    """Of 0.001 to 1, 0.01 is a third of the way on a logarithmic scale, and 0.8 is 97 % of it."""
    log, linear = Range(0.001, 1.0, log=True), Range(0.001, 1.0)
    assert [log.ends(value) for value in (0.0011, 0.01, 0.8)] == [(True, False), (False, False), (False, True)]
    assert [linear.ends(value) for value in (0.01, 0.8, 0.96)] == [(True, False), (False, False), (False, True)]


def test_neighbours_are_at_most_one_step_apart_in_every_key():
    grid = points({"lr": [1.0, 0.1, 0.01, 10.0], "layers": ["tensor", "module", "block"]})
    near = [grid[i] for i in neighbours(grid, {"lr": 0.1, "layers": "module"})]
    values = [{"lr": lr, "layers": layers} for lr in (1.0, 0.1, 0.01) for layers in ("tensor", "module", "block")]
    assert near == [other for other in values if other != {"lr": 0.1, "layers": "module"}]
    assert neighbours(points({"lr": [0.1]}), {"lr": 0.1}) == []
