"""Losses: one value per sample, by name or of your own, and one line for what does not fit."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from kinds import Text, Tokens, TwoInputs, conv, draw, integers, linear
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


@pytest.mark.parametrize("make", [lambda t: t, lambda t: (t, "hidden"), lambda t: {"logits": t}, lambda t: [t]])
def test_outputs_may_be_wrapped(make):
    class Wrapped(nn.Linear):
        def forward(self, input):
            return make(super().forward(input))

    assert simulate(Wrapped(4, 3), (X, Y)).run(1)[0]["round"] == 1


class NoTensor(nn.Linear):
    def forward(self, input):
        return {"hidden": super().forward(input)}


class AnyNames(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, **inputs):
        return super().forward(inputs["x"])


def centred(outputs, targets):
    each = F.cross_entropy(outputs, targets, reduction="none")
    return each - each.mean()


def noisy(outputs, targets):
    return (outputs[:, 0] - targets) ** 2 + torch.rand(len(outputs))


def one_number(outputs, targets):
    return (outputs[:, 0] - targets).mean()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(Text(True), ({"ids": integers(8, 12, 3), "attention_mask": X}, Y % 2)),
     r"an input 'ids', which the model's forward does not take.*it takes input_ids, attention_mask"),
    (lambda: simulate(TwoInputs(), ({"numbers": X}, Y)), "the train data lack the input 'kind'.*they have numbers"),
    (lambda: simulate(TwoInputs(), (X, Y)), "cannot take the train data"),
    (lambda: simulate(AnyNames(), ({"a": X}, Y)), r"data.* it looks for 'x', .* not have \(test_losses\.py:\d+\)"),
    (lambda: simulate(NoTensor(4, 3), (X, Y)), "returns a dict without outputs.*tuple.*'logits'"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), Y)), "one integer target per position.*targets of shape"),
    (lambda: simulate(nn.Conv2d(1, 2, 1), (torch.zeros(9, 1, 4, 4), integers(2, 9, 1, 4, 4))), r"y\.squeeze\(1\)"),
    (lambda: simulate(Tokens(5), (integers(9, 12, 6), integers(5, 12, 6))), "use loss='token_cross_entropy'"),
    (lambda: simulate(Tokens(5), (integers(9, 12, 3), integers(5, 12, 3))), "on the last axis: use loss='token_c"),
    (lambda: simulate(Tokens(5), (integers(9, 12, 3), Y * 2)), "5 on the first .* mean over them in the model"),
    (lambda: simulate(linear(1), (X, Y)), "labels go up to 2: it needs 3; for regression, use loss='mse'"),
    (lambda: simulate(linear(1), (X, Y % 2)), "labels go up to 1: it needs 2; use loss='bce' for two classes"),
    (lambda: simulate(linear(1), (X, draw(12, 2)), loss="bce"), r"2 outputs, or .* one-hot .* y\.argmax\(1\)"),
    (lambda: simulate(linear(1), (X, Y - 2), loss="mse"), "for regression, give floats"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: (o[:, 0] - t).log()), "NaN before the first step"),
    (lambda: simulate(linear(3), (X, draw(12, 2))), "soft labels of the outputs' shape"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3).double())), "data sum to [023]: use loss='bce' for"),
    (lambda: simulate(linear(3), (X, torch.tensor([[1.5, -0.5, 0.0]]).double().repeat(12, 1))), "at least 0"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3))), "for several labels a sample use loss='bce'"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3).bool())), "for several labels a sample use loss='bce'"),
    (lambda: simulate(linear(3), (X, draw(12, 2)), loss="nll"), "nll needs .* one integer target"),
    (lambda: simulate(linear(3), (X, Y), loss="bce"), "the binary cross entropy needs outputs of the targets' shape"),
    (lambda: simulate(linear(1), (X, Y), loss="bce"), "bce needs targets from 0 to 1, .* such as 2: .* -100"),
    (lambda: simulate(linear(3), (X, Y + 1)), "classes are numbered from 0, and the labels start at 1"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4) + 1)), "classes are numbered from 0"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4) - 1)), "but -1; .*-100, or ignore_index=-1"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4).double())), r"y\.astype\('int64'\)"),
    (lambda: simulate(linear(3), (X, Y - 1)), "but -1; if it marks a missing label, drop the sample"),
    (lambda: simulate(linear(3), (X, torch.where(draw(12, 3) > 1, torch.nan, 1.0)), loss="bce"), "holds nan; .*-100"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3)), loss=nn.BCEWithLogitsLoss()), "use loss='bce' instead"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3).double()), loss=nn.BCEWithLogitsLoss()), "use loss='bce', or"),
    (lambda: simulate(linear(3), (X, integers(2, 12, 3)), loss=losses.BinaryCrossEntropy([1.0, 2.0])),
     r"positive weights of shape \[2\], but a sample has targets of shape \[3\]"),
    (lambda: simulate(linear(1), (X, Y % 2), loss=losses.BinaryCrossEntropy([1.0, 2.0])), r"of shape \[\]: give"),
    (lambda: simulate(linear(3), (X, Y), loss="causal_lm"), "causal_lm needs outputs"),
    (lambda: simulate(linear(3), (X, Y), loss=losses.CrossEntropy([1.0, 2.0])), "2 class weights, but .* 3 outputs"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=one_number), r"one value per sample, shape \[2\], not shape \[\]"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: (o - t) ** 2),
     r"not shape \[2, 2\], from outputs of shape \[2, 1\] and targets of shape \[2\]: use outputs.squeeze\(1\)"),
    (lambda: simulate(linear(3), (X, draw(12, 3)), loss=lambda o, t: (o - t) ** 2), "mean over a sample's other axes"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: ((o - t) ** 2).mean(1)),
     r"the loss mixes samples.* outputs \[n, 1\] and targets \[n\]: use outputs.squeeze\(1\)"),
    (lambda: simulate(linear(1), (X, draw(12)), loss=lambda o, t: ((o - t) ** 2).mean(0)), "the loss mixes samples"),
    (lambda: simulate(linear(2), (X, draw(12, 1)), loss=lambda o, t: (o[:, 0] - t).abs().mean(1)),
     r"the loss mixes samples.* use targets.squeeze\(1\)"),
    (lambda: simulate(linear(1), (X, torch.tensor([0, 0, 0, 1] * 3)), loss=lambda o, t: ((o - t) ** 2).mean(1)),
     "the loss mixes samples"),
    (lambda: simulate(linear(3), (X, Y), loss=centred), "the loss mixes samples"),
    (lambda: simulate(linear(3), (X, Y), loss="kinds:no_such"), "cannot load the loss 'kinds:no_such'"),
    (lambda: simulate(linear(3), (X, Y), loss="hubert"), "did you mean 'huber'"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda o, t: o[:, 0] > t), "not torch.bool values"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda o, t: None), r"number per sample, shape \[2\], not a NoneType:"),
    (lambda: simulate(linear(3), (X, Y), loss=lambda o, t: 1 / 0), r"ZeroDivisionError: .* \(test_losses.py:\d+\)"),
    (lambda: losses.BinaryCrossEntropy(pos_weight=3.0), "no option 'pos_weight'; did you mean 'positive_weight'"),
    (lambda: losses.CrossEntropy([1.0, -1.0]), "finite numbers of at least 0"),
    (lambda: simulate(conv(3), (draw(12, 2, 4, 4), integers(3, 12, 4, 4)), augmentation=lamina.data.Augment()),
     "augmentation moves the pixels of x"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("is_zero", [False, True])
@pytest.mark.parametrize("own", [
    lambda o, t: (o[:, 0].sort()[0] - t) ** 2, lambda o, t: (o[:, 0] - t) ** 2 / len(t),
    lambda o, t: (o[:, 0] - t) ** 2 * torch.arange(len(t)), lambda o, t: (o[:, 0].cumsum(0) - t) ** 2,
    lambda o, t: (o[:, 0] - t.roll(1)) ** 2, lambda o, t: (o[:, 0] - t) ** 2 * (t > t.median()),
])  # fmt: skip
def test_a_loss_that_depends_on_the_rest_of_the_batch_is_refused(own, is_zero):
    model = linear(1)
    for parameter in model.parameters() if is_zero else ():
        nn.init.zeros_(parameter)  # all outputs are equal, and nothing about them says what the loss does
    with pytest.raises(lamina.BadInput, match="the loss mixes samples") as refused:
        simulate(model, (X, draw(12).sort()[0]), loss=own)
    assert "squeeze" not in str(refused.value)
    simulate(model, (X, draw(12)), loss=lambda o, t: (o[:, 0] - t) ** 2)


def test_a_loss_may_check_that_its_outputs_are_probabilities():
    def entropy(outputs, targets):
        assert (outputs.sum(1) - 1).abs().max() < 1e-6
        return -outputs[torch.arange(len(targets)), targets].log()

    simulate(nn.Sequential(linear(3), nn.Softmax(1)), (X, Y), loss=entropy, engine="loop")


def test_a_loss_of_ones_own_may_draw_random_numbers_and_a_sample_be_alone():
    simulate(linear(1), (X, draw(12)), loss=noisy, engine="loop")
    lamina.Simulation(linear(1).double(), (X[:1], draw(1)), "fedavg", clients=1, loss=noisy, engine="loop")


def test_a_class_that_occurs_only_in_the_test_maps_is_warned_of(caplog):
    x, maps = draw(12, 2, 4, 4), integers(2, 12, 4, 4)
    maps[0, 0] = -100
    simulate(conv(3), (x, maps), test=(x, maps.clamp(min=0)))
    assert not caplog.text
    ones = torch.where(maps == 0, 1, maps)
    for train, test, unseen in ((maps, maps.clamp(min=0) * 2, 2), (ones, maps, 0)):
        simulate(conv(3), (x, train), test=(x, test))
        assert f"class {unseen} appears only in the test data: no client can learn it" in caplog.text


def test_training_data_without_any_label_are_warned_of(caplog):
    maps = torch.full((12, 4, 4), -100)
    simulate(conv(3), (draw(12, 2, 4, 4), maps))
    assert caplog.messages == [
        "all targets of the train data are -100, which does not count: there is nothing to learn"
    ]


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


def test_soft_labels_may_be_rounded():
    soft = (100 * draw(12, 3).softmax(1)).round() / 100
    assert simulate(linear(3), (X, soft)).run(1)[0]["train_loss"] > 0


def test_a_model_without_log_softmax_is_warned_of_nll(caplog):
    torch.manual_seed(0)  # by chance, all outputs of a start may be negative
    simulate(nn.Sequential(linear(3), nn.LogSoftmax(1)), (X, Y), loss="nll")
    assert not caplog.text
    simulate(linear(3), (X, Y), loss="nll")
    assert "nll needs log-probabilities" in caplog.text


def test_bce_ignores_labels_of_minus_100_as_integers_and_as_floats():
    outputs, labels = draw(5, 3), integers(2, 5, 3)
    labels[0, 1] = labels[1, :2] = labels[2] = -100
    counted, signs = (labels != -100).numpy(), (2 * labels - 1).numpy()
    each = np.where(counted, np.log1p(np.exp(-signs * outputs.numpy())), 0)
    expected = torch.tensor(each.sum(1) / np.maximum(counted.sum(1), 1))
    for targets in (labels, labels.double()):
        torch.testing.assert_close(losses.bce(outputs, targets), expected)
    torch.testing.assert_close(losses.bce(outputs[:, :1], labels[:, 0].double()), torch.tensor(each[:, 0]))
