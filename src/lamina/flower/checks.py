"""Check what nodes send. A bad reply is refused with a reason, and read no further.

Everything here is a pure function of the reply. Whatever it contains, these functions raise nothing but `Refused`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from lamina.base.errors import BadInput, is_number, is_whole
from lamina.base.finite import all_finite
from lamina.flower.wire import Unreadable, decode, entries_of, shorten, wire_bytes
from lamina.objective.objective import Buffers
from lamina.training.evaluation import weight_name
from lamina.training.metrics import ACCURACY, LOSS, METRICS, PERPLEXITY, Metric

SLACK = 16 * 1024  # bytes of names and numbers a reply may have beside its tensors
LARGEST_LOSS = 1e30  # so that no mean of losses overflows
KINDS = {"up": ArrayRecord, "buffers": ArrayRecord, "figures": MetricRecord}  # the records of a reply


class Refused(Exception):
    """An update that is not used; the text says why."""


@dataclass(frozen=True)
class Limits:
    """Limits for updates, which must be well-formed and finite in any case.

    Args:
        max_norm: the largest norm of ``delta``; not with differential privacy, which clips.
        times_median: an update is refused if the norm of a field or buffer, or the number of examples, is more than
            this many times the round's median. It stops broken nodes and absurd values; against hostile nodes, use a
            robust mean (``aggregation``). With fewer than three answers nothing is compared. None switches it off, as
            differential privacy does.
        max_examples: the most examples a client may say it has.
    """

    max_norm: float | None = None
    times_median: float | None = 100.0
    max_examples: int = 10_000_000

    def __post_init__(self) -> None:
        for name, value in {"max_norm": self.max_norm, "times_median": self.times_median}.items():
            if value is not None and not (is_number(value) and value > 0):
                raise BadInput(f"limits: {name} = {value!r} is not a number > 0")
        if not is_whole(self.max_examples) or self.max_examples < 1:
            raise BadInput(f"limits: max_examples = {self.max_examples!r} is not a whole number >= 1")


class FullGradient(NamedTuple):
    """What a client sends in Mime's first exchange, in place of an Up."""

    gradient: Tensor


class NodeMetrics(NamedTuple):
    """A client's checked evaluation of the model on its data."""

    figures: Mapping[str, float]  # the mean loss, the means that the metrics need, and the weights of a sample in them
    examples: int


class Problem(NamedTuple):
    """Why a node cannot do a task, in its own words."""

    text: str
    missing: list[str]  # what the server believes it holds, and it does not
    diverged: str | None  # the layer in which its training went non-finite; None: it did not


class Update(NamedTuple):
    """A client's checked update; or its full gradient, with one step and no loss."""

    up: Any
    buffers: Buffers
    examples: int
    steps: int
    loss: float


class Expected(NamedTuple):
    """What a sound update looks like in this round."""

    tensors: Mapping[str, Tensor]  # of the upload, by name, with the right shapes and dtypes
    read: Callable[[Mapping[str, Tensor], int], Any]  # returns the upload from the tensors of a client
    buffers: Buffers  # the floating buffers
    steps: Callable[[int], int] | None  # from examples to local steps K_i; None: a full gradient, without training
    limits: Limits
    non_negative: Sequence[str] = ()

    @classmethod
    def plain(cls, record: Any, buffers: Buffers, *others: Any) -> Expected:
        """Return what is expected of an upload, or full gradient, whose fields are sent as they are."""
        tensors = {name: value for name, value in record._asdict().items() if value is not None}
        return cls(tensors, lambda given, client: record._replace(**given), buffers, *others)


def read_update(content: RecordDict, expected: Expected, client: int, examples_before: int | None = None) -> Update:
    """Return the checked update or full gradient in a client's reply; raises `Refused`.

    `examples_before` is the number of examples the client gave earlier in this round (Mime).
    """
    explained = [*expected.tensors.values(), *expected.buffers.values()]
    figures, examples = _read_figures(content, explained, expected.limits, ("up", "figures"), ("buffers",))
    tensors = _read_tensors(content, "up", expected.tensors)
    buffers = _read_tensors(content, "buffers", expected.buffers)
    try:
        up = expected.read(tensors, client)
    except Unreadable as error:
        raise Refused(f"its upload {error}") from error
    if not all_finite(*up):
        raise Refused("its upload is read as a NaN or an infinity")
    for name in expected.non_negative:
        if (value := getattr(up, name, None)) is not None and bool((value < 0).any()):
            raise Refused(f"'{name}' has negative entries, and is never negative")
    for name, value in buffers.items():
        if name.endswith("running_var") and bool((value < 0).any()):
            raise Refused(f"the buffer '{name}' has negative entries, and it is a variance")
    if examples_before is not None and examples != examples_before:
        raise Refused(f"says {examples} examples, and said {examples_before} when it sent its gradient")
    steps, loss = 1, 0.0
    if expected.steps is not None:
        if set(figures) != {"examples", "steps", "loss"}:
            raise Refused("its figures are not examples, steps and loss")
        steps, loss = expected.steps(examples), figures["loss"]
        if not is_whole(figures["steps"]) or figures["steps"] != steps:
            raise Refused(f"says {_quote(figures['steps'])} local steps, but {examples} examples make {steps}")
        _check_loss(loss, "training")
    most = expected.limits.max_norm
    if most is not None and hasattr(up, "delta") and (length := norm(up.delta)) > most:
        raise Refused(f"'delta' has norm {length:.4g}, over the limit of {most:g}")
    return Update(up, buffers, examples, steps, loss)


def read_evaluation(
    content: RecordDict, limits: Limits, most: int | None = None, metrics: Sequence[Metric] | None = None
) -> NodeMetrics:
    """Return a checked evaluation; raises `Refused`.

    `most` is the number of examples the client said it trains on, where it evaluates on the same. Without `metrics`
    that it must report, it reports the accuracy, if its data have classes.
    """
    figures, examples = _read_figures(content, [], limits, ("figures",))
    if metrics is None:
        metrics = (ACCURACY,) if figures.get("accuracy") is not None else ()
    if most is not None and examples > most:
        raise Refused(f"says it evaluates on {examples} examples, and said it trains on {most}")
    _check_loss(figures.get("loss"), "evaluation")
    wanted = {metric.name: metric for metric in metrics if metric is not LOSS}
    for name, metric in wanted.items():
        value = figures.get(name)
        smallest, largest = 0.0 if metric.name in METRICS else -LARGEST_LOSS, 1.0 if metric.percent else LARGEST_LOSS
        if not (isinstance(value, float) and smallest <= value <= largest):
            raise Refused(f"its {name} is {_quote(value)}")
    means = {name: figures[name] for name in ("loss", *wanted)}
    for metric in (LOSS, *wanted.values()):
        key = weight_name(metric)
        weight = means[key] = figures.get(key, 1.0)
        if not (
            isinstance(weight, float)
            and 0 < weight <= (LARGEST_LOSS if metric.percent or metric is PERPLEXITY else 1.0)
        ):
            raise Refused(f"its {key} is {_quote(weight)}")
    return NodeMetrics(means, examples)


def read_problem(content: RecordDict) -> Problem | None:
    """Return why a node cannot do a task; None if the reply reports no problem."""
    if not isinstance(content.get("problem"), ConfigRecord):
        return None
    entries = entries_of(content, "problem")
    missing, layer = entries.get("missing"), entries.get("diverged")
    names = [m for m in missing if isinstance(m, str)][:100] if isinstance(missing, list) else []
    return Problem(shorten(str(entries.get("text", ""))), names, shorten(layer, 80) if isinstance(layer, str) else None)


def _read_figures(
    content: RecordDict, tensors: Sequence[Tensor], limits: Limits, needed: Sequence[str], optional: Sequence[str] = ()
) -> tuple[dict[str, Any], int]:
    """Check a reply's size, its records and its number of examples; return its figures and that number."""
    explained, size = sum(t.numel() * t.element_size() for t in tensors) + SLACK, wire_bytes(content)
    if size > explained:
        raise Refused(f"it holds {size} bytes, and the model explains {explained}")
    for name in needed:
        if not isinstance(content.get(name), KINDS[name]):
            raise Refused(f"the record '{name}' is missing")
    for name, record in content.items():
        if name not in (*needed, *optional) or not isinstance(record, KINDS[name]):
            raise Refused(f"it has an unknown record '{shorten(name, 40)}'")
    figures: dict[str, Any] = dict(content["figures"])
    examples: Any = figures.get("examples")
    if not is_whole(examples) or not 1 <= examples <= limits.max_examples:
        raise Refused(f"says {_quote(examples)} examples; at least 1 and at most {limits.max_examples} are allowed")
    return figures, int(examples)


def _read_tensors(content: RecordDict, name: str, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a record: exactly those wanted, and finite."""
    arrays, tensors = entries_of(content, name, ArrayRecord), {}
    for key in wanted:
        if key not in arrays:
            raise Refused(f"the field '{key}' is missing in '{name}'")
    for key in arrays:
        if key not in wanted:
            raise Refused(f"it has an unknown field '{shorten(key, 40)}' in '{name}'")
    for key, like in wanted.items():
        try:
            tensors[key] = decode(arrays[key], like)
        except Unreadable as error:
            raise Refused(f"'{key}' {error}") from error
        if not all_finite(tensors[key]):
            raise Refused(f"'{key}' holds a NaN or an infinity")
    return tensors


def _check_loss(loss: Any, kind: str) -> None:
    if not isinstance(loss, float) or not abs(loss) <= LARGEST_LOSS:  # which a NaN is not
        raise Refused(f"its {kind} loss is {_quote(loss)}")


def _quote(value: Any) -> str:
    return shorten(repr(value), 40)


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm, computed in double precision."""
    return math.sqrt(float(torch.sum(tensor.double() ** 2)))
