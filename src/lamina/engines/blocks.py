"""The local step on a CPU, block by block.

A step is about ten operations on vectors as long as the model. If these do not fit the caches, every operation reads
and writes main memory. So the first two steps are recorded. If all of their operations are elementwise, later steps
repeat them on one block of the vectors after another, and what an operation writes is still in the core's cache when
the next one reads it. An elementwise operation computes the same in every block, to the last bit. A gradient comes as
one tensor for each parameter; blocks are gathered from them, because one long vector would have to be written and read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, Number
from lamina.base.dispatch import WatchingMode
from lamina.objective.layers import Layers

Recordings = dict[Any, list["Recording | None"]]  # by what a step depends on; None: it is not elementwise

BLOCK = 1 << 17  # elements per thread; a power of two, so that vector instructions leave none over between two blocks


class Segments:
    """A vector whose segments lie apart in memory."""

    def __init__(self, segments: Sequence[Tensor]) -> None:
        self._segments = [segment.reshape(-1) for segment in segments]
        self._lengths = [segment.numel() for segment in segments]
        self.length = sum(self._lengths)

    def joined(self) -> Tensor:
        """Return the vector."""
        return torch.cat(self._segments)

    def blocks(self, size: int) -> Iterator[Tensor]:
        """Yield the vector block by block; each is valid until the next one."""
        buffer = self._segments[0].new_empty(min(size, self.length))
        pieces: list[Tensor] = []
        filled = 0
        for segment, length in zip(self._segments, self._lengths, strict=True):
            start = 0
            while start < length:
                end = min(length, start + size - filled)
                piece, count, start = segment[start:end], end - start, end
                if count == size:  # a whole block needs no copy
                    yield piece
                    continue
                pieces.append(piece)
                filled += count
                if filled == size:
                    yield torch.cat(pieces, out=buffer)
                    pieces, filled = [], 0
        if filled:
            yield torch.cat(pieces, out=buffer[:filled])


class Step:
    """An algorithm's `step` in the local training of one client, with the same arguments and results."""

    def __init__(self, algorithm: Algorithm, recordings: Recordings, *, may_overwrite: bool) -> None:
        """Prepare the steps of a client.

        Args:
            algorithm: whose step.
            recordings: what earlier clients of the algorithm have recorded.
            may_overwrite: whether nobody reads a local state any more once the next one is computed.
        """
        self._algorithm, self._recordings, self._may_overwrite = algorithm, recordings, may_overwrite
        self._own: list[Tensor | None] = []  # the last state, if it lies in memory that was allocated here

    def __call__(
        self, local: Any, down: Any, gradient: Tensor | Segments, lr: Number, layers: Layers, **more: Tensor
    ) -> Any:
        """Return the local state after one step."""
        size, y = BLOCK * torch.get_num_threads(), local.y
        is_small = y.device.type != "cpu" or y.numel() < 2 * size or isinstance(lr, Tensor)
        kinds = [None if value is None else (value.shape, value.dtype) for value in (*local, *down, *more.values())]
        key = lr, layers, type(local), type(down), tuple(more), tuple(kinds)
        # Two steps are recorded: what is random or was read out of a tensor unnoticed differs between them.
        recordings = [] if is_small else self._recordings.get(key, [])
        recording = recordings[-1] if len(recordings) == 2 else None
        if recording is not None:
            inputs = [*local, *down, gradient, *more.values()]
            after = recording.repeat(inputs, y.numel(), size, self._own)
            self._own = [after[field] for field in recording.written_fields] if self._may_overwrite else []
            return type(local)(*after)
        grad = gradient.joined() if isinstance(gradient, Segments) else gradient
        if is_small or len(recordings) == 2:
            return self._algorithm.step(local, down, grad, lr, layers, **more)
        after, recording = _record(self._algorithm, local, down, grad, lr, layers, more)
        is_repeated = all(one is not None and recording is not None and one.equals(recording) for one in recordings)
        self._recordings.clear()  # another learning rate, mostly: the last one does not come back
        self._recordings[key] = [*recordings, recording if is_repeated else None]
        return after


def _record(
    algorithm: Algorithm, local: Any, down: Any, grad: Tensor, lr: Number, layers: Layers, more: Mapping[str, Tensor]
) -> tuple[Any, Recording | None]:
    """Take a step; return the local state after it and the recording, or None if the step is not elementwise."""
    # one tensor may be several inputs in this step, and not in the next: each becomes a tensor of its own
    inputs = [None if value is None else value.detach() for value in (*local, *down, grad, *more.values())]
    rest: Any = iter(inputs)
    local, down, grad = type(local)(*islice(rest, len(local))), type(down)(*islice(rest, len(down))), next(rest)
    recorder = _Recorder(inputs, grad.shape)
    with recorder:
        after = algorithm.step(local, down, grad, lr, layers, **dict(zip(more, rest, strict=True)))
    return after, recorder.recording(after)


class _Operation(NamedTuple):
    """An elementwise operation on values, which are numbered: inputs, constants and results."""

    function: Any
    positional: list[int]
    named: dict[str, int]
    result: int

    @property
    def operands(self) -> set[int]:
        """The values that it reads."""
        return {*self.positional, *self.named.values()}


class _Recorder(WatchingMode):  # type: ignore[no-untyped-call]
    """Records the operations of a step."""

    def __init__(self, inputs: Sequence[Tensor | None], shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = shape  # of a vector
        self._is_elementwise = True
        self._operations: list[_Operation] = []
        self._vectors: dict[int, torch.dtype] = {}  # the types of the values that are vectors
        self._values: list[Any] = []  # constants; None in the place of another value
        # A tensor is known by its id while it lives. Holding on to them would keep all intermediate vectors in memory.
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        for tensor in inputs:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._is_elementwise = self._is_elementwise and self._record(func, args, kwargs, result)
        return result

    def recording(self, after: Any) -> Recording | None:
        """Return the recording of a step with this result; None if it cannot be repeated block by block."""
        outputs = [None if field is None else self._number(field) for field in after]
        if not self._is_elementwise or any(o is None and f is not None for o, f in zip(outputs, after, strict=True)):
            return None
        return Recording(self._operations, self._values, self._vectors, outputs)

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Record an operation; return whether it is elementwise."""
        tensors = [value for value in (*args, *kwargs.values(), result) if isinstance(value, Tensor)]
        if not isinstance(result, Tensor) or any(tensor.requires_grad for tensor in tensors):
            return False
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if all(self._number(tensor) is None for tensor in tensors):
            return result.numel() == 1 and not is_random  # a constant
        variant = _writing_variant(func) if torch.Tag.pointwise in func.tags and not is_random else None
        if variant is None or not all(self._fits(tensor) for tensor in tensors[:-1]):
            return False
        positional = [self._operand(value) for value in args]
        named = {name: self._operand(value) for name, value in kwargs.items()}
        function = variant if result.shape == self._shape else func
        self._operations.append(_Operation(function, positional, named, self._add(result)))
        return True

    def _fits(self, operand: Tensor) -> bool:
        """Return whether an operand is a single number, or a vector that the step was given or has computed."""
        return operand.numel() == 1 or (operand.shape == self._shape and self._number(operand) is not None)

    def _number(self, value: Any) -> int | None:
        reference, number = self._numbers.get(id(value), (None, None))
        return number if reference is not None and reference() is value else None

    def _operand(self, value: Any) -> int:
        number = self._number(value)
        if number is None:
            self._values.append(value)
            return len(self._values) - 1
        return number

    def _add(self, tensor: Tensor | None) -> int:
        number = len(self._values)
        self._values.append(None)
        if tensor is not None:
            self._numbers[id(tensor)] = weakref.ref(tensor), number
            if tensor.shape == self._shape:
                self._vectors[number] = tensor.dtype
        return number


class Recording:
    """The elementwise operations of a step."""

    def __init__(
        self,
        operations: Sequence[_Operation],
        values: Sequence[Any],
        vectors: Mapping[int, torch.dtype],
        outputs: Sequence[int | None],
    ) -> None:
        """Decide where results are written.

        Args:
            operations: in the order of the step.
            values: the constants, by number.
            vectors: the types of the values that are vectors; any other value is a single number.
            outputs: the value of every field of the local state after the step.
        """
        self._operations, self._values, self._outputs = operations, values, outputs
        self._on_numbers = [operation for operation in operations if operation.result not in vectors]
        self._on_vectors = [operation for operation in operations if operation.result in vectors]
        results = [operation.result for operation in self._on_vectors]
        last_use = {value: place for place, operation in enumerate(self._on_vectors) for value in operation.operands}
        self._read = sorted(value for value in last_use if value in vectors and value not in results)
        self._written = {value: vectors[value] for value in results if value in outputs}
        self.written_fields = [field for field, value in enumerate(outputs) if value in self._written]
        # A field may be written over its old value if that is neither read later nor a field of the new state, too.
        self._over: dict[int, int] = {}  # number of the result, of the old value
        places = {value: place for place, value in enumerate(results)}
        for field, value in enumerate(outputs):
            if value in self._written and field not in outputs and last_use.get(field, -1) <= places[value]:
                self._over.setdefault(value, field)
        # any other result lies in a buffer until its last use
        self._buffers: list[torch.dtype] = []
        self._buffer_of: dict[int, int] = {}
        free: list[int] = []
        for place, operation in enumerate(self._on_vectors):
            free += [self._buffer_of[v] for v in operation.operands if v in self._buffer_of and last_use[v] == place]
            if operation.result in self._written:
                continue
            dtype = vectors[operation.result]
            buffer = next((buffer for buffer in free if self._buffers[buffer] == dtype), len(self._buffers))
            if buffer == len(self._buffers):
                self._buffers.append(dtype)
            else:
                free.remove(buffer)
            self._buffer_of[operation.result] = buffer

    def equals(self, other: Recording) -> bool:
        """Return whether two recordings have the same operations and constants."""
        if (self._operations, self._outputs) != (other._operations, other._outputs):
            return False
        return all(
            torch.equal(one, two) if isinstance(one, Tensor) and isinstance(two, Tensor) else one == two
            for one, two in zip(self._values, other._values, strict=True)
        )

    def repeat(
        self, inputs: Sequence[Tensor | Segments | None], length: int, size: int, own: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the fields of the local state after the step.

        Args:
            inputs: of the step.
            length: that of a vector.
            size: that of a block.
            own: those of the inputs that may be overwritten, which saves the time to read the memory of new ones.
        """
        values = [*inputs, *self._values[len(inputs) :]]
        for function, positional, named, result in self._on_numbers:
            named_values = {name: values[number] for name, number in named.items()}
            values[result] = function(*[values[number] for number in positional], **named_values)
        wholes = {number: values[number] for number in self._read}
        addresses = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)]
        for number, dtype in self._written.items():
            old = None if number not in self._over else inputs[self._over[number]]
            is_free = (
                isinstance(old, Tensor)
                and any(old is value for value in own)
                and old.dtype == dtype
                and addresses.count(old.untyped_storage().data_ptr()) == 1
            )
            wholes[number] = old if is_free else torch.empty(length, dtype=dtype)
        buffers = [torch.empty(size, dtype=dtype) for dtype in self._buffers]
        blocks = (v.blocks(size) if isinstance(v, Segments) else torch.split(v, size) for v in wholes.values())
        count = 0
        for pieces in zip(*blocks, strict=True):
            for number, piece in zip(wholes, pieces, strict=True):
                values[number] = piece
            if len(pieces[0]) != count:  # of the first block, and perhaps of the last one
                count = len(pieces[0])
                for number, buffer in self._buffer_of.items():
                    values[number] = buffers[buffer][:count]
            for function, positional, named, result in self._on_vectors:
                named_values = {name: values[number] for name, number in named.items()} if named else {}
                function(*[values[number] for number in positional], **named_values, out=values[result])
        for number, vector in wholes.items():
            values[number] = vector
        fields = [None if number is None else values[number] for number in self._outputs]
        return [field.joined() if isinstance(field, Segments) else field for field in fields]  # a kept gradient


def _writing_variant(function: Any) -> Any:
    """Return the variant of an operation that writes its result into a given tensor, or None."""

    def signature(arguments: Sequence[Any]) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in arguments]

    packet, wanted = function.overloadpacket, signature(function._schema.arguments)
    for variant in (getattr(packet, name) for name in packet.overloads()):
        arguments = variant._schema.arguments
        if arguments and arguments[-1].is_out and signature(arguments[:-1]) == wanted:
            return variant
    return None
