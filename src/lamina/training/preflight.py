"""Checks that a model, its data and the protocol fit each other, before the first round."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lamina.algorithms.contract import Algorithm
from lamina.base import rng
from lamina.base.errors import BadInput, LaminaError, describe_error, nearest, where_it_failed
from lamina.base.limits import check_memory, in_bytes
from lamina.base.registry import parameters_of
from lamina.base.text import listed
from lamina.data.dataset import Dataset
from lamina.data.feed import prepare
from lamina.models.allocation import LargestActivation
from lamina.objective.batch import Inputs, map_batch, tensors
from lamina.objective.losses import (
    IGNORED,
    TORCH_LOSSES,
    Loss,
    causal_lm,
    class_axis,
    counted,
    huber,
    is_binary,
    is_own,
    mean_absolute_error,
    mean_squared_error,
    nll,
)
from lamina.objective.objective import Objective
from lamina.rounds.plan import Plan
from lamina.training.evaluation import EVALUATION_BATCH, Pairs
from lamina.training.masks import forward_of

log = logging.getLogger(__name__)

VOCABULARY_CHUNK = 1000  # samples at a time
PROBABILITY_SAMPLES = 64  # logits of so many samples do not all lie between 0 and 1 by chance
LOSS_SAMPLES = 6  # a user's loss is tried on so many samples together, and on each one alone
LOSS_NOISE = 0.1  # the largest relative change of an output, so that no two are equal
SOFT_LABEL_TOLERANCE = 0.05  # how far rounding may move the sum of a sample's soft labels from 1
NLL_TOLERANCE = 1e-3  # rounding may make a log-probability larger than 0 by so much
INTEGER_REFUSED = re.compile(r"\bLong(Tensor)?\b|\blong (long|int)\b|int64")  # in torch's messages


def check_fit(objective: Objective, data: Dataset, name: str, rows: int) -> bool:
    """Refuse data that do not fit the model and the loss, after a run of two samples; return if there is an accuracy.

    `name` is what messages call the data, "train" or "test". `rows` is the number of samples whose activations are in
    memory at once, for the estimate of memory.
    """
    if isinstance(data.x, dict):
        _check_keys(objective.module, list(data.x), name)
    _check_vocabulary(objective, data, name)
    inputs, samples = data.inputs(slice(2), objective.dtype), len(data.y[:2])
    written = objective.written_parameter(inputs)
    if written is not None:
        raise BadInput(
            f"the model's forward pass writes into the parameter '{written}', outside of the algorithm's step: "
            "compute a new tensor instead"
        )
    if name == "train":
        _check_state(objective, inputs)
    try:
        with torch.no_grad(), LargestActivation(samples) as activation, _results(objective) as results:
            outputs = objective.outputs(objective.start, objective.buffers, inputs, train=False)
    except BadInput:
        raise
    except Exception as error:  # whatever a user's forward raises
        shape, reason = map_batch(lambda values: tuple(values.shape[1:]), data.x), " ".join(str(error).split())
        if isinstance(error, KeyError):
            reason = f"it looks for {reason}, which they do not have"
        elif tensors(inputs)[0].dtype == torch.int64 and INTEGER_REFUSED.search(reason):
            reason += "; integers reach the model as they are: give features as floats, x.astype('float32')"
        positions = getattr(getattr(objective.module, "config", None), "max_position_embeddings", None)
        if positions is not None and any(v.dim() > 1 and v.shape[1] > positions for v in tensors(data.x)):
            reason += f"; its config has max_position_embeddings = {positions}: enlarge it or shorten the sequences"
        where = f" ({line})" if (line := where_it_failed(error)) else ""
        raise BadInput(f"the model cannot take the {name} data, samples of shape {shape}: {reason}{where}") from error
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
    if data.class_names is not None and objective.loss in (mean_squared_error, mean_absolute_error, huber):
        raise BadInput(
            f"the {name} targets are names of classes, and the loss compares numbers: give numbers (with pandas, "
            "pandas.to_numeric), or take a loss for classes such as 'cross_entropy'"
        )
    axis = class_axis(objective.loss)
    classes = data.classes if axis is not None else None
    if classes is not None and axis is not None and (outputs.dim() < 2 or outputs.shape[axis] < classes):
        shape, has_last = tuple(outputs.shape[1:]), outputs.dim() > 2 and outputs.shape[-1] >= classes
        if axis == 1 and has_last and outputs.shape[:-1] == data.y[:2].shape:
            raise BadInput(
                f"the model's outputs have shape {shape} a sample, with the classes on the last axis: use "
                "loss='token_cross_entropy', or 'causal_lm' to predict the next token"
            )
        hint = ""
        if has_last and data.y.dim() == 1:
            hint = " on the first of these axes; if the others are positions, take the mean over them in the model"
        elif outputs[0].numel() == 1 and data.y.dim() == 1:
            hint = "; use loss='bce' for two classes" if classes == 2 else "; for regression, use loss='mse'"
        lowest = int(torch.where(data.y < 0, classes, data.y).min())
        if 0 < lowest < classes and outputs.dim() > 1 and classes - lowest <= outputs.shape[axis]:
            hint = f"; classes are numbered from 0, and the labels start at {lowest}: subtract {lowest}"
        elif data.y.dim() > 1:
            hint = (
                f"; if {classes - 1} marks what to ignore, give a Dataset(x, y, ignore_index={classes - 1}), or "
                f"data.ignore_index = {classes - 1} in a file"
            )
        raise BadInput(
            f"the model's outputs have shape {shape} a sample, but the {name} labels go up to {classes - 1}: it needs "
            f"{classes}{hint}",
            without_data=f"the model's outputs have shape {shape} a sample, but the {name} data have more classes",
        )
    if name == "train" and results and isinstance(results[0], tuple | list) and len(results[0]) > 1:
        log.warning(
            "the model returns %d values: the loss and the metrics get the first, the others are ignored",
            len(results[0]),
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
    if has_target is not None and not bool(has_target.any()):
        if name == "test":
            raise BadInput("all targets of the test data are -100, which does not count: give at least one label")
        log.warning("all targets of the train data are -100, which does not count: there is nothing to learn")
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


@contextlib.contextmanager
def _results(objective: Objective) -> Iterator[list[Any]]:
    """Collect what the module itself returns, of which `outputs` is a part."""
    results: list[Any] = []
    hook = objective.seeded.register_forward_hook(lambda module, inputs, result: results.append(result))
    try:
        yield results
    finally:
        hook.remove()


def _check_state(objective: Objective, inputs: Inputs) -> None:
    """Refuse or report what a forward pass leaves behind for the next one in other ways than torch's own modules do."""
    replaced = objective.replaced_buffer(inputs)
    if replaced is not None:
        what = f"the model's forward pass assigns a new tensor to the buffer '{replaced}', which would be lost"
        raise BadInput(f"{what}: write into it: self.{replaced.rpartition('.')[2]}.copy_(…)")
    changed = objective.changed_attribute(inputs)
    if changed is not None:
        why = f", because its forward pass changes {changed}" if changed else ""
        advice = "clients share this state, and no checkpoint holds it; keep it in a buffer, written in place"
        log.warning("the model's outputs for one batch differ from call to call%s: %s", why, advice)


def _check_keys(module: nn.Module, keys: list[str], name: str) -> None:
    """Refuse inputs by name that the module's forward does not take, or lacks."""
    known, takes_any = parameters_of(forward_of(module))
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


def _check_vocabulary(objective: Objective, data: Dataset, name: str) -> None:
    """Refuse data with a token id that an embedding has no row for; `name` says which data they are.

    The embedding notices too late: on a GPU such an id kills the process, and among stacked clients it is another
    client's row.
    """
    if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in objective.module.modules()):
        return
    # The largest and smallest values of every position, as two samples: cheap, but they need not occur together.
    extremes = map_batch(lambda values: torch.stack([values.amax(0), values.amin(0)]), data.x)
    if all(_has_rows(layer, low, high) for layer, low, high, _ in _token_ids(objective, data, [extremes]).values()):
        return
    starts = range(0, len(data), VOCABULARY_CHUNK)
    chunks = (map_batch(lambda v, i=i: v[i : i + VOCABULARY_CHUNK], data.x) for i in starts)  # type: ignore[misc]
    for layer_name, (layer, low, high, are_positions) in _token_ids(objective, data, chunks).items():
        if not _has_rows(layer, low, high):
            where = f"layer '{layer_name}' ({type(layer).__name__})"
            if are_positions:
                rows = (
                    f"{where} has {layer.num_embeddings}: shorten the sequences or enlarge the layer (in transformers' "
                    "configurations: n_positions or max_position_embeddings)"
                )
                raise BadInput(
                    f"the sequences of the {name} data are too long: they need {high + 1} positions, but {rows}",
                    without_data=f"the sequences of the {name} data need more positions than the model has: {rows}",
                )
            rows = (
                f"{where} has a vocabulary of {layer.num_embeddings} ids, 0 to {layer.num_embeddings - 1}: enlarge "
                "num_embeddings or map the ids"
            )
            raise BadInput(
                f"the {name} data hold the token id {high if low >= 0 else low}, but {rows}",
                without_data=f"the {name} data hold a token id that has no row in the model: {rows}",
            )


def _has_rows(layer: Any, low: int, high: int) -> bool:
    return low >= 0 and high < int(layer.num_embeddings)


def _token_ids(objective: Objective, data: Dataset, chunks: Any) -> dict[str, tuple[Any, int, int, bool]]:
    """Return every embedding by its name: the layer, its smallest and largest id, and whether the ids are positions.

    Ids are positions if they count up in every sequence.
    """
    seen: dict[str, tuple[Any, int, int, bool]] = {}

    def watch(name: str) -> Callable[..., Any]:
        def hook(layer: Any, args: Any, kwargs: Any) -> Any:
            ids = args[0] if args else kwargs["input"]
            if not ids.numel():
                return None
            _, low, high, are_positions = seen.get(name, (layer, 0, 0, True))
            are_positions = are_positions and ids.dim() > 0 and ids.shape[-1] > 1 and bool((ids.diff() == 1).all())
            seen[name] = layer, min(low, int(ids.min())), max(high, int(ids.max())), are_positions
            ids = ids.clamp(0, layer.num_embeddings - 1)  # so that the other embeddings are reached too
            return ((ids, *args[1:]), kwargs) if args else (args, kwargs | {"input": ids})

        return hook

    layers = [(n, m) for n, m in objective.seeded.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    with contextlib.ExitStack() as handles, torch.no_grad():
        for name, layer in layers:
            handles.enter_context(layer.register_forward_pre_hook(watch(name), with_kwargs=True))
        for x in chunks:
            inputs = prepare(x, data.mean, data.std, objective.dtype)
            with contextlib.suppress(Exception):  # other problems are reported when the model runs
                objective.outputs(objective.start, objective.buffers, inputs, train=False)
    return seen


def _check_loss(objective: Objective, outputs: Tensor, targets: Tensor, name: str) -> None:
    known, sizes = TORCH_LOSSES.get(type(objective.loss)), f"shape [{len(targets)}]"
    try:
        losses: Any = objective.loss(outputs, targets)
    except Exception as error:  # whatever a user's loss raises
        reason = str(error) if isinstance(error, LaminaError) else describe_error(error)
        instead = f"; use loss='{known}' instead" if known else ""
        raise BadInput(
            f"the loss cannot compare the model's outputs with the {name} targets: {reason}{instead}"
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


def _check_samples_alone(objective: Objective, data: Dataset, name: str) -> None:
    """Refuse a user's loss in which the loss of a sample depends on its batch: the others, their order or number."""
    first = data.y[:EVALUATION_BATCH]
    others = (first != first[:1]).reshape(len(first), -1).any(1).nonzero().flatten().tolist()
    spread = range(0, len(first), max(1, len(first) // LOSS_SAMPLES))
    rows = list(dict.fromkeys([0, *others[:1], *spread]))[:LOSS_SAMPLES]  # equal targets would hide a mistake
    with torch.no_grad(), rng.forked(objective.device, seed=0):
        inputs, targets = data.inputs(torch.tensor(rows, device=first.device), objective.dtype), first[rows]
        outputs = objective.outputs(objective.start, objective.buffers, inputs, train=False)
        # So would equal outputs (a last layer of zeros): each is shrunk a little, which keeps log-probabilities below 0
        # and probabilities between 0 and 1.
        noise = LOSS_NOISE * torch.rand(outputs.shape).to(outputs)
        varied = torch.where(outputs == 0, noise, outputs * (1 - noise))

    def losses_of(outputs: Tensor, places: list[int], seed: int = 0) -> Tensor:
        with torch.no_grad(), rng.forked(objective.device, seed=seed):  # a loss may draw random numbers
            return objective.loss(outputs[places], targets[places])

    def is_same(losses: Tensor, other: Tensor) -> bool:
        return torch.allclose(losses, other, rtol=1e-4, atol=1e-6, equal_nan=True)

    every = list(range(len(rows)))
    if name == "train" and bool(losses_of(outputs, every).isnan().any()):  # no learning rate helps
        raise BadInput(
            "the loss of some train samples is NaN before the first step: look at the model's outputs, and for roots, "
            "logarithms and divisions in the loss"
        )
    try:
        together = losses_of(varied, every)
    except Exception:  # the loss may check its outputs, such as the sum of probabilities
        varied, together = outputs, losses_of(outputs, every)
    copies = torch.stack([losses_of(varied, [place] * len(rows))[place] for place in every])
    mixes = not is_same(together, copies)
    if is_same(together, losses_of(varied, every, seed=1)):  # else a sample's random number depends on its place
        longer = [*reversed(every), every[-1]]
        mixes = mixes or not is_same(losses_of(varied, longer), together[longer])
    if mixes:
        with Pairs(len(rows)) as pairs:
            losses_of(varied, every)
        raise BadInput(
            f"the loss mixes samples: with the {name} data, the loss of a sample changes with the others of its batch, "
            "their order or their number; compute it from the sample's own row of outputs "
            f"[n{_axes(outputs)}] and targets [n{_axes(targets)}]"
            f"{_squeeze(outputs, targets, ': ') if pairs.found else ''}"
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
