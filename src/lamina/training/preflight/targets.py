"""Checks of the targets: they suit the loss, and those of the test data are like those of the training data."""

from __future__ import annotations

import logging

from torch import Tensor

from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.data.dataset import Dataset
from lamina.data.feed import Augment
from lamina.objective import losses
from lamina.objective.batch import named_tensors, tensors
from lamina.objective.losses import IGNORED, class_axis, counted, is_binary
from lamina.rounds.settings import TrainSettings
from lamina.training.preflight.dry_run import DryRun

log = logging.getLogger(__name__)

NUMBER_LOSSES = (losses.mean_squared_error, losses.mean_absolute_error, losses.huber)
SOFT_LABEL_TOLERANCE = 0.05  # how far rounding may move the sum of a sample's soft labels from 1


def check_settings(protocol: TrainSettings, data: Dataset) -> None:
    """Refuse targets that the loss's name or the augmentation does not allow."""
    if protocol.loss == "cross_entropy" and data.classes is None and isinstance(data.y, Tensor) and data.y.dim() == 1:
        raise BadInput(
            "cross_entropy needs classes, but the labels are floats: for classes, convert them to integers (in an "
            "experiment file: data.task = 'classification'); for regression, use loss='mse'"
        )
    if isinstance(protocol.augmentation, Augment) and any(y.dim() > 2 for y in tensors(data.y)):
        raise BadInput("augmentation moves the pixels of x, but not those of y: switch it off for target maps")


def check_class_names(run: DryRun) -> None:
    """Refuse names of classes if the loss compares numbers."""
    if run.data.class_names is not None and run.objective.loss in NUMBER_LOSSES:
        raise BadInput(
            f"the {run.name} targets are names of classes, and the loss compares numbers: give numbers (with pandas, "
            "pandas.to_numeric), or take a loss for classes such as 'cross_entropy'"
        )


def check_binary_targets(run: DryRun) -> None:
    """Refuse targets of `bce` that are not between 0 and 1."""
    y = run.data.y
    if is_binary(run.objective.loss) and isinstance(y, Tensor):
        others = y[((y < 0) | (y > 1)) & (y != IGNORED)]
        rule = f"bce needs targets from 0 to 1, and some {run.name} targets are others"
        advice = "give missing labels as -100; cross_entropy takes classes"
        if len(others):
            raise BadInput(f"{rule}, such as {float(others[0]):g}: {advice}", without_data=f"{rule}: {advice}")


def check_soft_labels(run: DryRun) -> None:
    """Refuse float targets of a cross entropy that are not shares of the classes."""
    targets, axis = run.data.y, class_axis(run.objective.loss)
    if axis is None or not isinstance(targets, Tensor) or not targets.is_floating_point():
        return
    sums = targets.sum(axis)
    is_wrong = ((sums - 1).abs() > SOFT_LABEL_TOLERANCE) | (targets < 0).any(axis)
    wrong = is_wrong.reshape(len(sums), -1).any(1).nonzero().flatten()
    if len(wrong):
        sample = int(wrong[0])
        total = float(sums[sample].flatten()[is_wrong[sample].flatten()][0])
        rule = "cross_entropy takes floats as soft labels, which are at least 0 and sum to 1"
        advice = "use loss='bce' for several labels a sample, 'mse' for numbers"
        raise BadInput(
            f"{rule}, but those of sample {sample} of the {run.name} data sum to {total:g}: {advice}",
            without_data=f"{rule}, and some of the {run.name} data do not: {advice}",
        )


def check_counted(run: DryRun) -> None:
    """Refuse test data, and warn of training data, in which no target counts."""
    counts = counted(run.objective.loss, run.data.y)
    if counts is not None and not bool(counts.any()):
        if run.name == "test":
            raise BadInput("all targets of the test data are -100, which does not count: give at least one label")
        log.warning("all targets of the train data are -100, which does not count: there is nothing to learn")


def check_alike(train: Dataset, test: Dataset) -> None:
    """Refuse test data with other inputs or more classes; warn of a label that only they have."""
    names, other = (sorted(data.x) if isinstance(data.x, dict) else None for data in (train, test))
    if names != other and names is not None and other is not None:
        raise BadInput(
            f"the test data have the inputs {listed(other)}, but the training data {listed(names)}: give both the same"
        )
    wanted, given = (sorted(named_tensors(data.y, "y")) for data in (train, test))
    if wanted != given:
        raise BadInput(
            f"the test data have the targets {listed(given)}, the training data {listed(wanted)}: give both the same"
        )
    if train.classes is None or test.classes is None or train.y.dim() != 1:
        return
    if train.class_names is not None or test.labels_are_names:  # `match` compares the names
        return
    extra = sorted(set(test.y.unique().tolist()) - set(train.y.unique().tolist()))
    if extra and extra[-1] >= train.classes:
        raise BadInput(
            f"class {extra[-1]} appears only in the test data; drop it there, or declare it: "
            f"lamina.Dataset(x, y, classes={extra[-1] + 1}) for the training data",
            without_data="a class appears only in the test data",
        )
    if extra:
        log.warning("class %d appears only in the test data: no client can learn it", extra[0])
