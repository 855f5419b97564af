"""Checks of the loss: it returns one number per sample, from that sample alone, and reaches the parameters."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from lamina.base import rng
from lamina.base.errors import BadInput, LaminaError, describe_error, takes
from lamina.base.text import listed, plural
from lamina.data.dataset import Dataset
from lamina.engines.loop import FIXED_CHUNK
from lamina.objective.batch import Inputs, Targets, take
from lamina.objective.losses import TORCH_LOSSES, is_user_defined, takes_tensors
from lamina.objective.objective import Objective
from lamina.objective.outputs import elements_of, map_outputs, tensors_in
from lamina.rounds.plan import Plan
from lamina.training.evaluation import form
from lamina.training.preflight.dry_run import DryRun, Pairs

log = logging.getLogger(__name__)

MAX_NOISE = 0.1  # the largest relative change of an output
MORE_BATCHES, MORE_SAMPLES = 3, 32  # to try if some parameter receives no gradient
CUT = (
    "activation checkpointing with use_reentrant=True cuts the gradient after frozen layers: call "
    "checkpoint(..., use_reentrant=False)"
)


def check_loss(run: DryRun) -> None:
    """Refuse a loss that fails, or does not return one number per sample; two samples show it."""
    loss, samples = run.objective.loss, min(2, run.samples)
    if run.objective.mixes_samples:  # it may need more than two
        samples = run.samples
    known, sizes = TORCH_LOSSES.get(type(loss)), f"shape [{samples}]"
    outputs, targets = _outputs(run, slice(samples)), take(run.targets, slice(samples))
    known = known or next((name for each, name in TORCH_LOSSES.items() if each is loss), None)
    try:
        losses: Any = run.objective.losses(outputs, targets)
    except Exception as error:  # whatever a user's loss raises
        reason = str(error) if isinstance(error, LaminaError) else describe_error(error)
        instead = f"; use loss='{known}' instead" if known else ""
        if is_user_defined(loss) and not takes(loss, outputs, targets):
            instead = "; define it as loss(outputs, targets)"
        elif not takes_tensors(loss) and not isinstance(outputs, Tensor):
            instead += f"; it gets {form(outputs)}"
        raise BadInput(
            f"the loss cannot compare the model's outputs with the {run.name} targets: {reason}{instead}"
        ) from error
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = f"{losses.dtype} values" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise BadInput(
            f"the loss must return a tensor with one number per sample, {sizes}, not {kind}: compute it from outputs "
            "and targets with torch's functions, which know the gradient"
        )
    if losses.shape != (samples,):
        advice = f"use loss='{known}', or " if known else ""
        advice += "use reduction='none' and " if losses.dim() == 0 else ""
        advice += "take the mean over a sample's other axes"
        advice += ", or wrap a loss of the whole batch: lamina.losses.per_batch(…)" if losses.dim() == 0 else ""
        if losses.shape == (samples,) * 2:
            advice = _squeeze(outputs, targets) or advice
        raise BadInput(
            f"the loss must return one value per sample, {sizes}, not shape {list(losses.shape)}, from "
            f"{_shapes('outputs', outputs)} and {_shapes('targets', targets)}: {advice}"
        )


def check_nan(run: DryRun) -> None:
    """Refuse a user's loss that is NaN before the first step: no learning rate helps."""
    if is_user_defined(run.objective.loss) and bool(_losses(run).isnan().any()):
        raise BadInput(
            "the loss of some train samples is NaN before the first step: look at the model's outputs, and for roots, "
            "logarithms and divisions in the loss"
        )


def check_samples_alone(run: DryRun) -> None:
    """Refuse a user's loss in which the loss of a sample depends on its batch: the others, their order or number."""
    count = run.samples
    if not is_user_defined(run.objective.loss) or run.objective.mixes_samples or count == 1:
        return
    vary = True
    try:
        together = _losses(run, vary=vary)
    except Exception:  # the loss may check its outputs, such as the sum of probabilities
        vary = False
        together = _losses(run)
    copies = torch.stack([_losses(run, [place] * count, vary=vary)[place] for place in range(count)])
    mixes = not _are_equal(together, copies)
    if _are_equal(together, _losses(run, seed=1, vary=vary)):  # else a sample's random number depends on its place
        longer = [*reversed(range(count)), count - 1]
        mixes = mixes or not _are_equal(_losses(run, longer, vary=vary), together[longer])
    if mixes:
        with Pairs(count) as pairs:
            _losses(run, vary=vary)
        outputs, targets = run.evaluation.outputs, run.targets
        raise BadInput(
            f"the loss mixes samples: with the {run.name} data, the loss of a sample changes with the others of its "
            "batch, their order or their number; compute it from the sample's own row of "
            f"{_rows('outputs', outputs)} and {_rows('targets', targets)}"
            f"{_squeeze(outputs, targets, ': ') if pairs.found else ', or wrap a loss of the whole batch: '}"
            f"{'' if pairs.found else 'lamina.losses.per_batch(…)'}"
        )


def check_small_batches(objective: Objective, data: Dataset, plan: Plan, full_gradient: bool) -> None:
    """Refuse batches for which a loss of a whole batch is not finite, such as a last one of a single sample.

    `full_gradient` says whether the algorithm also takes gradients over all data, in batches of another size.
    """
    sizes, batch = plan.clients.parts.sizes, plan.protocol.batch_size
    lasts = [*(sizes if batch is None else sizes % batch), *(sizes % FIXED_CHUNK if full_gradient else ())]
    smallest = min((int(size) for size in lasts if size), default=0)
    if not objective.mixes_samples or not smallest:
        return
    buffers, rows = {name: buffer.clone() for name, buffer in objective.buffers.items()}, slice(smallest)
    problem = ""
    try:
        with torch.no_grad():
            outputs = objective.outputs(objective.start, buffers, data.inputs(rows, objective.dtype), train=True)
            value = float(objective.losses(outputs, take(data.y, rows))[0])
        problem = "" if math.isfinite(value) else f"is {value}"
    except Exception as error:  # whatever a user's loss raises
        problem = f"fails ({describe_error(error)})"
    if problem:
        raise BadInput(
            f"the per_batch loss {problem} for a batch of {plural(smallest, 'sample')}, the smallest of a client: "
            "choose a batch_size that leaves larger last batches, or let the loss handle small ones"
        )


def warn_of_unreached(run: DryRun) -> None:
    """Warn of outputs that a user's loss ignores, and of trainable parameters that never receive a gradient.

    A loss that reaches no parameter is refused.
    """
    objective = run.objective
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unreached, ignored = _unreached(run, run.inputs, run.targets)
        for seed in range(MORE_BATCHES if unreached or ignored else 0):  # some parts run at random, or for some samples
            generator = torch.Generator().manual_seed(seed)
            rows = torch.randint(len(run.data), (MORE_SAMPLES,), generator=generator).to(objective.device)
            more = _unreached(run, run.data.inputs(rows, objective.dtype), take(run.data.y, rows))
            unreached, ignored = unreached & more[0], ignored & more[1]
    names = [name for name in objective.layers.names if name in unreached]
    is_cut = any("None of the inputs have requires_grad" in str(one.message) for one in caught)
    hint = f"; {CUT}" if is_cut else ""
    if names == list(objective.layers.names):
        raise BadInput(f"there is no gradient: the loss does not depend on any trainable parameter{hint}")
    if ignored and not takes_tensors(objective.loss):  # `warn_of_ignored_outputs` names those of the others
        whole = run.evaluation.outputs
        log.warning(
            "the loss ignores %s of the %s that the model returns: use %s in the loss, unless only metrics need %s",
            listed([name for name in elements_of(whole) if name in ignored]), type(whole).__name__,
            *("it" if len(ignored) == 1 else "them",) * 2,
        )  # fmt: skip
    if names:
        numbers = sum(math.prod(objective.layers.shapes[name]) for name in names)
        log.warning(
            "%s of the model never %s a gradient (%s), because the loss does not depend on them: they are sent and "
            "counted all the same (%s); freeze them with requires_grad_(False), or use them in the loss%s",
            plural(len(names), "trainable parameter"), "receives" if len(names) == 1 else "receive", listed(names),
            plural(numbers, "number"), hint,
        )  # fmt: skip


def _unreached(run: DryRun, inputs: Inputs, targets: Targets) -> tuple[set[str], set[str]]:
    """Return the names of the parameters and of the outputs that the loss of a training batch does not depend on.

    Outputs that lead to others, such as hidden states, count as used with these.
    """
    objective = run.objective
    parameters = {n: p.clone().requires_grad_() for n, p in objective.layers.unflatten(objective.start).items()}
    buffers = {n: b.clone() for n, b in objective.buffers.items()}

    def unreached(outputs: Any) -> tuple[set[str], set[str]]:
        loss = objective.losses(outputs, targets).mean()
        if not loss.requires_grad:
            return set(parameters), set()
        elements = {
            name: [t for t in tensors_in(part) if t.requires_grad] for name, part in elements_of(outputs).items()
        }
        trained = [(name, tensor) for name, part in elements.items() for tensor in part]
        points = [*parameters.values(), *(tensor for _, tensor in trained)]
        is_used = [each is not None for each in torch.autograd.grad(loss, points, allow_unused=True)]
        used = {name for (name, _), found in zip(trained, is_used[len(parameters) :], strict=True) if found}
        return (
            {name for name, found in zip(parameters, is_used, strict=False) if not found},
            {name for name, part in elements.items() if part} - used,
        )

    try:
        found: tuple[set[str], set[str]] = objective.outputs_at(
            parameters, buffers, inputs, train=True, on_outputs=unreached
        )
    except Exception:  # raised again, and explained, in training
        return set(), set()
    return found


def _outputs(run: DryRun, places: list[int] | slice, *, vary: bool = False) -> Any:
    """Return the outputs of some samples, perhaps varied a little: equal ones would hide a mistake.

    Numbers become smaller, which keeps log-probabilities below 0 and probabilities between 0 and 1.
    """
    generator, axes = torch.Generator().manual_seed(0), iter(run.sample_axes)

    def chosen(values: Tensor) -> Tensor:
        axis = next(axes, None)
        if vary and values.is_floating_point():
            noise = MAX_NOISE * torch.rand(values.shape, generator=generator).to(values)
            values = torch.where(values == 0, noise, values * (1 - noise))
        return values if axis is None else values.movedim(axis, 0)[places].movedim(0, axis)

    return map_outputs(chosen, run.evaluation.outputs)


def _losses(run: DryRun, places: list[int] | slice = slice(None), *, seed: int = 0, vary: bool = False) -> Tensor:
    """Return the losses of some samples; a loss may draw random numbers."""
    with torch.no_grad(), rng.forked(run.objective.device, seed=seed):
        return run.objective.losses(_outputs(run, places, vary=vary), take(run.targets, places))


def _are_equal(losses: Tensor, others: Tensor) -> bool:
    return torch.allclose(losses, others, rtol=1e-4, atol=1e-6, equal_nan=True)


def _rows(what: str, values: Any) -> str:
    """Return the name and the axes of a tensor; only the name of several."""
    return f"{what} [n{''.join(f', {size}' for size in values.shape[1:])}]" if isinstance(values, Tensor) else what


def _shapes(what: str, values: Any) -> str:
    return (
        f"{what} of shape {list(values.shape)}" if isinstance(values, Tensor) else f"{what} (a {type(values).__name__})"
    )


def _squeeze(outputs: Any, targets: Any, start: str = "") -> str:
    """Return the advice to leave out an axis of one that broadcasts [n] and [n, 1] to [n, n], or an empty string."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return ""
    if targets.dim() == 1 and outputs.shape[1:] == (1,):
        return f"{start}use outputs.squeeze(1), because [n, 1] and [n] broadcast to [n, n]"
    if targets.shape[1:] == (1,) and outputs.shape[1:] != (1,):
        return f"{start}use targets.squeeze(1), because [n] and [n, 1] broadcast to [n, n]"
    return ""
