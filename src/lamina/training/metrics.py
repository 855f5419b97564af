"""The registry of metrics: how each is computed, which direction is better, and how it is shown.

All other modules ask here about the columns of a history: targets, the best model, tuning, tables, plots. To add a
metric of lamina's own, add a line to `METRICS`; users give functions or `Metric` objects. This module does not import
torch, because the listing commands ask it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.base.errors import BadInput, short_repr, unknown
from lamina.base.registry import import_named

if TYPE_CHECKING:
    from torch import Tensor

Values = tuple[Any, ...]  # tensors with the samples on their first axis; for a user's metric, what the model returns

# the columns of each diagnostic (lamina/diagnostics.py)
DIAGNOSTICS = {
    "gradient": ("gradient_squared_norm", "scaled_gradient_squared_norm"),
    "pseudo_gradient": ("pseudo_gradient_gap", "pseudo_gradient_cosine"),
    "drift": ("drift", "extrapolation"),
    "amendment": ("amendment_cosine",),
    "second_moment": ("second_moment_mean", "second_moment_variance", "second_moment_growth"),
}
SMALLER_IS_BETTER = (
    "consistency", "gradient_squared_norm", "scaled_gradient_squared_norm", "pseudo_gradient_gap", "drift"
)  # fmt: skip
# columns that a metric's name must not hide
OTHER_COLUMNS = {
    "run", "data", "model", "algorithm", "learning_rate", "seed",  # of `lamina export`
    "round", "lr", "clients", "steps", "train_loss", "consistency", "update_norm", "bytes_down", "bytes_up", "seconds",
    "paper_bytes", "evaluation_seconds", "asked", "missing", "refused", "wire_bytes_down", "wire_bytes_up",
    "clock_seconds", "evaluating_nodes", "evaluation_bytes", "epsilon", "clip_bound",
    *(column for columns in DIAGNOSTICS.values() for column in columns),
}  # fmt: skip
CLIENT_PREFIXES, CLIENT_SUFFIXES = ("client_", "heldout_", "node_"), ("_mean", "_worst10", "_std")
SHARED = "shared_"  # prefix of columns of the shared model, beside those of the clients' own models
NEEDS_LABELS = "needs class labels, and one output per class or one logit for two classes"


class Batch(NamedTuple):
    """Some samples and what the model makes of them; the first axis of every tensor counts the samples.

    A user's metric gets all that the model returns, uncut, and targets in the form of the data's; lamina's own get a
    tensor each. Logits and targets of a causal language model are aligned: the target of a position is the token that
    follows it.
    """

    outputs: Any
    targets: Any
    losses: Tensor  # [n]
    hits: Tensor | None  # whether each prediction is right, in the targets' shape, where they are labels
    classes: int | None  # None if the targets are not labels
    class_axis: int | None = None  # of the outputs; None if the loss does not say it
    counted: Tensor | None = None  # which targets count, in their shape; None: all


def outputs_and_targets(batch: Batch) -> Values:
    """Keep all that the model returns, and all targets."""
    return batch.outputs, batch.targets


@dataclass(frozen=True)
class Metric:
    """A number that tells how good a model is, with its direction.

    >>> import lamina
    >>> Metric("bias", lambda outputs, targets: (outputs.flatten() - targets).mean().abs(), larger_is_better=False)
    Metric('bias', smaller is better)

    Args:
        name: the name of its column.
        function: a function of what the model returns and the targets, for all samples, to one number.
        larger_is_better: its direction.
        percent: whether tables and plots show the value, a fraction, in per cent.
        keep: what is kept of every batch, instead of outputs and targets, for `function`: tensors with the samples on
            their first axis. A metric of large outputs saves memory with it.
    """

    name: str
    function: Callable[..., Any]
    larger_is_better: bool = True
    percent: bool = False
    keep: Callable[[Batch], Values] = outputs_and_targets

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise BadInput(f"a metric's name is a word such as 'top3', not {short_repr(self.name)}")
        if self.name in OTHER_COLUMNS:
            raise BadInput(f"'{self.name}' is another column of the history: give the metric another name")
        if not callable(self.function):
            raise BadInput(f"metric '{self.name}': {short_repr(self.function)} is not a function of (outputs, targets)")
        if not isinstance(self.larger_is_better, bool):
            raise BadInput(f"metric '{self.name}': larger_is_better = {self.larger_is_better!r}: must be True or False")

    def __repr__(self) -> str:
        return f"Metric({self.name!r}, {'larger' if self.larger_is_better else 'smaller'} is better)"


# --- what is kept of a batch ------------------------------------------------------------------------------------------


def _losses(batch: Batch) -> Values:
    """Return the loss of every sample, and where targets may be missing, whether the sample has any."""
    if batch.counted is None:
        return (batch.losses,)
    has_target = batch.counted.reshape(len(batch.losses), -1).any(1)
    return batch.losses.where(has_target, 0.0), has_target.to(batch.losses.dtype)


def _label_losses(batch: Batch) -> Values:
    """Return the sum of every sample's losses over its labels that count, and how many count."""
    if batch.counted is None:
        return (batch.losses,)
    counts = batch.counted.reshape(len(batch.losses), -1).sum(1).to(batch.losses.dtype)
    return batch.losses.where(counts > 0, 0.0) * counts, counts


def _hits(batch: Batch) -> Values:
    """Return how many predictions of every sample are right, and if it may have several labels, of how many."""
    if batch.hits is not None:
        return (batch.hits.float(),) if batch.counted is None else _right_of(batch.hits, batch.counted)
    if _has_one_target_per_output(batch):
        right = (batch.outputs.reshape(batch.targets.shape) > 0) == (batch.targets > 0)
        return _right_of(right, batch.targets >= 0)
    predicted, actual, classes = _predictions(batch)
    return _right_of(predicted == actual, (actual >= 0) & (actual < classes))


def _top5_hits(batch: Batch) -> Values:
    axis = _class_axis(batch)
    if axis is None or batch.outputs.shape[axis] < 6:
        raise BadInput(f"needs class labels and more than five outputs a label, not {_shapes(batch)}")
    hits = (batch.outputs.topk(5, dim=axis).indices == batch.targets.unsqueeze(axis)).any(axis)
    return _right_of(hits, batch.targets >= 0)


def _right_of(right: Tensor, counted: Tensor) -> Values:
    """Return how many of every sample's labels that count are predicted, and how many count [n]."""
    sums = [side.reshape(len(side), -1).sum(1) for side in (right & counted, counted)]
    return tuple(side.float() if right.dim() == 1 else side.double() for side in sums)


def _predictions(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Return the predicted and the true class of every label, and the number of classes."""
    outputs, targets, axis = batch.outputs, batch.targets, _class_axis(batch)
    if axis is not None:
        return outputs.argmax(axis), targets, outputs.shape[axis]
    if _has_one_target_per_output(batch) and targets.numel() == len(targets):
        return (outputs.flatten() > 0).long(), targets.flatten().long(), 2
    raise BadInput(f"{NEEDS_LABELS}, not {_shapes(batch)}")


def _class_axis(batch: Batch) -> int | None:
    """Return the axis of the outputs that holds the classes, if the targets are labels; one logit has no such axis."""
    outputs, targets = batch.outputs, batch.targets
    if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1 and outputs.numel() > targets.numel():
        last = outputs.dim() - 1  # where the classes of a token may be
        for axis in (1, last) if batch.class_axis is None else (batch.class_axis % outputs.dim(),):
            if outputs.shape[:axis] + outputs.shape[axis + 1 :] == targets.shape:
                return axis
    return None


def _has_one_target_per_output(batch: Batch) -> bool:
    """Return whether targets are 0 or 1 and every one has a logit: two classes, or several labels a sample."""
    outputs, targets = batch.outputs, batch.targets
    if targets.dim() == 1 and not targets.is_floating_point() and batch.hits is None:  # a regression's, perhaps
        return False
    fits: bool = outputs.shape[: targets.dim()] == targets.shape[: outputs.dim()]
    return fits and bool(outputs.numel() == targets.numel())


def _counts(batch: Batch) -> Values:
    """Return for every sample how often each class is predicted rightly, predicted, and true [n, 3, classes]."""
    import torch

    if batch.targets.numel() > len(batch.targets) and _has_one_target_per_output(batch):
        predicted = (batch.outputs.reshape(batch.targets.shape) > 0) & (batch.targets >= 0)
        actual = batch.targets > 0
        sides = (predicted & actual, predicted, actual)
        return (torch.stack([side.reshape(*side.shape[:2], -1).sum(2) for side in sides], 1).float(),)
    predicted, actual, classes = _predictions(batch)
    predicted, actual = (side.reshape(len(side), -1) for side in (predicted, actual))
    counted = (actual >= 0) & (actual < classes)  # others, such as -100, are ignored

    def count(side: Tensor, where: Tensor) -> Tensor:
        zeros: Tensor = batch.outputs.new_zeros((len(side), classes))
        return zeros.scatter_add_(1, side.where(where, 0).long(), where.to(zeros.dtype))

    right = counted & (predicted == actual)
    return (torch.stack([count(actual, right), count(predicted, counted), count(actual, counted)], 1).float(),)


def _scores(batch: Batch) -> Values:
    """Return a score for each of several yes-or-no questions, and the answers [n, questions]; below 0: no answer."""
    outputs, targets = batch.outputs, batch.targets
    if _has_one_target_per_output(batch) and targets.dim() < 3:
        return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1)
    if targets.is_floating_point() or targets.dim() != 1 or outputs.dim() != 2:
        raise BadInput(f"{NEEDS_LABELS}, not {_shapes(batch)}; it does not support maps")
    if outputs.shape[1] == 2:
        return outputs[:, 1:] - outputs[:, :1], targets[:, None]
    classes = targets.new_tensor(range(outputs.shape[1]))
    return outputs.double().softmax(1), (targets[:, None] == classes).long()


def _errors(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return outputs minus targets [n, numbers], and which of them count: all but integer targets of -100."""
    from lamina.objective.losses import IGNORED

    outputs, targets = batch.outputs, batch.targets
    if outputs.numel() != targets.numel() or outputs.dim() - targets.dim() > 1:
        raise BadInput(f"needs one output for every target number, not {_shapes(batch)}")
    counted = (targets != IGNORED) | targets.is_floating_point()
    errors = (outputs.reshape(targets.shape) - targets).reshape(len(targets), -1)
    return errors.double(), counted.reshape(errors.shape)


def _mean_errors(batch: Batch, power: int) -> Values:
    """Return the mean of every sample's errors that count, to a power, and whether it has any."""
    errors, counted = _errors(batch)
    means = (errors.abs() ** power).where(counted, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return (means,) if batch.targets.is_floating_point() else (means, counted.any(1).double())


def _errors_and_targets(batch: Batch) -> Values:
    """Return outputs minus targets and the targets; where they do not count, 0 and NaN."""
    errors, counted = _errors(batch)
    return errors.where(counted, 0.0), batch.targets.reshape(errors.shape).double().where(counted, float("nan"))


def _shapes(batch: Batch) -> str:
    outputs, targets = ([int(n) for n in side.shape[1:]] for side in (batch.outputs, batch.targets))
    kind = str(batch.targets.dtype).removeprefix("torch.")
    return f"outputs of shape {outputs} and {kind} targets of shape {targets} a sample"


# --- the number of all samples ----------------------------------------------------------------------------------------


def mean(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the mean. With `counts`, each value is a sum over that many items: return total / count, NaN if 0."""
    return values.double().mean() if counts is None else values.double().sum() / counts.double().sum()


def _perplexity(*losses: Tensor) -> Tensor:
    return mean(*losses).exp()


def _root_mean(*values: Tensor) -> Tensor:
    return mean(*values).sqrt()


def _r2(errors: Tensor, targets: Tensor) -> Tensor:
    """Return the coefficient of determination, averaged over the numbers of a target; NaN for constant targets."""
    spread = ((targets - targets.nanmean(0)) ** 2).nansum(0)
    return (1 - (errors**2).sum(0) / spread.where(spread > 0, float("nan"))).mean()


def _f1_macro(counts: Tensor) -> Tensor:
    right, predicted, actual = counts.double().sum(0)
    return _mean_of_present(2 * right, predicted + actual)


def _f1_micro(counts: Tensor) -> Tensor:
    right, predicted, actual = counts.double().sum(0)
    return mean(2 * right, predicted + actual)


def _mean_iou(counts: Tensor) -> Tensor:
    right, predicted, actual = counts.double().sum(0)
    return _mean_of_present(right, predicted + actual - right)


def _mean_of_present(part: Tensor, whole: Tensor) -> Tensor:
    """Return the mean ratio of the classes that are true or predicted at least once."""
    return (part / whole.clamp(min=1)).sum() / (whole > 0).sum()


def _auroc(scores: Tensor, answers: Tensor) -> Tensor:
    """Return the area under the ROC curve, averaged over the questions that have both answers; equal scores tie."""
    import torch

    areas = []
    for score, answer in zip(scores.double().T, answers.T, strict=True):
        score, answer = score[answer >= 0], answer[answer >= 0] > 0
        _, inverse, counts = score.unique(return_inverse=True, return_counts=True)
        ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]  # from 1; the mean rank of equal scores
        yes, no = answer.sum(), (~answer).sum()
        areas.append((ranks.double()[answer].sum() - yes * (yes + 1) / 2) / (yes * no))
    return torch.stack(areas).nanmean()


# --- the registry -----------------------------------------------------------------------------------------------------

LOSS = Metric("loss", mean, larger_is_better=False, keep=_losses)
ACCURACY = Metric("accuracy", mean, percent=True, keep=_hits)
PERPLEXITY = Metric("perplexity", _perplexity, larger_is_better=False, keep=_label_losses)
AUROC = Metric("auroc", _auroc, percent=True, keep=_scores)
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        ACCURACY,
        LOSS,
        Metric("top5_accuracy", mean, percent=True, keep=_top5_hits),
        Metric("f1", _f1_macro, percent=True, keep=_counts),
        Metric("f1_macro", _f1_macro, percent=True, keep=_counts),
        Metric("f1_micro", _f1_micro, percent=True, keep=_counts),
        Metric("mean_iou", _mean_iou, percent=True, keep=_counts),
        AUROC,
        PERPLEXITY,
        Metric("mae", mean, larger_is_better=False, keep=partial(_mean_errors, power=1)),
        Metric("rmse", _root_mean, larger_is_better=False, keep=partial(_mean_errors, power=2)),
        Metric("r2", _r2, keep=_errors_and_targets),
    )
}
FUNCTIONS_OF_MEANS = (mean, _perplexity, _root_mean)  # of one number per sample, and of how many it is the sum
LABEL_METRICS = ("accuracy", "top5_accuracy", "f1", "f1_macro", "f1_micro", "mean_iou", "auroc")
_users_metrics: dict[str, Metric] = {}  # the users' metrics by name, so that their columns have a direction


def is_function_of_mean(metric: Metric) -> bool:
    """Return whether a metric follows from the mean over samples alone, so that parts of the data can be averaged.

    >>> [name for name, metric in METRICS.items() if not is_function_of_mean(metric)]
    ['f1', 'f1_macro', 'f1_micro', 'mean_iou', 'auroc', 'r2']
    """
    return metric.function in FUNCTIONS_OF_MEANS


def find(given: Any) -> Metric:
    """Return a metric: by name, as ``package.module:function``, from a function, or as it is.

    A function is larger-is-better unless its name ends like a cost ("…loss", "…_mse"): give a `Metric` to say so.

    >>> find("rmse")
    Metric('rmse', smaller is better)
    """
    if isinstance(given, str) and ":" not in given:
        if given not in METRICS:
            raise unknown("metric", given, METRICS)
        return METRICS[given]
    metric = import_named("metric", given) if isinstance(given, str) else given
    if not isinstance(metric, Metric):
        if not callable(metric) or isinstance(metric, type):
            raise BadInput(
                f"metric {short_repr(given)} is neither a name nor a function of (outputs, targets) nor a lamina.Metric"
            )
        name = str(getattr(metric, "__name__", type(metric).__name__)).replace("<lambda>", "metric")
        metric = Metric(name, metric, larger_is_better=not _is_cost(name))
    if metric.name in METRICS and metric is not METRICS[metric.name]:
        raise BadInput(f"'{metric.name}' is a metric of lamina's own: give yours another name")
    return metric


def find_all(metrics: Any) -> tuple[Metric, ...] | None:
    """Return several metrics, the primary one first; None, as given, stands for the default."""
    if metrics is None:
        return None
    if isinstance(metrics, str | Metric) or callable(metrics):
        metrics = [metrics]
    if isinstance(metrics, Mapping) and metrics:
        first = next(iter(metrics))
        raise BadInput(f"metrics is a dict: give a list, such as [lamina.Metric({str(first)!r}, function), 'accuracy']")
    if not isinstance(metrics, Sequence) or not metrics:
        raise BadInput(f"metrics = {short_repr(metrics)}: give a list of at least one, such as ['accuracy', 'f1']")
    every = tuple(find(metric) for metric in metrics)
    names = [metric.name for metric in every]
    for metric in every:
        if names.count(metric.name) > 1:
            raise BadInput(f"metrics: there are two of the name '{metric.name}'")
        _register(metric)
    return every


def _register(metric: Metric) -> None:
    """Let the column of a user's metric have a direction; refuse a second direction for the same name."""
    earlier = _users_metrics.get(metric.name, metric)
    if earlier.larger_is_better != metric.larger_is_better:
        raise BadInput(
            f"this process knows a metric '{metric.name}' with the other direction ({earlier!r}): give one of them "
            "another name, or start Python again"
        )
    if metric.name not in METRICS:
        _users_metrics[metric.name] = metric
        of_column.cache_clear()


# --- descriptions in a run's folder -----------------------------------------------------------------------------------


def description(metrics: Iterable[Metric]) -> list[dict[str, Any]]:
    """Return metrics as a run's config.json stores them: a report does not run the user's code."""
    return [{"name": m.name, "larger_is_better": m.larger_is_better, "percent": m.percent} for m in metrics]


def read_primary(config: Mapping[str, Any]) -> str | None:
    """Register the metrics that a run's configuration describes; return the name of the first, None for the default."""
    described = config.get("metrics")
    names: list[str] = []
    for one in described if isinstance(described, list) else []:
        if isinstance(one, Mapping) and isinstance(one.get("name"), str):
            names.append(one["name"])
            if one["name"] not in METRICS:
                larger, percent = (one.get(key) is True for key in ("larger_is_better", "percent"))
                _register(Metric(one["name"], lambda *_: float("nan"), larger, percent))  # never computed
    return names[0] if names else None


# --- columns ----------------------------------------------------------------------------------------------------------


@cache  # for histories of many rounds, whose every row is asked
def of_column(column: str) -> Metric | None:
    """Return the metric behind a column, such as f1 behind ``client_f1_worst10`` and ``f1@noisy``; None without one.

    >>> of_column("client_accuracy_worst10"), of_column("bytes_up")
    (Metric('accuracy', larger is better), None)
    """
    metrics, column = METRICS | _users_metrics, column.partition("@")[0]
    if column in metrics:
        return metrics[column]
    prefix = next((prefix for prefix in CLIENT_PREFIXES if column.startswith(prefix)), None)
    if prefix is None:
        return None
    name = column.removeprefix(prefix)
    suffix = next((suffix for suffix in CLIENT_SUFFIXES if name.endswith(suffix)), "")
    return metrics.get(name) or metrics.get(name.removesuffix(suffix))


def client_mean(metric: str) -> str:
    """Return the column with the mean of a metric over clients, each on its own test data."""
    return f"client_{metric}_mean"


def judged_column(metric: str, has: Callable[[str], bool]) -> str:
    """Return the column that a run is judged by, given its first metric and which columns its history has.

    It is the metric on the test data. If clients have models of their own, or there are no shared test data, it is the
    mean over clients; with held-out clients only, it is theirs.

    >>> judged_column("f1", ["f1", "client_f1_mean"].__contains__), judged_column("f1", ["client_f1_mean"].__contains__)
    ('f1', 'client_f1_mean')
    """
    of_clients, shared = client_mean(metric), f"{SHARED}{client_mean(metric)}"
    # the server of a federation has no `of_clients`
    order = (of_clients, metric, shared) if has(shared) else (metric, of_clients)
    return next(filter(has, (*order, f"heldout_{metric}")), metric)


def is_metric(column: str) -> bool:
    """Return whether a column is a metric itself, also of one of several test sets, and not one of clients."""
    name, _, _ = column.partition("@")
    return name in METRICS or name in _users_metrics


def smaller_is_better(column: str) -> bool:
    """Return whether a column improves as it falls: losses, distances, gradients, spreads and costs.

    >>> [name for name in ("accuracy", "loss", "consistency", "update_norm", "rmse") if smaller_is_better(name)]
    ['loss', 'consistency', 'rmse']
    """
    metric = of_column(column)
    if metric is not None and (metric.name == column.partition("@")[0] or not column.endswith("_std")):
        return not metric.larger_is_better
    return _is_cost(column)


def _is_cost(column: str) -> bool:
    """Return whether a column's name tells that it improves as it falls."""
    name, endings = column.lower(), ("loss", "error", "mae", "mse", "nll", "perplexity", "seconds", "_std")
    return (name.endswith(endings) and not name.startswith("neg_")) or column in SMALLER_IS_BETTER or "bytes" in column


def is_percent(column: str) -> bool:
    """Return whether tables and plots show a column in per cent."""
    metric = of_column(column)
    return metric is not None and metric.percent and not column.startswith("node_")


def with_unit(column: str) -> str:
    """Return a column as a heading: ``accuracy, %``."""
    return f"{column}, %" if is_percent(column) else column
