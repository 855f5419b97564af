"""Losses: one value per sample, by name or of your own, and one line for what does not fit."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import lamina
from kinds import conv, draw, integers, linear
from lamina.objective import losses

X, Y = draw(12, 4), integers(3, 12)
LOGITS, MAP = draw(2, 3, 4, 4), integers(3, 2, 4, 4)


def simulate(model, data, **settings):
    return lamina.Simulation(model.double(), data, "fedavg", clients=2, device="cpu", **settings)


def test_positions_that_do_not_count_leave_the_mean_of_the_sample():
    targets = MAP.clone()
    targets[0, :2] = -100
    targets[1] = -100
    found = losses.cross_entropy(LOGITS, targets)
    expected = F.cross_entropy(LOGITS[:1, :, 2:], targets[:1, 2:])  # torch's mean over what counts
    torch.testing.assert_close(found, torch.stack([expected, torch.zeros_like(expected)]))


def test_torchs_own_losses_agree():
    soft, weight = LOGITS[:, :, 0, 0].softmax(1), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    outputs, labels, tokens = LOGITS[:, :, 0, 0], MAP[:, 0, 0], MAP[:, 0]
    pairs = [
        (losses.cross_entropy(outputs, labels), F.cross_entropy(outputs, labels)),
        (losses.cross_entropy(outputs, soft), F.cross_entropy(outputs, soft)),
        (losses.token_cross_entropy(LOGITS[:, :, 0].mT, tokens), F.cross_entropy(LOGITS[:, :, 0], tokens)),
        (losses.causal_lm(LOGITS[:, :, 0].mT, tokens), F.cross_entropy(LOGITS[:, :, 0, :-1], tokens[:, 1:])),
        (losses.nll(outputs.log_softmax(1), labels), F.cross_entropy(outputs, labels)),
        (losses.bce(outputs, soft), F.binary_cross_entropy_with_logits(outputs, soft)),
        (losses.mean_absolute_error(outputs, soft), F.l1_loss(outputs, soft)),
        (losses.huber(3 * outputs, soft), F.huber_loss(3 * outputs, soft)),
        (
            losses.CrossEntropy(weight, label_smoothing=0.2).double()(outputs, labels),
            F.cross_entropy(outputs, labels, weight, label_smoothing=0.2, reduction="none").mean(),
        ),
        (
            losses.BinaryCrossEntropy([1.0, 2.0, 3.0]).double()(outputs, soft),
            F.binary_cross_entropy_with_logits(outputs, soft, pos_weight=weight),
        ),
    ]
    for found, expected in pairs:
        assert found.shape == (2,)
        torch.testing.assert_close(found.mean(), expected)


def test_a_position_is_right_if_its_largest_output_or_the_sign_of_its_logit_says_so():
    right = F.one_hot(MAP, 3).movedim(-1, 1).double()
    half = MAP.clone()
    half[:, :2] = (half[:, :2] + 1) % 3
    assert torch.equal(losses.hits(losses.cross_entropy, right, half, 3), half == MAP)
    assert losses.hits(losses.bce, torch.tensor([[-1.0, 2.0]]), torch.tensor([[0, 0]]), 2).tolist() == [[True, False]]
    assert losses.hits(losses.huber, right, MAP, 3) is None


def test_a_loss_of_ones_own_is_found_by_name():
    run = simulate(linear(1), (X, draw(12)), loss="kinds:own_loss")
    assert run.objective.loss.__name__ == "own_loss"


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(linear(1), (X, Y - 2), loss="mse"), "for regression, give floats"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4) - 1)), "but -1; .*-100, or ignore_index=-1"),
    (lambda: simulate(linear(3), (X, Y - 1)), "but -1; if it marks a missing label, drop the sample"),
    (lambda: simulate(linear(3), (X, torch.where(draw(12, 3) > 1, torch.nan, 1.0)), loss="bce"), "holds nan; .*-100"),
    (lambda: simulate(linear(3), (X, Y), loss="kinds:no_such"), "cannot load the loss 'kinds:no_such'"),
    (lambda: simulate(linear(3), (X, Y), loss="hubert"), "did you mean 'huber'"),
    (lambda: losses.BinaryCrossEntropy(pos_weight=3.0), "no option 'pos_weight'; did you mean 'positive_weight'"),
    (lambda: losses.CrossEntropy([1.0, -1.0]), "finite numbers of at least 0"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 3), (2, 3, 3), (2, 4, 5, 3), (2, 3, 3, 3)], ids=str)
def test_soft_labels_with_the_classes_on_the_last_axis(shape):
    """The mean over all positions of -sum_c t_c log p_c, whatever the number of axes."""
    outputs, targets = draw(*shape), draw(*shape).softmax(-1)
    expected = -(targets * outputs.log_softmax(-1)).sum(-1).reshape(len(outputs), -1).mean(1)
    torch.testing.assert_close(losses.token_cross_entropy(outputs, targets), expected)
    torch.testing.assert_close(losses.CrossEntropy(class_axis=-1)(outputs, targets), expected)
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=outputs.dtype)
    weighted = -(weight * targets * outputs.log_softmax(-1)).sum(-1).reshape(len(outputs), -1).mean(1)
    torch.testing.assert_close(losses.CrossEntropy(weight, class_axis=-1).to(outputs)(outputs, targets), weighted)


def test_bce_ignores_labels_of_minus_100_as_integers_and_as_floats():
    outputs, labels = draw(5, 3), integers(2, 5, 3)
    labels[0, 1] = labels[1, :2] = labels[2] = -100
    counted, signs = (labels != -100).numpy(), (2 * labels - 1).numpy()
    each = np.where(counted, np.log1p(np.exp(-signs * outputs.numpy())), 0)
    expected = torch.tensor(each.sum(1) / np.maximum(counted.sum(1), 1))
    for targets in (labels, labels.double()):
        torch.testing.assert_close(losses.bce(outputs, targets), expected)
    torch.testing.assert_close(losses.bce(outputs[:, :1], labels[:, 0].double()), torch.tensor(each[:, 0]))
