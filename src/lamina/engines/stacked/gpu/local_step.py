"""The local step of an algorithm as one GPU kernel, or one more for each norm that it waits for.

`Algorithm.step` is plain torch: about twenty operations on vectors as long as the model. Run one by one they would read
and write every vector many times. So `step` is run once on a tiny model while every operation is recorded, and the
record is written down as Triton code that reads each vector once. Compiling it takes about half a second for a model
of any size. A step with an operation that is not listed in `EXPRESSIONS` cannot be fused and runs as it is.

A kernel works on blocks of consecutive elements of one row, each within one parameter tensor. So a number per layer or
per row is a single number to a block.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.algorithms.contract import Algorithm, options
from lamina.algorithms.primitives import clip_by_norm
from lamina.algorithms.rehearsal import TINY
from lamina.dispatch import WatchingMode
from lamina.engines.stacked.gpu.launch import launch
from lamina.layers import Grouping, Layers

BLOCK = 1024  # elements that a program works on
SUMMED_BLOCKS = 1024  # of a norm, at a time
ALIGNMENT = 16  # elements: with starts and strides in multiples of it, loads are wide
TRACED_ROWS = 5

# Triton expressions of torch's elementwise operations; None: the value itself
EXPRESSIONS: dict[str, str | None] = {
    "mul.Tensor": "({0} * {1})",
    "mul.Scalar": "({0} * {1})",
    "div.Tensor": "tl.div_rn({0}, {1})",
    "div.Scalar": "tl.div_rn({0}, {1})",
    "neg.default": "(-{0})",
    "abs.default": "tl.abs({0})",
    "sqrt.default": "tl.sqrt_rn({0})",
    "rsqrt.default": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "reciprocal.default": "tl.div_rn(1.0, {0})",
    "square.default": "({0} * {0})",
    "exp.default": "tl.exp({0})",
    "log.default": "tl.log({0})",
    "maximum.default": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum.default": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "where.self": "tl.where({0}, {1}, {2})",
    "bitwise_and.Tensor": "({0} & {1})",
    "bitwise_or.Tensor": "({0} | {1})",
    "logical_and.default": "({0} & {1})",
    "logical_or.default": "({0} | {1})",
    "alias.default": None,
    "clone.default": None,
    "detach.default": None,
    "expand.default": None,
    "lift_fresh_copy.default": None,
}
for _name, _sign in {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items():
    EXPRESSIONS[f"{_name}.Tensor"] = EXPRESSIONS[f"{_name}.Scalar"] = f"({{0}} {_sign} {{1}})"

Kind = str  # "element", "tensor" or "module" (one number per layer), "row", or "number"


class CannotFuse(Exception):
    """A step has an operation without a Triton expression."""


@dataclass(frozen=True)
class Value:
    """A recorded value: an input (no `code`), an expression of earlier values, or the norm of one."""

    name: str
    kind: Kind
    code: str = ""
    uses: tuple[str, ...] = ()
    norm_of: str = ""  # the value whose norm this is, over `over`
    over: str = ""  # "tensor", "module" or "row"
    number_of_pass: int = 0  # the first kernel that can compute it: the norms it needs are known by then


class Trace(WatchingMode):
    """The operations of a step on a tiny model, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Value] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no id is used twice

    def add_input(self, name: str, tensor: Tensor) -> None:
        """Name a tensor that the step starts from."""
        self._add(Value(name, _kind(tensor)), tensor)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a value that was computed."""
        return self._names[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = func.__name__
        if operation == "linalg_vector_norm.default":
            order, axes = (args[1] if len(args) > 1 else 2), (args[2] if len(args) > 2 else None)
            if order != 2 or axes not in ([-1], [1]):
                raise CannotFuse(operation)
            self.add_norm(args[0], result, "row")
        elif not any(isinstance(argument, Tensor) and id(argument) in self._names for argument in args):
            if not (isinstance(result, Tensor) and (result.dim() == 0 or _is_constant(result))):
                raise CannotFuse(operation)
            self._add(Value(self._new_name(), _kind(result), code=_literal(float(result.flatten()[0]))), result)
        else:
            code, operands = self._expression(operation, args, kwargs, result)
            values = [self.values[name] for name in operands]
            number = max(value.number_of_pass for value in values)
            self._add(Value(self._new_name(), _kind(result), code, tuple(operands), number_of_pass=number), result)
        return result

    def add_norm(self, vector: Tensor, norms: Tensor, over: str) -> None:
        """Record norms that a later kernel can read."""
        operand = self.values[self.name_of(vector)]
        name, number = self._new_name(), operand.number_of_pass + 1
        self._add(Value(name, _kind(norms), "", (), operand.name, over, number_of_pass=number), norms)

    def add_copy(self, source: Tensor, copy: Tensor) -> None:
        """Record a tensor that is to a block the same number as another."""
        value = self.values[self.name_of(source)]
        name = self._new_name()
        self._add(Value(name, _kind(copy), value.name, (value.name,), number_of_pass=value.number_of_pass), copy)

    def _add(self, value: Value, tensor: Tensor) -> None:
        self.values[value.name] = value
        self._names[id(tensor)] = value.name
        self._alive.append(tensor)

    def _new_name(self) -> str:
        return f"v{len(self.values)}"

    def _expression(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return the Triton code of an operation, and the values it uses."""
        operands: list[str] = []

        def term(argument: Any) -> str:
            if isinstance(argument, Tensor):
                if id(argument) in self._names:
                    operands.append(self._names[id(argument)])
                    return operands[-1]
                if argument.dim() == 0:
                    return _literal(argument.item())
                raise CannotFuse(operation)
            if isinstance(argument, int | float):
                return _literal(argument)
            return ""

        terms = [term(argument) for argument in args]
        base = operation.partition(".")[0]
        if base in ("add", "sub", "rsub"):
            scale = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            first, second = terms[:2] if base != "rsub" else (terms[1], terms[0])
            if scale != 1:
                scaled = f"({_literal(scale)} * {terms[1] if base != 'rsub' else terms[0]})"
                first, second = (first, scaled)
            return f"({first} {'+' if base == 'add' else '-'} {second})", operands
        if base == "pow" and args[1] == 2:
            return f"({terms[0]} * {terms[0]})", operands
        if base == "clamp":
            low, high = (*args[1:], None, None)[:2]
            low, high = kwargs.get("min", low), kwargs.get("max", high)
            code = terms[0]
            for limit, function in ((low, "maximum"), (high, "minimum")):
                if limit is not None:
                    code = f"tl.{function}({code}, {term(limit)}, propagate_nan=tl.PropagateNan.ALL)"
            return code, operands
        if base == "lerp":
            return f"({terms[0]} + {terms[2]} * ({terms[1]} - {terms[0]}))", operands
        if base == "_to_copy":
            return f"({terms[0]}).to(tl.float32)", operands
        if base in ("zeros_like", "ones_like", "full_like"):
            return _literal({"zeros_like": 0.0, "ones_like": 1.0}.get(base, args[-1])), operands
        if operation not in EXPRESSIONS:
            raise CannotFuse(operation)
        template = EXPRESSIONS[operation]
        return (terms[0] if template is None else template.format(*terms)), operands


class TracedLayers(Layers):
    """The tiny model's layers; what a step asks of them is recorded as one operation each."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(TINY.shapes)
        self._trace = trace
        self.matrices = torch.zeros(TRACED_ROWS, len(TINY.names))
        trace.add_input("matrices", self.matrices)

    def norms(self, u: Tensor, by: Grouping = "tensor") -> Tensor:
        """Record the norms of all layers."""
        with _paused(self._trace):
            norms = super().norms(u, by)
        self._trace.add_norm(u, norms, by)
        return norms

    def spread(self, per_layer: Tensor, by: Grouping = "tensor") -> Tensor:
        """Record a value that every element of a layer reads."""
        with _paused(self._trace):
            elements = super().spread(per_layer, by)
        self._trace.add_copy(per_layer, elements)
        return elements

    def matrix_mask(self, like: Tensor) -> Tensor:
        """Record a value per tensor that the kernels read: the shapes are those of the real model."""
        with _paused(self._trace):
            flags = TINY.matrix_mask(like)
        self._trace.add_copy(self.matrices, flags)
        return flags


class _paused:  # noqa: N801
    """Suspend a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        self._trace.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        self._trace.__enter__()


def _kind(tensor: Tensor) -> Kind:
    sizes = {TINY.size: "element", len(TINY.group_sizes("tensor")): "tensor", len(TINY.group_sizes("module")): "module"}
    sizes |= {1: "row"}
    return "number" if tensor.dim() == 0 else sizes[tensor.shape[-1]]


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _literal(number: float) -> str:
    number = float(number)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


# --- from the record to kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One kernel: its code, its inputs, the norms it prepares, and whether it writes the new state."""

    function: Any
    inputs: tuple[str, ...]
    norms: tuple[str, ...]  # the values whose squares it adds up
    is_last: bool


HEAD = """
@triton.jit
def local_step(blocks, active, addresses, {arguments}BLOCK: tl.constexpr):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(active + row) == 0:
        return
    start = {start}
    end = tl.load(blocks + 8 * block + 1)
    tensor = tl.load(blocks + 8 * block + 2)
    module = tl.load(blocks + 8 * block + 3)
    i = start + tl.arange(0, BLOCK)
    mask = i < end
    wide = {wide}
"""
# a gradient is bfloat16 or float32, and the starts of its rows are aligned or not
LOAD_GRADIENT = """        if is_aligned:
            grad = tl.load(address.to(tl.pointer_type({dtype})) + row * tl.multiple_of(stride, 16) + offset, mask=wide, other=0.0){convert}
        else:
            grad = tl.load(address.to(tl.pointer_type({dtype})) + row * stride + offset, mask=mask, other=0.0){convert}
"""  # noqa: E501
GRADIENT = f"""    address = tl.multiple_of(tl.load(addresses + 4 * tensor), 16)
    stride = tl.load(addresses + 4 * tensor + 1)
    is_aligned = tl.load(addresses + 4 * tensor + 3) != 0
    offset = i - {{first}}
    if tl.load(addresses + 4 * tensor + 2) == 2:
{LOAD_GRADIENT.format(dtype="tl.bfloat16", convert=".to(tl.float32)")}    else:
{LOAD_GRADIENT.format(dtype="tl.float32", convert="")}"""
INDEX = {"element": "i", "tensor": "tensor", "module": "module", "row": "0"}


def write_pass(
    values: Mapping[str, Value], outputs: Mapping[str, str], number: int, *, rounded: bool, aligned: bool
) -> tuple[str, list[str], list[str], bool]:
    """Return the code of one kernel, the inputs it reads, the norms it prepares, and whether it is the last."""
    last = max([values[name].number_of_pass for name in outputs.values()], default=0)
    norms = [v.name for v in values.values() if v.norm_of and values[v.norm_of].number_of_pass == number]
    norms = [name for name in norms if number < last]
    targets = [values[name].norm_of for name in norms] if number < last else list(outputs.values())
    needed: set[str] = set()
    waiting = list(targets)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += values[name].uses
    ordered = [value for name, value in values.items() if name in needed]  # recorded in the order of computation
    inputs = [value.name for value in ordered if not value.code]
    body = []
    for value in ordered:
        if value.code:
            body.append(f"    {value.name} = {value.code}")
        elif value.name == "grad":
            first = "tl.load(blocks + 8 * block + 4)"
            first = f"tl.multiple_of({first}, {ALIGNMENT})" if aligned else first
            body.append(GRADIENT.format(first=first).rstrip("\n"))
        elif value.kind == "element":
            body.append(f"    {value.name} = tl.load(p_{value.name} + row * s_{value.name} + i, mask=wide, other=0.0)")
        else:
            body.append(f"    {value.name} = tl.load(p_{value.name} + row * s_{value.name} + {INDEX[value.kind]})")
    arguments = "".join(f"p_{name}, s_{name}, " for name in inputs if name != "grad")
    if number < last:
        for name in norms:
            operand = values[name].norm_of
            arguments += f"q_{name}, "
            square = f"tl.sum(tl.where(mask, {operand} * {operand}, 0.0))"
            body.append(f"    tl.store(q_{name} + row * tl.num_programs(0) + block, {square})")
    else:
        for field, name in outputs.items():
            arguments += f"o_{field}, t_{field}, "
            if _kind_of_output(values, name) == "element":
                body.append(f"    tl.store(o_{field} + row * t_{field} + i, {name}, mask=wide)")
            else:
                kind = values[name].kind
                flag = {"tensor": 5, "module": 6, "row": 7}[kind]
                first = f"tl.load(blocks + 8 * block + {flag}) != 0"
                body.append(f"    tl.store(o_{field} + row * t_{field} + {INDEX[kind]}, {name}, mask={first})")
        if rounded and "y" in outputs:
            arguments += "rounded, rounded_row, "
            body.append(f"    tl.store(rounded + row * rounded_row + i, ({outputs['y']}).to(tl.bfloat16), mask=wide)")
    start, wide = "tl.load(blocks + 8 * block)", "mask"
    if aligned:
        # only the last tensor ends between two multiples, and the buffers have room there: loads may be wide
        start = f"tl.multiple_of({start}, {ALIGNMENT})"
        wide = f"i < (end + {ALIGNMENT - 1}) // {ALIGNMENT} * {ALIGNMENT}"
    return (
        HEAD.format(arguments=arguments, start=start, wide=wide) + "\n".join(body) + "\n",
        inputs,
        norms,
        number == last,
    )


def _kind_of_output(values: Mapping[str, Value], name: str) -> Kind:
    return values[name].kind


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
        rounded: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Trace the algorithm's step and write its kernels.

        Args:
            algorithm: its numbers may be tensors [rows, 1], which are read anew in every step.
            local: the local state; a vector field is [rows, p].
            down: the broadcast; a field may be one vector for all rows, expanded.
            lr: the learning rates [rows, 1].
            clip: the largest norm of every row's gradient [rows, 1], or None.
            layers: the layout of the vectors.
            rounded: where to write the new parameters in bfloat16 as well [rows, p].
        """
        self._layers, self._rounded, self._rows = layers, rounded, len(local.y)
        by = algorithm.grouping
        sizes = {1: "row", len(layers.group_sizes(by)): by, layers.size: "element"}
        if len(sizes) < 3:
            raise CannotFuse("numbers per layer and elements cannot be told apart in so small a model")
        buffers: dict[str, Tensor] = {"lr": lr} | ({} if clip is None else {"clip": clip})
        for prefix, record in (("local", local), ("down", down)):
            fields = zip(record._fields, record, strict=True)
            buffers |= {f"{prefix}_{name}": value for name, value in fields if value is not None}
        numbers = {name: getattr(algorithm, name) for name in options(type(algorithm))}
        buffers |= {f"number_{name}": value for name, value in numbers.items() if isinstance(value, Tensor)}
        kinds = {name: sizes[value.shape[-1]] for name, value in buffers.items()}
        values, outputs = _trace(algorithm, local, down, clip is not None, kinds)
        matrices = torch.tensor([[float(len(shape) > 1) for shape in layers.shapes.values()]], device=lr.device)
        buffers["matrices"] = matrices.expand(self._rows, -1)
        self._outputs = {field: buffers[f"local_{field}"] for field in outputs}
        self._blocks, self._groups, aligned = _block_table(layers, lr.device)
        strides = (
            [value.stride(0) for name, value in buffers.items() if values[name].kind == "element"] if values else []
        )
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
            source, inputs, norms, is_last = write_pass(
                values, outputs, number, rounded=rounded is not None, aligned=aligned
            )
            self._passes.append(Pass(_compiled(source), tuple(inputs), tuple(norms), is_last))
        self._values = values
        for value in values.values():
            if value.norm_of:
                groups = len(self._groups[value.over])
                self._norms[value.name] = torch.zeros(self._rows, groups, device=lr.device)
        self._partial = {name: torch.zeros(self._rows, len(self._blocks), device=lr.device) for name in self._norms}

    def addresses(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return a line per gradient: address, stride between rows, bytes of an element, and if rows are aligned."""
        rows = [[g.data_ptr(), g.stride(0), g.element_size(), g.stride(0) % ALIGNMENT == 0] for g in gradients]
        return torch.tensor(rows, dtype=torch.int64)

    def run(self, rows: int, active: Tensor, addresses: Tensor) -> None:
        """Take the step in the first rows.

        Args:
            rows: how many.
            active: 0 for a row that keeps its state [rows].
            addresses: those of the gradients, on the device.
        """
        grid = (len(self._blocks), rows)
        for step in self._passes:
            arguments: list[Any] = []
            for name in step.inputs:
                if name != "grad":
                    buffer = self._norms[name] if name in self._norms else self._buffers[name]
                    arguments += [buffer, buffer.stride(0)]
            arguments += [self._partial[name] for name in step.norms]
            if step.is_last:
                for field, buffer in self._outputs.items():
                    target = self._scratch.get(field, buffer)
                    arguments += [target, target.stride(0)]
                if self._rounded is not None and "y" in self._outputs:
                    arguments += [self._rounded, self._rounded.stride(0)]
            launch(
                step.function,
                grid,
                self._blocks,
                active,
                addresses,
                *arguments,
                BLOCK=BLOCK,
                num_warps=4,
            )
            for name in step.norms:
                groups = self._groups[self._values[name].over]
                launch(
                    _add_squares, (len(groups), rows), self._partial[name], self._norms[name], groups,
                    len(self._blocks), SUMMED_BLOCKS, num_warps=4,
                )  # fmt: skip
        for field, scratch in self._scratch.items():  # not in place: other blocks may still read the old number
            buffer = self._outputs[field]
            buffer[:rows].copy_(torch.where(active[:rows].unsqueeze(1) > 0, scratch[:rows], buffer[:rows]))


def _trace(
    algorithm: Algorithm, local: Any, down: Any, clipped: bool, kinds: Mapping[str, Kind]
) -> tuple[dict[str, Value], dict[str, str]]:
    """Run the step on a tiny model; return all values, and the name of the new value of every local field."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"element": TINY.size, "row": 1, "tensor": len(TINY.group_sizes("tensor"))}
    sizes["module"] = len(TINY.group_sizes("module"))
    trace = Trace()

    def draw(name: str) -> Tensor:
        tensor = torch.rand(TRACED_ROWS, sizes[kinds.get(name, "element")], generator=generator) + 0.5
        trace.add_input(name, tensor)
        return tensor

    def record(prefix: str, like: Any) -> Any:
        fields = zip(like._fields, like, strict=True)
        return type(like)(*(None if value is None else draw(f"{prefix}_{name}") for name, value in fields))

    tiny_local, tiny_down = record("local", local), record("down", down)
    lr, grad = draw("lr"), draw("grad")
    numbers = {name.removeprefix("number_"): draw(name) for name in kinds if name.startswith("number_")}
    limit = draw("clip") if clipped else None
    tiny = dataclasses.replace(algorithm, **numbers)  # type: ignore[type-var]
    layers = TracedLayers(trace)
    with trace:
        if limit is not None:
            grad = clip_by_norm(grad, limit)
        after = tiny.step(tiny_local, tiny_down, grad, lr, layers)
    outputs = {}
    for field, old, new in zip(tiny_local._fields, tiny_local, after, strict=True):
        if new is not None and new is not old:
            if old is None or new.shape != old.shape:
                raise CannotFuse(f"field '{field}' changes its shape")
            outputs[field] = trace.name_of(new)
    return trace.values, outputs


def _block_table(layers: Layers, device: torch.device) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Return the blocks, the first and last block of every layer, and whether all blocks start at aligned elements.

    A block is [start, end, tensor, module, start of the tensor, is first of its tensor, of its module, of the row].
    """
    rows: list[list[int]] = []
    modules, ends, total = layers.group_sizes("module"), [], 0
    for size in modules:
        total += size
        ends.append(total)
    start, groups = 0, {"tensor": [], "module": [[0, 0] for _ in modules], "row": []}  # type: ignore[var-annotated]
    seen_modules: set[int] = set()
    for tensor, size in enumerate(layers.sizes):
        module = next(m for m, end in enumerate(ends) if start < end or size == 0)
        first = len(rows)
        for place in range(start, start + size, BLOCK):
            new_module = module not in seen_modules
            seen_modules.add(module)
            if new_module:
                groups["module"][module][0] = len(rows)
            flags = [int(place == start), int(new_module), int(not rows)]
            rows.append([place, min(place + BLOCK, start + size), tensor, module, start, *flags])
            groups["module"][module][1] = len(rows)
        groups["tensor"].append([first, len(rows)])
        start += size
    groups["row"].append([0, len(rows)])
    aligned = all(row[0] % ALIGNMENT == 0 for row in rows)
    tables = {name: torch.tensor(pairs, dtype=torch.int32, device=device) for name, pairs in groups.items()}
    return torch.tensor(rows, dtype=torch.int32, device=device), tables, aligned
