"""Fetch Hugging Face data sets by name, and read them into arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamina.data.images import stack_pictures
from lamina.errors import BadInput, missing_extra, nearest

_INPUT_COLUMNS = ("image", "img", "images", "pixel_values", "x", "input_ids", "features", "inputs")
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "targets", "y", "class")


def is_hub_dataset(data: Any) -> bool:
    """Return whether `data` is a `datasets.Dataset` or a dictionary of them, without importing the package."""
    return hasattr(data, "column_names") and hasattr(data, "with_format")


def fetch(repository: str, *subset: str) -> Mapping[str, Any] | None:
    """Return all splits of a data set on the hub (or in its local cache); None if `datasets` is not installed.

    `subset` is the name of the configuration, for a data set that has several.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        return None
    try:
        splits: Mapping[str, Any] = load_dataset(repository, *subset)
    except Exception as error:  # offline, refused, moved: each layer below has its own exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the Hugging Face hub did not deliver {repository} ({reason})") from error
    return splits


def arrays(
    data: Any, x: str | None, y: str | None, *, text_labels: bool = False, options: tuple[str, str] = ("x", "y")
) -> tuple[Any, Any, dict[str, NDArray[Any]], int | None]:
    """Return inputs, labels, other columns and the declared number of classes of one split.

    `text_labels` accepts labels that are text, for a caller that numbers them. Messages call the arguments x and y by
    the names in `options`.
    """
    if isinstance(data, Mapping):
        raise BadInput(f"this is a dictionary of splits; give one of them, for example data['{next(iter(data))}']")
    names = list(data.column_names)
    x = _column("input", options[0], x, _INPUT_COLUMNS, names)
    y = _column("label", options[1], y, LABEL_COLUMNS, names if y else [name for name in names if name != x])
    plain = data.with_format(None)  # ignore the user's format: read Python objects and pictures
    if len(plain) == 0:
        raise BadInput("the Hugging Face data set is empty; give at least one sample")
    try:
        first = plain[0]
    except ImportError as error:  # `datasets` itself works without Pillow, until it meets a picture
        raise missing_extra("pillow", "images", f"decoding column '{x}'") from error
    if isinstance(first[x], str):
        raise BadInput(
            f"column '{x}' holds text; tokenise it to equal lengths and name that column with {options[0]}=..."
        )
    if isinstance(first[y], str) and not text_labels:
        raise BadInput(f"column '{y}' holds text labels; number them with data.class_encode_column('{y}')")
    inputs = stack_pictures(plain[x], len(plain), f"column '{x}'") if hasattr(first[x], "convert") else list(plain[x])
    labels = list(plain[y])
    for name, values in ((x, inputs), (y, labels)):
        missing = next((row for row, value in enumerate(values) if value is None), None)
        if missing is not None:
            raise BadInput(f"column '{name}' has no value in sample {missing}; fill or drop it, as with data.filter(…)")
    others = {
        name: np.asarray(list(plain[name]))
        for name in names
        if name not in (x, y) and isinstance(first[name], int | float | str)
    }
    classes = getattr(getattr(data, "features", {}).get(y), "num_classes", None)
    return inputs, labels, others, classes


def _column(what: str, option: str, given: str | None, usual: Sequence[str], names: Sequence[str]) -> str:
    if given is not None:
        if given not in names:
            raise BadInput(f"no column '{given}'{nearest(given, names)} (columns: {', '.join(names)})")
        return given
    for name in usual:
        if name in names:
            return name
    raise BadInput(f"cannot tell the {what} column among {', '.join(names)}; name it with {option}=...")
