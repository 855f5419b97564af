"""Data sets of several clients, in a list or a dict, as one `Dataset` with a column that names the client."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lamina.base.errors import BadInput, is_whole
from lamina.data import hub
from lamina.data.convert import is_frame
from lamina.data.dataset import Dataset, as_dataset
from lamina.data.mapped import Mapped
from lamina.objective.batch import Inputs, map_batch, named_tensors, tensors

CLIENT = "client"  # the column that names the client of every sample


def as_data(given: Any, name: str = "data") -> Dataset:
    """Return one data set, or the joined data sets of the clients in a list or a dict.

    A pair of arrays is (x, y). A list of data sets has one per client, numbered from 0; the keys of a dict name them.
    """
    _refuse_unread(given)
    if isinstance(given, Mapping) and not hub.is_hub_dataset(given):
        if {*given} == {"train", "test"}:
            raise BadInput("the data are a dict of 'train' and 'test': pass them apart, train and test=…")
        if not given or any(_is_data_set(item) or _is_pair(item) for item in given.values()):
            are_numbers = all(is_whole(key) for key in given)  # which are in the order of numbers, not of text
            texts = list(map(str, given))
            twice = next((key for key in given if texts.count(str(key)) > 1), None)
            if twice is not None:
                raise BadInput(f"two clients have the name {str(twice)!r}, as text and as another type: rename one")
            return _joined({int(key) if are_numbers else str(key): item for key, item in given.items()}, name)
    if isinstance(given, list | tuple):
        data_sets, pairs = list(map(_is_data_set, given)), list(map(_is_pair, given))
        are_data = [one or other for one, other in zip(data_sets, pairs, strict=True)]
        is_several = isinstance(given, list) or len(given) > 2  # (x, y) may have a pair of inputs
        if given and all(are_data) and is_several:
            return _joined(dict(enumerate(given)), name)
        if (any(data_sets) or (any(pairs) and len(given) > 2)) and not all(are_data):
            odd = are_data.index(False)
            raise BadInput(
                f"item {odd} of the data is a {type(given[odd]).__name__} and item {are_data.index(True)} a data set: "
                "give a list with one data set per client, or one pair (x, y)"
            )
        if any(data_sets):
            raise BadInput(
                "the data are a pair of data sets: give a list for two clients, [first, second], and test data as "
                "test=…"
            )
        if len(given) != 2:
            raise BadInput(
                f"the data are {len(given)} items, of which none is a data set: give a pair (x, y), or a list with one "
                "data set per client"
            )
    return as_dataset(given, name=name)


def _refuse_unread(given: Any) -> None:
    """Refuse clients' data loaders, and tables whose targets are not named."""
    items = list(given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ())
    if any(isinstance(item, torch.utils.data.DataLoader) for item in items):
        raise BadInput("cannot read a DataLoader: give the data sets, loader.dataset; lamina draws the batches")
    if items and all(map(is_frame, items)) and (isinstance(given, Mapping) or len(items) != 2):  # two may be (x, y)
        raise BadInput(
            'the data are tables without named targets: give lamina.data.as_dataset(table, y="price") for every client '
            "(with preprocessing, one that is fitted once), or one table with a column of clients"
        )


def _is_data_set(item: Any) -> bool:
    return isinstance(item, Dataset | torch.utils.data.Dataset) or hub.is_hub_dataset(item)


def _is_pair(item: Any) -> bool:
    """Return whether an item of a list is a pair (x, y), and not the x or the y of one."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    has_axes = [getattr(part, "ndim", 0) > 0 or part is None for part in item]  # y = None is refused with a hint
    return all(has_axes) or (isinstance(item, tuple) and isinstance(item[1], list | dict | tuple | np.ndarray | Tensor))


def _joined(items: Mapping[Any, Any], name: str) -> Dataset:
    """Return the samples of all clients, one client after the other."""
    if not items:
        raise BadInput("the data of the clients are empty: give at least one data set")
    parts: dict[Any, Dataset] = {}
    for client, item in items.items():
        try:
            parts[client] = as_dataset(item, name=name)
        except BadInput as error:
            raise BadInput(f"client {client!r}: {error}", without_data=f"the data of a client: {error}") from error
    parts = _with_common_classes(parts)
    first_client, first = next(iter(parts.items()))
    for client, part in parts.items():
        why = _difference(part, first)
        if why:
            raise BadInput(f"client {client!r} has {why} than client {first_client!r}: give all clients the same")
    x, mask = _joined_inputs(list(parts.values()))
    shared = [column for column in first.columns if all(column in part.columns for part in parts.values())]
    columns = {column: np.concatenate([part.columns[column] for part in parts.values()]) for column in shared}
    columns[CLIENT] = np.repeat(np.array(list(parts)), [len(part) for part in parts.values()])
    classes = None if first.classes is None else max(part.classes or 1 for part in parts.values())
    return dataclasses.replace(
        first,
        x=x,
        y=_joined_targets(list(parts.values())),
        classes=classes,
        mask=mask,
        columns=columns,
        client_column=CLIENT,
    )


def _with_common_classes(parts: dict[Any, Dataset]) -> dict[Any, Dataset]:
    """Return the data sets with the same number for every text label; one client may lack some of the classes."""
    named = {client: part for client, part in parts.items() if part.class_names is not None}
    if not named:
        return parts
    if len(named) < len(parts):
        other = next(client for client in parts if client not in named)
        raise BadInput(
            f"the labels of client {next(iter(named))!r} have names, and those of client {other!r} are numbers: give "
            "names, or numbers, in all"
        )
    if not all(part.names_from_labels for part in named.values()):
        return parts  # `_difference` compares names that were given
    names = tuple(sorted({name for part in named.values() for name in part.class_names or ()}))
    common = {}
    for client, part in named.items():
        numbers = torch.tensor([names.index(name) for name in part.class_names or ()])
        common[client] = dataclasses.replace(part, y=numbers[part.y], classes=len(names), class_names=names)
    return common


def _difference(part: Dataset, first: Dataset) -> str:
    """Return what the data of two clients differ in, or an empty string."""
    if part.preprocessing != first.preprocessing:
        return "another preprocessing of its table (fit it once, and give preprocessing=…)"
    one, other = named_tensors(part.x), named_tensors(first.x)
    if type(part.x) is not type(first.x) and (isinstance(part.x, dict | tuple) or isinstance(first.x, dict | tuple)):
        return "other inputs"
    if one.keys() != other.keys():
        return "other inputs"
    for what in one:
        kinds, shapes = (one[what].dtype, other[what].dtype), (one[what].shape[1:], other[what].shape[1:])
        if kinds[0] != kinds[1] and {torch.uint8, torch.bool} & {*kinds}:
            return f"{what} of another type ({kinds[0]}, not {kinds[1]})"
        is_padded = what == "x" and (part.mask is not None or first.mask is not None)
        if shapes[0][is_padded:] != shapes[1][is_padded:]:
            return f"{what} of another shape ({list(shapes[0])}, not {list(shapes[1])})"
    targets, others = named_tensors(part.y, "y"), named_tensors(first.y, "y")
    if type(part.y) is not type(first.y) or targets.keys() != others.keys():
        return f"other targets ({', '.join(targets)})"
    for what, y in targets.items():
        if y.is_floating_point() != others[what].is_floating_point() or y.dim() != others[what].dim():
            kind = "targets" if what == "y" else what
            return f"{kind} of another kind ({y.dtype} {list(y.shape[1:])})"
    for field in ("mean", "std", "class_names", "column_names"):
        if getattr(part, field) != getattr(first, field):
            return f"another {field}"
    return ""


def _joined_inputs(parts: Sequence[Dataset]) -> tuple[Inputs, Any]:
    """Return the inputs of all clients, and their mask if some client's sequences were padded."""
    if all(part.mask is None for part in parts):
        places = range(len(tensors(parts[0].x)))
        joined = iter([_cat([tensors(part.x)[place] for part in parts]) for place in places])
        x: Inputs = map_batch(lambda _: next(joined), parts[0].x)
        return x, None
    if any(isinstance(part.x, dict | tuple) for part in parts):
        raise BadInput(
            "several inputs of different length cannot be joined: pad those of all clients to one length, and give "
            "their mask as an input"
        )
    masks = [part.x.new_ones(part.x.shape[:2], dtype=torch.bool) if part.mask is None else part.mask for part in parts]
    return _cat(_of_one_length([part.x for part in parts], fill=0)), _cat(_of_one_length(masks, fill=0))


def _joined_targets(parts: Sequence[Dataset]) -> Any:
    """Return the targets of all clients; maps [n, length] are padded with -100, which does not count."""
    lists = zip(*(tensors(part.y) for part in parts), strict=True)
    joined = iter([_cat(_of_one_length(list(ys), fill=-100 if ys[0].dim() == 2 else None)) for ys in lists])
    return map_batch(lambda _: next(joined), parts[0].y)


def _of_one_length(values: list[Tensor], fill: int | None) -> list[Tensor]:
    """Return tensors [n, length, ...] padded at the end to the longest; with no `fill`, the same ones."""
    if fill is None or len({part.shape[1] for part in values}) == 1:
        return values
    longest = max(part.shape[1] for part in values)
    return [F.pad(part, (0, 0) * (part.dim() - 2) + (0, longest - part.shape[1]), value=fill) for part in values]


def _cat(values: Sequence[Tensor | Mapped]) -> Any:
    return Mapped.joined(values) if any(isinstance(part, Mapped) for part in values) else torch.cat(values)  # type: ignore[arg-type]
