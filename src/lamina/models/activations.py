"""Smooth stand-ins for ReLU, for which the papers' smoothness assumption holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.models.registry import choice, number


class SMU(nn.Module):
    """The smooth maximum unit: SMU(x) = (x + x erf(mu x)) / 2 (Biswas et al. 2021; Sun et al. 2023, Table 8).

    It tends to ReLU as mu grows, and is the exact GELU at mu = 1/sqrt(2). mu is fixed, not trained: Sun et al.
    "select a proper mu" without giving it.

    >>> SMU(mu=1e6)(torch.tensor([-2.0, 0.0, 3.0])).tolist()
    [0.0, 0.0, 3.0]
    """

    def __init__(self, mu: float = 1.0) -> None:
        super().__init__()
        self.mu = number("mu", mu, low=0)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation elementwise."""
        return 0.5 * (x + x * torch.erf(self.mu * x))

    def extra_repr(self) -> str:
        """Show mu when the module is printed."""
        return f"mu={self.mu:g}"


def activation(name: str, mu: float) -> nn.Module:
    """Make ``relu``, ``gelu`` (its tanh form, as in Sun et al.'s Table 8) or ``smu``."""
    choice("activation", name, ("relu", "gelu", "smu"))
    if name == "relu":
        return nn.ReLU()
    return nn.GELU(approximate="tanh") if name == "gelu" else SMU(mu)
