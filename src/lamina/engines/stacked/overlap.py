"""Let large layers take the local step while a GPU still computes the gradients of others.

A step moves memory and a backward pass mostly computes, so both at once take less time than one after the other. A
layer may take the step as soon as its gradient is complete and no kernel needs its old weights any more. One pass is
watched to find out for which layers that is so, and when; the captured pass does the same once more.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.engines.stacked.side_stream import observed
from lamina.objective.layers import Layers

LARGE = 1 << 20  # elements of a layer in all rows: fewer are not worth a kernel of their own


class Watched:
    """Watches a pass: where the gradient of every layer comes from, and how often its weights are read.

    Args:
        layers: the layout of the vectors.
        vectors: the parameters that the pass may read [rows, p].
    """

    def __init__(self, layers: Layers, vectors: Sequence[Tensor]) -> None:
        self._layers, self._vectors = layers, vectors
        self._starts = np.cumsum([0, *layers.sizes])
        self._arrivals: Counter[str] = Counter()
        self._saved: Counter[str] = Counter()
        self._gradients: dict[str, Tensor] = {}
        self.early: dict[str, int] = {}  # layers that may take the step early, and how often their gradient arrives

    @contextlib.contextmanager
    def of_pass(self, active: Tensor) -> Iterator[None]:
        """Watch the pass within the context; rows are active if they take the step."""
        with observed(self), torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor):
            yield

    def arrived(self, name: str, gradient: Tensor, stream: Any) -> None:
        """Take note of a gradient from the side stream."""
        self._arrivals[name] += 1
        self._gradients[name] = gradient

    def save(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that the backward pass will read."""
        for vector in self._vectors:
            place, rest = divmod(tensor.data_ptr() - vector.data_ptr(), vector.element_size())
            if rest == 0 and 0 <= place < len(vector) * vector.stride(0):
                number = int(np.searchsorted(self._starts, place % vector.stride(0), "right")) - 1
                self._saved.update(self._layers.names[number : number + 1])
        return tensor

    def finish(self, pieces: Mapping[str, Tensor]) -> None:
        """Note the layers that may take the step early; `pieces` are the gradients that the step reads.

        The side stream must compute the whole gradient in that memory, and nothing may read the weights after it: they
        are saved once for each time that the gradient arrives.
        """
        for name, gradient in self._gradients.items():
            is_whole = gradient.data_ptr() == pieces[name].data_ptr()
            if is_whole and gradient.numel() >= LARGE and self._saved[name] == self._arrivals[name]:
                self.early[name] = self._arrivals[name]
        self._gradients.clear()


class Overlap:
    """Lets layers take the step when their gradients have arrived, on a stream that gives way to the others.

    Args:
        step: the fused step, which is one kernel.
        rows: how many rows take it.
        addresses: where the addresses of the gradients will be.
        expected: the layers, and how often the gradient of each arrives.
    """

    def __init__(self, step: Any, rows: int, addresses: Tensor, expected: Mapping[str, int]) -> None:
        self._step, self._rows, self._addresses = step, rows, addresses
        self._left, self._gradients = dict(expected), dict[str, Tensor]()
        self._blocks = {name: step.blocks_of([name]) for name in expected}
        self._late: Tensor = step.blocks_of([name for name in step.names if name not in expected])
        self._stream = _stream_of(addresses.device)
        self.is_right = True  # whether the pass was like the one that was watched

    @contextlib.contextmanager
    def of_pass(self, active: Tensor) -> Iterator[None]:
        """Let layers take the step during the pass within the context; rows are active if they take it."""
        self._active = active
        try:
            with observed(self):
                yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a capture that ends early must not leave a stream behind
                self._join()
            raise

    def arrived(self, name: str, gradient: Tensor, stream: Any) -> None:
        """Let a layer take the step if its gradient is complete; the kernels that read its weights are queued."""
        self._left[name] = self._left.get(name, 0) - 1
        if self._left[name] == 0:
            self._gradients[name] = gradient
            self._stream.wait_stream(torch.cuda.current_stream())
            self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                self._step.run(self._rows, self._active, self._addresses, self._blocks[name], is_last=False)

    def finish(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Wait for the steps that were taken, and return the blocks of the other layers."""
        self._join()
        addresses = {name: gradient.data_ptr() for name, gradient in self._gradients.items()}
        self.is_right = self._blocks.keys() == addresses.keys() and all(
            self._left[name] == 0 and pieces[name].data_ptr() == address for name, address in addresses.items()
        )
        self._gradients.clear()  # the memory of a graph's gradients serves other graphs
        del self._active
        return self._late

    def _join(self) -> None:
        if self._gradients:  # a stream without work is not part of a capture
            torch.cuda.current_stream().wait_stream(self._stream)


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """Return the same stream at every call: memory that one graph has used can serve the next."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
