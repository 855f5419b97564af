"""Record the operations of an algorithm's local step, so that they can be written down as a kernel.

`Algorithm.step` is plain torch. It is run once on a tiny model while every operation is recorded. A step with an
operation that is not listed in `EXPRESSIONS` cannot be fused. Neither can one whose operations or constants depend on
the sizes of the model (``if grad.shape[-1] < 100``): a user's step is run again on the shapes of the real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.primitives import clip_by_norm
from lamina.algorithms.rehearsal import TINY, is_user_defined
from lamina.base.dispatch import WatchingMode
from lamina.objective.layers import Grouping, Layers, MatrixChoice, MatrixFunction

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
    "sign.default": "(tl.where({0} > 0, 1.0, 0.0) - tl.where({0} < 0, 1.0, 0.0))",  # of a NaN 0, as torch's
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

MATRIX_MASKS: dict[MatrixChoice, str] = {"matrices": "is_matrix", "hidden": "is_hidden"}  # inputs: 1 for a matrix

Kind = str  # "element", "tensor" or "module" (one number per layer), "row", or "number"


class CannotFuse(Exception):
    """A step has an operation without a Triton expression."""


@dataclass(frozen=True)
class Value:
    """A recorded value: an input (no `code`), an expression of earlier values, the norm of one, or one's matrices."""

    name: str
    kind: Kind
    code: str = ""
    uses: tuple[str, ...] = ()
    norm_of: str = ""  # the value whose norm this is, over `over`
    over: str = ""  # "tensor", "module" or "row"
    matrices_of: str = ""  # the value to whose matrices `function` was applied, by operations of torch
    function: Callable[[Layers, Tensor], Tensor] | None = dataclasses.field(default=None, compare=False)
    number_of_pass: int = 0  # the first kernel that can compute it: norms and matrices it needs are known by then


class Trace(WatchingMode):
    """The operations of a step on some layers, in order."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._kinds = {layers.size: "element", 1: "row"}  # of tensors by their last size
        self._kinds |= {len(layers.group_sizes(by)): by for by in ("module", "tensor")}
        self.values: dict[str, Value] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []  # so that no id is used twice
        self._only: Tensor | None = None  # the only value that may be read now, by operations that are not recorded

    def add_input(self, name: str, tensor: Tensor) -> None:
        """Name a tensor that the step starts from."""
        self._add(Value(name, self._kind(tensor)), tensor)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a value that was computed."""
        return self._names[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = func.__name__
        if self._only is not None:
            if any(id(leaf) in self._names and leaf is not self._only for leaf in tree_leaves((args, kwargs))):
                raise CannotFuse("another value than the matrices in a function of matrices")
            return result
        if operation == "linalg_vector_norm.default":
            order, axes = (args[1] if len(args) > 1 else 2), (args[2] if len(args) > 2 else None)
            if order != 2 or axes not in ([-1], [1]):
                raise CannotFuse(operation)
            self.add_norm(args[0], result, "row")
        elif not any(isinstance(argument, Tensor) and id(argument) in self._names for argument in args):
            number = _constant(operation, args, result)
            self._add(Value(self._new_name(), self._kind(result), code=_literal(number)), result)
        else:
            code, operands = self._expression(operation, args, kwargs, result)
            values = [self.values[name] for name in operands]
            number = max(value.number_of_pass for value in values)
            self._add(Value(self._new_name(), self._kind(result), code, tuple(operands), number_of_pass=number), result)
        return result

    def add_norm(self, vector: Tensor, norms: Tensor, over: str) -> None:
        """Record norms that a later kernel can read."""
        operand = self.values[self.name_of(vector)]
        name, number = self._new_name(), operand.number_of_pass + 1
        self._add(Value(name, self._kind(norms), "", (), operand.name, over, number_of_pass=number), norms)

    def add_copy(self, source: Tensor, copy: Tensor) -> None:
        """Record a per-layer value that every element of the layer reads."""
        value = self.values[self.name_of(source)]
        name = self._new_name()
        self._add(Value(name, self._kind(copy), value.name, (value.name,), number_of_pass=value.number_of_pass), copy)

    def apply_to_matrices(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Return a function of a vector, which reads no other value of the step."""
        self._only = vector
        try:
            return function(vector)
        finally:
            self._only = None

    def add_mapped(self, vector: Tensor, mapped: Tensor, function: Callable[[Layers, Tensor], Tensor]) -> None:
        """Record a function of a vector's matrices that a later kernel can read the result of."""
        operand = self.values[self.name_of(vector)]
        name, number = self._new_name(), operand.number_of_pass + 1
        value = Value(name, "element", matrices_of=operand.name, function=function, number_of_pass=number)
        self._add(value, mapped)

    def add_choice(self, of: MatrixChoice, one: Tensor, other: Tensor, chosen: Tensor) -> None:
        """Record the choice of one value in matrices, and of another elsewhere."""
        mask = MATRIX_MASKS[of]
        self.values.setdefault(mask, Value(mask, "tensor"))
        names = self.name_of(one), self.name_of(other)
        number = max(self.values[name].number_of_pass for name in names)
        code = "tl.where({} != 0, {}, {})".format(mask, *names)
        self._add(Value(self._new_name(), "element", code, (mask, *names), number_of_pass=number), chosen)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within the context."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _kind(self, tensor: Tensor) -> Kind:
        return self._kinds.get(tensor.shape[-1], "") if tensor.dim() else "number"

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
            first, second = (terms[1], terms[0]) if base == "rsub" else terms[:2]
            scale = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
            if scale != 1:
                second = f"({_literal(scale)} * {second})"
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
            start, end, weight = terms  # from the nearer end, as torch does
            near = f"{start} + {weight} * ({end} - {start})", f"{end} - (1.0 - {weight}) * ({end} - {start})"
            return f"tl.where({weight} < 0.5, {near[0]}, {near[1]})", operands
        if base == "threshold":
            return f"tl.where({terms[0]} <= {terms[1]}, {terms[2]}, {terms[0]})", operands
        if base == "_to_copy":
            return f"({terms[0]}).to(tl.float32)", operands
        if base in ("zeros_like", "ones_like", "full_like"):
            return _literal({"zeros_like": 0.0, "ones_like": 1.0}.get(base, args[-1])), operands
        if operation not in EXPRESSIONS:
            raise CannotFuse(operation)
        template = EXPRESSIONS[operation]
        return (terms[0] if template is None else template.format(*terms)), operands


def kind_of(by: Grouping) -> Kind:
    """Return the kind of one number per layer; if the whole model is one layer, that is a number per row."""
    return "row" if by == "model" else by


class TracedLayers(Layers):
    """Layers of a traced model; what a step asks of them is recorded as one operation each."""

    def __init__(self, layers: Layers, trace: Trace) -> None:
        super().__init__(layers.shapes)
        self._trace = trace

    def norms(self, u: Tensor, by: Grouping = "tensor") -> Tensor:
        """Record the norms of all layers."""
        with self._trace.paused():
            norms = super().norms(u, by)
        self._trace.add_norm(u, norms, kind_of(by))
        return norms

    def spread(self, per_layer: Tensor, by: Grouping = "tensor") -> Tensor:
        """Record a value that every element of a layer reads."""
        with self._trace.paused():
            elements = super().spread(per_layer, by)
        self._trace.add_copy(per_layer, elements)
        return elements

    def map_matrices(self, function: MatrixFunction, u: Tensor, of: MatrixChoice = "matrices") -> Tensor:
        """Record that a function is applied to all matrices, between two kernels."""
        mapped = self._trace.apply_to_matrices(
            lambda vector: super(TracedLayers, self).map_matrices(function, vector, of), u
        )
        self._trace.add_mapped(u, mapped, lambda layers, vector: layers.map_matrices(function, vector, of))
        return mapped

    def where_matrix(self, one: Tensor, other: Tensor, of: MatrixChoice = "matrices") -> Tensor:
        """Record a choice between two values by the tensor."""
        with self._trace.paused():
            chosen = super().where_matrix(one, other, of)
        self._trace.add_choice(of, one, other, chosen)
        return chosen


def _constant(operation: str, args: Sequence[Any], result: Any) -> float:
    """Return the number that a tensor without named arguments consists of."""
    if operation == "scalar_tensor.default":
        return float(args[0])
    if not isinstance(result, Tensor) or result.is_meta or not bool((result == result.flatten()[0]).all()):
        raise CannotFuse(operation)
    return float(result.flatten()[0])


def _literal(number: float) -> str:
    number = float(number)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def trace_step(
    algorithm: Algorithm, local: Any, down: Any, clipped: bool, kinds: Mapping[str, Kind], layers: Layers
) -> tuple[dict[str, Value], dict[str, str]]:
    """Return all values that a step computes, and the name of the new value of every local field."""
    values, outputs = _record_step(algorithm, local, down, clipped, kinds, TINY, "cpu")
    if not is_user_defined(algorithm):
        return values, outputs
    try:
        real_values, real_outputs = _record_step(algorithm, local, down, clipped, kinds, layers, "meta")
    except CannotFuse:
        raise
    except Exception as error:  # whatever a step does that needs numbers
        raise CannotFuse(f"an operation that cannot be followed without numbers ({type(error).__name__})") from error
    if real_outputs != outputs or list(map(_formula, real_values.values())) != list(map(_formula, values.values())):
        raise CannotFuse("the sizes of the model")
    return values, outputs


def _formula(value: Value) -> Value:
    """Return a value without its kind: in a small model, sizes of several kinds may be equal."""
    return dataclasses.replace(value, kind="")


def _record_step(
    algorithm: Algorithm, local: Any, down: Any, clipped: bool, kinds: Mapping[str, Kind], layers: Layers, device: str
) -> tuple[dict[str, Value], dict[str, str]]:
    """Run the step on these layers and record it; on the device "meta", tensors have shapes, but no numbers."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"element": layers.size, "row": 1, "tensor": len(layers.group_sizes("tensor"))}
    sizes["module"] = len(layers.group_sizes("module"))
    trace = Trace(layers)

    def draw(name: str) -> Tensor:
        shape = TRACED_ROWS, sizes[kinds.get(name, "element")]
        has_numbers = device != "meta"
        tensor = torch.rand(shape, generator=generator) + 0.5 if has_numbers else torch.empty(shape, device=device)
        trace.add_input(name, tensor)
        return tensor

    def record(prefix: str, like: Any) -> Any:
        fields = zip(like._fields, like, strict=True)
        return type(like)(*(None if value is None else draw(f"{prefix}_{name}") for name, value in fields))

    own_local, own_down = record("local", local), record("down", down)
    lr, grad = draw("lr"), draw("grad")
    numbers = {name.removeprefix("number_"): draw(name) for name in kinds if name.startswith("number_")}
    limit = draw("clip") if clipped else None
    more = {"loss": draw("loss")} if "loss" in kinds else {}
    with_numbers = dataclasses.replace(algorithm, **numbers)  # type: ignore[type-var]
    traced = TracedLayers(layers, trace)
    with trace:
        if limit is not None:
            grad = clip_by_norm(grad, limit)
        after = with_numbers.step(own_local, own_down, grad, lr, traced, **more)
    outputs = {}
    for field, old, new in zip(own_local._fields, own_local, after, strict=True):
        if new is not None and new is not old:
            if old is None or new.shape != old.shape:
                raise CannotFuse(f"field '{field}' changes its shape")
            outputs[field] = trace.name_of(new)
    return trace.values, outputs
