"""What all stacked layers share: clients folded into the batch and taken out of it again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


class CannotStack(Exception):
    """A module has a layer with no stacked form; the text names the layer and says why."""


class NormOptions(NamedTuple):
    """How to normalise, and what to do after it."""

    groups: int
    eps: float
    relu: bool = False
    twice: bool = False  # return the images twice, for two layers whose gradients the norm adds up


def unfold_clients(x: Tensor, clients: int) -> Tensor:
    """[C * B, ...] -> [C, B, ...]."""
    return x.reshape(clients, -1, *x.shape[1:])


def per_client(parameter: Tensor, x: Tensor, feature_axis: int) -> Tensor:
    """View [C, F] so that it broadcasts over x [C, B, ...] with the features at `feature_axis`."""
    shape = [1] * x.dim()
    shape[0], shape[feature_axis] = parameter.shape
    return parameter.reshape(shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Every client's x W^T + b, computed as (W x^T + b)^T: its backward pass gives W's gradient in W's own layout."""
    clients, features = weight.shape[:2]
    if clients == 1:  # squeezed, not indexed: the backward pass of an index fills and copies a tensor
        return F.linear(x, weight.squeeze(0), None if bias is None else bias.squeeze(0).to(weight.dtype))
    columns = x.reshape(clients, -1, x.shape[-1]).transpose(1, 2)
    if bias is None:
        out = torch.bmm(weight, columns)
    else:
        out = torch.baddbmm(bias.to(weight.dtype).unsqueeze(2), weight, columns)
    return out.transpose(1, 2).reshape(*x.shape[:-1], features)


def at_least_float32(x: Tensor) -> torch.dtype:
    """Return the type that statistics of x are computed in."""
    return torch.promote_types(x.dtype, torch.float32)
