"""torch's Muon beside its AdamW, as a local half: Muon takes matrices only, so the other tensors are AdamW's."""

from unittest import mock

import torch

SHAPES = {"conv.weight": (4, 18), "conv.bias": (4,), "fc.weight": (5, 8), "fc.bias": (5,)}  # the kernel as a matrix


def muon(y, grad, lr, state, k, beta, beta1, beta2, eps, decay, muon_scale, in_float64=False):
    """Take a local step; both optimizers are created anew in every round.

    With `in_float64` Muon's iteration does not round to bfloat16.
    """
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    if k == 1:
        parts = [part.reshape(shape) for part, shape in zip(y.split(sizes), SHAPES.values(), strict=True)]
        parameters = state["parameters"] = [torch.nn.Parameter(part.clone()) for part in parts]
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim < 2]
        state["optimizers"] = (
            torch.optim.Muon(matrices, lr=lr * muon_scale, weight_decay=decay, momentum=beta),
            torch.optim.AdamW(others, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay),
        )
    for parameter, part in zip(state["parameters"], grad.split(sizes), strict=True):
        parameter.grad = part.reshape(parameter.shape).clone()
    rounding = torch.Tensor.clone if in_float64 else torch.Tensor.bfloat16
    with mock.patch.object(torch.Tensor, "bfloat16", rounding):
        for optimizer in state["optimizers"]:
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in state["parameters"]])
