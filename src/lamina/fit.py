"""Checks that a model, its data and the protocol fit each other, before the first round."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lamina import rng
from lamina.algorithms.contract import Algorithm
from lamina.batch import map_batch, tensors
from lamina.data.dataset import Dataset
from lamina.errors import BadInput, nearest
from lamina.evaluation import EVALUATION_BATCH
from lamina.limits import check_memory, in_bytes
from lamina.losses import IGNORED, TORCH_LOSSES, Loss, causal_lm, class_axis, counted, is_binary, is_own, nll
from lamina.models.allocation import LargestActivation
from lamina.objective import Objective
from lamina.plan import Plan
from lamina.text import listed
from lamina.vocabulary import check_vocabulary

log = logging.getLogger(__name__)

PROBABILITY_SAMPLES = 64  # logits of so many samples do not all lie between 0 and 1 by chance
SOFT_LABEL_TOLERANCE = 0.05  # how far rounding may move the sum of a sample's soft labels from 1
NLL_TOLERANCE = 1e-3  # rounding may make a log-probability larger than 0 by so much
INTEGER_REFUSED = re.compile(r"\bLong(Tensor)?\b|\blong (long|int)\b|int64")  # in torch's messages
MASK_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": lambda mask: mask.long(),
    "mask": lambda mask: mask,
    "lengths": lambda mask: mask.sum(1),
}


def check_fit(objective: Objective, data: Dataset, name: str, rows: int) -> bool:
    """Refuse data that do not fit the model and the loss, after a run of two samples; return if there is an accuracy.

    `name` is what messages call the data, "train" or "test". `rows` is the number of samples whose activations are in
    memory at once, for the estimate of memory.
    """
    if isinstance(data.x, dict):
        _check_keys(objective.module, list(data.x), name)
    check_vocabulary(objective, data, name)
    inputs, samples = data.inputs(slice(2), objective.dtype), len(data.y[:2])
    written = objective.written_parameter(inputs)
    if written is not None:
        raise BadInput(
            f"the model's forward pass writes into the parameter '{written}', outside of the algorithm's step: "
            "compute a new tensor instead"
        )
    try:
        with torch.no_grad(), LargestActivation(samples) as activation:
            outputs = objective.outputs(objective.start, objective.buffers, inputs, train=False)
    except BadInput:
        raise
    except Exception as error:  # whatever a user's forward raises
        shape, reason = map_batch(lambda values: tuple(values.shape[1:]), data.x), " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"it looks for {reason}, which they do not have"
        elif tensors(data.x)[0].dtype == torch.int64 and INTEGER_REFUSED.search(reason):
            reason += "; integers reach the model as they are: give features as floats, x.astype('float32')"
        raise BadInput(f"the model cannot take the {name} data, samples of shape {shape}: {reason}") from error
    check_memory(
        f"an activation of {in_bytes(activation.bytes)} per sample, for {rows} samples of the {name} data,",
        activation.bytes * rows,
        "take a smaller model or smaller batches",
        objective.device,
    )
    if outputs.dim() == 0 or len(outputs) != samples:
        raise BadInput(
            f"the model's outputs have shape {tuple(outputs.shape)} for {samples} samples of the {name} data; the "
            "first axis must be the samples'"
        )
    axis = class_axis(objective.loss)
    classes = data.classes if axis is not None else None
    if classes is not None and axis is not None and (outputs.dim() < 2 or outputs.shape[axis] < classes):
        shape = tuple(outputs.shape[1:])
        is_last = axis == 1 and outputs.shape[:-1] == data.y[:2].shape and outputs.shape[-1] >= classes
        hint = ", or loss='token_cross_entropy' or 'causal_lm' for classes on the last axis" if is_last else ""
        lowest = int(torch.where(data.y < 0, classes, data.y).min())
        if 0 < lowest < classes and outputs.dim() > 1 and classes - lowest <= outputs.shape[axis]:
            hint = f"; classes are numbered from 0, and the labels start at {lowest}: subtract {lowest}"
        elif data.y.dim() > 1 and not is_last:
            hint = (
                f"; if {classes - 1} marks what to ignore, give a Dataset(x, y, ignore_index={classes - 1}), or "
                f"data.ignore_index = {classes - 1} in a file"
            )
        raise BadInput(
            f"the model's outputs have shape {shape} a sample, but the {name} labels go up to {classes - 1}: it needs "
            f"{classes}{hint}",
            without_data=f"the model's outputs have shape {shape} a sample, but the {name} data have more classes",
        )
    _check_loss(objective, outputs, data.y[:2], name)
    if is_own(objective.loss) and samples > 1:
        _check_samples_alone(objective, data, name)
    if is_binary(objective.loss):
        others = data.y[((data.y < 0) | (data.y > 1)) & (data.y != IGNORED)]
        rule = f"bce needs targets from 0 to 1, and some {name} targets are others"
        advice = "give missing labels as -100; cross_entropy takes classes"
        if len(others):
            raise BadInput(f"{rule}, such as {float(others[0]):g}: {advice}", without_data=f"{rule}: {advice}")
    if axis is not None and data.y.is_floating_point():
        _check_soft_labels(data.y, axis, name)
    has_target = counted(objective.loss, data.y)
    if name == "test" and has_target is not None and not bool(has_target.any()):
        raise BadInput("all targets of the test data are -100, which does not count: give at least one label")
    if objective.loss is nll and name == "train" and bool((outputs > NLL_TOLERANCE).any()):
        log.warning("nll needs log-probabilities, and the model's outputs are larger than 0: use cross_entropy instead")
    has_accuracy = objective.correct(outputs, data.y[:2], data.classes) is not None
    if has_accuracy and axis is None and not is_binary(objective.loss) and outputs[0].numel() == 1 and name == "train":
        with torch.no_grad():
            inputs = data.inputs(slice(PROBABILITY_SAMPLES), objective.dtype)
            several = objective.outputs(objective.start, objective.buffers, inputs, train=False)
        if bool(((several >= 0) & (several <= 1)).all()):
            log.warning("all outputs lie in 0..1; the accuracy needs logits, not probabilities: leave the Sigmoid out")
    return has_accuracy


def warn_of_unseen_classes(loss: Loss, train: Dataset, test: Dataset) -> None:
    """Warn of a class that occurs only in the test maps; new tokens in a text to predict are usual."""
    if class_axis(loss) is None or loss is causal_lm or train.y.dim() < 2 or not (train.classes and test.classes):
        return
    size = max(train.classes, test.classes) + 1  # the first number counts the positions without a label
    seen, tested = (data.y.flatten().clamp(min=-1).add(1).bincount(minlength=size) > 0 for data in (train, test))
    unseen = (tested & ~seen)[1:].nonzero().flatten().tolist()
    if unseen:
        log.warning("class %d appears only in the test data: no client can learn it", unseen[0])


def with_mask(data: Dataset, module: nn.Module) -> Dataset:
    """Return data with padded sequences whose inputs include the mask, if the module's forward takes one.

    The names are `attention_mask` (1 and 0), `mask` (bool) and `lengths`. If several inputs are padded, these names
    are for a mask that all of them share, and `<input>_mask` and so on for the mask of one.
    """
    if data.mask is None:
        return data
    parameters = list(_parameters(module))
    inputs = data.x if isinstance(data.x, dict) else dict(zip(parameters, tensors(data.x), strict=False))
    given = data.mask if isinstance(data.mask, dict) else {0: data.mask}
    places: dict[Any, str] = dict(enumerate(parameters))
    masks = {places.get(key, str(key)): mask for key, mask in given.items()}
    first = next(iter(masks.values()))
    wanted = {f"{name}_{kind}": form(mask) for name, mask in masks.items() for kind, form in MASK_FORMS.items()}
    is_shared = all(torch.equal(mask, first) for mask in masks.values())
    if is_shared:
        wanted |= {kind: form(first) for kind, form in MASK_FORMS.items()}
    free = [name for name in parameters if name not in inputs]
    missing = {name: values for name, values in wanted.items() if name in free}
    unclear = [name for name in MASK_FORMS if name in free]
    if unclear and not missing:
        names = " and ".join(f"{name}_{unclear[0]}" for name in masks)
        raise BadInput(
            f"the model's forward takes '{unclear[0]}', but the lists of {' and '.join(masks)} differ in length: let "
            f"it take {names}, or pad the lists and give '{unclear[0]}' as an input"
        )
    return dataclasses.replace(data, x={**inputs, **missing}, mask=None) if missing else data


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward; of a peft model, which passes everything on, those of its base."""
    inner = getattr(module, "get_base_model", None)
    return inspect.signature((inner() if callable(inner) else module).forward).parameters


def _check_keys(module: nn.Module, keys: list[str], name: str) -> None:
    """Refuse inputs by name that the module's forward does not take, or lacks."""
    parameters = _parameters(module)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {key: one for key, one in parameters.items() if one.kind in kinds}
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for key in keys:
        # a misspelt name would be ignored by a forward that takes any
        if key not in known and (not takes_any or nearest(key, [other for other in known if other not in keys])):
            raise BadInput(
                f"the {name} data have an input '{key}', which the model's forward does not take{nearest(key, known)} "
                f"(it takes {listed(list(known))})"
            )
    for key, parameter in known.items():
        if key not in keys and parameter.default is inspect.Parameter.empty:
            raise BadInput(f"the {name} data lack the input '{key}' of the model's forward (they have {listed(keys)})")


def _check_loss(objective: Objective, outputs: Tensor, targets: Tensor, name: str) -> None:
    known = TORCH_LOSSES.get(type(objective.loss))
    try:
        losses: Any = objective.loss(outputs, targets)
    except Exception as error:  # whatever a user's loss raises
        reason = " ".join(str(error).split())
        instead = f"; use loss='{known}' instead" if known else ""
        raise BadInput(
            f"the loss cannot compare the model's outputs with the {name} targets: {reason}{instead}"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (len(targets),):
        shape = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        instead = f"loss='{known}', or " if known else ""
        advice = f"use {instead}reduction='none', and take the mean over a sample's other axes"
        if shape == f"shape {[len(targets)] * 2}":
            advice = _squeeze(outputs, targets) or advice
        raise BadInput(
            f"the loss must return one value per sample, shape [{len(targets)}], not {shape}, from outputs of shape "
            f"{list(outputs.shape)} and targets of shape {list(targets.shape)}: {advice}"
        )


def _check_samples_alone(objective: Objective, data: Dataset, name: str) -> None:
    """Refuse a user's loss in which the loss of a sample depends on the other samples of its batch."""
    first = data.y[:EVALUATION_BATCH]
    others = (first != first[:1]).reshape(len(first), -1).any(1).nonzero().flatten().tolist()
    rows = torch.tensor([0, others[0] if others else 1], device=first.device)  # equal targets would hide a mistake
    with torch.no_grad():
        inputs, targets = data.inputs(rows, objective.dtype), first[rows]
        outputs = objective.outputs(objective.start, objective.buffers, inputs, train=False)

    def losses_of(places: list[int]) -> Tensor:
        with torch.no_grad(), rng.forked(objective.device, seed=0):  # a loss may draw random numbers
            return objective.loss(outputs[places], targets[places])

    # A sample is compared with two copies of it: batches of one would need other kernels, and may have special cases.
    together, copies = losses_of([0, 1]), torch.stack([losses_of([place, place])[place] for place in (0, 1)])
    if not torch.allclose(together, copies, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise BadInput(
            f"the loss mixes samples: with the {name} data, the loss of a sample changes with the others of its batch; "
            f"compute it from the sample's own row of outputs [n{_axes(outputs)}] and targets [n{_axes(targets)}]"
            f"{_squeeze(outputs, targets, ': ')}"
        )


def _axes(values: Tensor) -> str:
    return "".join(f", {size}" for size in values.shape[1:])


def _squeeze(outputs: Tensor, targets: Tensor, start: str = "") -> str:
    """Return the advice to leave out an axis of one that broadcasts [n] and [n, 1] to [n, n], or an empty string."""
    if targets.dim() == 1 and outputs.shape[1:] == (1,):
        return f"{start}use outputs.squeeze(1), because [n, 1] and [n] broadcast to [n, n]"
    if targets.shape[1:] == (1,) and outputs.shape[1:] != (1,):
        return f"{start}use targets.squeeze(1), because [n] and [n, 1] broadcast to [n, n]"
    return ""


def _check_soft_labels(targets: Tensor, axis: int, name: str) -> None:
    """Refuse float targets of a cross entropy that are not shares of the classes."""
    sums = targets.sum(axis)
    is_wrong = ((sums - 1).abs() > SOFT_LABEL_TOLERANCE) | (targets < 0).any(axis)
    wrong = is_wrong.reshape(len(sums), -1).any(1).nonzero().flatten()
    if len(wrong):
        sample = int(wrong[0])
        total = float(sums[sample].flatten()[is_wrong[sample].flatten()][0])
        rule = "cross_entropy takes floats as soft labels, which are at least 0 and sum to 1"
        advice = "use loss='bce' for several labels a sample, 'mse' for numbers"
        raise BadInput(
            f"{rule}, but those of sample {sample} of the {name} data sum to {total:g}: {advice}",
            without_data=f"{rule}, and some of the {name} data do not: {advice}",
        )


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
        one = data.inputs(slice(1), objective.dtype)
        buffers = {n: b.clone() for n, b in objective.buffers.items()}
        with torch.no_grad():
            objective.outputs(objective.start, buffers, one, train=True)  # refuses a batch of one, or copes
