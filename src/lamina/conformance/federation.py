"""Our side of a comparison: a small federation in float64, whose steps the other implementation repeats.

Only one half of the other implementation is compared; the other half of the method is always ours. So its local steps
start each round from our server's broadcast, and its server gets our clients' uploads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lamina.algorithms.contract import Algorithm, ClientInfo, ServerInfo, with_displacement
from lamina.algorithms.declaration import options as options_of
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.base.limits import check_count, check_number
from lamina.base.registry import import_named
from lamina.base.text import listed
from lamina.conformance.feed import GivenData, RandomGradients, Source
from lamina.conformance.optimizer import OptimizerHalf
from lamina.conformance.target import MODEL, WORDS, Half, Target, as_vector, find_target, values_of
from lamina.conformance.verdict import Comparison, Conformance
from lamina.rounds.aggregation import Aggregation, as_aggregation, combine_uploads, combine_vectors, name_of
from lamina.training.inputs import as_algorithm

WEIGHTINGS = ("clients", "examples")


def conform(
    algorithm: Algorithm | str | Mapping[str, Any],
    theirs: Any,
    *,
    half: Half | None = None,
    options: Mapping[str, Any] | None = None,
    lr: float | None = None,
    steps: int = 50,
    local_steps: int = 10,
    clients: int = 3,
    aggregation: Any = "mean",
    weighting: str = "clients",
    model: nn.Module | None = None,
    data: tuple[Tensor, Tensor] | None = None,
    loss: str | Any = "cross_entropy",
    tolerance: float = 1e-12,
    seed: int = 0,
) -> Conformance:
    """Compare an algorithm with another implementation of a half of it, step by step, in float64.

    >>> import lamina
    >>> def step(y, grad, lr, x):
    ...     return y - lr * (grad + 0.1 * (y - x))
    >>> print(lamina.conform("fedprox", step).verdict)
    the same to 1e-12 over 50 steps (5 rounds)

    Args:
        algorithm: an algorithm, the name of one, or a table {"name": "fedadam", "beta1": 0.8}.
        theirs: the other implementation, or its name "module:thing": a class of torch optimizers or a function that
            creates one from `params`; a Flower strategy, its class or a function that creates one; or a function. Its
            parameters say which half it is: (y, grad, …) a local step, (x, delta, …) a step of the server,
            (model, batches, …) the training of a client.
        half: "local" or "server" for an optimizer; default: "local" if clients keep more than the model during a round,
            or the server has nothing but the model; otherwise "server".
        options: keyword arguments for the other implementation.
        lr: the local learning rate; default: the algorithm's card.
        steps: how many steps to compare: local ones of each client, or rounds of the server.
        local_steps: of a client in a round.
        clients: how many take part in each round.
        aggregation: how our server combines the uploads, as in `Simulation`.
        weighting: "clients" or "examples"; client i then has i * 10 examples.
        model: for a whole client, the module to train; default: a small network.
        data: for a whole client, inputs and targets, dealt to the clients; default: random ones.
        loss: for a whole client, as in `Simulation`.
        tolerance: the largest difference that counts as none, relative to the largest entry of a quantity.
        seed: of the gradients, the model and the data.
    """
    if half not in (None, *MODEL):
        raise BadInput(f"half = {half!r} is none of {', '.join(MODEL)}")
    if weighting not in WEIGHTINGS:
        raise BadInput(f"weighting = {weighting!r} is none of {', '.join(WEIGHTINGS)}")
    for name, count in {"steps": steps, "local_steps": local_steps, "clients": clients}.items():
        check_count(name, count)
    check_number("tolerance", tolerance, above=0)
    algorithm = as_algorithm(algorithm)
    lr = check_number("lr", algorithm.card.lr if lr is None else lr, above=0)
    random = RandomGradients(seed)
    name = getattr(theirs, "__qualname__", type(theirs).__qualname__)
    target = find_target(theirs, name, algorithm, half, options or {}, random.layers)
    if target.half != "client" and (model is not None or data is not None):
        raise BadInput(f"model and data are for a whole client, but {target.description} is {WORDS[target.half]}")
    source: Source = random
    if target.half == "client":
        source = GivenData(model, data, loss, clients=clients, seed=seed)
    algorithm.check_model(source.layers)
    if isinstance(aggregation, str) and ":" in aggregation:
        imported = import_named("aggregation", aggregation)
        aggregation = imported() if isinstance(imported, type) else imported
    federation = Federation(
        algorithm, target, source, lr, steps, local_steps, clients, as_aggregation(aggregation), weighting, tolerance
    )
    return federation.run()


@dataclass
class Federation:
    """The two sides of a comparison."""

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
    unseen: list[str] = field(default_factory=list)  # fields of the broadcast that theirs does not get
    float_types: set[torch.dtype] = field(default_factory=set)  # of the model, as the other implementation returns it

    def run(self) -> Conformance:
        """Run both sides until the model differs, or to the end."""
        layers, x = self.source.layers, self.source.start
        self.comparison = Comparison(MODEL[self.target.half], layers, self.tolerance)
        rounds = self.steps if self.target.half == "server" else -(-self.steps // self.local_steps)
        self.server = self.algorithm.init(x, layers)
        self.kept = [self.algorithm.client_init(x, layers) for _ in range(self.clients)]
        self.their_x = x
        self.states: list[dict[str, Any]] = [{} for _ in range(self.clients + 1)]  # theirs; the last is the server's
        for number in range(1, rounds + 1):
            self.run_round(number)
            if self.comparison.is_over:
                break
        return self.conformance(rounds)

    def run_round(self, number: int) -> None:
        """Run a round of our side, and the half of theirs in it."""
        algorithm, layers, needs = self.algorithm, self.source.layers, self.algorithm.needs(number)
        examples = [10.0 * (c + 1) if self.weighting == "examples" else 1.0 for c in range(self.clients)]
        weights = [count / sum(examples) for count in examples]
        full: Sequence[Any] = [None] * self.clients
        if needs.full_gradient or needs.control_variate:
            full = [self.source.full_gradient(number, c, self.server.x) for c in range(self.clients)]
        mean = combine_vectors(self.aggregation, full, weights) if needs.control_variate else None
        steps = self.local_steps
        if self.target.half != "server":
            steps = min(steps, self.steps - (number - 1) * steps)
        server_info = ServerInfo(number, self.lr, layers, mean_gradient=mean)
        down = algorithm.broadcast(self.server, server_info)
        uploads: list[tuple[Any, dict[str, Tensor]]] = []
        for c in range(self.clients):
            info = ClientInfo(number, self.lr, layers, float(steps), full[c] if needs.full_gradient else None)
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
                **values_of(up), "x": self.their_x, "deltas": deltas,
                "delta": combine_vectors(self.aggregation, list(deltas), weights),
                "weights": torch.tensor(weights, dtype=torch.float64), "examples": examples, "state": self.states[-1],
                "lr": self.lr, "server_lr": getattr(algorithm, "server_lr", 1.0), "round": number, "_quantity": "x",
                "mean_steps": float(steps), "participation": 1.0,
            })  # fmt: skip
            self.comparison.check(self.server._asdict(), theirs, before=(before, self.their_x), round=number)
            self.their_x = theirs["x"]

    def train_client(self, c: int, down: Any, info: ClientInfo) -> Any:
        """Train a client of ours, and theirs as far as it is compared; return our upload."""
        algorithm, number, kept, steps = self.algorithm, info.round, self.kept[c], int(info.steps)
        local = algorithm.begin(down, kept, info)
        first = algorithm.begin(down, algorithm.client_init(down.x, self.source.layers), info)
        given = {
            **values_of(down), "kept": kept, "state": self.states[c], "lr": self.lr, "round": number,
            "_quantity": "y", "_restarts": equal_records(local, first),
        }  # fmt: skip
        if isinstance(self.target.call, OptimizerHalf):
            self.unseen = [name for name in values_of(down) if name != "x"]
        start = their_y = local.y
        for k in range(1, steps + 1):
            grad, more = self._gradients(number, c, k, local, down)
            before, local = local.y, algorithm.step(local, down, grad, self.lr, self.source.layers, **more)
            if self.target.half == "local":
                theirs = self.call({**given, **more, "y": their_y, "grad": grad, "k": k})
                place = {"round": number, "client": c + 1, "step": k}
                self.comparison.check(local._asdict(), theirs, before=(before, their_y), **place)
                their_y = theirs["y"]
                if self.comparison.is_over:
                    return None
        up, self.kept[c] = algorithm.finish(local, down, kept, info)
        if self.target.half == "client":
            with rng.forked(down.x.device, seed=number):
                theirs = self.call({**given, **self.source.given(number, c, down.x, steps)})
            ours = {**values_of(self.kept[c]), **values_of(up), "y": local.y}
            self.comparison.check(ours, theirs, before=(start, start), round=number, client=c + 1)
        return up

    def _gradients(self, number: int, c: int, k: int, local: Any, down: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient of a local step, and what else the method asks for: a second one, and the loss."""
        needs, source = self.algorithm.needs(number), self.source
        control = down.x if needs.control_variate else None
        grad = source.gradient(number, c, k, local.y, control)
        more = {"loss": source.loss(number, c, k, local.y)} if needs.loss else {}
        if needs.second_gradient:
            point = self.algorithm.second_point(local, down, grad, self.lr, source.layers)
            more["second_grad"] = source.gradient(number, c, k, point, control, second=True)
        return grad, more

    def call(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the quantities that the other implementation computes, as tensors like ours."""
        result = self.target.call(given)
        model, layers, like = given["_quantity"], self.source.layers, self.source.start
        if model not in result:
            raise BadInput(f"{self.target.description} returns {', '.join(result)}, and no '{model}'")
        theirs = {}
        for name, value in result.items():
            if name != model and not hasattr(value, "shape") and not isinstance(value, Mapping):
                continue
            try:
                theirs[name], kind = as_vector(value, layers, like, f"{name} of {self.target.description}")
            except BadInput:
                if name == model:
                    raise
                continue  # something else that it stores or returns
            if name == model:
                self.float_types.add(kind)
        if theirs[model].numel() != layers.size:
            shape = tuple(theirs[model].shape)
            raise BadInput(f"{self.target.description} returns '{model}' of shape {shape} for a model ({layers.size},)")
        theirs[model] = theirs[model].flatten()
        return theirs

    def conformance(self, rounds: int) -> Conformance:
        """Return what was found, in words."""
        comparison, target = self.comparison, self.target
        others = [difference for name, difference in comparison.first.items() if name != comparison.model]
        values = [f"{name}={getattr(self.algorithm, name)!r}" for name in options_of(type(self.algorithm))]
        ours = f"{self.algorithm.card.name}({', '.join(values)}), lr={self.lr:g}, {WORDS[target.half].split(' ', 1)[1]}"
        aggregation = name_of(self.aggregation)
        ours += f", aggregation {aggregation}" * (aggregation != "mean") + ", by examples" * (
            self.weighting != "clients"
        )
        difference = comparison.first.get(comparison.model)
        return Conformance(
            ours=ours,
            theirs=target.description,
            version=target.version,
            steps=self.steps,
            rounds=rounds,
            tolerance=self.tolerance,
            quantities=tuple(comparison.compared),
            largest=comparison.largest,
            difference=difference,
            others=tuple(others),
            notes=tuple(self._notes(difference)),
        )

    def _notes(self, difference: Any) -> Iterator[str]:
        """Yield what may explain the difference."""
        if difference is None:
            return
        if self.comparison.of_step is not None:
            yield f"that is {self.comparison.of_step:.2g} of the largest entry of our step"
        if self.comparison.ratio is not None:
            yield f"their step there is {self.comparison.ratio:.6g} times ours, in every coordinate"
        if self.target.half == "local" and self.unseen:
            yield f"an optimizer does not get {listed(self.unseen)}, which our clients receive: give a function of them"
        if torch.float64 not in self.float_types and difference.relative < 1e-5:
            kinds = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in self.float_types))
            yield f"theirs computes in {kinds}: --tolerance 1e-5 asks for agreement up to its rounding"


def equal_records(one: Any, other: Any) -> bool:
    """Return whether two records hold the same values."""
    others = values_of(other)
    return all(torch.equal(value, others[name]) for name, value in values_of(one).items())
