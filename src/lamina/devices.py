"""Where a run computes: the device, and whether the model fits into its memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lamina.errors import BadInput
from lamina.limits import MODEL_COPIES, check_memory


def choose_device(device: str | torch.device) -> torch.device:
    """The device to run on: "auto" takes a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"device '{device}' cannot be used here: {reason}") from error
    return chosen


def check_model_fits(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose training cannot fit the memory: before it is copied, in words that help."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        return  # a lazy layer: its size is not known yet
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    count = sum(tensor.numel() for tensor in model.parameters())
    # one copy is the caller's own, which lies in the host's memory already
    copies = MODEL_COPIES - 1 if device.type == "cpu" else MODEL_COPIES
    check_memory(f"training a model of {count:,} parameters", copies * size, "take a smaller model", device)
