"""`Dataset`: tensors indexed by sample, from arrays, tensors or a Hugging Face data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina import rng
from lamina.data import hub
from lamina.errors import BadInput
from lamina.text import plural

ONE_ARRAY = "put the features into one array, for example np.column_stack([table[name] for name in names])"
NUMBER_CLASSES = "names, y = np.unique(labels, return_inverse=True)"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and their labels, checked when it is created.

    >>> data = Dataset(torch.zeros(4, 2), torch.tensor([0, 1, 2, 1]))
    >>> len(data), data.classes
    (4, 3)
    """

    x: Tensor
    """[n, ...]: uint8 images [n, channels, height, width], other integers for tokens, or floating-point features.

    Arrays and lists are converted. uint8 with one or two axes is a table or tokens: it is stored as int64 and reaches
    the model unchanged."""
    y: Tensor
    """[n] int64 labels; or floating-point targets [n, ...] for regression."""
    classes: int | None = None
    """Number of classes; the largest label + 1 unless given, None for regression."""
    mean: tuple[float, ...] | None = None
    """Per channel, subtracted from x / 255 (uint8 images only) when a batch is prepared."""
    std: tuple[float, ...] | None = None
    """Per channel, divides x / 255 - mean."""
    name: str = "data"
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further values per sample, such as the writer of a digit, to split by (`ByColumn`)."""
    class_names: tuple[str, ...] | None = None
    """The name of every class, if the labels had names."""

    def __post_init__(self) -> None:
        for what in ("x", "y"):
            object.__setattr__(self, what, _tensor(self.name, what, getattr(self, what)))
        if self.x.dtype == torch.uint8 and self.x.dim() <= 2:  # a table or tokens: `prepare` would read intensities
            object.__setattr__(self, "x", self.x.to(torch.int64))
        object.__setattr__(self, "columns", {name: np.asarray(values) for name, values in self.columns.items()})
        if self.x.dim() == 0 or self.y.dim() == 0 or len(self.x) != len(self.y):
            shapes = f"{list(self.x.shape)} and {list(self.y.shape)}"
            raise BadInput(f"{self.name}: x and y must hold one row per sample, found shapes {shapes}")
        if len(self.x) == 0:
            raise BadInput(f"{self.name}: the data set is empty; give at least one sample")
        for what, tensor in (("x", self.x), ("y", self.y)):
            _check_numbers(self.name, what, tensor)
        for column, values in self.columns.items():
            if len(values) != len(self.x):
                counts = f"{plural(len(values), 'value')} for {plural(len(self.x), 'sample')}"
                raise BadInput(f"{self.name}: column '{column}' has {counts}; give one each")
        self._check_labels()
        self._check_images()

    def _check_labels(self) -> None:
        if self.y.is_floating_point():
            if self.classes is not None:
                raise BadInput(
                    f"{self.name}: labels must be integers, found {self.y.dtype}; convert them, or leave `classes` out "
                    "for regression"
                )
            return
        if self.y.dim() != 1:
            raise BadInput(f"{self.name}: labels must have shape [n], found {list(self.y.shape)}")
        labels = self.y.to(torch.int64)
        classes = int(labels.max()) + 1 if self.classes is None else int(self.classes)
        bad = torch.nonzero((labels < 0) | (labels >= classes)).flatten()
        if len(bad):
            valid = f"0..{classes - 1}" if self.classes is not None else "0, 1, 2, ..."
            raise BadInput(f"{self.name}: the label of sample {int(bad[0])} is not one of {valid}")
        if self.class_names is not None and len(self.class_names) != classes:
            counts = f"{plural(len(self.class_names), 'name')} for {plural(classes, 'class', 'classes')}"
            raise BadInput(f"{self.name}: class_names has {counts}; give one each")
        object.__setattr__(self, "y", labels)
        object.__setattr__(self, "classes", classes)

    def _check_images(self) -> None:
        are_images = self.x.dtype == torch.uint8 and self.x.dim() == 4
        channels = self.x.shape[1] if are_images else 0
        if channels > 4 and self.x.shape[-1] in (1, 3, 4):
            raise BadInput(
                f"{self.name}: images of shape {list(self.x.shape[1:])} look channels-last; "
                "give [n, channels, height, width], for example x.permute(0, 3, 1, 2)"
            )
        if self.mean is None and self.std is None:
            return
        if self.mean is None or self.std is None:
            raise BadInput(f"{self.name}: give both mean and std, or neither")
        if not are_images:
            raise BadInput(
                f"{self.name}: mean and std are for uint8 images [n, channels, height, width]; "
                f"x is {self.x.dtype} of shape {list(self.x.shape)}: normalise it before, or leave them out"
            )
        if len(self.mean) != channels or len(self.std) != channels:
            counts = f"{len(self.mean)} and {len(self.std)}"
            raise BadInput(f"{self.name}: mean and std need {channels} values (one per channel), found {counts}")
        if not all(np.isfinite(m) for m in self.mean) or not all(np.isfinite(s) and s > 0 for s in self.std):
            raise BadInput(f"{self.name}: mean must be finite and std positive, found {self.mean} and {self.std}")

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        target = "regression" if self.classes is None else plural(self.classes, "class", "classes")
        samples = f"{plural(len(self), 'sample')} of {list(self.x.shape[1:])} {self.x.dtype}"
        return f"Dataset('{self.name}', {samples}, {target})"

    @property
    def labels(self) -> NDArray[np.int64] | None:
        """The labels as a numpy array, or None for regression."""
        return None if self.classes is None else self.y.cpu().numpy()

    def subset(self, indices: Any) -> Dataset:
        """Return the samples at `indices` (integers, in that order)."""
        chosen = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
        if chosen.ndim != 1 or chosen.size == 0 or not np.issubdtype(chosen.dtype, np.integer):
            raise BadInput(f"{self.name}: a subset needs a non-empty list of integer sample indices")
        outside = np.flatnonzero((chosen < 0) | (chosen >= len(self)))
        if len(outside):
            raise BadInput(f"{self.name}: sample index {chosen[outside[0]]} is not in 0..{len(self) - 1}")
        chosen = chosen.astype(np.int64)
        rows = torch.from_numpy(chosen)
        return dataclasses.replace(
            self,
            x=self.x[rows.to(self.x.device)],
            y=self.y[rows.to(self.y.device)],
            columns={column: values[chosen] for column, values in self.columns.items()},
        )

    def holdout(self, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
        """Split off a random fraction: return the rest and the held-out samples, both in the original order."""
        held = round(fraction * len(self)) if 0 < fraction < 1 else 0
        if not 0 < held < len(self):
            raise BadInput(
                f"{self.name}: a holdout of {fraction} of {plural(len(self), 'sample')} leaves one side empty; "
                "choose a fraction between 0 and 1 that leaves both at least one sample"
            )
        order = rng.permutation(rng.key(seed, "holdout"), len(self))
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data on another device (the columns stay on the host)."""
        x, y = self.x.to(device), self.y.to(device)
        return self if x is self.x and y is self.y else dataclasses.replace(self, x=x, y=y)


class Splits(NamedTuple):
    """A training and a test set."""

    train: Dataset
    test: Dataset


def as_dataset(
    data: Any,
    *,
    x: str | None = None,
    y: str | None = None,
    classes: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    name: str = "data",
) -> Dataset:
    """Convert data to a `Dataset`.

    Args:
        data: A `Dataset` (returned unchanged), an ``(x, y)`` pair of arrays or tensors, a torch
            `TensorDataset` of two tensors, or one split of a Hugging Face `datasets.Dataset`.
        x: The column that holds the inputs (Hugging Face only; guessed from the usual names when None).
        y: The column that holds the labels (likewise).
        classes: Number of classes, when some may be missing from the labels.
        mean: Per channel, for uint8 images.
        std: Per channel, for uint8 images.
        name: The name of the data in messages and tables.

    >>> as_dataset((np.zeros((3, 28, 28), np.uint8), [0, 1, 1]))
    Dataset('data', 3 samples of [1, 28, 28] torch.uint8, 2 classes)
    """
    if isinstance(data, Dataset):
        return data
    columns: Mapping[str, NDArray[Any]] = {}
    if hub.is_hub_dataset(data):
        inputs, targets, columns, known_classes = hub.arrays(data, x, y)
        classes = known_classes if classes is None else classes
    else:
        if isinstance(data, torch.utils.data.TensorDataset):
            data = data.tensors
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise BadInput(
                f"cannot read data of type {type(data).__name__}: give a pair (x, y) of arrays, a TensorDataset of "
                "two tensors, or one split of a Hugging Face dataset"
            )
        inputs, targets = data
    inputs, targets = _tensor(name, "x", inputs), _tensor(name, "y", targets)
    if inputs.dtype == torch.uint8 and inputs.dim() == 3:
        inputs = inputs.unsqueeze(1)  # grey images are often stored without their only channel
    return Dataset(inputs, targets, classes, mean, std, name, columns)


def _tensor(name: str, what: str, values: Any) -> Tensor:
    """Return a tensor, in writable memory, of anything numpy or torch can read."""
    if isinstance(values, Tensor):
        return values.detach()
    if isinstance(values, Mapping):
        raise BadInput(f"{name}: {what} is a dict, and a model gets one tensor; {ONE_ARRAY}")
    try:
        array = np.asarray(values)
        _refuse_objects(name, what, array)
        if array.dtype.kind == "u" and array.dtype != np.uint8:
            array = array.astype(np.int64)  # torch computes little with the larger unsigned types
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except BadInput:
        raise
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{name}: {what} is not an array of numbers of one shape ({reason})") from error


def _refuse_objects(name: str, what: str, array: NDArray[Any]) -> None:
    """Refuse text and dicts, with advice."""
    first = array.flat[0] if array.size and array.dtype.kind in "OUS" else None
    if isinstance(first, str | bytes):
        advice = "tokenise it into whole numbers" if what == "x" else "number the classes: " + NUMBER_CLASSES
        raise BadInput(f"{name}: {what} holds text; {advice}")  # without the text: a node's messages reach the server
    if isinstance(first, Mapping):
        raise BadInput(f"{name}: {what} holds dicts, and a model gets one tensor; {ONE_ARRAY}")


def _check_numbers(name: str, what: str, tensor: Tensor) -> None:
    if tensor.is_complex():
        raise BadInput(f"{name}: complex numbers are not supported; give real and imaginary parts as features")
    if tensor.is_floating_point():
        finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
        if not bool(finite.all()):
            first = int(torch.nonzero(~finite)[0])
            raise BadInput(f"{name}: sample {first} of {what} holds a NaN or an infinity; clean or drop it")
