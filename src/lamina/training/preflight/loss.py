"""Checks of the loss: it returns one number per sample, from that sample alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.base import rng
from lamina.base.errors import BadInput, LaminaError, describe_error
from lamina.objective.losses import TORCH_LOSSES, is_user_defined
from lamina.training.preflight.dry_run import DryRun, Pairs

MAX_NOISE = 0.1  # the largest relative change of an output


def check_loss(run: DryRun) -> None:
    """Refuse a loss that fails, or does not return one number per sample; two samples show it."""
    loss, outputs, targets = run.objective.loss, run.evaluation.outputs[:2], run.targets[:2]
    known, sizes = TORCH_LOSSES.get(type(loss)), f"shape [{len(targets)}]"
    known = known or next((name for each, name in TORCH_LOSSES.items() if each is loss), None)
    try:
        losses: Any = loss(outputs, targets)
    except Exception as error:  # whatever a user's loss raises
        reason = str(error) if isinstance(error, LaminaError) else describe_error(error)
        instead = f"; use loss='{known}' instead" if known else ""
        raise BadInput(
            f"the loss cannot compare the model's outputs with the {run.name} targets: {reason}{instead}"
        ) from error
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = f"{losses.dtype} values" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise BadInput(
            f"the loss must return a tensor with one number per sample, {sizes}, not {kind}: compute it from outputs "
            "and targets with torch's functions, which know the gradient"
        )
    if losses.shape != (len(targets),):
        advice = f"use loss='{known}', or " if known else ""
        advice += "use reduction='none' and " if losses.dim() == 0 else ""
        advice += "take the mean over a sample's other axes"
        if losses.shape == (len(targets),) * 2:
            advice = _squeeze(outputs, targets) or advice
        raise BadInput(
            f"the loss must return one value per sample, {sizes}, not shape {list(losses.shape)}, from outputs of "
            f"shape {list(outputs.shape)} and targets of shape {list(targets.shape)}: {advice}"
        )


def check_nan(run: DryRun) -> None:
    """Refuse a user's loss that is NaN before the first step: no learning rate helps."""
    if is_user_defined(run.objective.loss) and bool(_losses(run, run.evaluation.outputs).isnan().any()):
        raise BadInput(
            "the loss of some train samples is NaN before the first step: look at the model's outputs, and for roots, "
            "logarithms and divisions in the loss"
        )


def check_samples_alone(run: DryRun) -> None:
    """Refuse a user's loss in which the loss of a sample depends on its batch: the others, their order or number."""
    outputs, targets, count = run.evaluation.outputs, run.targets, len(run.targets)
    if not is_user_defined(run.objective.loss) or count == 1:
        return
    # Equal outputs, as of a last layer of zeros, would hide a mistake: each is shrunk a little, which keeps
    # log-probabilities below 0 and probabilities between 0 and 1.
    with rng.forked(run.objective.device, seed=0):
        noise = MAX_NOISE * torch.rand(outputs.shape).to(outputs)
    varied = torch.where(outputs == 0, noise, outputs * (1 - noise))
    try:
        together = _losses(run, varied)
    except Exception:  # the loss may check its outputs, such as the sum of probabilities
        varied, together = outputs, _losses(run, outputs)
    copies = torch.stack([_losses(run, varied, [place] * count)[place] for place in range(count)])
    mixes = not _are_equal(together, copies)
    if _are_equal(together, _losses(run, varied, seed=1)):  # else a sample's random number depends on its place
        longer = [*reversed(range(count)), count - 1]
        mixes = mixes or not _are_equal(_losses(run, varied, longer), together[longer])
    if mixes:
        with Pairs(count) as pairs:
            _losses(run, varied)
        raise BadInput(
            f"the loss mixes samples: with the {run.name} data, the loss of a sample changes with the others of its "
            "batch, their order or their number; compute it from the sample's own row of outputs "
            f"[n{_axes(outputs)}] and targets [n{_axes(targets)}]"
            f"{_squeeze(outputs, targets, ': ') if pairs.found else ''}"
        )


def _losses(run: DryRun, outputs: Tensor, places: list[int] | slice = slice(None), seed: int = 0) -> Tensor:
    """Return the losses of some samples; a loss may draw random numbers."""
    with torch.no_grad(), rng.forked(run.objective.device, seed=seed):
        return run.objective.loss(outputs[places], run.targets[places])


def _are_equal(losses: Tensor, others: Tensor) -> bool:
    return torch.allclose(losses, others, rtol=1e-4, atol=1e-6, equal_nan=True)


def _axes(values: Tensor) -> str:
    return "".join(f", {size}" for size in values.shape[1:])


def _squeeze(outputs: Tensor, targets: Tensor, start: str = "") -> str:
    """Return the advice to leave out an axis of one that broadcasts [n] and [n, 1] to [n, n], or an empty string."""
    if targets.dim() == 1 and outputs.shape[1:] == (1,):
        return f"{start}use outputs.squeeze(1), because [n, 1] and [n] broadcast to [n, n]"
    if targets.shape[1:] == (1,) and outputs.shape[1:] != (1,):
        return f"{start}use targets.squeeze(1), because [n] and [n, 1] broadcast to [n, n]"
    return ""
