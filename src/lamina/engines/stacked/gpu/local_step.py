"""The local step of an algorithm as one GPU kernel, plus one per norm or function of matrices that it depends on.

A step is about twenty operations on vectors as long as the model. Run one by one they would read and write every vector
many times. So the operations that `trace` recorded are written down as Triton code that reads each vector once.
Compiling it takes about half a second for a model of any size.

A kernel works on blocks of consecutive elements of one row, each within one parameter tensor. So a number per layer or
per row is a single number to a block.
"""

from __future__ import annotations

import functools
import linecache
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.declaration import options
from lamina.engines.stacked.gpu.launch import launch
from lamina.engines.stacked.gpu.trace import MATRIX_MASKS, CannotFuse, Value, kind_of, trace_step
from lamina.objective.layers import Layers

BLOCK = 1024  # elements that a program works on
MAX_GRID_AXIS = 65535  # programs along the second or third axis of a launch
SUMMED_BLOCKS = 1024  # of a norm, at a time
ALIGNMENT = 16  # elements: with starts and strides in multiples of it, loads are wide


@dataclass(frozen=True)
class Pass:
    """One kernel."""

    function: Any
    inputs: list[str]  # without the gradient, which it finds by the table of addresses
    norms: list[str]  # whose squares it adds up, block by block
    mapped: list[str]  # functions of matrices, whose operands it writes down
    is_last: bool  # whether it writes the new state


BLOCK_COLUMNS = (  # of the table of blocks: elements from `start` to `end`, in a tensor that starts at `tensor_start`
    "start", "end", "tensor", "module", "tensor_start", "first_of_tensor", "first_of_module", "first_of_row",
)  # fmt: skip
ADDRESS_COLUMNS = ("address", "stride", "bytes", "is_aligned")  # of the gradient of every tensor


def _column(name: str) -> str:
    """Return the Triton code that reads a column of the block's own line, or of its tensor's gradient."""
    if name in BLOCK_COLUMNS:
        return f"tl.load(blocks + {len(BLOCK_COLUMNS)} * block + {BLOCK_COLUMNS.index(name)})"
    return f"tl.load(addresses + {len(ADDRESS_COLUMNS)} * tensor + {ADDRESS_COLUMNS.index(name)})"


HEAD = f"""
@triton.jit
def local_step(blocks, active, addresses, {{arguments}}BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    if tl.load(active + row) == 0:
        return
    start = {{start}}
    end = {_column("end")}
    tensor = {_column("tensor")}
    module = {_column("module")}
    i = start + tl.arange(0, BLOCK)
    mask = i < end
    wide = {{wide}}
"""
# a gradient is bfloat16 or float32, and the starts of its rows are aligned or not
LOAD_GRADIENT = """        if is_aligned:
            grad = tl.load(address.to(tl.pointer_type({dtype})) + row * tl.multiple_of(stride, 16) + offset, mask=wide, other=0.0){convert}
        else:
            grad = tl.load(address.to(tl.pointer_type({dtype})) + row * stride + offset, mask=mask, other=0.0){convert}
"""  # noqa: E501
GRADIENT = f"""    address = tl.multiple_of({_column("address")}, 16)
    stride = {_column("stride")}
    is_aligned = {_column("is_aligned")} != 0
    offset = i - {{first}}
    if {_column("bytes")} == 2:
{LOAD_GRADIENT.format(dtype="tl.bfloat16", convert=".to(tl.float32)")}    else:
{LOAD_GRADIENT.format(dtype="tl.float32", convert="")}"""
INDEX = {"element": "i", "tensor": "tensor", "module": "module", "row": "0"}


def write_pass(
    values: Mapping[str, Value], outputs: Mapping[str, str], number: int, *, rounded: bool, aligned: bool
) -> Pass:
    """Write one kernel: it computes what norms and functions of matrices are of or, the last one, the new state.

    Args:
        values: everything that was recorded.
        outputs: the value of every field of the local state that changes.
        number: of the kernel; the norms of all kernels before are known.
        rounded: whether the new parameters are also written in bfloat16.
        aligned: whether vectors start, and rows are apart, by multiples of the alignment.
    """
    last = max([values[name].number_of_pass for name in outputs.values()], default=0)
    norms, mapped, targets = [], [], list(outputs.values())
    if number < last:
        norms = [v.name for v in values.values() if v.norm_of and values[v.norm_of].number_of_pass == number]
        mapped = [v.name for v in values.values() if v.matrices_of and values[v.matrices_of].number_of_pass == number]
        targets = [values[name].norm_of for name in norms] + [values[name].matrices_of for name in mapped]
    needed: set[str] = set()
    waiting = list(targets)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += values[name].uses
    ordered = [value for name, value in values.items() if name in needed]  # recorded in the order of computation
    inputs = [value.name for value in ordered if not value.code and value.name != "grad"]
    body = []
    for value in ordered:
        if value.code:
            body.append(f"    {value.name} = {value.code}")
        elif value.name == "grad":
            first = _column("tensor_start")
            first = f"tl.multiple_of({first}, {ALIGNMENT})" if aligned else first
            body.append(GRADIENT.format(first=first).rstrip("\n"))
        elif value.kind == "element":
            body.append(f"    {value.name} = tl.load(p_{value.name} + row * s_{value.name} + i, mask=wide, other=0.0)")
        else:
            body.append(f"    {value.name} = tl.load(p_{value.name} + row * s_{value.name} + {INDEX[value.kind]})")
    arguments = "".join(f"p_{name}, s_{name}, " for name in inputs)
    if number < last:
        for name in norms:
            operand = values[name].norm_of
            arguments += f"q_{name}, "
            square = f"tl.sum(tl.where(mask, {operand} * {operand}, 0.0))"
            body.append(f"    tl.store(q_{name} + row * (tl.num_programs(1) * tl.num_programs(2)) + block, {square})")
        for name in mapped:
            arguments += f"u_{name}, r_{name}, "
            body.append(f"    tl.store(u_{name} + row * r_{name} + i, {values[name].matrices_of}, mask=wide)")
    else:
        for field, name in outputs.items():
            arguments += f"o_{field}, t_{field}, "
            kind, mask = values[name].kind, "wide"
            if kind != "element":  # written once, by the first block of the layer or row
                mask = f"{_column(f'first_of_{kind}')} != 0"
            body.append(f"    tl.store(o_{field} + row * t_{field} + {INDEX[kind]}, {name}, mask={mask})")
        if rounded and "y" in outputs:
            arguments += "rounded, rounded_row, "
            body.append(f"    tl.store(rounded + row * rounded_row + i, ({outputs['y']}).to(tl.bfloat16), mask=wide)")
    start, wide = _column("start"), "mask"
    if aligned:
        # only the last tensor ends between two multiples, and the buffers have room there: loads may be wide
        start = f"tl.multiple_of({start}, {ALIGNMENT})"
        wide = f"i < (end + {ALIGNMENT - 1}) // {ALIGNMENT} * {ALIGNMENT}"
    source = HEAD.format(arguments=arguments, start=start, wide=wide) + "\n".join(body) + "\n"
    return Pass(_compiled(source), inputs, norms, mapped, is_last=number == last)


@functools.cache
def _compiled(source: str) -> Any:
    """Return a kernel from its source; the same source is compiled once in a process, and cached on disk by Triton."""
    name = f"<lamina local step {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": "lamina_local_step"}
    exec(compile(source, name, "exec"), scope)
    return scope["local_step"]


@triton.jit
def _add_squares(partial, norms, groups, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """norms[row, group] = the root of the sum over the group's blocks."""
    group = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first = tl.load(groups + 2 * group)
    last = tl.load(groups + 2 * group + 1)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(first, last, WIDTH):
        i = start + tl.arange(0, WIDTH)
        total += tl.load(partial + row * COUNT + i, mask=i < last, other=0.0)
    tl.store(norms + row * tl.num_programs(0) + group, tl.sqrt_rn(tl.sum(total)))


class LocalStep:
    """The fused step of one algorithm on given buffers: `local`, which it updates in place, `down`, and numbers."""

    def __init__(
        self, algorithm: Algorithm, local: Any, down: Any, lr: Tensor, clip: Tensor | None, layers: Layers,
        rounded: Tensor | None = None, loss: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Trace the algorithm's step and write its kernels.

        Args:
            algorithm: its numbers may be tensors [rows, 1], which are read again in every step.
            local: the local state; a vector field is [rows, p].
            down: the broadcast; a field may be one vector for all rows, expanded.
            lr: the learning rates [rows, 1].
            clip: the largest norm of every row's gradient [rows, 1], or None.
            layers: the layout of the vectors.
            rounded: where to write the new parameters in bfloat16 as well [rows, p].
            loss: where the losses of the batches will be [rows, 1], if the step gets them.
        """
        self._rounded, self._rows, self._layers = rounded, len(local.y), layers
        by = algorithm.grouping
        sizes = {1: "row", len(layers.group_sizes(by)): kind_of(by), layers.size: "element"}
        if len(sizes) < (2 if by == "model" else 3):
            raise CannotFuse("numbers per layer and elements cannot be told apart in so small a model")
        given = {"lr": lr, "clip": clip, "loss": loss}
        buffers: dict[str, Tensor] = {name: value for name, value in given.items() if value is not None}
        for prefix, record in (("local", local), ("down", down)):
            fields = zip(record._fields, record, strict=True)
            buffers |= {f"{prefix}_{name}": value for name, value in fields if value is not None}
        numbers = {name: getattr(algorithm, name) for name in options(type(algorithm))}
        buffers |= {f"number_{name}": value for name, value in numbers.items() if isinstance(value, Tensor)}
        kinds = {name: sizes[value.shape[-1]] for name, value in buffers.items()}
        values, outputs = trace_step(algorithm, local, down, clip is not None, kinds, layers)
        for of, mask in MATRIX_MASKS.items():
            if mask in values:
                chosen = torch.tensor([name in layers.matrices(of) for name in layers.names], device=lr.device)
                buffers[mask] = chosen.to(lr.dtype).expand(self._rows, -1)
        self._operands = {
            value.name: self._new_vectors(layers.size, lr.device) for value in values.values() if value.matrices_of
        }
        buffers |= {name: self._new_vectors(layers.size, lr.device) for name in self._operands}
        self._outputs = {field: buffers[f"local_{field}"] for field in outputs}
        self._table, self._groups, aligned = _block_table(layers, lr.device)
        self._blocks = torch.from_numpy(self._table).to(lr.device)
        strides = [value.stride(0) for name, value in buffers.items() if values[name].kind == "element"]
        aligned = aligned and all(stride % ALIGNMENT == 0 for stride in strides)
        self._norms: dict[str, Tensor] = {}
        self._scratch = {
            field: torch.zeros_like(buffer)
            for field, buffer in self._outputs.items()
            if values[outputs[field]].kind != "element"
        }
        self._buffers, self._passes = buffers, []
        last = max([values[name].number_of_pass for name in outputs.values()], default=0)
        for number in range(last + 1):
            is_rounded = rounded is not None
            self._passes.append(write_pass(values, outputs, number, rounded=is_rounded, aligned=aligned))
        self._values = values
        for value in values.values():
            if value.norm_of:
                groups = len(self._groups[value.over])
                self._norms[value.name] = torch.zeros(self._rows, groups, device=lr.device)
        self._partial = {name: torch.zeros(self._rows, len(self._blocks), device=lr.device) for name in self._norms}

    def _new_vectors(self, size: int, device: torch.device) -> Tensor:
        """Return a buffer for one vector per row, each at an aligned address and with room after its end."""
        pitch = -(-size // ALIGNMENT) * ALIGNMENT
        return torch.zeros(self._rows, pitch, device=device)[:, :size]

    def addresses(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return a line of `ADDRESS_COLUMNS` per gradient; the stride is between rows, the bytes are of an element."""
        rows = [[g.data_ptr(), g.stride(0), g.element_size(), g.stride(0) % ALIGNMENT == 0] for g in gradients]
        return torch.tensor(rows, dtype=torch.int64)

    @property
    def names(self) -> Sequence[str]:
        """The tensors of a vector."""
        return self._layers.names

    @property
    def is_one_kernel(self) -> bool:
        """Whether the step waits for no norm and no function of matrices, so that layers can take it one by one."""
        return len(self._passes) == 1

    def blocks_of(self, names: Collection[str]) -> Tensor:
        """Return the blocks of these tensors, for `run`; an empty one if there are none."""
        tensors = [number for number, name in enumerate(self._layers.names) if name in names]
        is_chosen = np.isin(self._table[:, BLOCK_COLUMNS.index("tensor")], tensors)
        chosen = self._table[is_chosen & (self._table[:, 0] < self._table[:, 1])]
        table = np.zeros((math.prod(_two_axes(max(1, len(chosen)))), len(BLOCK_COLUMNS)), dtype=np.int32)
        table[: len(chosen)] = chosen
        return torch.from_numpy(table).to(self._blocks.device)

    def run(
        self, rows: int, active: Tensor, addresses: Tensor, blocks: Tensor | None = None, *, is_last: bool = True
    ) -> None:
        """Take the step in the first rows.

        Args:
            rows: how many.
            active: 0 for a row that keeps its state [rows].
            addresses: those of the gradients, on the device.
            blocks: which blocks take it, if the step is one kernel; None: all.
            is_last: whether all other blocks have taken the step; new numbers per layer and row are stored then.
        """
        blocks = self._blocks if blocks is None else blocks
        # the rows of a block are neighbours, so that a vector which all rows read comes from the cache
        grid = (rows, *_two_axes(len(blocks)))
        for step in self._passes:
            arguments: list[Any] = []
            for name in step.inputs:
                buffer = self._norms[name] if name in self._norms else self._buffers[name]
                arguments += [buffer, buffer.stride(0)]
            arguments += [self._partial[name] for name in step.norms]
            for name in step.mapped:
                arguments += [self._operands[name], self._operands[name].stride(0)]
            if step.is_last:
                for field, buffer in self._outputs.items():
                    target = self._scratch.get(field, buffer)
                    arguments += [target, target.stride(0)]
                if self._rounded is not None and "y" in self._outputs:
                    arguments += [self._rounded, self._rounded.stride(0)]
            launch(step.function, grid, blocks, active, addresses, *arguments, BLOCK=BLOCK, num_warps=4)
            for name in step.norms:
                groups = self._groups[self._values[name].over]
                launch(
                    _add_squares, (len(groups), rows), self._partial[name], self._norms[name], groups,
                    len(self._blocks), SUMMED_BLOCKS, num_warps=4,
                )  # fmt: skip
            for name in step.mapped:
                function = self._values[name].function
                assert function is not None
                self._buffers[name][:rows].copy_(function(self._layers, self._operands[name][:rows]))
        for field, scratch in (
            self._scratch.items() if is_last else ()
        ):  # not in place: other blocks may still read the old number
            buffer = self._outputs[field]
            buffer[:rows].copy_(torch.where(active[:rows].unsqueeze(1) > 0, scratch[:rows], buffer[:rows]))


def _two_axes(blocks: int) -> tuple[int, int]:
    """Return two axes of a grid with room for all blocks.

    >>> _two_axes(7), _two_axes(100_001)
    ((7, 1), (50001, 2))
    """
    axes = -(-blocks // MAX_GRID_AXIS)
    return -(-blocks // axes), axes


def _block_table(layers: Layers, device: torch.device) -> tuple[Any, dict[str, Tensor], bool]:
    """Return the table of blocks, the range of blocks of every layer, and whether all start at aligned elements."""
    modules = {name: number for number, name in enumerate(layers.group_names("module"))}
    starts = np.cumsum([0, *layers.sizes]).tolist()
    lines = [
        [place, min(place + BLOCK, starts[tensor + 1]), tensor, modules[name.rpartition(".")[0]], starts[tensor]]
        for tensor, name in enumerate(layers.names)
        for place in range(starts[tensor], starts[tensor + 1], BLOCK)
    ]
    count = len(lines)
    table = np.zeros((math.prod(_two_axes(count)), len(BLOCK_COLUMNS)), dtype=np.int32)  # may end with empty blocks
    table[:count, :5] = lines
    groups = {}
    for kind, size in {"tensor": len(layers.names), "module": len(modules), "row": 1}.items():
        layer = table[:count, BLOCK_COLUMNS.index(kind)] if kind != "row" else np.zeros(count)  # never decreases
        table[:count, BLOCK_COLUMNS.index(f"first_of_{kind}")] = np.diff(layer, prepend=-1) != 0
        ranges = [np.searchsorted(layer, np.arange(size), side) for side in ("left", "right")]
        groups[kind] = torch.tensor(np.stack(ranges, 1), dtype=torch.int32, device=device)
    aligned = all(line[0] % ALIGNMENT == 0 for line in lines)
    return table, groups, aligned
