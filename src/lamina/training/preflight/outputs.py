"""Checks of the model's outputs."""

from __future__ import annotations

import logging

import torch

from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.objective.losses import class_axis, is_binary, loss_name, nll, takes_tensors
from lamina.objective.outputs import main_element, other_elements, outputs_of
from lamina.training.preflight.dry_run import DryRun

log = logging.getLogger(__name__)

PROBABILITY_SAMPLES = 64  # the logits of 64 samples do not all lie between 0 and 1 by chance
NLL_TOLERANCE = 1e-3  # rounding may make a log-probability positive, up to this number


def check_sample_axis(run: DryRun) -> None:
    """Refuse outputs whose first axis does not count the samples."""
    outputs, samples = run.evaluation.outputs, run.samples
    if takes_tensors(run.objective.loss):
        outputs = outputs_of(outputs)
    elif not isinstance(outputs, torch.Tensor):
        return  # the loss takes what it needs
    if outputs.dim() == 0 or len(outputs) != samples:
        raise BadInput(
            f"the model's outputs have shape {tuple(outputs.shape)} for {samples} samples of the {run.name} data; "
            "the first axis must be the samples'"
        )


def check_classes(run: DryRun) -> None:
    """Refuse outputs with fewer classes than the labels."""
    y, classes, axis = run.data.y, run.data.classes, class_axis(run.objective.loss)
    if classes is None or axis is None:
        return
    outputs = outputs_of(run.evaluation.outputs)
    if outputs.dim() > 1 and outputs.shape[axis] >= classes:
        return
    shape = f"the model's outputs have shape {tuple(outputs.shape[1:])} a sample"
    last_axis_fits = outputs.dim() > 2 and outputs.shape[-1] >= classes
    if axis == 1 and last_axis_fits and outputs.shape[:-1] == run.targets.shape:
        return  # the loss says that the classes are on the last axis
    hint = ""
    if last_axis_fits and y.dim() == 1:
        hint = " on the first of these axes; if the others are positions, take the mean over them in the model"
    elif outputs[0].numel() == 1 and y.dim() == 1:
        hint = "; use loss='bce' for two classes" if classes == 2 else "; for regression, use loss='mse'"
    lowest = int(torch.where(y < 0, classes, y).min())
    if 0 < lowest < classes and outputs.dim() > 1 and classes - lowest <= outputs.shape[axis]:
        hint = f"; classes are numbered from 0, and the labels start at {lowest}: subtract {lowest}"
    elif y.dim() > 1:
        last = classes - 1
        hint = f"; if {last} marks what to ignore, give a Dataset(x, y, ignore_index={last}), or "
        hint += f"data.ignore_index = {last} in a file"
    raise BadInput(
        f"{shape}, but the {run.name} labels go up to {classes - 1}: it needs {classes}{hint}",
        without_data=f"{shape}, but the {run.name} data have more classes",
    )


def warn_of_ignored_outputs(run: DryRun) -> None:
    """Warn of outputs that a named loss leaves out: what only they depend on is not trained."""
    result, loss = run.evaluation.outputs, run.objective.loss
    others = other_elements(result) if takes_tensors(loss) else []
    if others:
        name, kind, main = loss_name(loss), type(result).__name__, main_element(result)
        log.warning(
            "the model returns a %s: the loss '%s' takes its element %s and ignores %s; to use them, give a loss that "
            "is a function of (outputs, targets)", kind, name, main, listed(others),
        )  # fmt: skip


def warn_of_logits(run: DryRun) -> None:
    """Warn of positive outputs: nll needs log-probabilities."""
    if run.objective.loss is nll and bool((outputs_of(run.evaluation.outputs) > NLL_TOLERANCE).any()):
        log.warning("nll needs log-probabilities, and the model's outputs are larger than 0: use cross_entropy instead")


def warn_of_softmax(run: DryRun) -> None:
    """Warn of probabilities where a cross entropy needs logits: training would be slow."""
    axis = None if run.objective.loss is nll else class_axis(run.objective.loss)
    if axis is None:
        return
    outputs = outputs_of(run.evaluation.outputs)
    sums = outputs.sum(axis)
    if outputs.shape[axis] > 1 and _are_fractions(outputs) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        name = loss_name(run.objective.loss)
        log.warning("the outputs of every sample sum to 1, and %s needs logits: leave the Softmax out", name)


def warn_of_probabilities(run: DryRun) -> None:
    """Warn of probabilities where the accuracy needs a logit; a user's loss may take either."""
    objective = run.objective
    if run.batch.hits is None or class_axis(objective.loss) is not None or is_binary(objective.loss):
        return
    outputs = outputs_of(run.evaluation.outputs)
    if outputs[0].numel() == 1 and _are_fractions(outputs):  # perhaps by chance: look at more samples
        inputs = run.data.inputs(slice(PROBABILITY_SAMPLES), objective.dtype)
        with torch.no_grad():
            outputs = outputs_of(objective.outputs(objective.start, objective.buffers, inputs, train=False))
        if _are_fractions(outputs):
            log.warning("all outputs lie in 0..1; the accuracy needs logits, not probabilities: leave the Sigmoid out")


def _are_fractions(values: torch.Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())
