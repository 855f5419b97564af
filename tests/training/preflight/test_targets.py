"""Targets that do not suit the loss, and test data that are not like the training data."""

import pytest
import torch
from torch import nn

import lamina
from kinds import conv, draw, integers, linear

X, Y = draw(12, 4), integers(3, 12)


def simulate(model, data, **settings):
    return lamina.Simulation(model.double(), data, "fedavg", clients=2, device="cpu", **settings)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(linear(3), (X, integers(2, 12, 3).double())), "data sum to [023]: use loss='bce' for"),
    (lambda: simulate(linear(3), (X, torch.tensor([[1.5, -0.5, 0.0]]).double().repeat(12, 1))), "at least 0"),
    (lambda: simulate(linear(1), (X, Y), loss="bce"), "bce needs targets from 0 to 1, .* such as 2: .* -100"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4)), augmentation=lamina.data.Augment()),
     "augmentation moves the pixels of x"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_soft_labels_may_be_rounded():
    soft = (100 * draw(12, 3).softmax(1)).round() / 100
    assert simulate(linear(3), (X, soft)).run(1)[0]["train_loss"] > 0


def test_text_targets_are_refused_by_losses_of_numbers():
    prices = [f"{price:.2f}" for price in X[:, 0].tolist()]
    with pytest.raises(lamina.BadInput, match="names of classes, and the loss compares numbers: give numbers"):
        lamina.Simulation(nn.Linear(4, 1), (X, prices), "fedavg", loss="mse", device="cpu")


class Named(nn.Linear):
    def forward(self, a, **more):
        return super().forward(a)


def test_test_data_need_the_inputs_of_the_training_data():
    with pytest.raises(
        lamina.BadInput, match="test data have the inputs b, but the training data a: give both the same"
    ):
        lamina.Simulation(Named(4, 3), ({"a": X}, Y), test=({"b": X}, Y), clients=2, device="cpu")


def test_a_class_that_only_the_test_data_have_is_named(caplog):
    simulate(linear(3), (X, Y), test=(X, Y))
    assert not caplog.text
    simulate(linear(3), (X, Y), test=(X, torch.full_like(Y, 2)))
    assert not caplog.text
    with pytest.raises(lamina.BadInput, match="class 2 appears only in the test data; drop it there, or declare it"):
        lamina.Simulation(nn.Linear(4, 3).double(), (X, Y % 2), test=(X, Y), clients=2, device="cpu")
    lamina.Simulation(
        nn.Linear(4, 3).double(), lamina.Dataset(X, Y % 2, classes=3), test=(X, Y), clients=2, device="cpu"
    )
    assert "class 2 appears only in the test data: no client can learn it" in caplog.text


def test_training_data_without_any_label_are_warned_of(caplog):
    maps = torch.full((12, 4, 4), -100)
    simulate(conv(3), (draw(12, 2, 4, 4), maps))
    assert caplog.messages == [
        "all targets of the train data are -100, which does not count: there is nothing to learn"
    ]


def test_test_data_without_any_label_are_refused():
    x, maps = draw(12, 2, 4, 4), integers(3, 12, 4, 4)
    with pytest.raises(lamina.BadInput, match="all targets of the test data are -100"):
        simulate(conv(3), (x, maps), test=(x, torch.full_like(maps, -100)))


def test_a_number_beyond_the_classes_may_mark_what_to_ignore():
    x, maps = draw(12, 2, 4, 4), integers(3, 12, 4, 4)
    maps[0, 0, 0] = 255
    with pytest.raises(lamina.BadInput, match=r"Dataset\(x, y, ignore_index=255\)"):
        simulate(conv(3), (x, maps))
