"""Which engine is the fastest for a model, by a rule: the same model, batches and kind of processor give the same one.

docs/explanation/engines.md has the measurements behind the numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.base import rng
from lamina.base.dispatch import WatchingMode
from lamina.engines.stacked.memory import ALONE_FROM_PARAMETERS
from lamina.engines.state import copy_buffers
from lamina.objective.batch import Inputs, tensors
from lamina.objective.objective import Objective

# on a GPU
FEW_CLIENTS = 32  # of a round: with more, every model that can be stacked is faster stacked
LARGE = 1_000_000  # parameters of a network with BatchNorm: with fewer, it is faster stacked

# on a CPU, where stacking saves the time that torch needs for every operation, whatever its size
MOST_FLOPS = 80e6  # of a client's batch in a forward pass
MOST_NORMALISED = 250_000  # numbers that this pass writes in a network with norms over pixels: slow when stacked
SMALL_LSTM = 32  # units: torch's own LSTM computes all time steps in one operation

PIXEL_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def why_apart(objective: Objective, cohort: int, batch: int, sample: Inputs) -> str:
    """Return why clients are trained faster one by one than stacked, or an empty string.

    Args:
        objective: the model, on its device.
        cohort: how many clients train in a round.
        batch: samples of a local step.
        sample: some inputs.
    """
    trained = [m for m in objective.module.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    if objective.device.type == "cuda":
        return _on_a_gpu(trained, sum(p.numel() for p in objective.module.parameters()), cohort)
    return _on_a_cpu(objective, trained, batch, sample)


def _on_a_gpu(trained: list[nn.Module], size: int, cohort: int) -> str:
    if cohort > FEW_CLIENTS:
        return ""
    if any(isinstance(layer, nn.RNNBase) for layer in trained):
        return "cuDNN computes all time steps of a recurrent layer at once"
    if size >= LARGE and any(isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d) for layer in trained):
        return "BatchNorm in a large network is slower stacked"
    return ""


def _on_a_cpu(objective: Objective, trained: list[nn.Module], batch: int, sample: Inputs) -> str:
    if objective.layers.size >= ALONE_FROM_PARAMETERS:
        return f"a network of {objective.layers.size:,} parameters gains nothing from company on a CPU"
    if any(isinstance(layer, nn.LSTM) and layer.hidden_size > SMALL_LSTM for layer in trained):
        return f"torch's LSTM is faster than a stacked one of more than {SMALL_LSTM} units on a CPU"
    work = _Work()
    with rng.forked(objective.device), torch.no_grad(), work:
        objective.outputs(objective.start, copy_buffers(objective.buffers), sample, train=True)
    scale = batch / len(tensors(sample)[0])
    if work.flops * scale > MOST_FLOPS:
        return f"a pass over a batch has {work.flops * scale / 1e6:.0f} million flops: stacking saves little on a CPU"
    if work.numbers * scale > MOST_NORMALISED and any(isinstance(layer, PIXEL_NORMS) for layer in trained):
        return "norms over many pixels are slower stacked on a CPU"
    return ""


class _Work(WatchingMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point operations of a forward pass, and the numbers that it writes."""

    flops, numbers = 0, 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # imports Triton, which a run on a GPU does meanwhile

        self._count_of = flop_registry.get

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            count = self._count_of(func.overloadpacket)
            self.flops += 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
            main = result[0] if isinstance(result, tuple) else result  # norms also return their statistics
            self.numbers += main.numel() if isinstance(main, Tensor) else 0
        return result
