"""Where a run computes, and how exactly: the device, the precision, and whether the model fits into memory."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lamina.base.errors import BadInput
from lamina.base.limits import MODEL_COPIES, check_memory

Precision = Literal["fp32", "tf32", "bf16"]  # of matrix products and convolutions

log = logging.getLogger(__name__)


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device to run on; "auto" takes a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # also raises an error on a device without numbers ("meta")
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0][:100]
        raise BadInput(
            f"device = '{device}': torch cannot use it here ({reason}); use auto, cpu, or a GPU that `lamina doctor` "
            "lists, such as cuda or cuda:1"
        ) from error
    return chosen


def usable_precision(precision: Precision, device: torch.device) -> Precision:
    """Return "fp32" instead of "bf16" on a CPU without bf16 instructions, where it is hundreds of times slower."""
    if precision == "bf16" and device.type == "cpu" and not has_bf16_instructions():
        log.warning("precision='bf16': this CPU has no bf16 instructions, so the run uses fp32")
        return "fp32"
    return precision


def has_bf16_instructions() -> bool:
    """Return whether this CPU multiplies bf16 numbers in hardware."""
    kinds = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # of newer versions of torch
    checks = [getattr(torch.cpu, kind) for kind in kinds if hasattr(torch.cpu, kind)]
    if checks and platform.machine().lower() in ("x86_64", "amd64"):  # there oneDNN says yes wherever there is AVX-512
        return any(check() for check in checks)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def check_model_fits(model: nn.Module, device: torch.device) -> None:
    """Refuse a model whose training cannot fit into memory, before it is copied."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        return  # a lazy layer: its size is not known yet
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    count = sum(tensor.numel() for tensor in model.parameters())
    # one copy is the caller's own, which lies in the host's memory already
    copies = MODEL_COPIES - 1 if device.type == "cpu" else MODEL_COPIES
    check_memory(f"training a model of {count:,} parameters", copies * size, "take a smaller model", device)


_one_at_a_time = threading.RLock()


@contextmanager
def arithmetic(precision: Precision, deterministic: bool = False, *, benchmark: bool = True) -> Iterator[None]:
    """Set the arithmetic of convolutions and matrix products within a context, for one thread at a time.

    The switches belong to the whole process, and simulations that are alike share a module: other threads wait.

    Args:
        precision: "fp32" allows float32 only; the others allow TensorFloat-32. (torch's default mixes them.)
        deterministic: ask torch for reproducible kernels; it warns if a layer has none.
        benchmark: let cuDNN try all its algorithms on every new shape.
    """
    with _one_at_a_time:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
        matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
        cudnn.benchmark = benchmark and not deterministic
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
            if deterministic:  # otherwise unchanged: the call imports torch's compiler, which takes seconds
                torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning)
