"""Metrics against values computed by hand with numpy, and their directions."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from lamina.data.dataset import as_dataset
from lamina.objective.objective import Objective
from lamina.training.evaluation import Evaluation
from lamina.training.history import History
from lamina.training.metrics import LABEL_METRICS, Batch, find, find_all, read_primary, smaller_is_better

rng = np.random.default_rng(0)
SCORES = rng.normal(size=(1500, 7))  # more than one evaluation batch
LABELS = rng.integers(0, 6, 1500)  # class 6 never occurs
LINES = np.concatenate([rng.normal(size=(1500, 2)), np.ones((1500, 1))], axis=1)


class Same(nn.Module):
    """Return the inputs as outputs."""

    def __init__(self, *shape):
        super().__init__()
        self.weight, self.shape = nn.Parameter(torch.ones(1, dtype=torch.float64)), shape

    def forward(self, x):
        return (x * self.weight).reshape(len(x), *self.shape)


def measured(outputs, targets, *metrics, loss="cross_entropy"):
    shape = np.shape(outputs)[1:]
    objective = Objective(Same(*shape), loss)
    data = as_dataset((np.asarray(outputs).reshape(len(outputs), -1), targets))
    chosen = find_all(list(metrics))
    return Evaluation(chosen, data).run(objective, objective.start, objective.buffers)


def counts(predicted, actual, classes):
    """Return how often every class is rightly predicted, predicted, and true."""
    right = [np.sum((predicted == c) & (actual == c)) for c in range(classes)]
    return np.array([right, *([np.sum(side == c) for c in range(classes)] for side in (predicted, actual))])


def area(scores, positive):
    """Return the probability that a positive sample has the higher score; equal scores count half."""
    differences = scores[positive][:, None] - scores[~positive][None, :]
    return np.mean((differences > 0) + 0.5 * (differences == 0))


def test_class_metrics_equal_their_definitions():
    row = measured(SCORES, LABELS, "accuracy", "top5_accuracy", "f1", "f1_macro", "f1_micro", "mean_iou")
    predicted = SCORES.argmax(1)
    right, of_predicted, of_actual = counts(predicted, LABELS, 7)
    order = np.argsort(-SCORES, axis=1)[:, :5]
    assert row["accuracy"] == row["f1_micro"] == pytest.approx(np.mean(predicted == LABELS))
    assert row["top5_accuracy"] == pytest.approx(np.mean((order == LABELS[:, None]).any(1)))
    assert row["f1"] == row["f1_macro"] == pytest.approx(np.mean(2 * right / (of_predicted + of_actual)))
    assert row["mean_iou"] == pytest.approx(np.mean(right / (of_predicted + of_actual - right)))


def test_auroc_tells_confident_scores_apart():
    """In float32, the softmax of logits that differ by 20 or more is 1."""
    logits = (40 * np.random.default_rng(0).normal(size=(400, 3))).astype(np.float32)
    labels = np.arange(400) % 3
    exact = np.exp(logits - logits.max(1, keepdims=True), dtype=np.float64)
    exact /= exact.sum(1, keepdims=True)
    expected = np.mean([area(exact[:, c], c == labels) for c in range(3)])
    auroc = find("auroc")
    batch = Batch(torch.tensor(logits), torch.tensor(labels), torch.zeros(400), None, 3)
    assert float(auroc.function(*auroc.keep(batch))) == pytest.approx(expected, abs=1e-6)


def test_auroc_equals_the_share_of_ordered_pairs():
    probabilities = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
    row = measured(SCORES, LABELS, "auroc")
    assert row["auroc"] == pytest.approx(np.mean([area(probabilities[:, c], c == LABELS) for c in range(6)]))
    tied, binary = np.round(SCORES[:, :2]), LABELS % 2
    row = measured(tied, binary, "auroc", "f1")
    assert row["auroc"] == pytest.approx(area(tied[:, 1] - tied[:, 0], binary == 1))
    logit = nn.BCEWithLogitsLoss(reduction="none")
    assert measured(tied[:, 0], binary.astype(float), "auroc", loss=logit)["auroc"] == pytest.approx(
        area(tied[:, 0], binary == 1)
    )


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_metrics_of_one_logit_are_those_of_two_classes(shape, kind):
    binary, logits = LABELS % 2, SCORES[:, :1] + LABELS[:, None] % 2
    right, of_predicted, of_actual = counts(logits[:, 0] > 0, binary, 2)
    row = measured(logits, binary.reshape(shape).astype(kind), *LABEL_METRICS[2:], "accuracy", loss="bce")
    assert row["f1"] == row["f1_macro"] == pytest.approx(np.mean(2 * right / (of_predicted + of_actual)))
    assert row["f1_micro"] == row["accuracy"] == pytest.approx(np.mean((logits[:, 0] > 0) == binary))
    assert row["mean_iou"] == pytest.approx(np.mean(right / (of_predicted + of_actual - right)))
    assert row["auroc"] == pytest.approx(area(logits[:, 0], binary == 1))


def test_labels_with_a_logit_each_are_several_labels_whatever_last_axis_the_outputs_have():
    answers, logits = LABELS.reshape(500, 3) % 2, SCORES[:, 0].reshape(500, 3)
    right, of_predicted, of_actual = ((logits > 0) & (answers > 0)).sum(0), (logits > 0).sum(0), answers.sum(0)
    for outputs in (logits, logits[..., None]):
        row = measured(outputs, answers, "f1", "mean_iou", "accuracy", loss="bce")
        assert row["f1"] == pytest.approx(np.mean(2 * right / (of_predicted + of_actual)))
        assert row["mean_iou"] == pytest.approx(np.mean(right / (of_predicted + of_actual - right)))
        assert row["accuracy"] == pytest.approx(np.mean((logits > 0) == answers))


def test_perplexity_is_the_exponential_of_the_cross_entropy():
    log_sums = np.log(np.exp(SCORES).sum(1))
    expected = np.exp(np.mean(log_sums - SCORES[np.arange(1500), LABELS]))
    assert measured(SCORES, LABELS, "perplexity")["perplexity"] == pytest.approx(expected)


def test_regression_metrics_equal_their_definitions():
    targets = LINES[:, 0] + rng.normal(size=1500)
    row = measured(LINES[:, :1], targets, "mae", "rmse", "r2", loss="mse")
    errors = LINES[:, 0] - targets
    assert row["mae"] == pytest.approx(np.abs(errors).mean())
    assert row["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert row["r2"] == pytest.approx(1 - np.sum(errors**2) / np.sum((targets - targets.mean()) ** 2))


def test_maps_of_labels_ignore_unknown_pixels():
    outputs, maps = rng.normal(size=(6, 3, 4, 4)), rng.integers(0, 3, (6, 4, 4))
    maps[0, :2] = -100
    batch = Batch(torch.tensor(outputs), torch.tensor(maps), torch.zeros(6), None, 3)
    row = {name: float(find(name).function(*find(name).keep(batch))) for name in ("mean_iou", "f1", "accuracy")}
    kept = maps >= 0
    right, of_predicted, of_actual = counts(outputs.argmax(1)[kept], maps[kept], 3)
    assert row["mean_iou"] == pytest.approx(np.mean(right / (of_predicted + of_actual - right)))
    assert row["f1"] == pytest.approx(np.mean(2 * right / (of_predicted + of_actual)))
    assert row["accuracy"] == pytest.approx(np.mean(outputs.argmax(1)[kept] == maps[kept]))
    with pytest.raises(lamina.BadInput, match="does not support maps"):
        find("auroc").keep(batch)


def test_samples_without_any_label_leave_accuracy_and_loss():
    """Accuracy is the share of all labels, over evaluation batches; the loss is the mean over labelled samples, and the
    perplexity that of all labels.
    """
    outputs, maps = rng.normal(size=(1200, 6, 2, 2)), rng.integers(0, 6, (1200, 2, 2))
    maps[::3] = -100
    maps[1, 1:] = maps[1100:1150, 0] = -100
    row = measured(outputs, maps, "accuracy", "top5_accuracy", "perplexity")
    kept = maps >= 0
    assert row["accuracy"] == pytest.approx(np.mean(outputs.argmax(1)[kept] == maps[kept]))
    assert row["top5_accuracy"] == pytest.approx(np.mean(outputs.argmin(1)[kept] != maps[kept]))
    each = np.log(np.exp(outputs).sum(1)) - np.take_along_axis(outputs, maps.clip(0)[:, None], 1)[:, 0]
    expected = np.mean([each[i][kept[i]].mean() for i in range(1200) if kept[i].any()])
    assert [row["loss"], np.log(row["perplexity"])] == pytest.approx([expected, each[kept].mean()])

    answers = np.where(np.arange(1200)[:, None] % 4 == 0, -100, maps.reshape(1200, 4) % 2)
    logits, kept = outputs.reshape(1200, 24)[:, :4], answers >= 0
    for targets in (answers, answers.astype(float)):
        row = measured(logits, targets, "accuracy", loss="bce")
        assert row["accuracy"] == pytest.approx(np.mean((logits > 0)[kept] == answers[kept]))
    row = measured(logits, answers, "mae", "rmse", loss="mse")
    errors = np.abs(logits - answers)
    shares = [errors[i][kept[i]].mean() for i in range(1200) if kept[i].any()]
    assert row["mae"] == pytest.approx(np.mean(shares))
    assert row["rmse"] ** 2 == pytest.approx(row["loss"])


@pytest.mark.parametrize("loss", ["causal_lm", "token_cross_entropy"])
def test_token_metrics_compare_the_tokens_that_the_loss_compares(loss):
    words = 8  # as many as tokens: the shapes do not say which axis holds the classes
    scores, tokens = rng.normal(size=(40, words, words)), rng.integers(0, words, (40, words))
    tokens[:, -2] = -100
    row = measured(scores, tokens, "accuracy", "top5_accuracy", "f1", "f1_micro", "mean_iou", loss=loss)
    pairs = [
        (scores[sample, place], tokens[sample, place + shift])
        for sample in range(40)
        for shift in [int(loss == "causal_lm")]
        for place in range(words - shift)
        if tokens[sample, place + shift] >= 0
    ]
    predicted, actual = np.array([score.argmax() for score, _ in pairs]), np.array([token for _, token in pairs])
    right, of_predicted, of_actual = counts(predicted, actual, words)
    assert [row["accuracy"], row["f1_micro"]] == pytest.approx([np.mean(predicted == actual)] * 2)
    assert row["top5_accuracy"] == pytest.approx(np.mean([token in score.argsort()[-5:] for score, token in pairs]))
    assert row["f1"] == pytest.approx(np.mean(2 * right / (of_predicted + of_actual)))
    assert row["mean_iou"] == pytest.approx(np.mean(right / (of_predicted + of_actual - right)))


def test_several_labels_a_sample():
    outputs, targets = SCORES[:, :3], (SCORES[:, 3:6] > 0.5).astype(float)
    row = measured(outputs, targets, "f1", "auroc", loss=lambda o, t: ((o - t) ** 2).mean(1))
    right = ((outputs > 0) * targets).sum(0)
    assert row["f1"] == pytest.approx(np.mean(2 * right / ((outputs > 0).sum(0) + targets.sum(0))))
    assert row["auroc"] == pytest.approx(np.mean([area(outputs[:, i], targets[:, i] > 0) for i in range(3)]))


def test_labels_and_numbers_that_do_not_count_leave_every_metric():
    """-100 among several labels or numbers a sample; each column is measured where it counts."""
    outputs, labels, numbers = SCORES[:, :3], (SCORES[:, 3:6] > 0.5).astype(int), rng.integers(0, 9, (1500, 3))
    for targets in (labels, numbers):
        targets[::3, 1] = targets[1::2, 2] = -100
    row = measured(outputs, labels, "f1", "auroc", loss="bce")
    assert measured(outputs, labels.astype(float), "f1", "auroc", loss="bce") == pytest.approx(row)
    kept = [labels[:, i] >= 0 for i in range(3)]
    pairs = [(outputs[kept[i], i], labels[kept[i], i] > 0) for i in range(3)]
    assert row["auroc"] == pytest.approx(np.mean([area(scores, answers) for scores, answers in pairs]))
    shares = [2 * np.sum((scores > 0) & answers) / np.sum([scores > 0, answers]) for scores, answers in pairs]
    assert row["f1"] == pytest.approx(np.mean(shares))
    row = measured(outputs, numbers, "mae", "rmse", "r2", loss="mse")
    errors = np.ma.masked_array(outputs - numbers, numbers == -100)
    assert row["mae"] == pytest.approx(np.abs(errors).mean(1).mean())
    assert [row["rmse"] ** 2, row["loss"]] == pytest.approx([(errors**2).mean(1).mean()] * 2)
    spreads = np.ma.masked_array(numbers, numbers == -100).var(0)
    assert row["r2"] == pytest.approx(np.mean(1 - (errors**2).mean(0) / spreads))


def test_soft_labels_count_as_the_class_they_prefer():
    soft = 0.7 * np.eye(7)[LABELS] + 0.3 / 7
    names = ("accuracy", "top5_accuracy", "f1", "auroc")
    hard = measured(SCORES, LABELS, *names)
    for targets in (soft, np.eye(7)[LABELS]):
        row = measured(SCORES, targets, *names)
        assert [row[name] for name in names] == [hard[name] for name in names]


def worst_error(outputs, targets):
    return (outputs.flatten() - targets).abs().max()


COST = lamina.Metric("cost", lambda outputs, targets: float(len(targets)), larger_is_better=False)


def test_own_metrics_see_all_samples():
    row = measured(LINES[:, :1], LINES[:, 1], worst_error, COST, loss="mse")
    assert row["worst_error"] == pytest.approx(np.abs(LINES[:, 0] - LINES[:, 1]).max())
    assert row["cost"] == 1500
    assert smaller_is_better("worst_error")  # by its name
    assert smaller_is_better("cost")
    assert smaller_is_better("heldout_cost_worst10")


def test_targets_and_best_follow_the_direction():
    find_all([COST])
    history = History([{"round": 1, "cost": 3.0}, {"round": 2, "cost": 1.0}, {"round": 3, "cost": 2.0}])
    assert history.metric == "cost"
    assert (history.best(), history.last(), history.rounds_to(2.5)) == (1.0, 2.0, 2)
    assert History([{"round": 1, "loss": 1.0, "r2": 0.5}]).metric == "r2"
    assert History([{"round": 1, "loss": 1.0, "r2": 0.5}], metric="loss")[:1].best() == 1.0


def test_find_returns_a_metric_as_it_is():
    assert find(COST) is COST
    assert find("lamina.training.metrics:AUROC") is find("auroc")


@pytest.mark.parametrize("name", ["my_rmse", "valid_MSE", "mse", "log_mae", "word_perplexity", "worst_error", "nll"])
def test_the_name_of_a_function_may_say_that_smaller_is_better(name):
    def function(outputs, targets):
        return 0.0

    function.__name__ = name
    assert not find(function).larger_is_better
    for larger in (f"{name}_gain", f"neg_{name}"):
        function.__name__ = larger
        assert find(function).larger_is_better


def test_the_direction_of_a_metric_is_a_bool():
    with pytest.raises(lamina.BadInput, match="metric 'my': larger_is_better = 'no': must be True or False"):
        lamina.Metric("my", len, larger_is_better="no")


def test_a_name_has_one_direction_in_a_process():
    def odd_gap(outputs, targets):
        return (outputs.flatten() - targets).mean()

    find_all(lamina.Metric("odd_gap", odd_gap, larger_is_better=False))
    for other in (odd_gap, lamina.Metric("odd_gap", odd_gap)):  # a function is larger-is-better
        with pytest.raises(lamina.BadInput, match="with the other direction"):
            find_all(["accuracy", other])
    stored = {"metrics": [{"name": "odd_gap", "larger_is_better": True, "percent": False}]}
    with pytest.raises(lamina.BadInput, match="with the other direction"):
        read_primary(stored)
    assert read_primary({"metrics": [{**stored["metrics"][0], "larger_is_better": False}]}) == "odd_gap"


@pytest.mark.parametrize("name", ["lr", "seed", "model", "learning_rate"])
def test_a_metric_must_not_have_the_name_of_another_column(name):
    with pytest.raises(lamina.BadInput, match=name):
        lamina.Metric(name, lambda outputs, targets: 0.0)


def test_a_dict_of_metrics_is_refused_with_what_to_give():
    with pytest.raises(
        lamina.BadInput, match=r"metrics is a dict: give a list, such as \[lamina.Metric\('mine', function\)"
    ):
        find_all({"mine": lambda outputs, targets: 0.0})
