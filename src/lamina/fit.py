"""Checks that a model, its data and the protocol fit each other, before the first round."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from lamina.algorithms.contract import Algorithm
from lamina.data.dataset import Dataset
from lamina.data.feed import prepare
from lamina.errors import BadInput
from lamina.evaluation import EVALUATION_BATCH
from lamina.limits import check_memory, in_bytes
from lamina.models.allocation import LargestActivation
from lamina.objective import Objective, cross_entropy
from lamina.plan import Plan
from lamina.vocabulary import check_vocabulary

log = logging.getLogger(__name__)


def check_fit(objective: Objective, data: Dataset, name: str, rows: int) -> bool:
    """Refuse data that do not fit the model and the loss, after a run of two samples; return if there is an accuracy.

    `name` is what messages call the data, "train" or "test". `rows` is the number of samples whose activations are in
    memory at once, for the estimate of memory.
    """
    check_vocabulary(objective, data, name)
    inputs = prepare(data.x[:2], data.mean, data.std, objective.dtype)
    written = objective.written_parameter(inputs)
    if written is not None:
        raise BadInput(
            f"the model's forward pass writes into the parameter '{written}', outside of the algorithm's step: "
            "compute a new tensor instead"
        )
    try:
        with torch.no_grad(), LargestActivation(len(inputs)) as activation:
            outputs = objective.outputs(objective.start, objective.buffers, inputs, train=False)
    except Exception as error:  # whatever a user's forward raises
        shape, reason = tuple(data.x.shape[1:]), " ".join(str(error).split())
        if not (data.x.is_floating_point() or data.x.dtype == torch.uint8):
            reason += "; integers reach the model as they are: give features as floats, x.astype('float32')"
        raise BadInput(f"the model cannot take the {name} data, samples of shape {shape}: {reason}") from error
    check_memory(
        f"an activation of {in_bytes(activation.bytes)} per sample, for {rows} samples of the {name} data,",
        activation.bytes * rows,
        "take a smaller model or smaller batches",
        objective.device,
    )
    if not isinstance(outputs, Tensor):
        raise BadInput(f"the model returns a {type(outputs).__name__}; it must return one tensor, its outputs")
    classes = data.classes if objective.loss is cross_entropy else None
    if classes is not None and (outputs.dim() < 2 or outputs.shape[1] < classes):
        shape = tuple(outputs.shape[1:])
        raise BadInput(
            f"the model's outputs have shape {shape} a sample, but the {name} labels go up to {classes - 1}: it needs "
            f"{classes}",
            without_data=f"the model's outputs have shape {shape} a sample, but the {name} data have more classes",
        )
    _check_loss(objective, outputs, data.y[:2], name)
    return objective.correct(outputs, data.y[:2], data.classes) is not None


def _check_loss(objective: Objective, outputs: Tensor, targets: Tensor, name: str) -> None:
    try:
        losses: Any = objective.loss(outputs, targets)
    except Exception as error:  # whatever a user's loss raises
        reason = " ".join(str(error).split())
        raise BadInput(f"the loss cannot compare the model's outputs with the {name} targets: {reason}") from error
    if not isinstance(losses, Tensor) or losses.shape != (len(targets),):
        raise BadInput("the loss must return one value per sample, a tensor of shape [n]: use reduction='none'")


def training_rows(plan: Plan) -> int:
    """Return how many samples' activations one local step keeps, at least: the activation and its gradient."""
    largest = int(plan.clients.parts.sizes.max(initial=1))
    return 2 * min(plan.protocol.batch_size or largest, largest)


def evaluation_rows(data: Dataset) -> int:
    """Return how many samples are evaluated at a time on a CPU."""
    return min(len(data), EVALUATION_BATCH)


def check_clients(algorithm: Algorithm, objective: Objective, data: Dataset, plan: Plan) -> None:
    """Refuse or report what would only show in a later round."""
    first = algorithm.client_init(objective.start, objective.layers)
    if plan.clients.moving is not None and any(value is not None for value in first):
        log.warning("clients keep state between rounds, but 'reallocate' gives them other data in every round")
    batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in objective.module.modules())
    batch = plan.protocol.batch_size
    sizes = plan.clients.parts.sizes
    if batch_norm and bool(((sizes if batch is None else sizes % batch) == 1).any()):
        one = prepare(data.x[:1], data.mean, data.std, objective.dtype)
        buffers = {n: b.clone() for n, b in objective.buffers.items()}
        with torch.no_grad():
            objective.outputs(objective.start, buffers, one, train=True)  # refuses a batch of one, or copes
