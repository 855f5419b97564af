"""Local Muon: clients run Muon on matrices, and AdamW on all other tensors, from zero moments in every round.

The baseline of FedMuon's paper (Liu et al. 2025); Muon is that of Jordan et al. 2024. The paper's full text was not at
hand: this follows its authors' code. "C8" is an entry in the list of choices: docs/reference/algorithms.md. fedmuon.py
builds on this file.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lamina.algorithms.contract import Number
from lamina.algorithms.declaration import algorithm, option
from lamina.algorithms.localadamw import Local, LocalAdamW
from lamina.algorithms.primitives import add_decay, descend, ema, is_exactly
from lamina.base.errors import BadInput
from lamina.objective.layers import Layers, MatrixChoice

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c of the Newton-Schulz iteration
ITERATIONS = 5
# Added to the norm, so that a matrix of zeros stays one: the number of FedMuon's code and of Jordan et al.'s, which is
# far below the norms of gradients, and which bfloat16 can hold.
LEAST_NORM = 1e-7


def newton_schulz(u: Tensor) -> Tensor:
    """Return matrices [n, rows, cols] with the singular vectors of u, and singular values near 1 (0.7 to 1.2).

    A singular value far below the others remains small. An iteration is x <- (a I + b A + c A^2) x with A = x x'.
    """
    a, b, c = COEFFICIENTS
    x: Tensor = u / (torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True) + LEAST_NORM)
    is_tall = u.shape[-2] > u.shape[-1]
    x = x.mT if is_tall else x
    pairs, as_halves = ITERATIONS // 2 if _take_pairs(x) else 0, _multiply_halves(x)

    def polynomial(gram: Tensor) -> Tensor:
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)

    def multiply(q: Tensor, scale: float) -> Tensor:
        """Return (scale I + q) x."""
        if as_halves:
            return torch.baddbmm(x, q, low, torch.float32, beta=scale, out=x)
        if x.dtype == torch.bfloat16:
            return torch.baddbmm(x, q, x, beta=scale)  # rounded once
        return (q @ x).add_(x, alpha=scale)  # on a GPU, a large baddbmm copies x and is slower

    for _ in range(pairs):
        # x <- (a I + q) (a I + p) x, where p is the polynomial of A, and q that of the next A, (a I + p) A (a I + p).
        # a I is never added to p or q, because its rounding would hide small singular values. All factors commute, but
        # in this order rounding errors are multiplied by a I + p on the right, which is small where x is large.
        low = x.half() if as_halves else x
        gram = low @ low.mT
        p = polynomial(gram)
        half = torch.baddbmm(gram, p, gram, beta=a)
        q = polynomial(torch.baddbmm(half, half, p, beta=a))
        x = multiply(torch.baddbmm(p + q, q, p, beta=a), a * a)
    for _ in range(ITERATIONS - 2 * pairs):
        low = x.half() if as_halves else x
        x = multiply(polynomial(low @ low.mT), a)
    return x.mT if is_tall else x


def _multiply_halves(x: Tensor) -> bool:
    """Return whether to keep x in float32 but to round it, and all of A, to float16 for the products.

    Where a run allows TF32, a GPU that has it rounds factors anyway, to as many bits, and it multiplies float16 twice
    as fast. All factors are far below the largest float16, as x has singular values up to 1.2; what is below 6e-8 is
    lost.
    """
    if not x.is_cuda or x.dtype != torch.float32 or x.requires_grad or torch.version.hip is not None:
        return False
    return torch.backends.cuda.matmul.allow_tf32 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _take_pairs(x: Tensor) -> bool:
    """Return whether to take two iterations with one product with x [n, rows, cols] at the end.

    This needs 2 rows^2 cols + 5 rows^3 multiplications instead of 4 rows^2 cols + 2 rows^3. But an error in A grows up
    to a^2 = 12 times with every iteration that does not start from x. In TF32 a result's error is about twice that of
    single iterations; it would be up to 8 times with three at the end, and in bfloat16 up to 5 times with pairs.
    """
    return x.shape[-1] > 1.5 * x.shape[-2] and x.dtype != torch.bfloat16


@algorithm(
    "localmuon",
    title="Local Muon",
    reference="Liu et al. 2025",
    link="https://arxiv.org/abs/2510.27403",
    lr=0.03,
    presets={
        "authors": {"arithmetic": "bfloat16"},  # their code, with the constants for ResNet-18 (C12)
        "deit_tiny": {"muon_scale": 10.0},  # their constant for DeiT-Tiny, beside a rate of 3e-4
    },
)
class LocalMuon(LocalAdamW):
    """Local AdamW with the matrices' steps replaced by orthogonal ones."""

    beta: Number = option(0.95, "beta, decay rate of the matrices' momentum", low=0.0, high=1.0)
    muon_scale: Number = option(
        0.5, "c, the matrices' rate relative to that of the other tensors", low=0.0, open_low=True
    )
    beta2: Number = option(0.95, "beta_2, decay rate of the second moment", low=0.0, high=1.0)
    eps: Number = option(1e-10, "epsilon, added to the root of v", low=0.0)
    nesterov: bool = option(True, "orthogonalise (1 - beta) g + beta M, or the momentum M alone (C8)")
    conv_scale: Literal["one", "flattened"] = option(
        "one", "factor of a kernel's step: 1, or that of its matrix, sqrt(max(1, rows/cols)) (C9)"
    )
    muon_on: MatrixChoice = option("matrices", "all matrices, or all but the model's first and last (C10)")
    arithmetic: Literal["model", "bfloat16"] = option("model", "precision of the Newton-Schulz iteration (C12)")

    def check(self) -> None:
        """Refuse decay rates with which nothing is learned."""
        super().check()
        if is_exactly(self.beta, 1):
            raise BadInput("beta = 1 never lets a gradient into the momentum, so nothing is learned: choose beta < 1")

    def check_model(self, layers: Layers) -> None:
        """Refuse a model without matrices."""
        if not layers.matrices():
            raise BadInput(
                f"{self.card.title} orthogonalises matrices, and no trained tensor of the model has two axes or more: "
                "choose another algorithm, such as localadamw"
            )
        if not layers.matrices(self.muon_on):
            raise BadInput(
                'muon_on = "hidden" leaves out the first and the last matrix, and the model has no other: '
                'set muon_on = "matrices"'
            )

    def orthogonal(self, matrices: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return s NS5(U), for the matrices U of tensors of this shape."""
        low = matrices.bfloat16() if self.arithmetic == "bfloat16" else matrices
        o = newton_schulz(low).to(matrices.dtype)
        rows, cols = matrices.shape[-2:]
        is_scaled = rows > cols and (len(shape) < 4 or self.conv_scale == "flattened")
        return math.sqrt(rows / cols) * o if is_scaled else o

    def local_step(self, local: Local, grad: Tensor, layers: Layers) -> tuple[Local, Tensor]:
        """Return the local state with the moments after a gradient, and the direction c (O + lambda y)."""
        after, psi = self.next_moments(local, grad)  # AdamW's
        m = ema(local.m, grad, self.beta)
        u = ema(m, grad, self.beta) if self.nesterov else m
        muon = self.muon_scale * add_decay(layers.map_matrices(self.orthogonal, u, self.muon_on), local.y, self.decay)
        adamw = add_decay(psi, local.y, self.decay)
        after = after._replace(m=layers.where_matrix(m, after.m, self.muon_on))
        return after, layers.where_matrix(muon, adamw, self.muon_on)

    def step(self, local: Local, down: Any, grad: Tensor, lr: Number, layers: Layers) -> Local:
        after, direction = self.local_step(local, grad, layers)
        return after._replace(y=descend(local.y, direction, lr))
