"""Both sides of a comparison: a small federation of ours in float64, whose steps the other implementation repeats.

Only one half of the other implementation is compared; the other half of the method is always ours. So its local steps
start each round from our server's broadcast, and its server gets our clients' uploads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo, with_displacement
from lamina.algorithms.declaration import options as options_of
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.base.text import listed
from lamina.conformance.feed import Source
from lamina.conformance.function import MODEL_NAMES, TITLES, Function
from lamina.conformance.optimizer import OptimizerHalf
from lamina.conformance.target import Target
from lamina.conformance.values import as_vector, check_model_vector, equal_records, fields_of
from lamina.conformance.verdict import Comparison, Conformance
from lamina.rounds.aggregation import Aggregation, combine_uploads, combine_vectors, name_of


@dataclass
class Federation:
    """Both sides of a comparison, and their states."""

    algorithm: Algorithm
    target: Target
    source: Source
    lr: float
    steps: int
    local_steps: int
    clients: int
    aggregation: Aggregation
    weighting: str
    tolerance: float
    unseen_fields: list[str] = field(default_factory=list)  # of the broadcast, which their optimizer does not get
    model_types: set[torch.dtype] = field(default_factory=set)  # as the other implementation returns the model
    draws_numbers: bool = False  # whether the other implementation uses a process-wide random generator

    def run(self) -> Conformance:
        """Run both sides until their models differ, or to the end, and return the result."""
        layers, x = self.source.layers, self.source.start
        self.comparison = Comparison(MODEL_NAMES[self.target.half], layers, self.tolerance)
        rounds = self.steps if self.target.half == "server" else -(-self.steps // self.local_steps)
        self.server = self.algorithm.init(x, layers)
        self.client_states = [self.algorithm.client_init(x, layers) for _ in range(self.clients)]
        self.their_x = x
        self.their_states: list[dict[str, Any]] = [{} for _ in range(self.clients + 1)]  # the last is the server's
        for number in range(1, rounds + 1):
            self.run_round(number)
            if self.comparison.is_over:
                break
        return self.conformance(rounds)

    def run_round(self, number: int) -> None:
        """Run a round on our side, and the compared half of it on theirs."""
        algorithm, layers, needs = self.algorithm, self.source.layers, self.algorithm.needs(number)
        examples = [10.0 * (c + 1) if self.weighting == "examples" else 1.0 for c in range(self.clients)]
        weights = [count / sum(examples) for count in examples]
        full_gradients: Sequence[Any] = [None] * self.clients
        if needs.full_gradient or needs.control_variate:
            full_gradients = [self.source.full_gradient(number, c, self.server.x) for c in range(self.clients)]
        mean = combine_vectors(self.aggregation, full_gradients, weights) if needs.control_variate else None
        steps = self.local_steps
        if self.target.half != "server":
            steps = min(steps, self.steps - (number - 1) * steps)
        server_info = ServerInfo(number, self.lr, layers, mean_gradient=mean)
        down = algorithm.broadcast(self.server, server_info)
        uploads: list[tuple[Any, dict[str, Tensor]]] = []
        for c in range(self.clients):
            info = ClientInfo(number, self.lr, layers, float(steps), full_gradients[c] if needs.full_gradient else None)
            uploads.append((self.train_client(c, down, info), {}))
            if self.comparison.is_over:
                return
        up, _ = combine_uploads(self.aggregation, uploads, weights, algorithm.state_changes)
        before = self.server.x
        self.server = algorithm.update(
            self.server, up, server_info._replace(mean_gradient=None, mean_steps=float(steps))
        )
        if self.target.half == "server":
            deltas = torch.stack([with_displacement(algorithm, up).delta for up, _ in uploads])
            theirs = self.call({
                **fields_of(up), "x": self.their_x, "deltas": deltas,
                "delta": combine_vectors(self.aggregation, list(deltas), weights),
                "weights": torch.tensor(weights, dtype=torch.float64), "examples": examples,
                "state": self.their_states[-1], "lr": self.lr, "server_lr": getattr(algorithm, "server_lr", 1.0),
                "round": number, "mean_steps": float(steps), "participation": 1.0, "_model_name": "x",
            })  # fmt: skip
            self.comparison.check(self.server._asdict(), theirs, before=(before, self.their_x), round=number)
            self.their_x = theirs["x"]

    def train_client(self, c: int, down: Any, info: ClientInfo) -> Any:
        """Train a client on our side, and the compared part of it on theirs; return our upload."""
        algorithm, number, kept, steps = self.algorithm, info.round, self.client_states[c], int(info.steps)
        local = algorithm.begin(down, kept, info)
        fresh = algorithm.begin(down, algorithm.client_init(down.x, self.source.layers), info)
        values = {
            **fields_of(down), "kept": kept, "state": self.their_states[c], "lr": self.lr, "round": number,
            "_model_name": "y", "_restarts": equal_records(local, fresh),
        }  # fmt: skip
        if isinstance(self.target.call, OptimizerHalf):
            self.unseen_fields = [name for name in fields_of(down) if name != "x"]
        start = their_y = local.y
        for k in range(1, steps + 1):
            grad, extras = self._gradients(number, c, k, local, down)
            before, local = local.y, algorithm.step(local, down, grad, self.lr, self.source.layers, **extras)
            if self.target.half == "local":
                theirs = self.call({**values, **extras, "y": their_y, "grad": grad, "k": k})
                place = {"round": number, "client": c + 1, "step": k}
                self.comparison.check(local._asdict(), theirs, before=(before, their_y), **place)
                their_y = theirs["y"]
                if self.comparison.is_over:
                    return None
        up, self.client_states[c] = algorithm.finish(local, down, kept, info)
        if self.target.half == "client":
            theirs = self.call({**values, **self.source.client_arguments(number, c, down.x, steps)})
            ours = {**fields_of(self.client_states[c]), **fields_of(up), "y": local.y}
            self.comparison.check(ours, theirs, before=(start, start), round=number, client=c + 1)
        return up

    def _gradients(self, number: int, c: int, k: int, local: Any, down: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient of a local step, and the second gradient and the loss if the method needs them."""
        needs, source = self.algorithm.needs(number), self.source
        control = down.x if needs.control_variate else None
        grad = source.gradient(number, c, k, local.y, control)
        extras = {"loss": source.loss(number, c, k, local.y)} if needs.loss else {}
        if needs.second_gradient:
            point = self.algorithm.second_point(local, down, grad, self.lr, source.layers)
            extras["second_grad"] = source.gradient(number, c, k, point, control, second=True)
        return grad, extras

    def call(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the quantities that the other implementation computes, as tensors like ours."""
        states = rng.generator_states(torch.device("cpu"))
        result = self.target.call(values)
        is_function = isinstance(self.target.call, Function)  # Flower itself draws, for names of messages
        self.draws_numbers |= is_function and rng.generator_states(torch.device("cpu")) != states
        model, theirs = values["_model_name"], {}
        if model not in result:
            raise BadInput(f"{self.target.description} returns {', '.join(result)}, and no '{model}'")
        for name, value in result.items():
            if name != model and not hasattr(value, "shape") and not isinstance(value, Mapping):
                continue
            title = f"{name} of {self.target.description}"
            try:
                vector, kind = as_vector(value, self.source.layers, self.source.start, title)
            except BadInput:
                if name == model:
                    raise
                continue  # something else that it stores or returns
            if name == model:
                self.model_types.add(kind)
                advice = "; a client may train `model` in place and return nothing" * (self.target.half == "client")
                vector = check_model_vector(vector, kind, self.source.layers, title, advice)
            theirs[name] = vector
        return theirs

    def conformance(self, rounds: int) -> Conformance:
        """Return the result of the comparison."""
        comparison, target = self.comparison, self.target
        values = [f"{name}={getattr(self.algorithm, name)!r}" for name in options_of(type(self.algorithm))]
        half = TITLES[target.half].partition(" ")[2]
        settings = [f"{self.algorithm.card.name}({', '.join(values)})", f"lr={self.lr:g}", half]
        aggregation = name_of(self.aggregation)
        settings += [f"aggregation {aggregation}"] * (aggregation != "mean")
        settings += ["by examples"] * (self.weighting == "examples")
        return Conformance(
            ours=", ".join(settings),
            theirs=target.description,
            version=target.version,
            steps=self.steps,
            rounds=rounds,
            tolerance=self.tolerance,
            quantities=tuple(comparison.compared),
            largest=comparison.largest,
            difference=comparison.first.get(comparison.model),
            others=tuple(difference for name, difference in comparison.first.items() if name != comparison.model),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> list[str]:
        """Return possible explanations of the difference."""
        if not self.comparison.is_over:
            return []
        notes = list(self.comparison.notes(self.model_types))
        if self.target.half == "local" and self.unseen_fields:
            fields = listed(self.unseen_fields)
            notes.append(f"an optimizer does not get {fields}, which our clients receive: give a function of them")
        if self.draws_numbers:
            notes.append("theirs draws random numbers, which ours does not")
        return notes
