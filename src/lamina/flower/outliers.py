"""Find the answers of a round that stand out from the others, as those of broken nodes and of crude attacks do.

An answer is compared with the other answers of the same round and with nothing else, because anything remembered or
broadcast may be the work of an earlier attack. The statistics are medians and order statistics over the clients, which
a minority cannot set. `Limits` has the factors; docs/explanation/hostile-nodes.md says which attacks they stop, which
they do not, and what honest nodes were measured to need.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.flower.checks import Limits, Update
from lamina.objective.layers import Layers
from lamina.objective.objective import Buffers

FEWEST_FOR_A_MEDIAN = 3  # answers
FULL_COHORT = 10  # answers; with fewer, a median says less, and the limits are wider by as much
STEPS_CREDIT = 3.0  # times the median number of local steps for which a longer update is due to more data
OTHER_FIELDS = 1.5  # times `times_against`: gradients of honest clients are opposed more often than their steps
RETREAT = 0.25  # of the median norm: how far the median client may move back while others are judged for it
PER_LAYER = 2.0  # a layer's norm varies more between honest clients than that of the whole vector
SUM_OF_MOMENTS = 3.0  # times `times_median`: the limit for the sum of a layer's second moments
GROWTH_SO_FAR = 1.2  # times `times_median`: the limit for what all second moments grew by since the first round
ONE_MOMENT = 40.0  # times `times_median`: the limit for a single second moment
REMEMBERED = 5  # rounds whose medians judge a round with fewer than three answers
FEW_ANSWERS = 20.0  # times `times_median`: the limit in such a round
LOSS_FACTOR = 100.0  # times the typical loss of a round: more is absurd
LEAST_TYPICAL_LOSS = 1.0  # so that a client that fits worse than others, which fit perfectly, is not absurd
MOST_GROWTH = 10  # times the number of examples a client had when it last took part
HOSTILE_SHARE = 0.1  # of the clients, at least one: so many of the largest values are not believed

Reasons = Iterator[tuple[int, str]]  # by the position of a client among the answers: why its answer stands out
Sizes = dict[str, dict[int, float]]  # a size of every answer, by what is measured and client


class Growth(NamedTuple):
    """How much second moments grew over some rounds, in units of what is usual in a round."""

    own: float  # those of one client
    others: float  # the sum of the rounds' medians


class Broadcast(NamedTuple):
    """What the server knows of a round, apart from the answers."""

    layers: Layers
    buffers: Buffers  # the floating buffers that were broadcast
    inherited: Callable[[int], Mapping[str, Tensor]]  # by local steps: what a client's second moments began with
    by_examples: bool
    step: Callable[[int], Tensor | None] = lambda _: None  # by local steps: what `delta` inherits from the broadcast
    largest_growth: Mapping[str, float] = {}  # by layer of a second moment: the largest of all rounds' `median_growth`
    implied: Sequence[str] = ()  # fields that follow from others, which is checked: they are not judged again
    drift: Tensor | None = None  # how far the model has moved since its start
    totals: Mapping[str, Mapping[int, Tensor]] = {}  # by field that adds up and client: its sum over earlier rounds
    growth_by_client: Mapping[int, Growth] = {}  # by client, over the rounds that it took part in


def judge_updates(updates: Mapping[int, Update], broadcast: Broadcast, limits: Limits) -> dict[int, str]:
    """Return the clients whose updates stand out, each with the reason; nothing with fewer than three updates."""
    if limits.times_median is None or len(updates) < FEWEST_FOR_A_MEDIAN:
        return {}
    clients = list(updates)
    odd = judge_counts({client: update.examples for client, update in updates.items()}, limits)
    for i, why in _judge_answers(updates, broadcast, limits, limits.times_median):
        odd.setdefault(clients[i], why)
    return odd


def _judge_answers(updates: Mapping[int, Update], broadcast: Broadcast, limits: Limits, times: float) -> Reasons:
    answers, steps = list(updates.values()), _steps(updates)
    examples = torch.tensor([answer.examples for answer in answers], dtype=torch.float64)
    weights = examples / _median(examples) if broadcast.by_examples else torch.ones_like(examples)
    second_moments = broadcast.inherited(answers[0].steps)
    for name in answers[0].up._fields:
        vectors = [getattr(answer.up, name) for answer in answers]
        if vectors[0] is None or name in broadcast.implied or name in second_moments:
            continue
        if name == "delta" and broadcast.step(1) is not None:
            vectors = [vector - broadcast.step(answer.steps) for vector, answer in zip(vectors, answers, strict=True)]
        yield from _judge_vectors(f"'{name}'", vectors, weights, steps, broadcast.layers, limits)
        if name == "delta" and broadcast.drift is not None:
            yield from _judge_drift(vectors, weights, broadcast.drift, limits)
    if second_moments:
        yield from _judge_second_moments(updates, broadcast, times)
        yield from _judge_growth(updates, broadcast, times)
    for name, before in broadcast.totals.items():
        vectors = [getattr(answer.up, name) + before.get(client, 0.0) for client, answer in updates.items()]
        equal = torch.ones_like(steps)
        yield from _judge_vectors(
            f"the sum of '{name}' over all rounds", vectors, equal, equal, broadcast.layers, limits
        )
    for name in answers[0].buffers:
        values = [answer.buffers[name] for answer in answers]
        yield from _judge_buffer(name, values, broadcast.buffers[name], times)


def sizes_of_updates(updates: Mapping[int, Update], broadcast: Broadcast) -> Sizes:
    """Return the norms of the fields and buffers, what second moments grew by, and the numbers of examples."""
    sizes: Sizes = {}
    for client, update in updates.items():
        inherited = broadcast.inherited(update.steps)
        for name, value in zip(update.up._fields, update.up, strict=True):
            if value is not None:
                added = value.double() - inherited.get(name, 0.0)
                sizes.setdefault(f"'{name}' has norm", {})[client] = float(torch.linalg.vector_norm(added))
        if update.buffers:
            norms = torch.stack([torch.linalg.vector_norm(value.double()) for value in update.buffers.values()])
            sizes.setdefault("its buffers have norm", {})[client] = float(torch.linalg.vector_norm(norms))
        sizes.setdefault("its number of examples is", {})[client] = float(update.examples)
    return sizes


def medians(sizes: Sizes, used: Sequence[int]) -> dict[str, float]:
    """Return what to remember of a round: the medians over the answers used, or nothing if they are too few."""
    if len(used) < FEWEST_FOR_A_MEDIAN:
        return {}  # a single hostile node could set them
    return {what: statistics.median([values[client] for client in used]) for what, values in sizes.items()}


def judge_by_earlier_rounds(sizes: Sizes, recent: Mapping[str, Sequence[float]], limits: Limits) -> dict[int, str]:
    """Return the clients of a round with fewer than three answers that sent something absurd, each with the reason."""
    absurd: dict[int, str] = {}
    for what, values in sizes.items():
        if limits.times_median is None or len(values) >= FEWEST_FOR_A_MEDIAN or not recent.get(what):
            continue
        median, times = statistics.median(recent[what]), FEW_ANSWERS * limits.times_median
        for client, value in values.items():
            if value > times * median > 0:
                absurd.setdefault(
                    client, f"{what} {value:.4g}, more than {times:g} times the median of the last rounds, {median:.4g}"
                )
    return absurd


def judge_growth_of_data(examples: Mapping[int, int], before: Mapping[int, int], limits: Limits) -> dict[int, str]:
    """Return the clients that claim far more examples than when they last took part, each with the reason."""
    if limits.times_median is None:
        return {}
    return {
        client: f"says {count} examples, more than {MOST_GROWTH} times the {before[client]} when it last took part"
        for client, count in examples.items()
        if client in before and count > MOST_GROWTH * before[client]
    }


def judge_counts(examples: Mapping[int, int], limits: Limits, what: str = "examples") -> dict[int, str]:
    """Return the clients that claim far more examples, or labels, than the others, each with the reason."""
    if limits.times_median is None or len(examples) < FEWEST_FOR_A_MEDIAN:
        return {}
    times, median = limits.times_examples * _wider(len(examples)), statistics.median(examples.values())
    return {
        client: f"its number of {what} is {count}, more than {times:.3g} times the round's median, {median:.4g} "
        "(limits: times_examples)"
        for client, count in examples.items()
        if count > times * median
    }


def absurd_losses(losses: Mapping[int, float], before: float | None) -> tuple[float, list[int]]:
    """Return the typical loss of a round, and the clients whose loss is out of all proportion to it.

    The median counts; of two answers the smaller, and of one that of the round `before`, if there is any.

    >>> absurd_losses({0: 2.1, 1: 9e29, 2: 2.5, 3: 1.9}, None)
    (2.1, [1])
    """
    sizes = [abs(loss) for loss in losses.values()]
    if not sizes or (len(sizes) == 1 and before is None):
        return 0.0, []
    typical = statistics.median_low(sizes) if len(sizes) > 1 or before is None else before
    most = LOSS_FACTOR * max(abs(typical), LEAST_TYPICAL_LOSS)
    return typical, [client for client, loss in losses.items() if abs(loss) > most]


def _judge_vectors(
    title: str, vectors: Sequence[Tensor], weights: Tensor, steps: Tensor, layers: Layers, limits: Limits
) -> Reasons:
    """Find vectors that are much longer than the others, or long and opposed to them.

    A vector that is longer because its client took more local steps is not too long. Its weight in the mean counts
    where it is opposed to the others: a node must not undo by its weight what it may not undo by its length.
    """
    assert limits.times_median is not None
    wider = _wider(len(vectors))
    credit = steps.clamp(max=STEPS_CREDIT * float(_median(steps)))
    for where, products, more in _segments(vectors, layers):
        norms = products.diagonal().clamp(min=0).sqrt()
        median, per_step = _median(norms), _median(norms / steps)
        if not float(median) > 0:
            continue
        ratio = torch.minimum(norms / median, (norms / credit) / per_step)
        longest = limits.times_median * wider * more
        what = title + (f" of '{where}'" if where else "")
        for i in _where(ratio > longest):
            norm = f"{what} has norm {norms[i]:.4g}"
            yield i, f"{norm}, more than {longest:.3g} times the round's median, {median:.4g}"
        against = _opposition(products, norms, median) * weights
        most = limits.times_against * wider * more * (1.0 if title == "'delta'" else OTHER_FIELDS)
        for i in _where(against > most):
            opposition = f"{against[i]:.3g} times the weight of a median one; at most {most:.3g} is allowed"
            yield i, f"{what} is opposed to the others with {opposition}"


def _judge_drift(vectors: Sequence[Tensor], weights: Tensor, drift: Tensor, limits: Limits) -> Reasons:
    """Find steps that take back what all rounds so far have moved, even if this round moves elsewhere.

    Nobody is judged while most clients move back: they may have gone too far.
    """
    rows = torch.stack(list(vectors)).double()
    median = _median(torch.linalg.vector_norm(rows, dim=1))
    length = torch.linalg.vector_norm(drift.double())
    if not float(median * length) > 0:
        return
    back = -(rows @ (drift.double() / length)) / median
    if float(_median(back)) > RETREAT:
        return
    back = back * weights
    most = limits.times_against * _wider(len(vectors))
    for i in _where(back > most):
        distance = f"{back[i]:.3g} times the norm of a median one; at most {most:.3g} is allowed"
        yield i, f"'delta' moves the model back towards its start by {distance}"


def _opposition(products: Tensor, norms: Tensor, median: Tensor) -> Tensor:
    """Return how far every vector points against the mean of the others, in units of the median norm.

    The others are scaled down to the median norm first, so that no single one decides what their mean is.
    """
    scale = torch.where(norms > median, median / norms, 1.0)
    others = scale.repeat(len(norms), 1).fill_diagonal_(0.0)  # row i: the weights of all but i
    along = (others * products).sum(1)
    lengths = ((others @ products) * others).sum(1).clamp(min=0).sqrt()
    return torch.where(lengths > 0, -along / (lengths * median), 0.0)


def _segments(vectors: Sequence[Tensor], layers: Layers) -> list[tuple[str, Tensor, float]]:
    """Return the inner products of the whole vectors and, for vectors of the model's size, of every module.

    Each has the module's name, the products [clients, clients], and how much wider its limits are.
    """
    sizes = layers.group_sizes("module") if vectors[0].numel() == layers.size else [vectors[0].numel()]
    names = layers.group_names("module") if len(sizes) > 1 else ("",)
    pieces = zip(*(torch.split(vector.flatten(), sizes) for vector in vectors), strict=True)
    parts = []
    for name, rows in zip(names, pieces, strict=True):
        stacked = torch.stack(rows).double().cpu()
        parts.append((name or "model", stacked @ stacked.T, PER_LAYER))
    whole = ("", torch.stack([products for _, products, _ in parts]).sum(0), 1.0)
    return [whole, *parts] if len(parts) > 1 else [whole]


# --- second moments --------------------------------------------------------------------------------------------------


def _second_moments(updates: Mapping[int, Update], broadcast: Broadcast) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield a field, a layer, what its second moments began with, and what was added: [clients, size].

    Only what a client added in this round is compared: what it inherited from the broadcast may have been poisoned
    before, and would hide or excuse more of it. Late in a run most clients add next to nothing, so the sum may be as
    large as is usual in any round so far.
    """
    answers, layers = list(updates.values()), broadcast.layers
    inherited = [broadcast.inherited(answer.steps) for answer in answers]
    for name in inherited[0]:
        vectors = [getattr(answer.up, name) for answer in answers]
        if vectors[0] is None:
            continue
        sizes = layers.sizes if vectors[0].numel() == layers.size else [vectors[0].numel()]
        names = layers.names if len(sizes) == len(layers.names) else (name,)
        sent = zip(*(torch.split(vector, sizes) for vector in vectors), strict=True)
        began = zip(*(torch.split(moments[name], sizes) for moments in inherited), strict=True)
        for layer, rows, bases in zip(names, sent, began, strict=True):
            base = torch.stack(bases).double()
            yield name, layer, base, (torch.stack(rows).double() - base).clamp(min=0)


def _judge_second_moments(updates: Mapping[int, Update], broadcast: Broadcast, times: float) -> Reasons:
    """Find second moments that grow more than the others' do: in the sum over a layer, or in a single coordinate."""
    steps = _steps(updates)
    steps = steps.clamp(max=STEPS_CREDIT * float(_median(steps)))
    most_in_sum, most = (times * factor * _wider(len(updates)) for factor in (SUM_OF_MOMENTS, ONE_MOMENT))
    for name, layer, base, added in _second_moments(updates, broadcast):
        if name in broadcast.implied:
            continue
        sums = added.sum(1)
        usual = _usual(sums, name, layer, broadcast)
        usual_per_step = torch.maximum(_median(sums / steps), usual / _median(steps))
        for i in _where((sums > most_in_sum * usual) & (sums / steps > most_in_sum * usual_per_step)):
            growth = f"'{name}' of '{layer}' grew by {sums[i]:.4g} in sum"
            yield i, f"{growth}, more than {most_in_sum:.3g} times what the others' did, {usual:.4g}"
        reference = torch.maximum(_believed_maximum(added), base.amin(0)).clamp(min=float(_median(added.amax(1))))
        for i in _where((added > most * reference).any(1)):
            yield i, f"'{name}' of '{layer}' has entries more than {most:.3g} times as large as the others'"


def _judge_growth(updates: Mapping[int, Update], broadcast: Broadcast, times: float) -> Reasons:
    """Find clients whose second moments have grown more than the others' in the rounds that they took part in.

    What passes in every single round may still add up: a server's second moments forget slowly, or never.
    """
    most = times * GROWTH_SO_FAR * _wider(len(updates))
    for i, (own, others) in enumerate(add_growth(updates, broadcast).values()):
        if own > most * max(1.0, others):
            growth = f"its second moments have grown by {own:.3g} in all its rounds (1: what is usual in a round)"
            yield i, f"{growth}, more than {most:.3g} times as much as the others', {others:.3g}"


def add_growth(updates: Mapping[int, Update], broadcast: Broadcast) -> dict[int, Growth]:
    """Return `broadcast.growth_by_client` of these clients with this round added: the mean of their layers' growth.

    More local steps excuse more growth.
    """
    steps = _steps(updates)
    excused = (steps / _median(steps)).clamp(1.0, STEPS_CREDIT)
    ratios = [torch.zeros_like(steps)]
    for name, layer, _, added in _second_moments(updates, broadcast):
        sums = added.sum(1).cpu() / excused
        usual = _usual(sums, name, layer, broadcast)
        ratios.append(torch.where(usual > 0, sums / usual, 0.0))
    growth = (torch.stack(ratios).sum(0) / max(1, len(ratios) - 1)).tolist()
    median = statistics.median(growth)
    before = [broadcast.growth_by_client.get(client, Growth(0.0, 0.0)) for client in updates]
    return {
        client: Growth(old.own + own, old.others + median)
        for client, old, own in zip(updates, before, growth, strict=True)
    }


def median_growth(updates: Mapping[int, Update], broadcast: Broadcast) -> dict[str, float]:
    """Return the medians over the clients of what every layer's second moments grew by, or nothing if they are few."""
    if len(updates) < FEWEST_FOR_A_MEDIAN:
        return {}  # a single hostile node could set them
    return {
        f"{name} of {layer}": float(_median(added.sum(1)))
        for name, layer, _, added in _second_moments(updates, broadcast)
    }


def _usual(sums: Tensor, name: str, layer: str, broadcast: Broadcast) -> Tensor:
    return _median(sums).clamp(min=broadcast.largest_growth.get(f"{name} of {layer}", 0.0))


# --- buffers and statistics ------------------------------------------------------------------------------------------


def _judge_buffer(name: str, values: Sequence[Tensor], sent: Tensor, times: float) -> Reasons:
    """Find buffers (BatchNorm's statistics) with entries that are much further from the median than the others' are."""
    rows = torch.stack([value.flatten() for value in values]).double()
    median = _median(rows)
    distance = (rows - median).abs()
    moved = (median - sent.flatten().double()).abs()
    reference = torch.maximum(_believed_maximum(distance), moved).clamp(min=float(_median(distance.amax(1))))
    most = times * _wider(len(values))
    for i in _where((distance > most * reference).any(1)):
        far = f"more than {most:.3g} times as far from the round's median as the others'"
        yield i, f"the buffer '{name}' has entries {far}"


def _believed_maximum(rows: Tensor) -> Tensor:
    """Return the largest value of every coordinate, without those that a hostile minority may have sent."""
    hostile = max(1, round(HOSTILE_SHARE * len(rows)))
    return torch.topk(rows, hostile + 1, dim=0).values[-1]


def _median(values: Tensor) -> Tensor:
    """Return the median over the first axis: the mean of the two middle values of an even number."""
    ordered = values.sort(dim=0).values
    return 0.5 * (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2])


def _steps(updates: Mapping[int, Update]) -> Tensor:
    return torch.tensor([update.steps for update in updates.values()], dtype=torch.float64)


def _where(mask: Tensor) -> list[int]:
    return [int(i) for i in torch.nonzero(mask).flatten()]


def _wider(answers: int) -> float:
    return max(1.0, FULL_COHORT / answers)
