"""The state between two rounds, and a round's sums and report: shared by all engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ServerInfo, as_sent, with_displacement
from lamina.base.finite import all_finite
from lamina.channel.channel import OPEN, Channel
from lamina.channel.privacy import Privacy
from lamina.engines.divergence import diverged
from lamina.objective.objective import Buffers, Objective, buffer_bytes
from lamina.rounds.aggregation import MEAN, Aggregation, Mean, combine_uploads
from lamina.rounds.ledger import Ledger, bytes_besides_payload
from lamina.rounds.plan import RoundFacts

AT_A_TIME = 1 << 15  # elements of vectors on a CPU, whose differences then stay in a core's cache


@dataclass
class State:
    """Everything that carries over from one round to the next."""

    round: int  # rounds finished
    server: Any  # the algorithm's Server record, of the shared parameters
    buffers: Buffers  # the model's buffers (BatchNorm statistics); private ones stay as they were
    clients: dict[int, Any]  # what the clients that have taken part keep, see personal.py
    ledger: Ledger
    private_start: Tensor | None = None  # where the clients' private parameters start; None: there are none
    clip_bound: float | None = None  # of differential privacy, after the first round; None: it stays as it was given

    @classmethod
    def start(cls, algorithm: Algorithm, objective: Objective, clients: int) -> State:
        """Return the state before round 1."""
        server = algorithm.init(objective.shared_start, objective.shared_layers)
        return cls(0, server, dict(objective.buffers), {}, Ledger(clients), objective.private_start)


@dataclass(frozen=True)
class RoundReport:
    """The measurements of one round."""

    # means over clients are weighted as the algorithm's own
    train_loss: float  # mean over clients of their mean mini-batch loss
    consistency: float  # mean_i ||y_K - x+||^2
    update_norm: float  # ||x+ - x||
    bytes_down: int
    bytes_up: int
    trust_ratios: dict[str, float]  # of the clients' last local steps, mean by layer; empty unless asked for
    clip_bound: float | None  # of differential privacy in this round, if it adapts
    # The diagnostics need the rest.
    down: Any  # the broadcast
    displacement: Tensor  # D, the mean of the deltas, as the aggregation combines them
    mean_steps: float  # mean K_i


@dataclass
class RoundSums:
    """The sums of a round over its clients; the weights of the cohort sum to one."""

    up: Any = None  # the weighted sum of the Ups: their mean
    buffers: Buffers = field(default_factory=dict)  # the weighted sum of the floating buffers
    steps: float = 0.0  # mean K_i
    weight: float = 0.0  # of the clients that are in `up`; 1 at the end
    spread: float = 0.0  # sum_i w_i ||delta_i - mean||^2 over these clients, with the mean of theirs
    loss: float = 0.0  # mean over clients of their mean mini-batch loss
    within: float = 0.0  # the part of the clients whose uploads are within an adaptive bound
    trust: Tensor | None = None  # mean trust ratio of every layer
    weights: list[float] = field(default_factory=list)  # every client's weight; needed by all aggregations but the mean
    aggregation: Aggregation = MEAN
    channel: Channel = OPEN
    privacy: Privacy | None = None
    uploads: dict[int, tuple[Any, Buffers]] = field(default_factory=dict)  # by place in the cohort; see `keep`
    server_step: ServerStep | None = None  # if it is taken already; its measured values are on the host then

    @property
    def keeps_uploads(self) -> bool:
        """Whether the round's uploads must be kept; the mean needs only sums."""
        return not isinstance(self.aggregation, Mean)

    def keep(self, c: int, up: Any, buffers: Buffers) -> None:
        """Keep the upload of the c-th active client, if the aggregation is not the mean."""
        if self.keeps_uploads:
            self.uploads[c] = up, {name: value for name, value in buffers.items() if value.is_floating_point()}

    def combined(self, algorithm: Algorithm) -> tuple[Any, Buffers]:
        """Return what the server's step works on: the uploads, combined by the aggregation."""
        if not self.keeps_uploads:
            return self.up, self.buffers
        uploads = [self.uploads[c] for c in sorted(self.uploads)]
        return combine_uploads(self.aggregation, uploads, self.weights, algorithm.state_changes)

    def clipped(self, c: int, up: Any) -> Any:
        """Return the upload of the c-th active client as it enters the mean, and count it if it is within the bound."""
        if self.privacy is None:
            return up
        if (bound := self.privacy.adaptive_bound) is not None:
            self.within += self.weights[c] * float(self.privacy.within(up, bound))
        return self.privacy.clip(up)

    def add_client(
        self, c: int, algorithm: Algorithm, up: Any, buffers: Buffers, *, loss: float, steps: float, by_examples: bool
    ) -> None:
        """Add the upload and the figures of the c-th active client, with its weight."""
        weight, up = self.weights[c], with_displacement(algorithm, up)
        gap = 0.0
        if self.up is not None:
            gap = _squared_distance(up.delta, self.up.delta, 1 / self.weight)
        self.add_spread(weight, 0.0, gap)
        self.keep(c, up, buffers)  # a robust aggregation weights by itself; the mean needs only the sums
        if by_examples:  # `algorithm.state_changes` add up over all clients (SCAFFOLD's c): each counts the same
            up = undo_weighting(algorithm, up, weight * len(self.weights))
        self.up, self.buffers = self.plus(up, buffers, weight)
        self.loss += weight * loss
        self.steps += weight * steps

    def add_spread(self, weight: float, within: float, gap: float) -> None:
        """Add clients to `spread`, before their uploads are added to `up`.

        Nothing cancels in this form, unlike in the difference of the mean square and the square of the mean
        (Chan, Golub & LeVeque 1983).

        Args:
            weight: their weights' sum.
            within: sum_i w_i ||delta_i - mean||^2 over these clients, with the mean of theirs.
            gap: the squared distance of that mean from the mean of the clients added so far.
        """
        self.spread += within + (gap * self.weight * weight / (self.weight + weight) if self.weight else 0.0)
        self.weight += weight

    def add_trust(self, ratios: Tensor | None, weight: float) -> None:
        """Add one client's trust ratios, if its algorithm has them."""
        if ratios is not None:
            self.trust = weight * ratios if self.trust is None else self.trust + weight * ratios

    def plus(self, up: Any, buffers: Buffers, weight: float = 1.0) -> tuple[Any, Buffers]:
        """Return `up` and the floating `buffers` with these, weighted, added; a field that is not sent stays None."""
        if self.up is None:
            total_up = type(up)(*(None if value is None else weight * value for value in up))
        else:
            pairs = zip(self.up, up, strict=True)
            total_up = type(up)(*(None if value is None else total.add(value, alpha=weight) for total, value in pairs))
        floating = {name: value for name, value in buffers.items() if value.is_floating_point()}
        return total_up, self.buffers | {n: self.buffers.get(n, 0.0) + weight * b for n, b in floating.items()}


def _squared_distance(one: Tensor, other: Tensor, scale: float) -> float:
    """Return ||one - scale * other||^2 in double precision."""
    differences = (torch.sub(part, of_other, alpha=scale).double() for part, of_other in _pieces(one, other))
    return float(torch.stack([torch.dot(difference, difference) for difference in differences]).sum())


def _pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same piece of all vectors, one after another."""
    size = AT_A_TIME if vectors[0].device.type == "cpu" else max(1, vectors[0].numel())
    return zip(*(torch.split(vector, size) for vector in vectors), strict=True)


class ServerStep(NamedTuple):
    """The server's step of a round, perhaps still being computed by a GPU."""

    server: Any  # the algorithm's new Server record
    buffers: Buffers
    displacement: Tensor  # mean delta_i, as the aggregation combined it
    measured: Tensor  # ||x+ - x|| and ||mean delta_i - (x+ - x)||^2; float64


def step_server(
    algorithm: Algorithm, objective: Objective, state: State, plan: RoundFacts, sums: RoundSums
) -> ServerStep:
    """Take the server's step on the means, without waiting for a GPU."""
    layers = objective.shared_layers
    info = ServerInfo(plan.number, plan.lr, layers, plan.participation, mean_steps=sums.steps)
    up, buffers = sums.combined(algorithm)
    if sums.privacy is not None:
        up = sums.privacy.private_mean(algorithm, up, plan.number, plan.share)
        info = info._replace(noise_variance=sums.privacy.noise_variance(algorithm, up, plan.number))
    server = algorithm.update(state.server, as_sent(algorithm, up), info)
    squares = []
    for x, before, delta in _pieces(server.x, state.server.x, sums.up.delta):
        moved = (x - before).double()
        gap = delta.double() - moved
        squares.append(torch.stack([torch.dot(moved, moved), torch.dot(gap, gap)]))
    of_moved, of_gap = torch.stack(squares).sum(0)
    return ServerStep(server, buffers, up.delta, torch.stack([of_moved.sqrt(), of_gap]))


def close_round(
    algorithm: Algorithm,
    objective: Objective,
    state: State,
    plan: RoundFacts,
    down: Any,
    sums: RoundSums,
    clients: dict[int, Any],
) -> tuple[State, RoundReport]:
    """Return the state after the server's step and the round's report. All engines end a round here."""
    clip_bound = bound_of_round = None
    if sums.privacy is not None:  # before the mean with noise is seen by anybody
        sums.privacy.enter(sums.up, plan.number, plan.share, sums.within)
        clip_bound = sums.privacy.next_bound(plan.number, sums.within, plan.share)
        bound_of_round = sums.privacy.adaptive_bound
    step = step_server(algorithm, objective, state, plan, sums) if sums.server_step is None else sums.server_step
    update_norm, gap = step.measured.tolist()
    # a NaN or an infinity in x+ makes the norm one; the other way round the norm may overflow
    if not (math.isfinite(update_norm) or all_finite(step.server.x)):
        raise diverged(objective.shared_layers, step.server.x, plan.number, plan.lr, client=None)
    layers = objective.shared_layers
    # Which clients hold a field tells who has taken part, so with secret cohorts it is sent to all every time.
    is_secret = sums.privacy is not None and sums.privacy.secret_cohorts
    versions = {} if is_secret else algorithm.down_versions(plan.number)
    buffers = buffer_bytes(objective.shared_buffers(state.buffers))  # BatchNorm statistics travel with the model
    more_down, more_up = bytes_besides_payload(algorithm.needs(plan.number), state.server.x, buffers)
    upload = sums.channel.upload_bytes(algorithm, as_sent(algorithm, sums.up), layers)
    names = [name or "model" for name in objective.layers.group_names(algorithm.grouping)]
    report = RoundReport(
        train_loss=sums.loss,
        consistency=sums.spread + gap,  # mean_i ||delta_i - m||^2 = mean_i ||delta_i - D||^2 + ||D - m||^2, m = x+ - x
        update_norm=update_norm,
        bytes_down=state.ledger.down(sums.channel.narrow(down, layers), versions, plan.cohort)
        + more_down * len(plan.cohort),
        bytes_up=(upload + more_up) * len(plan.cohort),
        trust_ratios={} if sums.trust is None else dict(zip(names, sums.trust.tolist(), strict=True)),
        clip_bound=bound_of_round,
        down=down,
        displacement=step.displacement,
        mean_steps=sums.steps,
    )
    return State(
        plan.number, step.server, state.buffers | step.buffers, clients, state.ledger, state.private_start, clip_bound
    ), report


def copy_buffers(buffers: Buffers) -> Buffers:
    """Return copies, for a forward pass that must not update the buffers themselves."""
    return {name: buffer.clone() for name, buffer in buffers.items()}


def client_weights(plan: RoundFacts, by_examples: bool) -> list[float]:
    """Return every active client's weight in the mean."""
    shares = plan.examples if by_examples else np.ones(len(plan.cohort))
    weights: list[float] = (shares / shares.sum()).tolist()
    return weights


def undo_weighting(algorithm: Algorithm, up: Any, relative: float | Tensor) -> Any:
    """Scale an Up's `state_changes` so that the weighted mean over the cohort is the uniform mean of them.

    `relative` is the client's weight times the size of the cohort, or a column of such numbers for several rows.
    """
    return up._replace(**{n: v / relative for n in algorithm.state_changes if (v := getattr(up, n)) is not None})
