"""Measure what one hostile node of ten costs a federation with the default limits, and how close honest nodes come.

    python benchmarks/attacks.py                         # points of accuracy lost on digits, by algorithm and attack
    python benchmarks/attacks.py --honest                # honest nodes that would be refused, by partition
    python benchmarks/attacks.py fedlamb scaffold --rounds 30
    python benchmarks/attacks.py fedlamb --aggregation centred_clipping

The clients are trained by the stacked engine; the server's part of a round is the federation's own: its checks, the
comparison of the answers, and the mean of what is left.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lamina
from lamina.aggregation import make as make_aggregation
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.data import load, partitions
from lamina.engines.stacked import engine as stacked
from lamina.engines.state import Sums, close_round, undo_weighting
from lamina.flower import Limits, outliers
from lamina.flower.checks import CONTRADICTION, Update

RATES = {
    "fedadam": 0.1, "fedadam_star": 0.3, "fedams": 1e-3, "fedavg": 0.1, "fedcm": 0.3, "fedlada": 0.01,
    "fedlada_lamb": 0.03, "fedlamb": 0.01, "fedprox": 0.1, "localadam": 3e-3, "mime": 1e-3, "mimelamb": 0.01,
    "scaffold": 0.1,
}  # fmt: skip
PARTITIONS = {
    "iid": ("iid", {}),
    "two classes": ("classes", {"k": 2}),
    "Dirichlet 0.3": ("dirichlet", {"alpha": 0.3}),
    "Dirichlet 0.5, unequal sizes": ("dirichlet", {"alpha": 0.5, "sizes": "natural"}),
}
HOSTILE = 0  # the hostile client's number
NEAR = 0.97  # the fraction of a limit that an attack uses
SPLITS = load("digits")


class Server:
    """The federation's part of a round, which counts the clients that it refuses."""

    def __init__(self, attack: Attack | None, by_examples: bool, limits: Limits, aggregation: str) -> None:
        self.attack, self.by_examples, self.limits = attack, by_examples, limits
        self.aggregation = make_aggregation(aggregation)
        self.refused: dict[int, list[str]] = {}
        self.largest_growth: dict[str, float] = {}
        self.growth_by_client: dict[int, outliers.Growth] = {}
        self.totals: dict[str, dict[int, Tensor]] = {}
        self.start = torch.empty(0)

    def close(
        self, algorithm: Any, layers: Any, state: Any, plan: Any, down: Any, sums: Sums, clients: Any, taken: Any = None
    ) -> Any:
        """Stand in for the engine's `close_round`; `taken` is None, because the engine waits for a median's uploads."""

        def info(steps: int) -> ClientInfo:
            return ClientInfo(plan.number, plan.lr, layers, steps=float(steps))

        updates = {
            int(plan.cohort[c]): Update(up, buffers, int(plan.examples[c]), int(plan.steps[c]), 0.0)
            for c, (up, buffers) in sorted(sums.uploads.items())
        }
        first = next(iter(updates.values())).up
        self.start = state.server.x if plan.number == 1 else self.start
        broadcast = outliers.Broadcast(
            layers,
            {n: b for n, b in state.buffers.items() if b.is_floating_point()},
            lambda steps: algorithm.inherited_moments(down, info(steps)),
            self.by_examples,
            lambda steps: algorithm.inherited_step(down, info(steps)),
            self.largest_growth,
            tuple(algorithm.implied_fields(first, down, info(1))),
            drift=state.server.x - self.start,
            totals={name: self.totals.get(name, {}) for name in algorithm.state_changes},
            growth_by_client=self.growth_by_client,
        )
        if self.attack is not None and HOSTILE in updates:
            others = [update for client, update in updates.items() if client != HOSTILE]
            updates[HOSTILE] = self.attack(updates[HOSTILE], others, broadcast, state, down, plan.number, self.limits)
        odd = {}
        for client, update in updates.items():
            for name, value in algorithm.implied_fields(update.up, down, info(update.steps)).items():
                if float((getattr(update.up, name) - value).norm()) > CONTRADICTION * float(value.norm()):
                    odd[client] = f"'{name}' contradicts the other fields"
        odd |= outliers.judge_updates(updates, broadcast, self.limits)
        for client, why in odd.items():
            self.refused.setdefault(client, []).append(why)
            del updates[client]
        for name in algorithm.state_changes:
            before = self.totals.setdefault(name, {})
            before |= {c: getattr(update.up, name) + before.get(c, 0.0) for c, update in updates.items()}
        self.growth_by_client |= outliers.add_growth(updates, broadcast)
        for name, value in outliers.median_growth(updates, broadcast).items():
            self.largest_growth[name] = max(value, self.largest_growth.get(name, 0.0))
        shares = [update.examples if self.by_examples else 1 for update in updates.values()]
        weights = [share / sum(shares) for share in shares]
        kept = Sums(loss=sums.loss, square=sums.square, weights=weights, aggregation=self.aggregation)
        for c, (update, share) in enumerate(zip(updates.values(), shares, strict=True)):
            relative = share / sum(shares) * len(shares)
            kept.add(undo_weighting(algorithm, update.up, relative), update.buffers, share / sum(shares))
            kept.keep(c, update.up, update.buffers)
            kept.steps += share / sum(shares) * update.steps
        return close_round(algorithm, layers, state, plan, down, kept, clients)


# --- attacks ---------------------------------------------------------------------------------------------------------

Attack = Callable[[Update, list[Update], outliers.Broadcast, Any, Any, int, Limits], Update]


def moments(update: Update, broadcast: outliers.Broadcast) -> list[str]:
    """Return the fields that are second moments."""
    return [name for name in broadcast.inherited(update.steps) if getattr(update.up, name) is not None]


def times(factor: float) -> Attack:
    """Multiply all fields but second moments by a factor."""

    def attack(update: Update, others: Any, broadcast: Any, *_: Any) -> Update:
        fields = {n: v for n, v in update.up._asdict().items() if v is not None and n not in moments(update, broadcast)}
        return update._replace(up=update.up._replace(**{n: factor * v for n, v in fields.items()}))

    return attack


def only(field: str, factor: float) -> Attack:
    """Multiply one field by a factor."""

    def attack(update: Update, *_: Any) -> Update:
        return update._replace(up=update.up._replace(**{field: factor * getattr(update.up, field)}))

    return attack


def consistent(attack: Attack, algorithm: Any, lr: float) -> Attack:
    """Make the implied fields of an attack follow from its other fields."""

    def also(update: Update, others: Any, broadcast: Any, state: Any, down: Any, number: int, limits: Limits) -> Update:
        changed = attack(update, others, broadcast, state, down, number, limits)
        fields = algorithm.implied_fields(
            changed.up, down, ClientInfo(number, lr, broadcast.layers, float(changed.steps))
        )
        return changed._replace(up=changed.up._replace(**fields))

    return also


def opposed(aside: str = "", factor: float = 1.0) -> Attack:
    """Send every field but second moments against the others' mean, just below the limit; the rest goes aside."""
    start: list[Tensor] = []

    def attack(
        update: Update, others: Any, broadcast: Any, state: Any, down: Any, number: int, limits: Limits
    ) -> Update:
        if number == 1:
            start[:] = [state.server.x]
        fields = {}
        for name in (
            n for n, v in update.up._asdict().items() if v is not None and n not in moments(update, broadcast)
        ):
            rows = torch.stack([getattr(other.up, name) for other in others])
            common = broadcast.step(update.steps) if name == "delta" else None
            if common is not None:
                rows = rows - torch.stack([broadcast.step(other.steps) for other in others])
            norm, mean = NEAR * factor * rows.norm(dim=1).median(), rows.mean(0)
            against = -mean / mean.norm()
            vector = limits.times_against * norm * against
            if aside == "undo":
                away = start[0] - state.server.x
                vector = limits.times_against * norm * away / away.norm().clamp(min=1e-30)
            elif aside == "noise":
                away = torch.randn(mean.shape, generator=torch.Generator().manual_seed(number), dtype=mean.dtype)
                away = away - (away @ against) * against
                rest = math.sqrt(limits.times_median**2 - limits.times_against**2)
                vector = vector + rest * norm * away / away.norm().clamp(min=1e-30)
            fields[name] = vector if common is None else vector + common
        return update._replace(up=update.up._replace(**fields))

    return attack


def last_layer() -> Attack:
    """Send the last module's step against the others' mean, just below the limits."""

    def attack(
        update: Update, others: Any, broadcast: Any, state: Any, down: Any, number: int, limits: Limits
    ) -> Update:
        size = broadcast.layers.group_sizes("module")[-1]
        common = broadcast.step(update.steps)
        whole = torch.stack([other.up.delta for other in others])
        if common is not None:
            whole = whole - torch.stack([broadcast.step(other.steps) for other in others])
        rows = whole[:, -size:]
        mean = rows.mean(0)
        share = float(mean.norm() / whole.mean(0).norm())  # of the opposition of the whole vector
        norm = min(
            outliers.PER_LAYER * limits.times_against * float(rows.norm(dim=1).median()),
            limits.times_against * float(whole.norm(dim=1).median()) / max(share, 1e-3),
            limits.times_median * float(whole.norm(dim=1).median()),
        )
        delta = torch.zeros_like(update.up.delta)
        delta[-size:] = -0.9 * norm * mean / mean.norm()
        delta = delta if common is None else delta + common
        return update._replace(up=update.up._replace(delta=delta))

    return attack


def poisoned(kind: str) -> Attack:
    """Send second moments just below the limits in every round, spread in several ways, or zero."""

    def attack(
        update: Update, others: Any, broadcast: Any, state: Any, down: Any, number: int, limits: Limits
    ) -> Update:
        fields, generator = {}, torch.Generator().manual_seed(number)
        usual = outliers.add_growth({HOSTILE: update} | dict(enumerate(others, start=1)), broadcast)[HOSTILE].others
        before = broadcast.growth_by_client[HOSTILE].own if HOSTILE in broadcast.growth_by_client else 0.0
        left = outliers.GROWTH_SO_FAR * limits.times_median * max(1.0, usual) - before
        times_usual = NEAR * max(0.0, min(outliers.SUM_OF_MOMENTS * limits.times_median, left))
        for name in moments(update, broadcast):
            pieces = []
            base = broadcast.inherited(update.steps)[name].double()
            rows = torch.stack([getattr(o.up, name).double() - broadcast.inherited(o.steps)[name] for o in others])
            for layer, added, began in zip(
                broadcast.layers.names,
                torch.split(rows.clamp(min=0), broadcast.layers.sizes, -1),
                torch.split(base, broadcast.layers.sizes),
                strict=True,
            ):
                size = added.shape[1]
                usual = max(float(added.sum(1).median()), broadcast.largest_growth.get(f"{name} of {layer}", 0.0))
                share = torch.zeros(size, dtype=torch.float64)
                if kind == "spread":
                    share[:] = 1
                elif kind == "smallest":
                    share[(added.mean(0) + began).argsort()[: max(1, size // 2)]] = 1
                elif kind == "first tenth":
                    share[: max(1, size // 10)] = 1
                elif kind == "other hundredth":
                    share[torch.randperm(size, generator=generator)[: max(1, size // 100)]] = 1
                sums = times_usual * usual
                largest = torch.maximum(added.amax(0), began).clamp(min=float(added.amax(1).median()))
                most = NEAR * outliers.ONE_MOMENT * limits.times_median * largest
                pieces.append(torch.minimum(sums * share / share.sum().clamp(min=1), most))
            moment = torch.zeros_like(base) if kind == "zero" else base + torch.cat(pieces)
            fields[name] = moment.to(getattr(update.up, name).dtype)
        return update._replace(up=update.up._replace(**fields))

    return attack


def many_examples(attack: Attack | None = None) -> Attack:
    """Claim as many examples, and their steps, as the limits allow, with another attack on top."""

    def claim(
        update: Update, others: Any, broadcast: Any, state: Any, down: Any, number: int, limits: Limits
    ) -> Update:
        factor = NEAR * limits.times_examples
        update = update._replace(examples=int(update.examples * factor), steps=int(update.steps * factor))
        return update if attack is None else attack(update, others, broadcast, state, down, number, limits)

    return claim


def poisoned_buffers(sign: float) -> Attack:
    """Send BatchNorm's statistics just below the limit."""

    def attack(
        update: Update, others: Any, broadcast: Any, state: Any, down: Any, number: int, limits: Limits
    ) -> Update:
        buffers = {}
        for name in update.buffers:
            rows = torch.stack([other.buffers[name] for other in others])
            median = rows.median(0).values
            distance = (rows - median).abs()
            moved = (median - broadcast.buffers[name]).abs()
            reference = torch.maximum(distance.amax(0), moved).clamp(min=float(distance.amax(1).median()))
            value = median + sign * 0.9 * limits.times_median * reference
            buffers[name] = value.clamp(min=0) if name.endswith("running_var") else value
        return update._replace(buffers=buffers)

    return attack


def attacks(algorithm: Any, lr: float) -> dict[str, tuple[Attack, dict[str, Any]]]:
    """Return all attacks that concern an algorithm, each with settings of the simulation."""
    tiny = nn.Linear(2, 1)
    x = torch.cat([p.detach().flatten() for p in tiny.parameters()])
    layers = lamina.Layers.of(tiny)
    zero = torch.zeros_like(x)
    info = ClientInfo(1, lr, layers, full_gradient=zero)
    down = algorithm.broadcast(algorithm.init(x, layers), ServerInfo(1, lr, layers, mean_gradient=zero))
    client = algorithm.client_init(x, layers)
    up, _ = algorithm.finish(
        algorithm.step(algorithm.begin(down, client, info), down, x, lr, layers), down, client, info
    )

    def honestly(attack: Attack) -> Attack:
        return consistent(attack, algorithm, lr)

    choices: dict[str, tuple[Attack, dict[str, Any]]] = {
        "sign flip": (honestly(times(-1.0)), {}),
        "x -10": (honestly(times(-10.0)), {}),
        "x -50": (honestly(times(-50.0)), {}),
        "just below: opposed": (honestly(opposed()), {}),
        "just below: opposed + noise": (honestly(opposed("noise")), {}),
        "just below: undo": (honestly(opposed("undo")), {}),
        "just below: last layer": (honestly(last_layer()), {}),
        "many examples": (honestly(many_examples()), {}),
        "many examples, weighted": (honestly(many_examples()), {"weighting": "examples"}),
        "many examples, weighted, flip": (honestly(many_examples(times(-1.0))), {"weighting": "examples"}),
    }
    if algorithm.inherited_moments(down, info):
        kinds = ("spread", "smallest", "first tenth", "other hundredth", "zero")
        choices |= {f"second moments: {kind}": (poisoned(kind), {}) for kind in kinds}
    for field in algorithm.implied_fields(up, down, info):
        choices[f"{field} x -1"] = (only(field, -1.0), {})
        choices[f"{field} x -10"] = (only(field, -10.0), {})
    if algorithm.card.name in ("fedavg", "fedlamb"):
        choices |= {f"BatchNorm {sign:+.0f}": (poisoned_buffers(sign), {"batch_norm": True}) for sign in (1.0, -1.0)}
    return choices


# --- runs ------------------------------------------------------------------------------------------------------------


def model(batch_norm: bool, seed: int) -> nn.Module:
    """Return a perceptron with 64 hidden units."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = [nn.BatchNorm1d(64)] if batch_norm else []
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *norm, nn.ReLU(), nn.Linear(64, 10))


def run(
    name: str,
    attack: Attack | None = None,
    *,
    rounds: int = 15,
    clients: int = 10,
    partition: str = "iid",
    batch_norm: bool = False,
    weighting: Any = "clients",
    limits: Limits | None = None,
    aggregation: str = "mean",
    seed: int = 0,
) -> tuple[float, dict[int, list[str]]]:
    """Return the accuracy (mean of the last three rounds) and the refused clients."""
    kind, options = PARTITIONS[partition]
    algorithm = lamina.create(name)
    server = Server(attack, weighting == "examples", limits or Limits(), aggregation)
    simulation = lamina.Simulation(
        model(batch_norm, seed), SPLITS.train, algorithm, test=SPLITS.test, clients=clients, lr=RATES[name], epochs=2,
        batch_size=16, weighting=weighting, partition=partitions.make(kind, **options), engine="stacked", seed=seed,
        aggregation="median",  # so that the engine keeps the uploads; `close` takes their mean
    )  # fmt: skip
    stacked.close_round = server.close
    try:
        history = simulation.run(rounds)
    except lamina.Diverged:
        return math.nan, server.refused
    finally:
        stacked.close_round = close_round
    last = [row["accuracy"] for row in history[-3:]]
    return sum(last) / len(last), server.refused


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=sorted(RATES))
    parser.add_argument("--honest", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aggregation", default="mean")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    same = {
        "rounds": arguments.rounds,
        "clients": arguments.clients,
        "seed": arguments.seed,
        "aggregation": arguments.aggregation,
    }
    for name in arguments.algorithms:
        if arguments.honest:
            for partition in PARTITIONS:
                if partition == "two classes" and arguments.clients < 5:
                    continue
                started = time.perf_counter()
                accuracy, refused = run(name, partition=partition, **same)
                refusals = "; ".join(f"{len(why)} x client {c}: {why[0]}" for c, why in sorted(refused.items()))
                print(f"{name:13} {partition:30} {accuracy:.3f} refused: {refusals or 'nobody'}"
                      f" ({time.perf_counter() - started:.0f} s)", flush=True)  # fmt: skip
            continue
        honest: dict[str, float] = {}
        for what, (attack, settings) in attacks(lamina.create(name), RATES[name]).items():
            key = str(settings)
            if key not in honest:
                honest[key], _ = run(name, **same, **settings)
                print(f"{name:13} {'honest ' + key:35} {honest[key]:.3f}", flush=True)
            accuracy, refused = run(name, attack, **same, **settings)
            cost = 100 * (honest[key] - accuracy)
            hostile = len(refused.pop(HOSTILE, []))
            others = f", honest refused: {refused}" if refused else ""
            print(
                f"{name:13} {what:35} {cost:6.2f} points, refused {hostile} of {arguments.rounds}{others}", flush=True
            )


if __name__ == "__main__":
    main()
