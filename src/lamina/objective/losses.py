"""Losses: functions of (outputs, targets) that return one loss per sample, or with `per_batch` one per batch.

A loss averages over everything in a sample (pixels, tokens, labels), so that every sample counts the same, and returns
a tensor of shape [n]. Engines average over the samples of a batch. Positions whose target is the integer `IGNORED` do
not count, with `bce` the float neither; a sample with no other positions has a loss of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lamina.base.errors import BadInput, short_repr, unknown
from lamina.base.registry import import_named, refuse_unknown_options
from lamina.objective.batch import named_tensors, tensors
from lamina.objective.outputs import main_element, outputs_of

Loss = Callable[
    [Any, Any], Tensor
]  # of all that the model returns, and of the targets; of a tensor each if it is named
IGNORED = -100  # the target of a position that does not count, as in torch


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every sample.

    Args:
        outputs: logits [n, classes, ...], the classes on axis 1.
        targets: labels [n], integer maps [n, ...] (pixels, say), or soft labels of the outputs' shape.
    """
    return _classification(outputs, targets, 1)


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every sample; like `cross_entropy`, with the classes on the last axis.

    Args:
        outputs: logits [n, tokens, classes].
        targets: integers [n, tokens].
    """
    return _classification(outputs, targets, -1)


def causal_lm(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of every sample's next tokens: outputs at position t predict the target at t + 1.

    Args:
        outputs: logits [n, tokens, vocabulary].
        targets: the token ids [n, tokens] themselves, not shifted.
    """
    return _classification(*_next_tokens(outputs, targets), -1)


def nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of every sample: `cross_entropy` for a model that ends in log-softmax."""
    _refuse_shapes("nll", outputs, targets, 1)
    return _mean_over_positions(F.nll_loss(outputs, targets, reduction="none", ignore_index=IGNORED), targets)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the binary cross entropy of every sample.

    Args:
        outputs: logits of the targets' shape; [n, 1] fits [n].
        targets: 0 and 1 (integers or floats), or probabilities; [n, labels] for several labels a sample. A label of
            -100, integer or float, does not count.
    """
    return _binary(outputs, targets, None)


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of every sample [n], averaged over any further axes.

    Outputs must have the shape of the targets, but last axes of length one do not count: [n, 1] fits [n].
    """
    return _mean_over_positions((_like_targets("the squared error", outputs, targets) - targets) ** 2, targets)


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the absolute error of every sample; shapes as for `mean_squared_error`."""
    return _mean_over_positions((_like_targets("the absolute error", outputs, targets) - targets).abs(), targets)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Huber loss of every sample, quadratic up to an error of 1 and linear beyond it.

    Shapes as for `mean_squared_error`.
    """
    error = (_like_targets("the Huber loss", outputs, targets) - targets).abs()
    return _mean_over_positions(torch.where(error < 1, 0.5 * error**2, error - 0.5), targets)


class CrossEntropy(nn.Module):
    """`cross_entropy` with class weights or label smoothing.

    >>> loss = CrossEntropy(weight=[1.0, 5.0])
    >>> loss(torch.zeros(2, 2), torch.tensor([0, 1])) / torch.tensor(2.0).log()
    tensor([1., 5.])

    Args:
        weight: a factor per class. The losses are averaged over samples, not divided by the sum of the weights.
        label_smoothing: the share of every target that is spread over all classes.
        class_axis: the axis of the classes in the outputs; -1 for tokens.
    """

    weight: Tensor | None

    def __init__(
        self, weight: Sequence[float] | Tensor | None = None, label_smoothing: float = 0.0, class_axis: int = 1
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1 or class_axis not in (1, -1):
            raise BadInput(
                f"CrossEntropy: label_smoothing = {label_smoothing} must lie in 0..1, and class_axis = {class_axis} be "
                "1 or -1"
            )
        self.register_buffer("weight", _weights("CrossEntropy: weight", weight))
        self.label_smoothing, self.class_axis = label_smoothing, class_axis

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every sample."""
        classes = outputs.shape[self.class_axis] if outputs.dim() > 1 else 1
        if self.weight is not None and len(self.weight) != classes:
            raise BadInput(f"CrossEntropy has {len(self.weight)} class weights, but the model has {classes} outputs")
        return _classification(outputs, targets, self.class_axis, self.weight, self.label_smoothing)


class BinaryCrossEntropy(nn.Module):
    """`bce` with a factor on the loss of positive targets: a number, or one per label."""

    positive_weight: Tensor

    def __init__(self, positive_weight: float | Sequence[float] | Tensor = 1.0, **others: Any) -> None:
        super().__init__()
        refuse_unknown_options("BinaryCrossEntropy", others, ["positive_weight"])  # torch's is called pos_weight
        self.register_buffer("positive_weight", _weights("BinaryCrossEntropy: positive_weight", positive_weight))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every sample."""
        weights, labels = self.positive_weight.shape, targets.shape[1:]
        fits = all(one in (1, size) for one, size in zip(reversed(weights), reversed(labels), strict=False))
        if self.positive_weight.numel() > 1 and not (fits and len(weights) <= len(labels)):
            raise BadInput(
                f"BinaryCrossEntropy has positive weights of shape {list(weights)}, but a sample has targets of shape "
                f"{list(labels)}: give one weight per label, or one number"
            )
        return _binary(outputs, targets, self.positive_weight)


class PerBatch(nn.Module):
    """A loss of a whole batch; see `per_batch`."""

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        if not callable(function):
            raise BadInput(f"per_batch takes a function of (outputs, targets), not {short_repr(function)}")
        self.function = function

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of the batch once for each of its samples, whose mean it is then."""
        value, samples = self.function(outputs, targets), len(tensors(targets)[0])
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            shape = list(value.shape) if isinstance(value, Tensor) else None
            kind = f"a {type(value).__name__}" if shape is None else f"{value.dtype} values of shape {shape}"
            hint = "; for one loss per sample, leave per_batch out" if shape == [samples] else ""
            raise BadInput(f"a per_batch loss must return one number as a tensor with a gradient, not {kind}{hint}")
        return value.reshape(1).expand(samples)


def per_batch(function: Callable[[Any, Any], Tensor]) -> PerBatch:
    """Return a loss of a whole batch, for contrastive losses, metric learning and penalties over samples.

    The function gets the outputs and targets of one batch of one client, and returns one number. Use it as a decorator,
    or wrap a loss: ``per_batch(nn.CrossEntropyLoss())``. Clients train one by one, in the loop or in captured steps. In
    an evaluation, and in gradients over all data, the function gets at most 64 samples at a time.

    >>> @per_batch
    ... def spread(outputs, targets):
    ...     return outputs.var()
    >>> spread(torch.tensor([[0.0], [2.0]]), torch.zeros(2))
    tensor([2., 2.])
    """
    return PerBatch(function)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "token_cross_entropy": token_cross_entropy,
    "causal_lm": causal_lm,
    "nll": nll,
    "bce": bce,
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
    "huber": huber,
}
TORCH_LOSSES: dict[Any, str] = {
    nn.CrossEntropyLoss: "cross_entropy", nn.NLLLoss: "nll", nn.BCEWithLogitsLoss: "bce", nn.MSELoss: "mse",
    nn.L1Loss: "mae", nn.HuberLoss: "huber", F.cross_entropy: "cross_entropy", F.nll_loss: "nll",
    F.binary_cross_entropy_with_logits: "bce", F.mse_loss: "mse", F.l1_loss: "mae", F.huber_loss: "huber",
}  # fmt: skip
REGRESSION_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)
CLASS_AXES: dict[Loss, int] = {cross_entropy: 1, nll: 1, token_cross_entropy: -1, causal_lm: -1}


def as_loss(loss: str | Loss) -> Loss:
    """Return a loss by name, by "module:function", or the function itself."""
    if not isinstance(loss, str):
        return loss
    if loss in LOSSES:
        return LOSSES[loss]
    if ":" not in loss:
        raise unknown("loss", loss, LOSSES)
    function: Loss = import_named("loss", loss)
    if not callable(function):
        raise BadInput(f"loss = '{loss}' is not a function of (outputs, targets)")
    return function


def loss_name(loss: Loss) -> str:
    """Return what messages call a loss."""
    named = next((name for name, function in LOSSES.items() if function is loss), "")
    return named or str(getattr(loss, "__name__", type(loss).__name__))


def takes_tensors(loss: Loss) -> bool:
    """Return whether a loss compares two tensors, as named losses and those of torch do; others get everything."""
    return not is_user_defined(loss) or isinstance(loss, nn.modules.loss._Loss)


def losses_of(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """Return the loss of every sample [n], from what the model returns and the targets, which may be several."""
    if not takes_tensors(loss):
        return loss(outputs, targets)
    if not isinstance(targets, Tensor):
        raise BadInput(
            f"{loss_name(loss)} takes one tensor of targets, and there are {len(targets)} "
            f"({', '.join(named_tensors(targets, 'y'))}): give a loss that is a function of (outputs, targets)"
        )
    return loss(outputs_of(outputs), targets)


def instance_of_loss(cls: type[Any]) -> str:
    """Return what to give in place of the class of a loss."""
    name = TORCH_LOSSES.get(cls)
    of_torch = cls.__module__.startswith("torch.")
    instance = f"{cls.__name__}({'reduction=' + repr('none') if of_torch else ''})"
    return f"give loss='{name}', or an instance, {instance}" if name else f"give an instance, {instance}"


def class_axis(loss: Loss) -> int | None:
    """Return the axis of the outputs that holds the classes; None for a loss that says nothing about it."""
    if isinstance(loss, CrossEntropy):
        return loss.class_axis
    return next((axis for function, axis in CLASS_AXES.items() if function is loss), None)


def aligned(loss: Loss, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return outputs and targets position by position: with `causal_lm`, logits at t and the target at t + 1."""
    return _next_tokens(outputs_of(outputs), targets) if loss is causal_lm else (outputs, targets)


def is_user_defined(loss: Loss) -> bool:
    """Return whether the loss is not one of lamina's."""
    return not isinstance(loss, CrossEntropy | BinaryCrossEntropy) and all(loss is not one for one in LOSSES.values())


def is_regression(loss: Loss) -> bool:
    """Return whether the loss measures distances, even if the targets are integers."""
    is_known = any(loss is function for function in (mean_squared_error, mean_absolute_error, huber))
    return is_known or isinstance(loss, REGRESSION_MODULES)


def has_no_logits(loss: Loss) -> bool:
    """Return whether the sign of an output says nothing about a class: with distances, and with probabilities."""
    return is_regression(loss) or isinstance(loss, nn.BCELoss)


def is_binary(loss: Loss) -> bool:
    """Return whether the loss compares logits with targets from 0 to 1."""
    return loss is bce or isinstance(loss, BinaryCrossEntropy)


def counted(loss: Loss, targets: Any) -> Tensor | None:
    """Return which targets [n, ...] count, or None where all do: one label per sample, numbers and soft labels.

    Of several targets and in a loss of a whole batch, the user's loss decides what counts: None.
    """
    if not isinstance(targets, Tensor) or isinstance(loss, PerBatch):
        return None
    if targets.is_floating_point():
        return targets != IGNORED if is_binary(loss) else None
    return targets != IGNORED if targets.dim() > 1 else None


def hits(loss: Loss, result: Any, targets: Any, classes: int | None) -> Tensor | None:
    """Return which integer targets [n, ...] are predicted, in the shape of the aligned targets; None: no prediction.

    The prediction is the largest of at least `classes` outputs; with `bce`, and for a single output and labels 0 and 1,
    it is the output's sign. `classes` is None if the targets are not integers. Nothing says which of several outputs
    predicts the labels of a user's loss, unless one is called logits, nor whether a loss of a whole batch has any.
    """
    if classes is None or is_regression(loss) or isinstance(loss, PerBatch):
        return None
    if not takes_tensors(loss) and main_element(result) not in ("", ".logits", "['logits']"):
        return None
    outputs, axis = outputs_of(result), class_axis(loss)
    if is_binary(loss) or (axis is None and targets.dim() == 1 and shape(outputs) == (len(targets),)):
        if classes > 2 or shape(outputs) != shape(targets):
            return None
        answers: Tensor = (outputs.reshape(targets.shape) > 0) == (targets == 1)
        return answers
    if axis is None and (targets.dim() > 1 or outputs.dim() != 2):
        return None
    outputs, targets = aligned(loss, outputs, targets)
    axis = 1 if axis is None else axis
    if outputs.dim() != targets.dim() + 1 or outputs.shape[axis] < classes:
        return None
    right: Tensor = outputs.argmax(axis) == targets
    return right


def shape(values: Tensor) -> tuple[int, ...]:
    """Return the shape without last axes of length one, but always with the samples' axis."""
    sizes = tuple(values.shape)
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes


def _classification(
    outputs: Tensor, targets: Tensor, axis: int, weight: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    if axis == -1 and outputs.dim() > 2:
        is_soft = targets.is_floating_point()  # probabilities of the classes
        _refuse_shapes("cross_entropy", outputs.movedim(-1, 1), targets.movedim(-1, 1) if is_soft else targets, axis)
        # position by position: torch is many times slower with the classes on the second axis
        flat = targets.flatten(0, -2) if is_soft else targets.flatten()
        losses = _classification(outputs.flatten(0, -2), flat, 1, weight, smoothing)
        return _mean_over_positions(losses.reshape(outputs.shape[:-1]), targets)
    _refuse_shapes("cross_entropy", outputs, targets, axis)
    targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
    losses = F.cross_entropy(
        outputs, targets, weight, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )  # fmt: skip
    return _mean_over_positions(losses, targets)


def _binary(outputs: Tensor, targets: Tensor, positive_weight: Tensor | None) -> Tensor:
    outputs = _like_targets("the binary cross entropy", outputs, targets)
    losses = F.binary_cross_entropy_with_logits(
        outputs, targets.clamp(min=0).to(outputs.dtype), pos_weight=positive_weight, reduction="none"
    )
    if not targets.is_floating_point():
        return _mean_over_positions(losses, targets)
    counted = (targets != IGNORED).reshape(len(targets), -1)
    means = torch.where(counted, losses.reshape(counted.shape), 0.0).mean(1)
    return means * (counted.shape[1] / counted.sum(1, dtype=means.dtype).clamp(min=1))


def _next_tokens(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.dim() != 3 or outputs.shape[:2] != targets.shape or targets.shape[1] < 2:
        raise BadInput(
            "causal_lm needs outputs [tokens, vocabulary] and targets [tokens] of at least two tokens a sample, but a "
            f"sample has outputs of shape {list(outputs.shape[1:])} and targets of shape {list(targets.shape[1:])}"
        )
    return outputs[:, :-1], targets[:, 1:]


def _mean_over_positions(losses: Tensor, targets: Tensor) -> Tensor:
    """Return the mean [n] over every sample's positions whose target counts."""
    if losses.dim() == 1:
        return losses
    if targets.is_floating_point():
        return losses.flatten(1).mean(1)
    counts = (targets != IGNORED).reshape(losses.shape)
    return torch.where(counts, losses, 0.0).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)


def _like_targets(what: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the outputs in the shape of the targets, from which only last axes of length one may differ."""
    if shape(outputs) != shape(targets):
        hint = ""
        if outputs[0].numel() == 1 and targets.dim() == 2:
            hint = f": let the model have {targets.shape[1]} outputs, or give one-hot labels as numbers, y.argmax(1)"
        raise BadInput(
            f"{what} needs outputs of the targets' shape, but a sample has outputs of shape "
            f"{list(outputs.shape[1:])} and targets of shape {list(targets.shape[1:])}{hint}"
        )
    return outputs.reshape(targets.shape)


def _refuse_shapes(name: str, outputs: Tensor, targets: Tensor, axis: int) -> None:
    """Refuse targets that are neither labels [n, ...] nor soft labels of the outputs' shape [n, classes, ...]."""
    sizes = tuple(outputs.shape)
    if targets.is_floating_point() and name != "nll":
        fits, wanted = sizes == tuple(targets.shape), "soft labels of the outputs' shape"
    else:
        fits, wanted = (sizes[0], *sizes[2:]) == tuple(targets.shape), "one integer target per position"
        fits = fits and not targets.is_floating_point()
    if outputs.dim() > 1 and fits:
        return
    hint = ""
    if (
        sizes == tuple(targets.shape)
        and sizes[axis] > 1
        and bool((targets >= 0).all() and (targets.sum(axis) == 1).all())
    ):
        hint = "; give one-hot labels as class numbers, y.argmax(1)"
    elif axis == 1 and len(sizes) > 2 and sizes[:-1] == tuple(targets.shape):
        hint = "; the classes are on the last axis: use loss='token_cross_entropy' or 'causal_lm'"
    elif targets.dim() == len(sizes) > 1 and targets.shape[1] == 1 < sizes[1]:
        hint = "; leave the axis of 1 out: y.squeeze(1)" + ".astype('int64')" * targets.is_floating_point()
    elif targets.is_floating_point() and (sizes[0], *sizes[2:]) == tuple(targets.shape):
        hint = "; if they are classes, give integers: y.astype('int64')"
    elif sizes == tuple(targets.shape):
        hint = "; for several labels a sample use loss='bce'"
    given = f"{list(targets.shape[1:])} ({str(targets.dtype).removeprefix('torch.')})"
    raise BadInput(
        f"{name} needs outputs with a class axis and {wanted}, but a sample has outputs of shape "
        f"{list(sizes[1:])} and targets of shape {given}{hint}"
    )


def _weights(what: str, values: float | Sequence[float] | Tensor | None) -> Tensor | None:
    if values is None:
        return None
    try:
        weights = torch.as_tensor(values, dtype=torch.get_default_dtype())
    except (TypeError, ValueError) as error:
        raise BadInput(f"{what} must be one number per class, in the order of the classes ({error})") from error
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise BadInput(f"{what} must hold finite numbers of at least 0")
    return weights
