"""The reference engine: one client after another, as the papers' pseudo-code reads. Any `nn.Module`, any device.

Every other engine is tested against this one. Read `run_round`, then `train_client`: they are the whole method. Models
and gradients are flat vectors [p]. The words of this file:

    algorithm   the seven functions of a method (algorithms/contract.py); the five that run in a round are `broadcast`,
                `begin`, `step`, `finish` and `update`
    down, up    what the server broadcasts and what a client uploads: records of tensors that the algorithm defines
    client      the record that a client keeps from one of its rounds to the next
    kept        the same, and the private parts of the client's model, if there are any (personal.py)
    local       the state of local training; `local.y` is the local model
    objective   the module and the loss as a function of a flat vector; `objective.layers` knows where each layer lies
    buffers     the module's tensors that are not trained, such as BatchNorm statistics, by name
    protocol    the settings of training: learning rate, clipping, weighting, aggregation, ...
    plan        the random choices of one round: `plan.cohort` are the ids of its active clients, and client number c of
                the cohort takes `plan.steps[c]` local steps
    state       what carries over from round to round: `state.server` with the model x, the buffers, and the clients'
                records by client id
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.algorithms.primitives import clip_by_norm
from lamina.base import rng
from lamina.base.finite import all_finite
from lamina.channel.channel import Link
from lamina.data.dataset import Dataset
from lamina.data.feed import as_augmentation, training_inputs
from lamina.engines.blocks import Recordings, Segments, Step
from lamina.engines.divergence import StepCheck, diverged_upload
from lamina.engines.personal import client_broadcast, client_result, first_record, pass_channel, personal_model, unpack
from lamina.engines.state import RoundReport, RoundSums, State, client_weights, close_round, copy_buffers
from lamina.objective.batch import Inputs, Targets, take
from lamina.objective.objective import Buffers, Objective
from lamina.rounds.aggregation import combine_vectors
from lamina.rounds.plan import RoundPlan
from lamina.rounds.settings import TrainSettings

FULL_GRADIENT_CHUNK = 512  # samples at a time in a gradient over all of a client's data
# The same for BatchNorm without running statistics: its output for a sample depends on the samples evaluated with it,
# so every engine must evaluate the same ones together.
FIXED_CHUNK = 64


class StepBatch(NamedTuple):
    """The samples of one local step, and its randomness: every gradient of the step has the same dropout masks."""

    inputs: Inputs
    targets: Targets
    stream: Tensor  # the key of lamina's own dropout masks [1], the same in all engines
    seed: int  # of torch's generators, for a module that draws random numbers itself


@dataclass(frozen=True)
class Loop:
    """The reference engine for one algorithm, objective and data set."""

    algorithm: Algorithm
    objective: Objective
    data: Dataset  # on the objective's device
    protocol: TrainSettings
    record_trust_ratios: bool = False
    name: ClassVar[str] = "loop"
    why: str = "it is the reference"  # the reason for this engine, which messages quote
    _recordings: Recordings = field(init=False, default_factory=dict, repr=False, compare=False)

    def run_round(self, state: State, plan: RoundPlan) -> tuple[State, RoundReport]:
        """Run one round: broadcast, local training of every active client, mean, server update."""
        algorithm, objective = self.algorithm, self.objective
        layers = objective.layers
        needs = algorithm.needs(plan.number)  # what it asks for besides mini-batch gradients
        weights = client_weights(plan, self.protocol.by_examples)  # of the cohort in the mean; their sum is 1
        channel, x = self.protocol.channel, self.protocol.channel.seen(state.server.x, objective.shared_layers)

        records = [
            state.clients[i]
            if i in state.clients
            else first_record(algorithm, objective, x, state.private_start, state.buffers, channel)
            for i in plan.cohort.tolist()
        ]
        # the model that every client sees: the server's, with the private parts of its own
        seen = [personal_model(objective, x, state.buffers, record) for record in records]

        # Mime: grad F_i(x) over all of a client's data, for `finish`, and its mean over the cohort, for `broadcast`
        full_gradients: list[Any] = [None] * len(plan.cohort)
        if needs.full_gradient or needs.control_variate:
            full_gradients = [self.full_gradient(*seen[c], plan, c) for c in range(len(plan.cohort))]
        mean_gradient = None
        if needs.control_variate:
            shared = [objective.shared_part(gradient) for gradient in full_gradients]
            mean_gradient = combine_vectors(self.protocol.aggregation, shared, weights)

        server_info = ServerInfo(
            plan.number, plan.lr, objective.shared_layers, plan.participation, mean_gradient=mean_gradient
        )
        down = channel.seen_broadcast(algorithm.broadcast(state.server, server_info), objective.shared_layers)

        sums = RoundSums(weights=weights, aggregation=self.protocol.aggregation, channel=channel)
        sums.privacy = self.protocol.privacy and self.protocol.privacy.at(state.clip_bound)
        clients = dict(state.clients)
        for c, client_id in enumerate(plan.cohort.tolist()):
            full_gradient = full_gradients[c] if needs.full_gradient else None
            info = ClientInfo(plan.number, plan.lr, layers, float(plan.steps[c]), full_gradient)
            kept, own_gradient = unpack(records[c]), full_gradients[c] if needs.control_variate else None
            own_down = client_broadcast(algorithm, objective, down, kept, info, own_gradient)
            buffers = copy_buffers(seen[c][1])  # local training updates the copy

            local, losses = self.train_client(own_down, kept.client, buffers, info, plan, c)
            up, client = algorithm.finish(local, own_down, kept.client, info)
            whole_up, record = client_result(algorithm, objective, kept, (local, up, client), buffers, info)

            if not all_finite(losses, *up, *record):
                self.explain(own_down, kept.client, seen[c][1], info, plan, c, up)  # raises Diverged
            # what the server reads: the upload itself, unless codecs shrink it
            link = Link.of(objective.shared_layers, plan.streams[c], plan.cohort_stream, objective.device)
            sent, clients[client_id] = pass_channel(channel, algorithm, whole_up, down, record, link)
            # the mean of the uploads; the figures are for `update` and the report of the round
            up = sums.clipped(c, sent.up)
            loss, steps, by_examples = float(losses.mean()), float(plan.steps[c]), self.protocol.by_examples
            buffers = objective.shared_buffers(buffers)
            sums.add_client(c, algorithm, up, buffers, loss=loss, steps=steps, by_examples=by_examples)
            if self.record_trust_ratios:
                sums.add_trust(algorithm.trust_ratios(local), weights[c])

        # the last line of the papers' pseudo-code: `close_round` combines the uploads, calls
        # `algorithm.update(state.server, mean of the uploads, ...)` and writes the report of the round
        return close_round(algorithm, objective, state, plan, down, sums, clients)

    def train_client(
        self,
        down: Any,
        client: Any,
        buffers: Buffers,
        info: ClientInfo,
        plan: RoundPlan,
        c: int,
        watch: Callable[[int, Tensor, Tensor, Any, Any], None] | None = None,
    ) -> tuple[Any, Tensor]:
        """Train the c-th active client; return its final local state and the loss of every step [K_i].

        The buffers are updated in place. `watch` is called after every step with its number, its loss and gradient, and
        the local states before and after it.
        """
        algorithm, layers = self.algorithm, self.objective.layers
        needs = algorithm.needs(plan.number)
        # the original Mime: `step` gets g(y) - g(x), and adds the mean gradient that the server has sent
        control = down.x if needs.control_variate else None
        local = algorithm.begin(down, client, info)
        # `algorithm.step`, in blocks if the model is large; a local state is not kept unless it is watched
        step = Step(algorithm, self._recordings, may_overwrite=watch is None)
        is_clipped = self.protocol.clip is not None and not algorithm.clips_direction
        # whether only `step` reads the gradient, which need not be one vector then
        only_steps = watch is None and control is None and not (is_clipped or needs.second_gradient)
        grad: Any  # a vector, or its segments
        losses = []
        with rng.forked(self.objective.device):  # the module may draw random numbers; the caller must not notice
            for k in range(int(plan.steps[c])):
                batch = self._batch(plan, c, k)
                if only_steps:
                    grad, loss = self._segments(local.y, buffers, batch)
                else:
                    grad, loss = self._gradient(local.y, buffers, batch, control)
                more = {"loss": loss.reshape(1)} if needs.loss else {}
                if needs.second_gradient:  # of the same batch, at a point that the algorithm chooses
                    point = algorithm.second_point(local, down, grad, info.lr, layers)
                    # a copy, because only the pass at y updates the buffers
                    more["second_grad"], _ = self._gradient(point, copy_buffers(buffers), batch, control)
                after = step(local, down, grad, info.lr, layers, **more)
                losses.append(loss)
                if watch is not None:
                    watch(k, loss, grad, local, after)
                local = after
        return local, torch.stack(losses)

    def _gradient(self, y: Tensor, buffers: Buffers, batch: StepBatch, control: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradient of a batch at y, relative to the one at `control` and clipped if asked for, and the loss.

        The pass at y updates the buffers in place.
        """

        def gradient(at: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
            rng.seed_generators(self.objective.device, batch.seed)
            return self.objective.gradient(at, buffers, batch.inputs, batch.targets, streams=batch.stream)

        grad, loss = gradient(y, buffers)
        if control is not None:
            grad = grad - gradient(control, copy_buffers(buffers))[0]
        if self.protocol.clip is not None and not self.algorithm.clips_direction:
            grad = clip_by_norm(grad, self.protocol.clip)
        return grad, loss

    def _segments(self, y: Tensor, buffers: Buffers, batch: StepBatch) -> tuple[Segments, Tensor]:
        """Return what `_gradient` returns, but with the gradients of all parameters apart."""
        rng.seed_generators(self.objective.device, batch.seed)
        parameters = self.objective.layers.unflatten(y)
        gradients, loss = self.objective.gradient_at(
            parameters, buffers, batch.inputs, batch.targets, streams=batch.stream
        )
        return Segments([gradients[name] for name in parameters]), loss

    def _batch(self, plan: RoundPlan, c: int, k: int) -> StepBatch:
        """Gather, augment and normalise the batch of the c-th active client's step k."""
        data, device = self.data, self.objective.device
        index = torch.from_numpy(plan.batch(c, k)).to(device)
        x = take(data.x, index)
        augmentation = as_augmentation(self.protocol.augmentation)
        keys = None if augmentation is None else torch.from_numpy(plan.augment_keys(c, k)).to(device)
        inputs = training_inputs(x, keys, augmentation, data.mean, data.std, self.objective.dtype)
        stream = torch.from_numpy(plan.dropout_stream(c, k)).to(device)
        return StepBatch(inputs, take(data.y, index), stream, rng.torch_seed(int(plan.streams[c]), "dropout", k))

    def full_gradient(self, x: Tensor, buffers: Buffers, plan: RoundPlan, c: int) -> Tensor:
        """Return the gradient over all data of the c-th active client, with fixed BatchNorm statistics."""
        data, total = self.data, torch.zeros_like(x)
        index = torch.from_numpy(plan.samples[c]).to(self.objective.device)
        for part in torch.split(index, FIXED_CHUNK if self.objective.evaluates_by_batch else FULL_GRADIENT_CHUNK):
            inputs = data.inputs(part, self.objective.dtype)
            with rng.forked(x.device, seed=0):  # for a module that draws random numbers even when it is evaluated
                grad, _ = self.objective.gradient(x, buffers, inputs, take(data.y, part), train=False)
            total = total + grad * (len(part) / len(index))
        return total

    def explain(
        self, down: Any, client: Any, buffers: Buffers, info: ClientInfo, plan: RoundPlan, c: int, up: Any
    ) -> NoReturn:
        """Raise `Diverged` for a client whose result is not finite, after running it again and checking every step."""
        check = StepCheck(self.objective, buffers, plan, c, lambda k: self._batch(plan, c, k))
        self.train_client(down, client, copy_buffers(buffers), info, plan, c, check)
        raise diverged_upload(self.objective.layers, up, plan, c)  # the steps were finite, the upload is not
