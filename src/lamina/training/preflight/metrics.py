"""Checks of the metrics: the model's outputs, the loss and the targets have what each of them needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from lamina.base.errors import BadInput
from lamina.objective.losses import IGNORED, has_no_logits, is_binary, is_regression
from lamina.training.evaluation import keep, predict, value_of
from lamina.training.metrics import AUROC, LABEL_METRICS, METRICS, NEEDS_LABELS, PERPLEXITY, Metric, Values
from lamina.training.preflight.dry_run import DryRun, Pairs

log = logging.getLogger(__name__)


def check_metrics(run: DryRun, metrics: Sequence[Metric]) -> None:
    """Refuse metrics that do not suit the model's outputs, the loss or the targets."""
    for metric in metrics:
        _check_metric(run, metric)
    # a user's metric is tried on all samples: a few may be too few for it
    users = [metric for metric in metrics if metric.name not in METRICS]
    kept = predict(run.objective, run.objective.start, run.objective.buffers, run.data, users) if users else {}
    for metric in users:
        _warn_of_broadcasting(metric, kept[metric])


def _check_metric(run: DryRun, metric: Metric) -> None:
    loss, name, y = run.objective.loss, run.name, run.data.y
    keep(metric, run.batch)
    if not isinstance(y, torch.Tensor):
        return
    labels = y[y != IGNORED] if is_binary(loss) else y.flatten()
    if metric is PERPLEXITY and is_regression(loss):
        raise BadInput("metric 'perplexity' is the exponential of a cross entropy, and the loss is a regression's")
    are_labels = not y.is_floating_point() or bool(((labels == 0) | (labels == 1)).all())
    if metric.name in LABEL_METRICS and not are_labels and run.batch.class_axis is None:
        raise BadInput(f"metric '{metric.name}' {NEEDS_LABELS}, and the {name} targets are other numbers than 0, 1")
    if metric.name in LABEL_METRICS and metric is not AUROC and has_no_logits(loss):
        raise BadInput(f"metric '{metric.name}' takes an output above 0 for a yes, which this loss does not: use 'bce'")
    if metric is AUROC and bool((labels == labels[:1]).all()):
        raise BadInput(f"metric 'auroc' needs two classes, and the {name} data have one")
    if metric.name == "r2" and bool((y == y[:1]).all()):
        raise BadInput(f"metric 'r2' needs targets that differ, and those of the {name} data are all the same")


def _warn_of_broadcasting(metric: Metric, values: Values) -> None:
    """Warn if a user's metric of outputs [n, 1] and targets [n] (or the reverse) takes all pairs of samples.

    A metric may want pairs, but then it gives the same number for [n] and [n].
    """
    if not all(isinstance(value, torch.Tensor) for value in values):
        return
    with Pairs(len(values[0])) as pairs:
        number = value_of(metric, values)
    if not pairs.found or sorted(tuple(value.shape[1:]) for value in values) != [(), (1,)]:
        return
    try:
        flat = value_of(metric, tuple(value.flatten() for value in values))
    except BadInput:
        return  # it needs the axis
    if not torch.allclose(number, flat, rtol=1e-4, equal_nan=True):
        shapes = " and ".join(f"[n{', 1' * (value.dim() - 1)}]" for value in values)
        odd = f"metric '{metric.name}' is {number:g} for outputs and targets of shapes {shapes}"
        log.warning("%s, which broadcast to [n, n], and %g for [n] and [n]: flatten both in it", odd, flat)
