"""Convert arrays, lists, tables and torch data sets to tensors: the inputs and targets of a `Dataset`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.base.errors import BadInput, nearest
from lamina.base.text import listed
from lamina.data.hub import LABEL_COLUMNS
from lamina.data.images import stack_pictures
from lamina.data.mapped import Mapped, is_mapped
from lamina.objective.batch import Targets
from lamina.objective.fingerprint import alike
from lamina.objective.losses import IGNORED

log = logging.getLogger(__name__)

READ_TWICE = 64  # samples of a torch data set: 19 of 20 times enough to find one change in 20 samples


class Padded(NamedTuple):
    """Tensors of one length per sample, and where they hold values of the sample [n, length]; None: everywhere.

    Of several inputs, the mask is a dict of the padded ones' masks, by the input's name or its place in a tuple.
    """

    values: Any
    mask: Any


def convert_inputs(name: str, x: Any, count: int) -> Padded:
    """Return a sample's inputs as one tensor, a tuple or a dict of tensors; sequences are padded at the end with 0.

    `count` is the number of samples: it tells a tuple of inputs from a tuple of samples.
    """
    x = _by_key(name, "x", x)
    if isinstance(x, Mapping):
        if not x or not all(isinstance(key, str) for key in x):
            raise BadInput(f"{name}: x is a dict: give every input under the name that the model's forward has for it")
        parts = {key: convert(name, f"x[{key!r}]", values) for key, values in x.items()}
        return Padded({key: part.values for key, part in parts.items()}, _masks(parts))
    if isinstance(x, tuple) and _are_inputs(x, count):
        several = [convert(name, f"x[{i}]", values) for i, values in enumerate(x)]
        return Padded(tuple(part.values for part in several), _masks(dict(enumerate(several))))
    return convert(name, "x", x)


def count_samples(x: Any, y: Any) -> int:
    """Return the number of samples, which tells a tuple of inputs or targets from a tuple of samples."""
    for values in (y, x):
        if isinstance(values, Mapping) and values:
            values = next(iter(values.values()))
        elif isinstance(values, tuple):
            continue
        has_samples = hasattr(values, "__len__") and getattr(values, "ndim", None) != 0
        return len(values) if has_samples else 0
    return len(y[0] if y and hasattr(y[0], "__len__") and not isinstance(y[0], str | bytes) else y)


def convert_targets(
    name: str, y: Any, class_names: Sequence[str] | None, count: int
) -> tuple[Targets, tuple[str, ...] | None, bool]:
    """Return targets as a tensor, the classes' names, and whether y holds names: text labels.

    Text labels become their positions among the names.

    Token labels of different length are padded with -100, which the losses ignore. Several targets become a tuple or a
    dict of tensors; `count` is the number of samples.
    """
    names = None if class_names is None else tuple(map(str, class_names))
    y = _by_key(name, "y", y)
    if isinstance(y, Mapping):
        if not y or not all(isinstance(key, str) for key in y):
            raise BadInput(f"{name}: y is a dict: give every target under a name")
        return {key: _one_of_several(name, f"y[{key!r}]", values) for key, values in y.items()}, names, False
    if isinstance(y, tuple) and _are_inputs(y, count):
        return tuple(_one_of_several(name, f"y[{i}]", values) for i, values in enumerate(y)), names, False
    if isinstance(y, Tensor):
        return signed(name, "y", y.detach()), names, False
    array = _text_labels(name, y)
    if array is None:
        return convert(name, "y", y, IGNORED).values, names, False
    if names is None:
        names = tuple(sorted(set(array.tolist())))
    places = {label: place for place, label in enumerate(names)}
    for i, label in enumerate(array.tolist()):
        if label not in places:
            raise BadInput(
                f"{name}: the label {label!r} of sample {i} is not among the class names{nearest(label, names)}",
                without_data=f"{name}: the label of sample {i} is not among the class names",
            )
    return torch.tensor([places[label] for label in array.tolist()]), names, True


def _by_key(name: str, what: str, samples: Any) -> Any:
    """Return a list of dicts, one per sample, as a dict of lists; anything else as it is."""
    if not (isinstance(samples, list | tuple) and samples and isinstance(samples[0], Mapping)):
        return samples
    if any(not isinstance(sample, Mapping) or sample.keys() != samples[0].keys() for sample in samples):
        raise BadInput(f"{name}: the samples of {what} are dicts with different keys; give every sample the same")
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _one_of_several(name: str, what: str, values: Any) -> Tensor:
    """Return one of several targets as a tensor; integers as int64. What they mean is up to the user's loss."""
    target: Tensor = convert(name, what, values, IGNORED).values
    return target if target.is_floating_point() or target.is_complex() else target.to(torch.int64)


def convert(name: str, what: str, values: Any, fill: int = 0) -> Padded:
    """Return a tensor, in writable memory, of anything numpy or torch can read; sequences are padded with `fill`."""
    if isinstance(values, Tensor):
        return Padded(signed(name, what, values.detach()), None)
    if isinstance(values, Mapped):
        return Padded(values, None)
    if is_mapped(values) and what != "y":  # targets are few: they are read into memory
        return Padded(Mapped.of(name, what, values), None)
    if isinstance(values, Mapping):
        raise BadInput(f"{name}: {what} is a dict; x and y may be one, with a tensor under every name")
    if is_frame(values):
        values = _numbers_of(name, what, values)
    if isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.dtype.kind == "O"):
        values = list(values)
        if values and all(isinstance(item, Tensor) for item in values) and len({item.shape for item in values}) == 1:
            return Padded(signed(name, what, torch.stack([item.detach() for item in values])), None)
        if values and _is_sequence(values[0]) and len({len(item) if _is_sequence(item) else -1 for item in values}) > 1:
            return _pad(name, what, values, fill)
        if values and hasattr(values[0], "convert"):
            values = stack_pictures(values, len(values), lambda i: f"{name}: {what}: image {i}")
    try:
        array = np.asarray(values)
        if array.size and array.dtype.kind in "OUS" and isinstance(array.flat[0], str | bytes):
            advice = "give one text label per sample, or numbers" if what == "y" else "tokenise it into whole numbers"
            advice = "number the classes" if what.startswith("y[") else advice
            raise BadInput(f"{name}: {what} holds text; {advice}")  # not the text: a node's messages reach the server
        if array.dtype.kind == "O":
            array = np.asarray(array.tolist())  # perhaps a column of Python's numbers
        if array.dtype.kind == "O":
            odd = "something else than numbers, such as None, or numbers beyond 64 bits"
            raise BadInput(f"{name}: {what} holds {odd}; fill or drop those samples")
        array = signed(name, what, array)
        return Padded(torch.from_numpy(array if array.flags.writeable else array.copy()), None)
    except BadInput:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{name}: {what} is not an array of numbers of one shape ({reason})") from error


def signed(name: str, what: str, values: Any) -> Any:
    """Return an array or a tensor with its unsigned integers as int64, except uint8; refuse those that do not fit.

    torch computes little with the larger unsigned types.
    """
    if str(values.dtype).removeprefix("torch.") not in ("uint16", "uint32", "uint64"):
        return values
    wide = values.astype(np.int64) if isinstance(values, np.ndarray) else values.to(torch.int64)
    if bool((wide < 0).any()):  # it has wrapped around
        raise BadInput(f"{name}: {what} holds a whole number too large for int64: renumber it, or give floats")
    return wide


def read_samples(name: str, data: Any, y: str | None) -> tuple[Any, Any]:
    """Return the inputs and targets of a map-style torch data set, sample by sample.

    A sample is a tuple whose last element is the target, or a dict with the target under `y` or a usual name.
    """
    try:
        samples = [data[i] for i in range(len(data))]
    except (TypeError, NotImplementedError) as error:
        raise BadInput(f"{name}: a torch data set needs __len__ and __getitem__, which iterable ones lack") from error
    spread = np.linspace(0, len(samples), min(READ_TWICE, len(samples)), endpoint=False).astype(int).tolist()
    if any(not alike(samples[i], data[i]) for i in spread):
        raise BadInput(
            f"{name}: the samples of the torch data set change from read to read (a random transform?), but each is "
            "read once: take the transform out, and give augmentation=lamina.data.Augment() or a function of (batch, "
            "generator)"
        )
    first = samples[0] if samples else None
    if isinstance(first, Mapping):
        target = y if y is not None else next((key for key in LABEL_COLUMNS if key in first), None)
        if target is None or target not in first:
            raise BadInput(
                f"{name}: a sample has no target '{y or 'label'}' (keys: {listed(list(first))}); name it with y=…"
            )
        named_inputs = [{key: value for key, value in sample.items() if key != target} for sample in samples]
        return named_inputs, [sample[target] for sample in samples]
    if not isinstance(first, tuple | list) or len(first) < 2:
        raise BadInput(f"{name}: every sample of a torch data set must be a pair (inputs, target), or a dict")
    targets: Any = [sample[-1] for sample in samples]
    if isinstance(targets[0], tuple) and any(map(_is_sequence, targets[0])):
        targets = tuple(list(part) for part in zip(*targets, strict=True))
    inputs = [tuple(sample[:-1]) if len(first) > 2 else sample[0] for sample in samples]
    if isinstance(inputs[0], tuple):
        return tuple(list(part) for part in zip(*inputs, strict=True)), targets
    return inputs, targets


def is_frame(values: Any) -> bool:
    """Return whether a value is a pandas table, without importing pandas."""
    return hasattr(values, "columns") and hasattr(values, "to_numpy") and hasattr(values, "dtypes")


def column_names(x: Any, y: Any) -> dict[str, tuple[str, ...]]:
    """Return the columns' names of inputs and targets that are pandas tables, by what messages call each."""
    parts: dict[str, Any] = {"x": x, "y": y}
    for what, several in (("x", x), ("y", y)):
        if isinstance(several, Mapping | tuple):
            pairs = several.items() if isinstance(several, Mapping) else enumerate(several)
            parts |= {f"{what}[{key!r}]": values for key, values in pairs}
    return {what: tuple(map(str, values.columns)) for what, values in parts.items() if is_frame(values)}


NO_TARGETS = (
    "if your loss takes none, give zeros, (x, torch.zeros(len(x))), which it ignores; to reconstruct the inputs, (x, x)"
)


def refuse_other_order(name: str, x: Any, y: Any) -> None:
    """Refuse pandas inputs and targets whose rows have the same labels in another order: rows are paired by place."""
    if y is None:
        raise BadInput(f"{name}: y is None, and every sample needs a target: {NO_TARGETS}")
    one, other = getattr(x, "index", None), getattr(y, "index", None)  # a list has a method of this name
    if one is None or other is None or not hasattr(one, "equals") or not hasattr(other, "equals"):
        return
    if not one.equals(other) and one.is_unique and other.is_unique and set(one) == set(other):
        raise BadInput(
            f"{name}: the rows of x and y have the same index in another order; give y.loc[x.index], or y.to_numpy() "
            "if they are paired by their place"
        )


def _numbers_of(name: str, what: str, frame: Any) -> NDArray[Any]:
    """Return the columns of a table as one array; refuse those that hold no numbers."""
    for column, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if getattr(dtype, "kind", "O") not in "biuf":
            raise BadInput(
                f"{name}: column '{column}' of {what} holds no numbers; encode it, for example with "
                f"pandas.get_dummies(table, columns=['{column}']), or leave it out of x"
            )
    array = frame.to_numpy()
    return array if array.dtype.kind != "O" else np.asarray(array, np.float64)


def _are_inputs(x: tuple[Any, ...], count: int) -> bool:
    """Return whether a tuple holds one array per input or target, and not one sample per element."""
    if not all(isinstance(part, Tensor | Mapped | np.ndarray | list) or is_frame(part) for part in x):
        return False
    return len(x) != count or all(getattr(part, "ndim", 1) > 0 and len(part) == count for part in x)


def _masks(parts: Mapping[Any, Padded]) -> dict[Any, Tensor] | None:
    return {key: part.mask for key, part in parts.items() if part.mask is not None} or None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def _pad(name: str, what: str, items: list[Any], fill: int) -> Padded:
    """Return sequences of different length as one tensor, padded at the end."""
    if not all(map(_is_sequence, items)):
        raise BadInput(f"{name}: {what} is not an array of numbers of one shape (some samples are single numbers)")
    rows = [convert(name, what, item).values if len(item) else None for item in items]
    shapes = {row.shape[1:] for row in rows if row is not None}
    dtypes = {row.dtype for row in rows if row is not None}
    if len(shapes) > 1:
        raise BadInput(f"{name}: {what} is not an array of numbers of one shape (samples differ in more than length)")
    if torch.uint8 in dtypes and len(next(iter(shapes))) > 0:
        raise BadInput(f"{name}: {what} holds images of different sizes or channels; resize or convert them")
    if fill and any(dtype.is_floating_point for dtype in dtypes):
        raise BadInput(f"{name}: {what} holds floating-point targets of different length; pad them to one length")
    dtype = functools.reduce(torch.promote_types, dtypes, torch.int64)
    lengths = torch.tensor(list(map(len, items)))
    padded = torch.full((len(rows), int(lengths.max()), *next(iter(shapes))), fill, dtype=dtype)
    for i, row in enumerate(rows):
        if row is not None:
            padded[i, : len(row)] = row
    return Padded(padded, torch.arange(padded.shape[1]) < lengths.unsqueeze(1))


def _text_labels(name: str, y: Any) -> NDArray[Any] | None:
    """Return text labels as an array of strings [n]; None for other targets."""
    if isinstance(y, list | tuple) and not any(isinstance(label, str | bytes) for label in y):
        return None
    array = np.asarray(y, dtype=object if isinstance(y, list | tuple) else None)  # a NaN must not become the text "nan"
    if array.ndim != 1 or array.dtype.kind not in "OUS" or not any(isinstance(label, str | bytes) for label in array):
        return None
    missing = next((i for i, label in enumerate(array) if label is None or label != label), None)  # NaN is not itself
    if missing is not None:
        raise BadInput(f"{name}: sample {missing} has no label; give one, or drop the sample")
    if not all(isinstance(label, str | bytes) for label in array):
        raise BadInput(f"{name}: y mixes text and numbers; give one text label per sample, or numbers only")
    texts = [label.decode(errors="backslashreplace") if isinstance(label, bytes) else label for label in array]
    return np.array(texts, dtype=object)
