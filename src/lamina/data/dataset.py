"""`Dataset`: tensors indexed by sample, from arrays, lists, tables, torch or Hugging Face data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.base import rng
from lamina.base.errors import BadInput, is_number
from lamina.base.finite import all_finite
from lamina.base.registry import explain_options
from lamina.base.text import plural
from lamina.data import convert, hub
from lamina.data.feed import prepare
from lamina.data.mapped import Mapped
from lamina.data.preprocessing import TablePreprocessing, read_frame
from lamina.objective.batch import Inputs, map_batch, named_tensors, tensors
from lamina.objective.losses import IGNORED


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and their labels, checked when it is created.

    >>> data = Dataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]))
    >>> len(data), data.classes
    (4, 3)
    >>> Dataset({"ids": [[5, 2], [7, 1, 3]]}, ["spam", "ham"]).class_names
    ('ham', 'spam')

    Args:
        x: [n, ...]: uint8 images [n, channels, height, width], other integers for tokens, or floating-point features. A
            tuple or a dict of such tensors if the model takes several, called as ``model(x)``, ``model(*x)``,
            ``model(**x)``. Arrays, lists and tables are converted; sequences of different length are padded at the end
            with 0 (see `mask`). A memory-mapped array of numpy stays on disk: batches are read when they are used. All
            integers reach the model as int64, except uint8 with three or more axes: those are images. uint8 with one
            or two axes is a table or tokens. Booleans stay booleans.
        y: [n] int64 labels, or text labels, which are numbered; integer maps [n, ...] (pixels, tokens), in which -100
            does not count; or floating-point targets [n, ...] (regression, soft labels). A tuple or a dict of such
            tensors for a loss of yours that compares several.
        classes: Number of classes; the largest label + 1 unless given, None for floating-point targets.
        mean: Per channel, subtracted from x / 255 (uint8 images only) when a batch is prepared.
        std: Per channel, divides x / 255 - mean.
        name: The name of the data in messages and tables.
        columns: Further values per sample, such as the writer of a digit, to split by (`ByColumn`).
        class_names: The names of the classes, by number; the sorted text labels unless given.
        ignore_index: The integer target that does not count in maps; stored as -100.
        mask: [n, length] bool, true where a padded sequence holds values; a forward pass with a parameter
            `attention_mask`, `mask` or `lengths` that the inputs do not name receives it. Of several inputs, a dict of
            masks by the input's name or place: `<input>_mask` and so on receive each, `mask` only one that is the same
            for all.
        column_names: The names of the columns of x and y by "x" and "y" (of several inputs, by "x['name']" or "x[0]");
            taken from tables. Test data with the same names in another order are put in order.
        labels_are_names: Whether y named the classes before they were numbered, as text does. Such data do not match
            test data with plain numbers.
        preprocessing: How x was made of a table; a run's folder keeps it, and new tables can be prepared with it.
        client_column: The column that names the client of every sample: each of its values is a client, unless a
            partition is given. A list or a dict of clients' data sets is joined to a data set with the column "client".
        more_tests: Of test data, further test sets by name, whose columns end with it: ``accuracy@noisy``.
    """

    x: Any
    y: Any
    classes: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    name: str = "data"
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    class_names: Sequence[str] | None = None
    ignore_index: int = IGNORED
    mask: Any = None
    column_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels_are_names: bool = False
    preprocessing: TablePreprocessing | None = None
    client_column: str | None = None
    more_tests: Mapping[str, Dataset] = field(default_factory=dict)
    names_from_labels: bool = field(default=False, init=False)  # class_names are those in y: other data may have others

    def __post_init__(self) -> None:
        convert.refuse_other_order(self.name, self.x, self.y)
        count = convert.count_samples(self.x, self.y)
        y, names, are_names = convert.convert_targets(self.name, self.y, self.class_names, count)
        x, mask = convert.convert_inputs(self.name, self.x, count)
        # uint8 with few axes is a table or tokens: `prepare` would read intensities
        x = map_batch(lambda v: v.to(torch.int64) if v.dtype == torch.uint8 and v.dim() <= 2 else v, x)
        widths = {what: part.shape[1:] for what, part in {**named_tensors(x), **named_tensors(y, "y")}.items()}
        column_names = {
            what: given  # unless `dataclasses.replace` gave other features
            for what, given in {**self.column_names, **convert.column_names(self.x, self.y)}.items()
            if widths.get(what) == (len(given),)
        }
        columns = {name: np.asarray(values) for name, values in self.columns.items()}
        mask = self.mask if mask is None else mask
        for field_name, value in (
            ("x", x), ("y", y), ("class_names", names), ("columns", columns), ("mask", mask),
            ("column_names", column_names), ("labels_are_names", self.labels_are_names or are_names),
            ("names_from_labels", are_names and self.class_names is None),
        ):  # fmt: skip
            object.__setattr__(self, field_name, value)
        (first, target), *others = named_tensors(y, "y").items()
        for what, tensor in (*named_tensors(x).items(), *others):
            if tensor.dim() == 0 or target.dim() == 0 or len(tensor) != len(target):
                shapes = f"{list(tensor.shape)} and {list(target.shape)}"
                raise BadInput(f"{self.name}: {what} and {first} must hold one row per sample, found shapes {shapes}")
        if len(self) == 0:
            raise BadInput(f"{self.name}: the data set is empty; give at least one sample")
        for what, tensor in {**named_tensors(x), **named_tensors(y, "y")}.items():
            _check_numbers(self.name, what, tensor)
        for column, values in self.columns.items():
            if len(values) != len(self):
                counts = f"{plural(len(values), 'value')} for {plural(len(self), 'sample')}"
                raise BadInput(f"{self.name}: column '{column}' has {counts}; give one each")
        if self.client_column is not None and self.client_column not in self.columns:
            known = ", ".join(self.columns) or "none"
            raise BadInput(f"{self.name}: client_column '{self.client_column}' is no column (columns: {known})")
        self._check_labels()
        self._check_images()

    def _check_labels(self) -> None:
        if not isinstance(self.y, Tensor):
            if self.classes is not None or self.class_names is not None or self.ignore_index != IGNORED:
                raise BadInput(
                    f"{self.name}: classes, class_names and ignore_index are for one array of labels, and y is a "
                    f"{type(self.y).__name__}: leave them out; integers of several targets reach your loss as they are"
                )
            return
        if self.ignore_index != IGNORED and (self.y.is_floating_point() or self.y.dim() < 2):
            raise BadInput(
                f"{self.name}: ignore_index is for integer maps [n, ...], and y has shape {list(self.y.shape)} and "
                f"dtype {self.y.dtype}; drop samples without a label, or give missing ones as -100 with loss='bce'"
            )
        if self.y.is_floating_point():
            if self.classes is not None:
                raise BadInput(
                    f"{self.name}: labels must be integers, found {self.y.dtype}; convert them, or leave `classes` out "
                    "for regression"
                )
            return
        labels = self.y.to(torch.int64)
        if self.ignore_index != IGNORED:
            labels = torch.where(labels == self.ignore_index, IGNORED, labels)
            object.__setattr__(self, "ignore_index", IGNORED)
        least, largest = (int(bound) for bound in labels.aminmax()) if labels.numel() else (0, 0)
        named = None if self.class_names is None else len(self.class_names)
        classes = int(self.classes) if self.classes is not None else named or max(0, largest) + 1
        if named is not None and named != classes:
            counts = f"{plural(named, 'name')} for {plural(classes, 'class', 'classes')}"
            raise BadInput(f"{self.name}: class_names has {counts}; give one each")
        if least < 0 or largest >= classes:
            self._refuse_labels(labels, classes)
        object.__setattr__(self, "y", labels)
        object.__setattr__(self, "classes", classes)

    def _refuse_labels(self, labels: Tensor, classes: int) -> None:
        """Refuse labels that are neither classes nor, in maps, to be ignored."""
        is_wrong = (labels < 0) | (labels >= classes)
        if labels.dim() > 1:
            is_wrong &= labels != IGNORED
        bad = torch.nonzero(is_wrong)
        if len(bad):
            valid = f"0..{classes - 1}" if self.classes is not None else "0, 1, 2, ..."
            rule = f"{self.name}: the label of sample {int(bad[0, 0])} is not one of {valid}"
            value = int(labels[is_wrong][0])
            missing = f"give it as -100, or ignore_index={value}" if labels.dim() > 1 else "drop the sample"
            advice = f"if it marks a missing label, {missing}; for regression, give floats"
            raise BadInput(f"{rule}, but {value}; {advice}", without_data=rule)

    def _check_images(self) -> None:
        images = [values for values in tensors(self.x) if values.dtype == torch.uint8 and values.dim() == 4]
        for values in images:
            if values.shape[1] > 4 and values.shape[-1] in (1, 3, 4):
                raise BadInput(
                    f"{self.name}: images of shape {list(values.shape[1:])} look channels-last; "
                    "give [n, channels, height, width]: x.permute(0, 3, 1, 2), of a numpy array x.transpose(0, 3, 1, 2)"
                )
        if self.mean is None and self.std is None:
            return
        if not images:
            values = tensors(self.x)[0]
            raise BadInput(
                f"{self.name}: mean and std are for uint8 images [n, channels, height, width]; "
                f"x is {values.dtype} of shape {list(values.shape)}: normalise it before, or leave them out"
            )
        channels, mean, std = images[0].shape[1], self.mean or (), self.std or ()
        if not (len(mean) == len(std) == channels and np.isfinite([*mean, *std]).all() and min(std) > 0):
            raise BadInput(
                f"{self.name}: mean and std need {plural(channels, 'value')} each (one per channel), finite and with "
                f"std > 0, found {self.mean} and {self.std}"
            )

    def __len__(self) -> int:
        return len(tensors(self.y)[0])

    def __repr__(self) -> str:
        target = "regression" if self.classes is None else plural(self.classes, "class", "classes")
        if not isinstance(self.y, Tensor):
            target = f"targets {', '.join(named_tensors(self.y, 'y'))}"
        kinds = [f"{list(values.shape[1:])} {values.dtype}" for values in tensors(self.x)]
        if isinstance(self.x, dict):
            kinds = [f"{name} {kind}" for name, kind in zip(self.x, kinds, strict=True)]
        samples = f"{plural(len(self), 'sample')} of {', '.join(kinds)}"
        return f"Dataset('{self.name}', {samples}, {target})"

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The labels [n] as a numpy array, or None for other targets."""
        return None if self.classes is None or self.y.dim() > 1 else self.y.cpu().numpy()

    def inputs(self, rows: Tensor | slice, dtype: torch.dtype = torch.float32) -> Inputs:
        """Return the model's input for some samples."""
        inputs: Inputs = prepare(map_batch(lambda values: values[rows], self.x), self.mean, self.std, dtype)
        return inputs

    def subset(self, indices: Any) -> Dataset:
        """Return the samples at `indices` (integers, in that order)."""
        chosen = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
        is_list = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
        if not is_list or chosen.min() < 0 or chosen.max() >= len(self):
            raise BadInput(f"{self.name}: a subset needs a list of sample indices from 0 to {len(self) - 1}")
        chosen = chosen.astype(np.int64)
        rows = torch.from_numpy(chosen)
        return dataclasses.replace(
            self,
            x=map_batch(lambda v: v.subset(chosen) if isinstance(v, Mapped) else v[rows.to(v.device)], self.x),
            y=map_batch(lambda values: values[rows.to(values.device)], self.y),
            mask=None if self.mask is None else map_batch(lambda mask: mask[rows.to(mask.device)], self.mask),
            columns={column: values[chosen] for column, values in self.columns.items()},
        )

    def holdout(self, fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Split off a random fraction: return the rest and the held-out samples, both in the original order."""
        held = held_out_count(f"{self.name}: a holdout of", len(self), fraction)
        order = rng.permutation(rng.key(seed, "holdout"), len(self))
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data on another device (the columns stay on the host)."""
        x, y = (map_batch(lambda values: values.to(device), part) for part in (self.x, self.y))
        pairs = zip((*tensors(x), *tensors(y)), (*tensors(self.x), *tensors(self.y)), strict=True)
        is_here = all(a is b for a, b in pairs)
        mask = None if self.mask is None else map_batch(lambda mask: mask.to(device), self.mask)
        return self if is_here else dataclasses.replace(self, x=x, y=y, mask=mask)


explain_options(Dataset)


class Splits(NamedTuple):
    """A training and a test set."""

    train: Dataset
    test: Dataset


def as_dataset(
    data: Any,
    *,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    columns: str | Sequence[str] = (),
    class_names: Sequence[str] | None = None,
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    name: str = "data",
    preprocessing: TablePreprocessing | Mapping[str, Any] | None = None,
) -> Dataset:
    """Convert data to a `Dataset`.

    Args:
        data: A `Dataset` (returned unchanged), an ``(x, y)`` pair as `Dataset` takes it, a map-style torch data set
            whose samples are tuples (inputs, target) or dicts, a pandas table, or one split of a Hugging Face
            `datasets.Dataset`.
        x: The feature columns of a table (all others when None). Of a Hugging Face data set, the column that holds the
            inputs, or a list of them, which become a dict; the usual names, and all columns that a tokenizer gives,
            when None.
        y: The column, or the key of a sample, that holds the targets.
        columns: The columns of a table that are no features, such as the one that names the clients.
        class_names: The names of the classes, by number, when some may be missing from the labels.
        classes: Number of classes, when some may be missing from the labels.
        mean: Per channel, for uint8 images.
        std: Per channel, for uint8 images.
        name: The name of the data in messages and tables.
        preprocessing: How the features of a table are made: options of `TablePreprocessing.fit` in a dict, such as
            ``{"categorical": ["ward"], "missing": "mean"}``, or the fitted `preprocessing` of the training data.

    >>> as_dataset((np.zeros((3, 28, 28), np.uint8), [0, 1, 1]))
    Dataset('data', 3 samples of [1, 28, 28] torch.uint8, 2 classes)
    """
    if isinstance(data, Dataset):
        return data
    others: Mapping[str, NDArray[Any]] = {}
    column_names: Mapping[str, tuple[str, ...]] = {}
    fitted: TablePreprocessing | None = None
    if hub.is_hub_dataset(data):
        inputs, targets, others, known_classes = hub.arrays(data, x, y)
        classes = known_classes if classes is None else classes
    elif convert.is_frame(data):
        columns = [columns] if isinstance(columns, str) else columns
        inputs, targets, others, fitted = read_frame(name, data, x, y, columns, preprocessing)
        column_names = {"x": tuple(fitted.features)}
    elif isinstance(data, torch.utils.data.TensorDataset) and len(data.tensors) > 1:
        *several, targets = data.tensors
        inputs = several[0] if len(several) == 1 else tuple(several)
    elif isinstance(data, torch.utils.data.Dataset):
        inputs, targets = convert.read_samples(name, data, y)
    else:
        if not isinstance(data, tuple | list) or len(data) != 2:
            if isinstance(data, torch.utils.data.DataLoader):
                raise BadInput("cannot read a DataLoader: give its data set, loader.dataset; lamina draws the batches")
            raise BadInput(
                f"cannot read data of type {type(data).__name__}: give a pair (x, y) of arrays, a torch data set, a "
                "pandas table, or one split of a Hugging Face dataset"
                + f"; {convert.NO_TARGETS}"
                * (getattr(data, "ndim", 0) > 1)
            )
        inputs, targets = data
        convert.refuse_other_order(name, inputs, targets)
        column_names = convert.column_names(inputs, targets)
    inputs, mask = convert.convert_inputs(name, inputs, convert.count_samples(inputs, targets))
    if not isinstance(inputs, dict | tuple) and inputs.dtype == torch.uint8 and inputs.dim() == 3:
        inputs = inputs.unsqueeze(1)  # grey images are often stored without their only channel
    return Dataset(
        inputs, targets, classes, mean, std, name, others, class_names,
        mask=mask, column_names=column_names, preprocessing=fitted,
    )  # fmt: skip


def held_out_count(what: str, samples: int, fraction: Any) -> int:
    """Return how many of the samples a fraction holds out; refuse one that leaves a side empty, called `what`."""
    held_out = round(fraction * samples) if is_number(fraction) and 0 < fraction < 1 else 0
    if not 0 < held_out < samples:
        raise BadInput(
            f"{what} {fraction!r} of {plural(samples, 'sample')} leaves the training or the test data empty; choose a "
            "fraction between 0 and 1 that leaves both at least one sample"
        )
    return held_out


def _check_numbers(name: str, what: str, values: Tensor | Mapped) -> None:
    if values.is_complex():
        raise BadInput(f"{name}: complex numbers are not supported; give real and imaginary parts as features")
    if not values.is_floating_point() or (isinstance(values, Mapped) and values.is_checked):
        return
    start = 0
    for chunk in values.chunks() if isinstance(values, Mapped) else [values]:
        if not all_finite(chunk):
            finite = torch.isfinite(chunk).reshape(len(chunk), -1).all(dim=1)
            first = int(torch.nonzero(~finite)[0])
            value = float(chunk[first][~torch.isfinite(chunk[first])].flatten()[0])
            missing = ", or give a missing label as -100 with loss='bce'" if what == "y" and chunk.dim() > 1 else ""
            raise BadInput(f"{name}: sample {start + first} of {what} holds {value}; clean or drop it{missing}")
        start += len(chunk)
    if isinstance(values, Mapped):
        values.is_checked = True
