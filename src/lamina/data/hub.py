"""Fetch Hugging Face data sets by name, and read them into arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.base.errors import BadInput, missing_extra, nearest
from lamina.data.images import stack_pictures
from lamina.data.mapped import Mapped
from lamina.objective.losses import IGNORED

LARGE_BYTES = 1 << 30  # a column with more is read from disk when a batch needs it
_INPUT_COLUMNS = ("image", "img", "images", "pixel_values", "x", "input_ids", "features", "inputs")
_OF_TOKENS = ("token_type_ids", "attention_mask")  # what tokenizers give beside the ids
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "targets", "y", "class")


def is_hub_dataset(data: Any) -> bool:
    """Return whether `data` is a `datasets.Dataset` or a dictionary of them, without importing the package."""
    return hasattr(data, "column_names") and hasattr(data, "with_format")


def fetch(repository: str) -> Mapping[str, Any]:
    """Return all splits of a data set on the hub (or in its local cache)."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise missing_extra("datasets", "hub", f"downloading {repository}") from error
    try:
        splits: Mapping[str, Any] = load_dataset(repository)
    except Exception as error:  # offline, refused, moved: each layer below has its own exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the Hugging Face hub did not deliver {repository} ({reason})") from error
    return splits


def arrays(
    data: Any, x: str | Sequence[str] | None, y: str | None
) -> tuple[Any, Any, dict[str, NDArray[Any]], int | None]:
    """Return inputs, labels, other columns and the declared number of classes of one split.

    Inputs of several columns are a dict: those that x names, or a tokenizer's.
    """
    if isinstance(data, Mapping):
        raise BadInput(f"this is a dictionary of splits; give one of them, for example data['{next(iter(data))}']")
    names = list(data.column_names)
    wanted = [x] if x is None or isinstance(x, str) else list(x)
    if not wanted:
        raise BadInput(f"x names no column; name at least one (columns: {', '.join(names)})")
    inputs_of = [_column("input", "x", each, _INPUT_COLUMNS, names) for each in wanted]
    if x is None and inputs_of == ["input_ids"]:
        inputs_of += [name for name in _OF_TOKENS if name in names]
    y = _column("label", "y", y, LABEL_COLUMNS, names if y else [n for n in names if n not in inputs_of])
    plain = data.with_format(None)  # ignore the user's format: read Python objects and pictures
    if len(plain) == 0:
        raise BadInput("the Hugging Face data set is empty; give at least one sample")
    try:
        first = plain[0]
    except ImportError as error:  # `datasets` itself works without Pillow, until it meets a picture
        raise missing_extra("pillow", "images", f"decoding column '{inputs_of[0]}'") from error
    inputs: dict[str, Any] = {}
    for name in inputs_of:
        if isinstance(first[name], str):
            raise BadInput(f"column '{name}' holds text; tokenise it and name that column with x=...")
        if _decoded(first[name]).nbytes * len(plain) > LARGE_BYTES:
            inputs[name] = Mapped.of("data", f"column '{name}'", ColumnOnDisk(data, name, first[name]))
        elif hasattr(first[name], "convert"):
            inputs[name] = _pictures(plain, name)
        else:
            inputs[name] = list(plain[name])
    labels = list(plain[y])
    if y == "input_ids" and "attention_mask" in inputs:  # the tokens of a language model: padding is not a target
        pairs = zip(labels, inputs["attention_mask"], strict=True)
        labels = [[t if m else IGNORED for t, m in zip(tokens, mask, strict=True)] for tokens, mask in pairs]
    in_memory = {name: values for name, values in inputs.items() if not isinstance(values, Mapped)}
    for name, values in (*in_memory.items(), (y, labels)):
        missing = next((row for row, value in enumerate(values) if value is None), None)
        if missing is not None:
            raise BadInput(f"column '{name}' has no value in sample {missing}; fill or drop it, as with data.filter(…)")
    others = {
        name: np.asarray(list(plain[name]))
        for name in names
        if name != y and name not in inputs and isinstance(first[name], int | float | str)
    }
    classes = getattr(getattr(data, "features", {}).get(y), "num_classes", None)
    is_one = len(inputs) == 1 and (x is None or isinstance(x, str))
    return inputs[inputs_of[0]] if is_one else inputs, labels, others, classes


class ColumnOnDisk:
    """A large column of a split, which `Mapped` reads row by row like a memory-mapped array of one shape."""

    def __init__(self, data: Any, name: str, first: Any) -> None:
        self._data, self._name, self._is_picture = data, name, hasattr(first, "convert")
        row = self._read([0], None)
        self.shape, self.dtype, self.ndim = (len(data), *row.shape[1:]), row.dtype, row.ndim

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self._read(rows.tolist(), self.shape[1:])

    def _read(self, rows: list[int], shape: tuple[int, ...] | None) -> NDArray[Any]:
        """Return some rows; refuse those of another shape than the first one."""
        if self._is_picture:
            pictures = self._data.with_format(None)[rows][self._name]
            values: NDArray[Any] = stack_pictures(
                pictures, len(rows), lambda i: f"column '{self._name}': image {rows[i]}"
            )
        else:
            values = np.asarray(self._data.with_format("numpy")[rows][self._name])
        if values.dtype.kind not in "iufb" or (shape is not None and values.shape[1:] != shape):
            raise BadInput(
                f"column '{self._name}' is too large for memory, and its rows differ in shape or are not numbers: "
                "give them one shape with data.map(…), or fewer samples"
            )
        return values


def _decoded(value: Any) -> NDArray[Any]:
    """Return a picture or a list of numbers as an array."""
    try:
        return np.asarray(value)
    except ValueError:  # lists of different length
        return np.empty(0)


def _pictures(data: Any, column: str) -> NDArray[np.uint8]:
    return stack_pictures(data[column], len(data), lambda index: f"column '{column}': image {index}")


def _column(what: str, option: str, given: str | None, usual: Sequence[str], names: Sequence[str]) -> str:
    column = next((name for name in usual if name in names), None) if given is None else given
    if column is None:
        raise BadInput(f"cannot tell the {what} column among {', '.join(names)}; name it with {option}=...")
    if column not in names:
        raise BadInput(f"no column '{column}'{nearest(column, names)} (columns: {', '.join(names)})")
    return column
