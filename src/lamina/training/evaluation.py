"""The evaluation of a model, and the row of a round in the history."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.base import rng
from lamina.base.errors import BadInput, Diverged, LaminaError, describe_error
from lamina.data.dataset import Dataset
from lamina.data.parts import Parts
from lamina.engines.loop import FIXED_CHUNK
from lamina.engines.ranks import Ranks
from lamina.engines.state import RoundReport
from lamina.objective.batch import Targets, named_tensors, take, tensors
from lamina.objective.losses import aligned, class_axis, counted, hits
from lamina.objective.objective import Buffers, Objective
from lamina.objective.outputs import join_outputs, main_element, map_outputs, outputs_of, sample_axes, select_samples
from lamina.rounds.clients import Reserved
from lamina.rounds.plan import RoundFacts
from lamina.training.history import History, Row
from lamina.training.metrics import (
    ACCURACY,
    LABEL_METRICS,
    LOSS,
    METRICS,
    PERPLEXITY,
    SHARED,
    Batch,
    Metric,
    Values,
    judged_column,
    mean,
    of_column,
    outputs_and_targets,
)

log = logging.getLogger(__name__)
ClientModels = Callable[[int], tuple[Tensor, Buffers]]  # from a client's number to the model that it uses

EVALUATION_BATCH = 1000  # samples at a time
# input numbers at a time on a GPU, if that is more: small images come in large batches
EVALUATION_NUMBERS_GPU = 8 << 20
WEIGHT = "/weight"  # suffix of weight keys; not valid in a metric's name
MOST_EVALUATED = 16_384  # samples; tokens are small, but their activations are not


def sample_means(
    objective: Objective, x: Tensor, buffers: Buffers, data: Dataset, metrics: Sequence[Metric] | None = None
) -> dict[str, float]:
    """Return the mean of the values that the loss and every metric keep.

    The means of several parts of the data, weighted by their samples, give those of all data (`metric_of_mean`). Where
    not every sample counts once, its mean weight is there as well (`weight_name`).
    """
    means = {}
    for metric, values in predict(objective, x, buffers, data, metrics).items():
        means[metric.name] = float(mean(*values[:2]))
        if len(values) > 1:
            means[weight_name(metric)] = float(values[1].double().mean())
    return means


def weight_name(metric: Metric) -> str:
    """Return the key of a sample's mean weight in a metric's mean: the labels it has, or whether it has any."""
    return f"{metric.name}{WEIGHT}"


def metric_of_mean(metric: Metric, value: float) -> float:
    """Return a metric from its mean over samples; `is_function_of_mean` says for which metrics that works."""
    return float(value_of(metric, (torch.tensor([value], dtype=torch.float64),)))


def with_loss(metrics: Sequence[Metric]) -> list[Metric]:
    """Return the columns of an evaluation: the loss, then the metrics."""
    return [LOSS, *(metric for metric in metrics if metric is not LOSS)]


def value_of(metric: Metric, values: Values) -> Tensor:
    """Return a metric's number, as a float64 tensor of no axes, from what it keeps of the samples."""
    try:
        number = metric.function(*values)
    except LaminaError:
        raise
    except Exception as error:  # whatever a user's function raises
        raise BadInput(
            f"metric '{metric.name}' fails for {' and '.join(map(form, values))}: {describe_error(error)}"
        ) from error
    try:
        tensor = number.detach() if isinstance(number, Tensor) else torch.tensor(float(number))
        return tensor.double().reshape(())
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"tensor of shape {list(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
        raise BadInput(f"metric '{metric.name}' must return one number, not a {kind}") from error


def form(value: Any) -> str:
    """Return the shape of a tensor, or what else a metric or a loss gets of the model, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    kind, main = type(value).__name__, main_element(value)
    return f"the {kind} that the model returns" + (f" (outputs{main} is a tensor)" if main else "")


def predict(
    objective: Objective, x: Tensor, buffers: Buffers, data: Dataset, metrics: Sequence[Metric] | None = None,
    bounds: Sequence[int] | None = None,
) -> dict[Metric, Values]:  # fmt: skip
    """Return what the loss and every metric keep of the samples, joined over evaluation batches.

    `bounds` are where the samples of one client end and those of the next begin, which a loss of a batch keeps apart.
    """
    kept: dict[Metric, list[Values]] = {}
    parts = evaluation_batches(objective, data, bounds)
    with torch.no_grad(), rng.forked(objective.device, seed=0):  # a module may draw random numbers even in evaluation
        for part in parts:
            outputs = objective.outputs(x, buffers, data.inputs(part, objective.dtype), train=False)
            batch = as_batch(objective, outputs, take(data.y, part), data.classes)
            if metrics is None:
                metrics = () if batch.hits is None else (ACCURACY,)
            for metric in with_loss(metrics):
                kept.setdefault(metric, []).append(keep(metric, batch))
    if len(parts) == 1:
        return {metric: batches[0] for metric, batches in kept.items()}
    sizes = [part.stop - part.start for part in parts]
    return {
        metric: _joined(metric, batches, sizes, axes_of_samples(objective, data, metric))
        for metric, batches in kept.items()
    }


def axes_of_samples(objective: Objective, data: Dataset, metric: Metric) -> Iterable[int | None]:
    """Return the axis of the samples in every tensor that a metric keeps.

    What a metric's own `keep` returns has the samples on the first axis; of what a model returns, it is tried out.
    """
    if metric.keep is not outputs_and_targets:
        return itertools.repeat(0)

    def kept(samples: int) -> Values:
        some = data.subset(np.arange(samples) % len(data))
        inputs = some.inputs(slice(None), objective.dtype)
        outputs = objective.outputs(objective.start, objective.buffers, inputs, train=False)
        return keep(metric, as_batch(objective, outputs, some.y, data.classes))

    with torch.no_grad(), rng.forked(objective.device, seed=0):
        return sample_axes(kept)


def evaluation_batches(objective: Objective, data: Dataset, bounds: Sequence[int] | None = None) -> list[slice]:
    """Return the batches of an evaluation: as many samples as are fast, or equal parts if the loss is one of a batch.

    Such parts hold the samples of one client each, at most as many as are taken together in a gradient over all data.
    """
    if objective.mixes_samples:
        places = [0, len(data)] if bounds is None else list(bounds)
        pieces = [
            np.linspace(start, end, -(-(end - start) // FIXED_CHUNK) + 1).astype(int).tolist()
            for start, end in itertools.pairwise(places)
        ]
        return [slice(start, end) for piece in pieces for start, end in itertools.pairwise(piece)]
    size = EVALUATION_BATCH
    if objective.device.type != "cpu":
        sample_numbers = sum(values[0].numel() for values in tensors(data.x))
        size = min(max(size, EVALUATION_NUMBERS_GPU // sample_numbers), MOST_EVALUATED)
    return [slice(start, min(start + size, len(data))) for start in range(0, len(data), size)]


def _joined(metric: Metric, batches: Sequence[Values], sizes: Sequence[int], axes: Iterable[int | None]) -> Values:
    """Return what a metric keeps of several batches as if they were one."""
    try:
        return cast(Values, join_outputs(batches, sizes, axes))
    except RuntimeError as error:
        raise BadInput(
            f"metric '{metric.name}' needs all outputs together, and those of several batches do not fit "
            f"({str(error).splitlines()[0]}): give lamina.Metric(…, keep=…), which takes what it needs of each batch"
        ) from error


def as_batch(objective: Objective, outputs: Any, targets: Targets, classes: int | None) -> Batch:
    """Return what the model returns for some samples with their losses and whether the predictions are right."""
    loss = objective.loss
    right, losses = hits(loss, outputs, targets, classes), objective.losses(outputs, targets)
    outputs, targets = aligned(loss, outputs, targets)
    return Batch(outputs, targets, losses, right, classes, class_axis(loss), counted(loss, targets))


def keep(metric: Metric, batch: Batch) -> Values:
    """Return what a metric keeps of a batch; an error names the metric.

    A user's metric sees all that the model returns, and all targets; the others compare a tensor with a tensor. Metrics
    of labels see the most likely class of a soft label, which is the target of a loss over classes.
    """
    try:
        if metric.name in METRICS and metric not in (LOSS, PERPLEXITY):
            batch = _of_tensors(batch)
        if metric.name in LABEL_METRICS and batch.class_axis is not None and batch.targets.is_floating_point():
            batch = batch._replace(targets=batch.targets.argmax(batch.class_axis))
        return metric.keep(batch)
    except BadInput as error:
        raise BadInput(f"metric '{metric.name}' {error}") from error


def _of_tensors(batch: Batch) -> Batch:
    """Return a batch with the model's main output; refuse several targets."""
    if not isinstance(batch.targets, Tensor):
        names = ", ".join(named_tensors(batch.targets, "y"))
        raise BadInput(f"needs one tensor of targets, not {names}: give a function of (outputs, targets)")
    return batch._replace(outputs=outputs_of(batch.outputs))


# --- clients ----------------------------------------------------------------------------------------------------------


class ClientSamples(NamedTuple):
    """Samples of clients to evaluate on, those of one client after the other."""

    prefix: str  # of the columns: "client_" or "heldout_"
    suffix: str  # of the first column: "" or "_mean"
    data: Dataset
    parts: Parts  # the samples of every client
    pooled: bool  # whether the first column is the metric of all samples, not the mean over clients
    clients: Sequence[int] = ()  # the numbers of these clients; empty if they never train

    def of_shared_model(self) -> ClientSamples:
        """Return the samples with columns that say: this is the shared model, and not the clients' own ones."""
        return self._replace(prefix=f"{SHARED}{self.prefix}") if self.clients else self


def reserved_samples(reserved: Reserved, data: Dataset, device: torch.device) -> list[ClientSamples]:
    """Return the samples that no client trains on: those of held-out clients, and the clients' test splits."""
    samples = []
    groups = [
        ("client_", "_mean", reserved.local_tests, False, reserved.tested),
        ("heldout_", "", reserved.heldout, True, ()),
    ]
    for prefix, suffix, parts, pooled, clients in groups:
        if len(parts):
            group = in_order(ClientSamples(prefix, suffix, data, parts, pooled, clients))
            samples.append(group._replace(data=group.data.to(device)))
    return samples


def in_order(group: ClientSamples) -> ClientSamples:
    """Return clients' samples without those of others, those of one client after the other."""
    samples = group.parts.samples
    return group._replace(data=group.data.subset(samples), parts=Parts(np.arange(len(samples)), group.parts.bounds))


def samples_by_client(test: Dataset, names: Sequence[Any]) -> ClientSamples:
    """Return the own test data of the clients with these names."""
    values, owners = np.unique(test.columns[test.client_column or ""], return_inverse=True)
    parts, places = (
        Parts.by_owner(owners, len(values)),
        {str(value): place for place, value in enumerate(values.tolist())},
    )
    wanted = [places.get(str(name)) for name in names]
    tested = [client for client, place in enumerate(wanted) if place is not None]
    if not tested:
        raise BadInput("no client that trains has test data: give some, or hold out fewer clients")
    rows = [parts[place] for place in wanted if place is not None]
    return in_order(ClientSamples("client_", "_mean", test, Parts.of(rows), False, tested))


def client_scores(objective: Objective, metric: Metric, values: Values, group: ClientSamples) -> NDArray[Any]:
    """Return a metric of every client; NaN for one whose samples give no number (an AUROC of one class)."""
    parts = group.parts
    if metric.function is mean:
        numbers, *counts = (np.add.reduceat(v.cpu().numpy()[parts.samples], parts.bounds[:-1]) for v in values)
        with np.errstate(invalid="ignore"):  # a client without any label has no score
            scores: NDArray[Any] = numbers / (counts[0] if counts else parts.sizes.astype(numbers.dtype))
        return scores
    values, axes = map_outputs(Tensor.cpu, values), axes_of_samples(objective, group.data, metric)
    samples = (select_samples(values, torch.from_numpy(part), axes) for part in parts)
    return np.array([float(value_of(metric, value)) for value in samples])


def client_columns(objective: Objective, metric: Metric, values: Values, group: ClientSamples) -> dict[str, float]:
    """Return a metric over clients: mean (or that of all samples), mean of the worst 10 %, and standard deviation.

    A client whose samples give no number does not count.
    """
    scores = client_scores(objective, metric, values, group)
    scores = np.sort(scores[~np.isnan(scores)])
    name = f"{group.prefix}{metric.name}"
    if not len(scores):
        return {f"{name}{group.suffix}": math.nan}
    worst = max(1, round(0.1 * len(scores)))
    with np.errstate(invalid="ignore"):  # of infinite losses
        first = float(value_of(metric, values)) if group.pooled else float(scores.mean())
        return {
            f"{name}{group.suffix}": first,
            f"{name}_worst10": float((scores[:worst] if metric.larger_is_better else scores[-worst:]).mean()),
            f"{name}_std": float(scores.std()),
        }


def predict_apart(
    objective: Objective, model_of: ClientModels, group: ClientSamples, metrics: Sequence[Metric]
) -> dict[Metric, Values]:
    """Return what these metrics keep of the samples of all clients, each evaluated with the client's own model."""
    ranks, kept = Ranks.current(), {}
    for client, part in zip(group.clients, group.parts, strict=True):
        if ranks.owns(client):
            values = predict(objective, *model_of(client), group.data.subset(part), metrics)
            kept[client] = [map_outputs(Tensor.cpu, values[metric]) for metric in metrics]
    by_client = ranks.gather(kept)
    lists = zip(*(by_client[client] for client in group.clients), strict=True)  # by metric: what every client keeps
    sizes = group.parts.sizes.tolist()
    return {
        metric: _joined(metric, values, sizes, axes_of_samples(objective, group.data, metric))
        for metric, values in zip(metrics, lists, strict=True)
    }


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated after a round: metrics on the test data, and on samples of clients."""

    metrics: Sequence[Metric] | None  # the primary one first; None: the accuracy, where there is one
    test: Dataset | None
    clients: Sequence[ClientSamples] = ()
    more_tests: Mapping[str, Dataset] = field(default_factory=dict)  # further test data by name

    def judged_column(self, metric: str, own_models: bool) -> str:
        """Return the column that a run is judged by, given its first metric and whether clients have their own models.

        A history finds the same column in its rows.
        """
        columns = set() if self.test is None else {metric}
        for group in self.clients:
            column = f"{group.prefix}{metric}{group.suffix}"
            columns |= {column, f"{SHARED}{column}"} if own_models and group.clients else {column}
        return judged_column(metric, columns.__contains__)

    def start(
        self, objective: Objective, x: Tensor, buffers: Buffers, model_of: ClientModels | None = None
    ) -> Callable[[], dict[str, float]]:
        """Start evaluating a model on the test data, without waiting for a GPU; return a function that finishes it.

        It returns the values by name, with the columns of clients. If clients have models of their own (`model_of`),
        these are evaluated on the clients' samples, and the columns of the given model begin with "shared_".
        """
        tests = (
            {} if self.test is None else {"": self.test} | {f"@{name}": more for name, more in self.more_tests.items()}
        )
        names, numbers = [], []
        for ending, data in tests.items():
            for metric, values in predict(objective, x, buffers, data, self.metrics).items():
                names.append(f"{metric.name}{ending}")
                numbers.append(value_of(metric, values).to(objective.device))
        measured = torch.stack(numbers) if numbers else torch.empty(0)

        def finish() -> dict[str, float]:
            row = dict(zip(names, measured.tolist(), strict=True))  # waits for the GPU once
            for group in self.clients:
                evaluated = [
                    (predict(objective, x, buffers, group.data, self.metrics, group.parts.bounds.tolist()), group)
                ]
                if model_of is not None and group.clients:
                    evaluated[0] = evaluated[0][0], group.of_shared_model()
                    evaluated.append((predict_apart(objective, model_of, group, [*evaluated[0][0]]), group))
                for kept, columns in evaluated:
                    chosen = self.metrics or [metric for metric in kept if metric is not LOSS or len(kept) == 1]
                    for metric in chosen:
                        row |= client_columns(objective, metric, kept[metric], columns)
            return row

        return finish

    def of_clients(
        self, objective: Objective, x: Tensor, buffers: Buffers, model_of: ClientModels | None = None
    ) -> dict[int, dict[str, float]]:
        """Return the loss and the metrics of every client that has samples to evaluate on, by its number."""
        group = next((group for group in self.clients if group.clients), None)
        if group is None:
            raise BadInput(
                "no client has samples of its own to evaluate on: give local_test=0.2, test data by client, or "
                "client_metrics=True for those that it trains on"
            )
        kept = predict(objective, x, buffers, group.data, self.metrics, group.parts.bounds.tolist())
        if model_of is not None:
            kept = predict_apart(objective, model_of, group, [*kept])
        scores = {each.name: client_scores(objective, each, kept[each], group).tolist() for each in kept}
        return {
            client: {name: values[place] for name, values in scores.items()}
            for place, client in enumerate(group.clients)
        }

    def run(
        self, objective: Objective, x: Tensor, buffers: Buffers, model_of: ClientModels | None = None
    ) -> dict[str, float]:
        """Evaluate a model, see `start`."""
        return self.start(objective, x, buffers, model_of)()


# --- rounds -----------------------------------------------------------------------------------------------------------


def round_row(
    algorithm: Algorithm, x: Tensor, plan: RoundFacts, report: RoundReport, seconds: float
) -> dict[str, float | int]:
    """Return the metrics of a round without its evaluation."""
    models = algorithm.paper_models(plan.number)
    row: dict[str, float | int] = {
        "round": plan.number,
        "lr": plan.lr,
        "clients": len(plan.cohort),
        "steps": int(plan.steps.sum()),
        "train_loss": report.train_loss,
        "consistency": report.consistency,
        "update_norm": report.update_norm,
        "bytes_down": report.bytes_down,
        "bytes_up": report.bytes_up,
        "seconds": seconds,
    }
    if models is not None:  # the bytes as the papers count them, beside those sent
        row["paper_bytes"] = models * x.numel() * x.element_size() * len(plan.cohort)
    if report.clip_bound is not None:
        row["clip_bound"] = report.clip_bound
    return row | {f"trust_ratio/{layer}": value for layer, value in report.trust_ratios.items()}


def warn_of_nan(row: Row, earlier: Sequence[Row], metrics: Sequence[Metric]) -> None:
    """Warn of metrics that are NaN in a round and were not before; a loss that is not finite is `Diverged` instead.

    These are the metrics on all test data, and the column that the run is judged by.
    """
    columns = {History([row], metric.name).metric for metric in metrics}
    columns |= {column for column in row if column.partition("@")[0] in {metric.name for metric in metrics}}
    for name in () if _lost_loss(row) else sorted(columns):
        if math.isnan(row.get(name, 0.0)) and not any(math.isnan(one.get(name, 0.0)) for one in earlier):
            log.warning(
                "round %d: the metric '%s' is NaN; rounds without a number count for nothing: not for the best value, "
                "a target or the choice of settings",
                row["round"],
                name,
            )


def _lost_loss(row: Row) -> str:
    """Return the column of the first loss that is not finite, on whatever test data; empty if all are."""
    losses = (column for column in row if of_column(column) is LOSS and not column.startswith("node_"))
    return next((column for column in losses if not math.isfinite(row[column])), "")


def refuse_nonfinite(row: Row) -> None:
    """Raise `Diverged` for a round whose weights are finite but whose test loss is not."""
    column = _lost_loss(row)
    if column:
        raise Diverged(
            f"round {row['round']}: the test loss of the new model{f' ({column})' * (column != 'loss')} is "
            f"{row[column]}; "
            f"lower the learning rate (now {row['lr']:g}) or clip the gradients. All rounds are kept",
            round=int(row["round"]),
            client=None,
            layer="loss",
        )
