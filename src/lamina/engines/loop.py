"""The reference engine: one client after another, as the papers' pseudo-code reads. Any `nn.Module`, any device.

Every other engine is tested against this one. Read `run_round` from top to bottom: it is the whole method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina import rng
from lamina.aggregation import combine_vectors
from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo
from lamina.algorithms.primitives import clip_by_norm
from lamina.batch import Inputs, map_batch
from lamina.data.dataset import Dataset
from lamina.data.feed import prepare
from lamina.engines.state import RoundReport, State, Sums, client_weights, close_round, diverged, undo_weighting
from lamina.ledger import payload_bytes
from lamina.objective import Buffers, Objective
from lamina.plan import Round, dropout_streams
from lamina.protocol import Protocol

FULL_GRADIENT_CHUNK = 512  # samples at a time in a full-data gradient; the result does not depend on it,
WHOLE_BATCH = 64  # but for a model that evaluates samples by the batch they are in: those, in every engine


@dataclass(frozen=True)
class Loop:
    """The reference engine for one algorithm, objective and data set."""

    algorithm: Algorithm
    objective: Objective
    data: Dataset  # on the objective's device
    protocol: Protocol
    record_trust_ratios: bool = False
    why: str = "engine='loop' was asked for"  # why this engine, for messages

    def run_round(self, state: State, plan: Round) -> tuple[State, RoundReport]:
        """Run one round: broadcast, local training of every active client, mean, server update."""
        algorithm, layers, x = self.algorithm, self.objective.layers, state.server.x
        needs = algorithm.needs(plan.number)
        weights = client_weights(plan, self.protocol.by_examples)

        full_gradients: list[Any] = [None] * len(plan.cohort)
        if needs.full_gradient or needs.control_variate:  # Mime: grad F_i(x) over all local data
            full_gradients = [self.full_gradient(x, state.buffers, plan, c) for c in range(len(plan.cohort))]
        mean_gradient = (
            combine_vectors(self.protocol.aggregation, full_gradients, weights) if needs.control_variate else None
        )

        server_info = ServerInfo(plan.number, plan.lr, layers, plan.participation, mean_gradient=mean_gradient)
        down = algorithm.broadcast(state.server, server_info)

        sums, clients = Sums(weights=weights, aggregation=self.protocol.aggregation), dict(state.clients)
        for c, client_id in enumerate(plan.cohort.tolist()):
            full_gradient = full_gradients[c] if needs.full_gradient else None
            info = ClientInfo(plan.number, plan.lr, layers, float(plan.steps[c]), full_gradient)
            client = clients[client_id] if client_id in clients else algorithm.client_init(x, layers)
            buffers = {n: b.clone() for n, b in state.buffers.items()}

            local, losses = self.train_client(down, client, buffers, info, plan, c)
            up, clients[client_id] = algorithm.finish(local, down, client, info)

            if not _all_finite(losses, *up, *clients[client_id]):
                self.explain(down, client, state.buffers, info, plan, c, up)
            sums.keep(c, up, buffers)
            if self.protocol.by_examples:
                up = undo_weighting(algorithm, up, weights[c] * len(plan.cohort))
            sums.add(up, buffers, weights[c])
            sums.loss += weights[c] * float(losses.mean())
            sums.bytes_up += sum(payload_bytes(up).values())
            sums.steps += weights[c] * float(plan.steps[c])
            sums.square += weights[c] * float(torch.sum(up.delta.double() ** 2))
            if self.record_trust_ratios:
                sums.add_trust(algorithm.trust_ratios(local), weights[c])

        return close_round(algorithm, layers, state, plan, down, sums, clients)

    def train_client(
        self,
        down: Any,
        client: Any,
        buffers: Buffers,
        info: ClientInfo,
        plan: Round,
        c: int,
        watch: Callable[[int, Tensor, Tensor, Any, Any], None] | None = None,
    ) -> tuple[Any, Tensor]:
        """Train the c-th active client; return its final local state and the loss of every step [K_i]."""
        algorithm, objective = self.algorithm, self.objective
        local = algorithm.begin(down, client, info)
        losses = []
        streams = self._dropout_streams(plan, c)
        with rng.forked(objective.device):  # the module may draw random numbers itself
            for k in range(int(plan.steps[c])):
                inputs, targets = self._batch(plan, c, k)
                own_seed = rng.torch_seed(int(plan.streams[c]), "dropout", k)
                rng.seed_generators(objective.device, own_seed)
                grad, loss = objective.gradient(local.y, buffers, inputs, targets, streams=streams[:, k])
                if algorithm.needs(plan.number).control_variate:  # the same batch and dropout mask, at x
                    rng.seed_generators(objective.device, own_seed)
                    scratch = {n: b.clone() for n, b in buffers.items()}
                    grad = grad - objective.gradient(down.x, scratch, inputs, targets, streams=streams[:, k])[0]
                if self.protocol.clip is not None:
                    grad = clip_by_norm(grad, self.protocol.clip)
                after = algorithm.step(local, down, grad, info.lr, objective.layers)
                losses.append(loss)
                if watch is not None:
                    watch(k, loss, grad, local, after)
                local = after
        return local, torch.stack(losses)

    def _dropout_streams(self, plan: Round, c: int) -> Tensor:
        """Return the random stream of every local step's dropout masks [1, K_i]."""
        streams = dropout_streams(plan.streams[c : c + 1], int(plan.steps[c]))
        return torch.from_numpy(streams).to(self.objective.device)

    def _batch(self, plan: Round, c: int, k: int) -> tuple[Inputs, Tensor]:
        """Gather, augment and normalise one batch."""
        data, device = self.data, self.objective.device
        index = torch.from_numpy(plan.batch(c, k)).to(device)
        x = map_batch(lambda values: values[index], data.x)
        if self.protocol.augmentation is not None:
            x = self.protocol.augmentation(x, torch.from_numpy(plan.augment_keys(c, k)).to(device))
        return prepare(x, data.mean, data.std, self.objective.dtype), data.y[index]

    def full_gradient(self, x: Tensor, buffers: Buffers, plan: Round, c: int) -> Tensor:
        """Return the gradient over all of a client's data in evaluation mode (fixed BatchNorm statistics)."""
        data, total = self.data, torch.zeros_like(x)
        index = torch.from_numpy(plan.samples[c]).to(self.objective.device)
        for part in torch.split(index, WHOLE_BATCH if self.objective.evaluates_by_batch else FULL_GRADIENT_CHUNK):
            inputs = data.inputs(part, self.objective.dtype)
            with rng.forked(x.device, seed=0):
                grad, _ = self.objective.gradient(x, buffers, inputs, data.y[part], train=False)
            total = total + grad * (len(part) / len(index))
        return total

    def _first_nonfinite_module(self, y: Tensor, buffers: Buffers, plan: Round, c: int, k: int) -> str | None:
        """Return the first layer, in the order of the forward pass, whose output on a batch is not finite."""
        found: list[str] = []

        def look(name: str) -> Callable[..., None]:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                    found.append(name)

            return hook

        leaves = [(n, m) for n, m in self.objective.seeded.named_modules() if not list(m.children())]
        handles = [m.register_forward_hook(look(n or type(m).__name__)) for n, m in leaves]
        try:
            inputs, _ = self._batch(plan, c, k)
            streams = self._dropout_streams(plan, c)[:, k]
            with torch.no_grad():
                own = {n: b.clone() for n, b in buffers.items()}
                self.objective.outputs(y, own, inputs, train=True, streams=streams)
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else None

    def explain(self, down: Any, client: Any, buffers: Buffers, info: ClientInfo, plan: Round, c: int, up: Any) -> None:
        """Raise `Diverged` for a client whose result is not finite, after running it again and checking every step."""
        client_id, layers = int(plan.cohort[c]), self.objective.layers

        def watch(k: int, loss: Tensor, grad: Tensor, before: Any, after: Any) -> None:
            if _all_finite(loss, grad, *after):
                return
            step = f" (local step {k + 1} of {int(plan.steps[c])})"
            # what went wrong first: a layer's output, then its gradient, then the step itself
            module = self._first_nonfinite_module(before.y, buffers, plan, c, k)
            if module is not None:
                raise diverged(layers, before.y, plan.number, plan.lr, client_id, step, fallback=module)
            where = after.y if _all_finite(grad) else grad
            raise diverged(layers, where, plan.number, plan.lr, client_id, step)

        self.train_client(down, client, {n: b.clone() for n, b in buffers.items()}, info, plan, c, watch)
        for name, value in zip(up._fields, up, strict=True):  # finite steps, but what is sent up is not
            if value is not None and not bool(torch.isfinite(value).all()):
                raise diverged(layers, value, plan.number, plan.lr, client_id, f" (upload '{name}')")


def _all_finite(*values: Tensor | None) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values if value is not None)
