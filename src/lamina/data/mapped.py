"""Data larger than memory: rows of memory-mapped arrays, which are read from disk when a batch needs them."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.base.errors import BadInput

CHUNK_BYTES = 1 << 24  # read at a time by checks and digests
BLOCK_BYTES = 1 << 21  # that Linux may map around a page that is read
MOST_BLOCKS = 128  # that stay in this process's memory; the system's cache may keep more


class Mapped:
    """Samples on disk, in the place of a tensor [n, ...] in a `Dataset`; indexing it reads the rows into a tensor.

    Args:
        arrays: memory-mapped arrays whose samples have one shape and type, one after the other.
        dtype: of the tensors, unless it is the arrays'.
        rows: which of the samples, in which order; None: all.
        device: of the tensors.
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        dtype: torch.dtype | None = None,
        rows: NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._arrays, self._rows, self.device = list(arrays), rows, torch.device(device)
        self._bounds = np.cumsum([0, *map(len, self._arrays)])
        first = self._arrays[0]
        self._native = first.dtype.newbyteorder("=")
        self.dtype = dtype or torch.from_numpy(np.empty(0, self._native)).dtype
        self.shape = torch.Size([len(self), *first.shape[1:]])
        self.is_checked = False  # whether the values are known to be finite
        self._blocks = 0  # that were read since the last `_forget`

    @classmethod
    def of(cls, name: str, what: str, array: Any) -> Mapped:
        """Return the samples of a memory-mapped array, or of what reads like one; messages call it `what`."""
        kind = array.dtype
        if kind.kind not in "iufb" or kind == np.uint64:
            raise BadInput(f"{name}: {what} is memory-mapped with {kind} values: write it as floats, int64 or uint8")
        return cls([array], torch.int64 if kind.kind == "u" and kind.itemsize > 1 else None)

    def __len__(self) -> int:
        return int(self._bounds[-1]) if self._rows is None else len(self._rows)

    def __getitem__(self, rows: Tensor | slice | int) -> Tensor:
        if isinstance(rows, int):
            return self[rows : rows + 1][0]
        if isinstance(rows, slice):
            return self._read(np.arange(len(self))[rows])
        return self._read(rows.cpu().numpy().reshape(-1)).reshape(*rows.shape, *self.shape[1:])

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Return samples as `Tensor.index_select` does."""
        assert dim == 0
        return self[rows]

    def subset(self, rows: NDArray[np.int64]) -> Mapped:
        """Return some of the samples; none is read."""
        return self._with(rows=rows if self._rows is None else self._rows[rows])

    def to(self, to: torch.device | str | torch.dtype) -> Mapped:
        """Return the same samples for another device, or as another type."""
        if isinstance(to, torch.dtype):
            return self._with(dtype=to)
        return self if torch.device(to) == self.device else self._with(device=to)

    def unsqueeze(self, dim: int) -> Mapped:
        """Return the samples with one more axis."""
        return self._with(arrays=[np.expand_dims(array, dim) for array in self._arrays])

    def chunks(self) -> Iterator[Tensor]:
        """Yield all samples, a few at a time."""
        step = max(1, CHUNK_BYTES // max(1, self._row_bytes))
        for start in range(0, len(self), step):
            yield self[start : start + step]

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of values."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """Return whether the values are floats."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Return whether the values are complex numbers, which no mapped array may hold."""
        return False

    def new_ones(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return ones on the same device."""
        return torch.ones(size, dtype=dtype, device=self.device)

    @classmethod
    def joined(cls, parts: Sequence[Mapped | Tensor]) -> Mapped:
        """Return the samples of several parts, one after the other; tensors stay in memory."""
        mapped = [part if isinstance(part, Mapped) else cls([part.cpu().numpy()]) for part in parts]
        starts = np.cumsum([0, *(part._bounds[-1] for part in mapped)])
        rows = [start + part._own_rows for start, part in zip(starts, mapped, strict=False)]
        arrays = [array for part in mapped for array in part._arrays]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in mapped))
        joined = cls(arrays, dtype, np.concatenate(rows), mapped[0].device)
        joined._native = np.result_type(*(part._native for part in mapped))  # holds the values of every part
        return joined

    def _with(self, **changed: Any) -> Mapped:
        same: dict[str, Any] = {"arrays": self._arrays, "dtype": self.dtype, "rows": self._rows, "device": self.device}
        other = Mapped(**(same | changed))
        other._native = self._native
        other.is_checked = self.is_checked
        return other

    @property
    def _own_rows(self) -> NDArray[np.int64]:
        return np.arange(len(self)) if self._rows is None else self._rows

    @property
    def _row_bytes(self) -> int:
        return self.shape[1:].numel() * self._native.itemsize

    def _read(self, rows: NDArray[np.int64]) -> Tensor:
        """Return samples as a tensor."""
        rows = rows if self._rows is None else self._rows[rows]
        values = np.empty((len(rows), *self.shape[1:]), self._native)
        order = np.argsort(rows, kind="stable")  # from the front of the files to their end
        blocks = rows[order] * self._row_bytes // BLOCK_BYTES
        visited = self._blocks + np.cumsum(np.diff(blocks, prepend=-1) != 0)
        cuts = np.flatnonzero(np.diff(visited // MOST_BLOCKS, prepend=0))
        for number, some in enumerate(np.split(order, cuts)):
            if number:
                self._forget()
            owner = np.searchsorted(self._bounds, rows[some], side="right") - 1
            for part in np.unique(owner):
                mine = some[owner == part]
                values[mine] = self._arrays[part][rows[mine] - self._bounds[part]]
        self._blocks = int(visited.max(initial=0)) % MOST_BLOCKS
        read = torch.from_numpy(values)
        if self.device.type == "cuda":  # by pinned memory, so that the host does not wait for the GPU
            read = read.pin_memory().to(self.device, non_blocking=True)
        return read.to(self.device, self.dtype)

    def _forget(self) -> None:
        """Let the system drop the pages of the files from this process; they are read again when they are needed.

        Not those of a private map (mode "c"), which holds changes that no file has.
        """
        for array in self._arrays:
            base: Any = array
            while isinstance(base, np.ndarray):
                base = base.base
            is_shared = getattr(array, "mode", None) in ("r", "r+", "w+")
            if is_shared and isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                base.madvise(mmap.MADV_DONTNEED)


def is_mapped(values: Any) -> bool:
    """Return whether values are a memory-mapped array of numpy."""
    return isinstance(values, np.memmap) and values.ndim > 0
