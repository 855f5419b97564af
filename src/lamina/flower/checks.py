"""What a node sends is not believed but checked: a bad update is refused, with a reason, and never read any further.

Everything here is a pure function of the reply; nothing it contains can make these functions fail otherwise than by
`Refused`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from lamina.errors import BadInput, is_number, is_whole, unknown
from lamina.flower.wire import Unreadable, decode, shorten
from lamina.objective import Buffers

SLACK = 16 * 1024  # bytes of names and numbers a reply may have beside its tensors
FEWEST_FOR_A_MEDIAN = 3


class Refused(Exception):
    """An update that is not used; the text says why."""


@dataclass(frozen=True)
class Limits:
    """What an update may be, beside being well-formed and finite.

    Args:
        max_norm: the largest norm of ``delta``; or a norm for each of several fields, by name.
        on_large: what happens to a larger one: the update is refused, or the field is scaled down to the limit.
        times_median: from three answers on, an update is refused whose ``delta`` has a norm of more than so many times
            the round's median; for other fields, buffers and the number of examples, more than its square. None
            switches it off.
        max_examples: the most examples a client may say it has.
        non_negative: fields of which a negative entry is refused; unless given, the second moments ``v`` and ``v_hat``
            of lamina's own algorithms.
    """

    max_norm: float | Mapping[str, float] | None = None
    on_large: Literal["reject", "clip"] = "reject"
    times_median: float | None = 100.0
    max_examples: int = 10_000_000
    non_negative: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.on_large not in ("reject", "clip"):
            raise unknown("limits.on_large", self.on_large, ("reject", "clip"))
        given: list[tuple[str, Any]] = [*self.norms.items(), ("times_median", self.times_median)]
        for name, value in given:
            if value is not None and not (is_number(value) and value > 0):
                raise BadInput(f"limits: {name} = {value!r} is not a number > 0")
        if not is_whole(self.max_examples) or self.max_examples < 1:
            raise BadInput(f"limits: max_examples = {self.max_examples!r} is not a whole number >= 1")

    @property
    def norms(self) -> Mapping[str, float]:
        """The largest norm by field."""
        if self.max_norm is None:
            return {}
        return self.max_norm if isinstance(self.max_norm, Mapping) else {"delta": self.max_norm}


class Update(NamedTuple):
    """What a client sent, checked."""

    up: Any
    buffers: Buffers
    examples: int
    steps: int
    loss: float
    clipped: tuple[str, ...] = ()  # fields scaled down to their limit


class Expected(NamedTuple):
    """What a sound update looks like in this round."""

    up: Any  # an Up of the right fields, shapes and dtypes
    buffers: Buffers  # the floating buffers
    steps: Callable[[int], int]  # K_i of a client with so many examples
    limits: Limits
    non_negative: Sequence[str] = ()


def read_update(content: RecordDict, expected: Expected) -> Update:
    """A checked update from a reply's content; raises `Refused`."""
    wanted = {n: v for n, v in zip(expected.up._fields, expected.up, strict=True) if v is not None}
    refuse_size(content, [*wanted.values(), *expected.buffers.values()])
    refuse_records(content, {"up": ArrayRecord, "figures": MetricRecord}, {"buffers": ArrayRecord})
    tensors = read_tensors(content, "up", wanted)
    buffers = read_tensors(content, "buffers", expected.buffers)
    for name in expected.non_negative:
        if name in tensors and bool((tensors[name] < 0).any()):
            raise Refused(f"'{name}' has negative entries, and it is a second moment")
    for name, value in buffers.items():
        if name.endswith("running_var") and bool((value < 0).any()):
            raise Refused(f"the buffer '{name}' has negative entries, and it is a variance")
    examples = read_examples(content, expected.limits)
    figures: dict[str, Any] = dict(content["figures"])
    steps, loss = figures.get("steps"), figures.get("loss")
    if set(figures) != {"examples", "steps", "loss"}:
        raise Refused("its figures are not examples, steps and loss")
    if not is_whole(steps) or steps != expected.steps(examples):
        raise Refused(f"says {shorten(repr(steps), 40)} local steps, but {examples} examples make "
                      f"{expected.steps(examples)}")  # fmt: skip
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise Refused(f"its training loss is {shorten(repr(loss), 40)}")
    clipped = []
    for name, most in expected.limits.norms.items():
        if name not in tensors:
            continue
        norm = _norm([tensors[name]])
        if norm <= most:
            continue
        if expected.limits.on_large == "reject":
            raise Refused(f"'{name}' has norm {norm:.4g}, over the limit of {most:g}")
        tensors[name] = (tensors[name].double() * (most / norm)).to(tensors[name].dtype)
        clipped.append(name)
    up = type(expected.up)(*(tensors.get(name) for name in expected.up._fields))
    return Update(up, buffers, examples, int(steps), loss, tuple(clipped))


def read_gradient(content: RecordDict, like: Tensor, limits: Limits) -> tuple[Tensor, int]:
    """The full gradient of Mime's first exchange, and the number of examples; raises `Refused`."""
    refuse_size(content, [like])
    refuse_records(content, {"up": ArrayRecord, "figures": MetricRecord}, {})
    return read_tensors(content, "up", {"gradient": like})["gradient"], read_examples(content, limits)


def read_evaluation(content: RecordDict, limits: Limits) -> tuple[float, float | None, int]:
    """The loss, accuracy (if there are classes) and number of examples of an evaluation; raises `Refused`."""
    refuse_size(content, [])
    refuse_records(content, {"figures": MetricRecord}, {})
    examples = read_examples(content, limits)
    figures: dict[str, Any] = dict(content["figures"])
    loss, accuracy = figures.get("loss"), figures.get("accuracy")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise Refused(f"its evaluation loss is {shorten(repr(loss), 40)}")
    if accuracy is not None and not (isinstance(accuracy, float) and 0 <= accuracy <= 1):
        raise Refused(f"its accuracy is {shorten(repr(accuracy), 40)}")
    return loss, accuracy, examples


def read_problem(content: RecordDict) -> tuple[str, list[str]] | None:
    """What a node says it cannot do: its words, and what it lacks; None if it says nothing of the kind."""
    record = content.get("problem")
    if not isinstance(record, ConfigRecord):
        return None
    problem: dict[str, Any] = dict(record)
    text, missing = problem.get("text", ""), problem.get("missing", [])
    names = [m for m in missing if isinstance(m, str)] if isinstance(missing, list) else []
    return shorten(str(text)), names[:100]


def too_far_from_the_others(updates: Mapping[int, Update], limits: Limits) -> dict[int, str]:
    """The clients that sent something absurdly larger than the others did, each with the reason."""
    if limits.times_median is None:
        return {}
    wider = limits.times_median**2  # second moments are squares, and control variates of newcomers are large
    sizes = {
        f"'{name}' has norm": ({c: _norm([u.up[at]]) for c, u in updates.items()}, wider)
        for at, name in enumerate(next(iter(updates.values())).up._fields if updates else ())
        if all(u.up[at] is not None for u in updates.values())
    }
    sizes["'delta' has norm"] = ({c: _norm([u.up.delta]) for c, u in updates.items()}, limits.times_median)
    sizes["its buffers have norm"] = ({c: _norm(u.buffers.values()) for c, u in updates.items()}, wider)
    sizes["its number of examples is"] = ({c: float(u.examples) for c, u in updates.items()}, wider)
    found: dict[int, str] = {}
    for what, (values, times) in sizes.items():
        found = outliers(values, times, what) | found
    return found


def odd_gradients(gradients: Mapping[int, Tensor], limits: Limits) -> dict[int, str]:
    """The clients whose full gradient is absurdly larger than the others', each with the reason."""
    times = None if limits.times_median is None else limits.times_median**2
    return outliers({c: _norm([g]) for c, g in gradients.items()}, times, "'gradient' has norm")


def outliers(values: Mapping[int, float], times: float | None, what: str) -> dict[int, str]:
    """Whose value is more than so many times the median, if there are enough to speak of one."""
    if times is None or len(values) < FEWEST_FOR_A_MEDIAN:
        return {}
    median = statistics.median(values.values())
    return {
        client: f"{what} {value:.4g}, more than {times:g} times the round's median {median:.4g}"
        for client, value in values.items()
        if value > times * median > 0
    }


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(torch.sum(tensor.double() ** 2)) for tensor in tensors))


# --- parts -----------------------------------------------------------------------------------------------------------


def refuse_size(content: RecordDict, tensors: Sequence[Tensor]) -> None:
    """Refuse a reply that is larger than what it should hold."""
    explained = sum(t.numel() * t.element_size() for t in tensors) + SLACK
    size = content_bytes(content)
    if size > explained:
        raise Refused(f"it holds {size} bytes, and the model explains {explained}")


def content_bytes(content: RecordDict) -> int:
    """About how many bytes a content takes, whatever it holds."""
    total = 0
    for name, record in content.items():
        total += len(name)
        entries: dict[str, Any] = dict(record)
        for key, value in entries.items():
            total += len(key)
            if isinstance(value, Array):
                total += len(value.data) + len(value.dtype) + len(value.stype) + 8 * len(value.shape)
            else:
                for entry in value if isinstance(value, list) else [value]:
                    total += len(entry) if isinstance(entry, str | bytes) else 8
    return total


def refuse_records(content: RecordDict, needed: Mapping[str, type], allowed: Mapping[str, type]) -> None:
    """Refuse a reply without a record that is needed, or with one that is not known."""
    for name, kind in needed.items():
        if not isinstance(content.get(name), kind):
            raise Refused(f"the record '{name}' is missing")
    for name, record in content.items():
        if not isinstance(record, {**needed, **allowed}.get(name, type(None))):
            raise Refused(f"it has an unknown record '{shorten(name, 40)}'")


def read_tensors(content: RecordDict, name: str, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a record: exactly those wanted, and finite."""
    record = content.get(name)
    arrays = dict(record.items()) if isinstance(record, ArrayRecord) else {}
    for key in wanted:
        if key not in arrays:
            raise Refused(f"the field '{key}' is missing in '{name}'")
    for key in arrays:
        if key not in wanted:
            raise Refused(f"it has an unknown field '{shorten(key, 40)}' in '{name}'")
    tensors = {}
    for key, like in wanted.items():
        try:
            tensors[key] = decode(arrays[key], like)
        except Unreadable as error:
            raise Refused(f"'{key}' {error}") from error
        if not bool(torch.isfinite(tensors[key]).all()):
            raise Refused(f"'{key}' holds a NaN or an infinity")
    return tensors


def read_examples(content: RecordDict, limits: Limits) -> int:
    """The number of examples a client says it has."""
    figures: dict[str, Any] = dict(content["figures"])
    examples: Any = figures.get("examples")
    if not is_whole(examples) or not 1 <= examples <= limits.max_examples:
        raise Refused(f"says {shorten(repr(examples), 40)} examples; at least 1 and at most {limits.max_examples} "
                      "are allowed")  # fmt: skip
    return int(examples)
