"""Where each layer of a model lies in the flat vector x in R^p that the algorithms work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lamina.base.errors import BadInput
from lamina.base.finite import all_finite

Grouping = Literal["tensor", "module", "model"]
MatrixChoice = Literal["matrices", "hidden"]  # all tensors with two axes or more, or all but the model's first and last
MatrixFunction = Callable[[Tensor, tuple[int, ...]], Tensor]


class Layers:
    """The layout of a flat vector: one segment per trainable tensor, in the module's own order.

    A "layer" is one parameter tensor (``by="tensor"``, the practice of LAMB) or all tensors of one
    module together (``by="module"``: weight and bias share a norm); with ``by="model"`` the whole
    vector is one layer. Every method accepts any leading axes, so the same code serves one client, a
    stacked cohort and a population of experiments.

    >>> layers = Layers({"fc.weight": (2, 2), "fc.bias": (2,)})
    >>> u = torch.tensor([3.0, 0.0, 0.0, 4.0, 0.0, 1.0])
    >>> layers.norms(u)
    tensor([5., 1.])
    >>> layers.spread(torch.tensor([7.0, 8.0]))
    tensor([7., 7., 7., 7., 8., 8.])
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        if not shapes:
            raise BadInput(
                "the model has no trainable parameter: set requires_grad=True on at least one "
                "(adapters of peft: inference_mode=False)"
            )
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.names = tuple(self.shapes)
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.size = sum(self.sizes)
        modules: dict[str, int] = {}
        for name, size in zip(self.names, self.sizes, strict=True):
            owner = name.rpartition(".")[0]
            modules[owner] = modules.get(owner, 0) + size
        # Parameters of one module follow one another in named_parameters(), so groups are contiguous.
        self._sizes = {"tensor": self.sizes, "module": list(modules.values()), "model": [self.size]}
        self._names = {"tensor": self.names, "module": tuple(modules), "model": ("model",)}
        self._repeats: dict[tuple[str, torch.device], Tensor] = {}
        matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
        self._ends = {*matrices[:1], *matrices[-1:]}  # the first and last of the model, also in one of its parts

    @classmethod
    def of(cls, module: nn.Module) -> Layers:
        """Return the layout of a module's trainable parameters (a tied weight counts once)."""
        return cls({n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad})

    def group_names(self, by: Grouping = "tensor") -> tuple[str, ...]:
        """Return the names of the layers under a grouping."""
        return self._names[by]

    def group_sizes(self, by: Grouping = "tensor") -> list[int]:
        """Return the sizes of the layers under a grouping."""
        return self._sizes[by]

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors (each with the same leading axes) into [..., p]."""
        pieces = self.pieces(tensors)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the segments of the vector, [..., size of the tensor] each; no copy if the memory allows it."""
        pairs = [(tensors[name], len(shape)) for name, shape in self.shapes.items()]
        return [tensor.reshape(*tensor.shape[: tensor.dim() - axes], -1) for tensor, axes in pairs]

    def parts(self) -> list[Layers]:
        """Return one layout per tensor: what a method does layer by layer can be done part by part."""
        parts = [type(self)({name: shape}) for name, shape in self.shapes.items()]
        for part in parts:
            part._ends = self._ends
        return parts

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of [..., p] under the parameters' names and shapes; no copy."""
        lead = flat.shape[:-1]
        pieces = torch.split(flat, self.sizes, dim=-1)
        return {
            name: piece.reshape((*lead, *shape))
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def channels_last(self, device: torch.device | str = "cpu") -> ChannelsLast | None:
        """Return the layout with the input channels of every convolution kernel innermost; None without kernels."""
        return ChannelsLast(self.shapes, device) if any(len(shape) == 4 for shape in self.shapes.values()) else None

    def norms(self, u: Tensor, by: Grouping = "tensor") -> Tensor:
        """Return the Euclidean norm of every layer: [..., p] -> [..., number of layers]."""
        pieces = torch.split(u, self._sizes[by], dim=-1)
        return torch.stack([torch.linalg.vector_norm(piece, dim=-1) for piece in pieces], dim=-1)

    def means(self, u: Tensor, by: Grouping = "tensor") -> Tensor:
        """Return the mean over every layer: [..., p] -> [..., number of layers]."""
        return torch.stack([piece.mean(dim=-1) for piece in torch.split(u, self._sizes[by], dim=-1)], dim=-1)

    def spread(self, per_layer: Tensor, by: Grouping = "tensor") -> Tensor:
        """Repeat one value per layer over the layer: [..., number of layers] -> [..., p]."""
        if len(self._sizes[by]) == 1:
            return per_layer.expand(*per_layer.shape[:-1], self.size)
        key = (by, per_layer.device)
        if key not in self._repeats:
            self._repeats[key] = torch.tensor(self._sizes[by], device=per_layer.device)
        return per_layer.repeat_interleave(self._repeats[key], dim=-1, output_size=self.size)

    def matrices(self, of: MatrixChoice = "matrices") -> tuple[str, ...]:
        """Return the names of the tensors that are matrices: those with two axes or more, or all but the ends."""
        ends = self._ends if of == "hidden" else ()
        return tuple(name for name, shape in self.shapes.items() if len(shape) > 1 and name not in ends)

    def map_matrices(self, function: MatrixFunction, u: Tensor, of: MatrixChoice = "matrices") -> Tensor:
        """Return the vector with a function applied to all its matrices; the other tensors stay as they are.

        A convolution kernel is the matrix [out, in * kh * kw], and a tensor with three axes is a batch of matrices. The
        columns of a kernel may stand in another order, which must not matter to the function.

        Args:
            function: gets matrices [n, rows, cols], of all tensors with the same shape, and that shape; it returns
                matrices of the same size, each of which depends on one of its own alone.
            u: vectors [..., p].
            of: which tensors are matrices.

        >>> layers = Layers({"fc.weight": (2, 2), "fc.bias": (2,)})
        >>> layers.map_matrices(lambda matrices, shape: matrices.mT, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
        tensor([1., 3., 2., 4., 5., 6.])
        """
        pieces = dict(zip(self.names, torch.split(u, self.sizes, dim=-1), strict=True))
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in self.matrices(of):
            by_shape.setdefault(self.shapes[name], []).append(name)
        for shape, names in by_shape.items():
            alike = torch.stack([pieces[name] for name in names]) if len(names) > 1 else pieces[names[0]].unsqueeze(0)
            size = shape[1:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
            mapped = function(alike.reshape(-1, *size), shape).reshape(alike.shape)
            pieces |= dict(zip(names, mapped.unbind(0), strict=True))
        return torch.cat(list(pieces.values()), dim=-1) if len(pieces) > 1 else next(iter(pieces.values()))

    def where_matrix(self, one: Tensor, other: Tensor, of: MatrixChoice = "matrices") -> Tensor:
        """Return the elements of `one` in all matrices, and those of `other` in the other tensors: [..., p]."""
        names = self.matrices(of)
        pairs = zip(torch.split(one, self.sizes, dim=-1), torch.split(other, self.sizes, dim=-1), strict=True)
        pieces = [a if name in names else b for name, (a, b) in zip(self.names, pairs, strict=True)]
        return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]

    def first_nonfinite(self, u: Tensor) -> str | None:
        """Return the name of the first tensor that holds a NaN or an infinity, or None."""
        return next((name for name, piece in self.unflatten(u).items() if not all_finite(piece)), None)


class ChannelsLast(Layers):
    """The same vector in another order: convolution kernels as (out, kh, kw, in), which tensor cores read as they are.

    Norms per layer do not depend on the order within a layer, so algorithms need not know.

    >>> layers = Layers({"conv.weight": (1, 2, 1, 2)}).channels_last()
    >>> layers.order
    tensor([0, 2, 1, 3])
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], device: torch.device | str = "cpu") -> None:
        super().__init__(shapes)
        pieces = torch.split(torch.arange(self.size), self.sizes)
        ordered = [
            piece.reshape(shape).permute(0, 2, 3, 1).reshape(-1) if len(shape) == 4 else piece
            for piece, shape in zip(pieces, self.shapes.values(), strict=True)
        ]
        self.order = torch.cat(ordered).to(device)  # this layout's element j is the usual layout's element order[j]
        self.inverse = torch.argsort(self.order)

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the segments in this order; no copy of a tensor whose channels are last in memory."""
        moved = {
            name: tensors[name].movedim(-3, -1) if len(shape) == 4 else tensors[name]
            for name, shape in self.shapes.items()
        }
        return super().pieces(moved)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views under the parameters' usual shapes; kernels have their channels innermost in memory."""
        lead, tensors = flat.shape[:-1], {}
        for (name, shape), piece in zip(self.shapes.items(), torch.split(flat, self.sizes, dim=-1), strict=True):
            if len(shape) == 4:
                out, inp, kh, kw = shape
                tensors[name] = piece.reshape(*lead, out, kh, kw, inp).movedim(-1, -3)
            else:
                tensors[name] = piece.reshape((*lead, *shape))
        return tensors
