"""Error messages: names that were meant, values cut to a length, and the line of the user's code that failed."""

import numpy as np
import pytest

from lamina.base.errors import (
    describe_error,
    extra_hint,
    is_number,
    is_whole,
    nearest,
    unknown,
)  # fmt: skip


def test_the_nearest_name_ignores_case_hyphens_and_underscores():
    assert nearest("BatchSize", ["batch_size", "epochs"]) == "; did you mean 'batch_size'?"
    assert nearest("by_column", ["by-column"]) == "; did you mean 'by-column'?"
    assert nearest("zzz", ["batch_size", "epochs"]) == ""


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("learning_rate", ["lr", "local_test"], "lr"),
        ("LearningRate", ["lr"], "lr"),
        ("local_lr", ["local_test", "lr"], "lr"),
        ("num_rounds", ["rounds"], "rounds"),
        ("local_epochs", ["local_steps", "epochs"], "epochs"),
        ("client_fraction", ["participation", "augmentation"], "participation"),
        ("criterion", ["partition", "loss"], "loss"),
        ("acc", ["accuracy", "loss"], "accuracy"),
        ("sgd", ["fedavg", "fedlada"], "fedavg"),
    ],
)
def test_the_words_of_other_libraries_are_understood(name, known, meant):
    assert nearest(name, known) == f"; did you mean '{meant}'?"


def test_a_name_that_belongs_elsewhere_returns_its_hint_unless_a_known_name_is_meant():
    places = {"rounds": ": give it to run", "decay": ": an option"}
    assert nearest("num_rounds", ["clients"], places) == ": give it to run"
    assert nearest("deacy", ["decay"], places) == "; did you mean 'decay'?"
    assert nearest("learning_rate", ["clients"], places) == ""
    assert nearest("val", ["partition"]) == ""  # too far away


def test_an_unknown_name_lists_the_known_ones_and_says_how_to_name_your_own():
    error = unknown("model", "mlpp", ["mlp", "cnn"])
    assert str(error) == "unknown model 'mlpp'; did you mean 'mlp'? (known: cnn, mlp)"
    assert "your own is named 'mine.nets:Net', with a colon" in str(unknown("model", "mine.nets.Net", ["mlp"]))
    assert "a file with lamina.data.load('table', path='My.csv', label=…)" in str(
        unknown("data set", "My.csv", ["mnist"])
    )
    assert "with a colon" not in str(unknown("schedule", "mine.nets.Net", ["cosine"]))  # cannot be the user's


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [(3, True, True), (np.int32(3), True, True), (0.5, False, True), (np.float32(0.5), False, True),
     (True, False, False), ("3", False, False), (10**400, True, False)],
)  # fmt: skip
def test_numbers_of_python_and_numpy(value, whole, number):
    assert (is_whole(value), is_number(value)) == (whole, number)


def test_an_exception_of_the_users_code_is_described_in_one_line():
    with pytest.raises(ValueError, match="first") as caught:
        raise ValueError("first\nsecond")
    line = caught.traceback[-1].lineno + 1
    assert describe_error(caught.value) == f"ValueError: first (test_errors.py:{line})"
    assert describe_error(ValueError()) == "ValueError: "


def test_a_missing_package_of_an_extra_is_named_with_its_command():
    assert extra_hint(ModuleNotFoundError(name="PIL.Image")) == ": pip install -e '.[images]'"
    assert extra_hint(ModuleNotFoundError(name="some_package")) == ""
    assert extra_hint(ImportError(name="PIL")) == ""
