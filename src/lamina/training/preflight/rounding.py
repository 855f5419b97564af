"""Find parameters whose exact gradient is zero: rounding errors must not move them.

A bias before BatchNorm cancels out, and so does the key bias of attention. Their gradients are zero, but rounding gives
them small random values. An adaptive step divides by the size of the gradient, a layer-wise one by that of the step:
both turn such an error into a full step, and no two engines round alike.

A gradient that is zero for every input and all weights shrinks with the precision of the arithmetic. So the gradients
of a few samples are compared in float32 and in float64, at several points.
"""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import Tensor

from lamina.base import rng
from lamina.base.text import listed
from lamina.data.dataset import Dataset
from lamina.engines.devices import arithmetic
from lamina.objective.batch import map_batch
from lamina.objective.objective import Objective

log = logging.getLogger(__name__)

SAMPLES = 6
POINTS = 3
SMALL = 1e-5  # relative to the largest gradient: such elements may be rounding errors
SMALL_FRACTION = 0.25  # of a vector; a third of attention's joint bias of queries, keys and values is the keys'
SHRINKS_TO = 1e-4  # of rounding errors, from float32 to float64; a true gradient keeps its size


def ignore_rounding(objective: Objective, data: Dataset) -> None:
    """Let the objective return zero where the exact gradient is zero, and log the names of these parameters."""
    if objective.kept_gradients is not None:
        return
    objective.kept_gradients = {}
    with contextlib.suppress(Exception):  # of a user's module that does not run in the other precision, say
        zeros = _zero_gradients(objective, data)
        objective.kept_gradients = {name: (~is_zero).to(objective.start) for name, is_zero in zeros.items()}
    if objective.kept_gradients:
        log.info(
            "the training loss does not depend on %s, or on a part of it: its gradient is set to zero, or rounding "
            "would move it (a bias before a norm layer, or of attention's keys, can be left out)",
            listed(list(objective.kept_gradients)),
        )


def _zero_gradients(objective: Objective, data: Dataset) -> dict[str, Tensor]:
    """Return which elements of a parameter have a gradient of zero, by name; only parameters with such elements."""
    single = objective.in_type(torch.float32)
    first = _gradient(single, data, point=0)
    largest = max(float(gradient.max()) for gradient in first.values())
    small = {name: gradient <= SMALL * largest for name, gradient in first.items() if gradient.dim() == 1}
    suspects = [name for name, is_small in small.items() if float(is_small.double().mean()) >= SMALL_FRACTION]
    if not suspects:
        return {}
    double = objective.in_type(torch.float64)
    rough = [first, *(_gradient(single, data, point) for point in range(1, POINTS))]
    exact = [_gradient(double, data, point) for point in range(POINTS)]
    zeros = {}
    for name in suspects:
        rough_sizes, exact_sizes = (torch.stack([g[name] for g in gradients]) for gradients in (rough, exact))
        error = rough_sizes[:, small[name]].max()
        is_live = (rough_sizes > 0).any(0)
        is_zero = (exact_sizes <= SHRINKS_TO * error).all(0) & is_live
        if bool(is_zero.any()):
            # an element that is exactly zero, such as the bias of a unit that is switched off, is as the others are
            zeros[name] = is_zero | ~is_live if torch.equal(is_zero, is_live) else is_zero
    return zeros


def _gradient(objective: Objective, data: Dataset, point: int) -> dict[str, Tensor]:
    """Return the absolute gradient of a few samples by name, with other weights at every point."""
    generator = torch.Generator(objective.device).manual_seed(point)
    noise = torch.randn(objective.layers.size, generator=generator, dtype=torch.float32, device=objective.device)
    x = objective.start + (0.1 * objective.start.abs() + 0.01) * noise  # a bias may start at zero
    index = torch.linspace(0, len(data) - 1, SAMPLES, device=x.device).long()
    targets = map_batch(lambda y: y[index].to(objective.dtype) if y.is_floating_point() else y[index], data.y)
    buffers = {name: buffer.clone() for name, buffer in objective.buffers.items()}
    with rng.forked(x.device, seed=0), arithmetic("fp32", benchmark=False):
        gradient, _ = objective.gradient(x, buffers, data.inputs(index, objective.dtype), targets)
    return objective.layers.unflatten(gradient.double().abs())
