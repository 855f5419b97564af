"""Measure what one hostile node of ten costs a federation with the default limits, and how close honest nodes come.

    python benchmarks/attacks.py                         # points of accuracy lost on digits, by algorithm and attack
    python benchmarks/attacks.py --honest                # honest nodes that would be refused, by partition
    python benchmarks/attacks.py fedlamb scaffold --rounds 30
    python benchmarks/attacks.py --attack 'own data' --aggregation trimmed_mean

The clients are trained by the stacked engine; the server's part of a round is the federation's own: its checks, the
comparison of the answers, and the mean of what is left.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lamina
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.data import load, partitions
from lamina.engines.stacked import engine as stacked
from lamina.engines.state import Sums, close_round, undo_weighting
from lamina.flower import Limits, outliers
from lamina.flower.checks import CONTRADICTION, Update
from lamina.rounds.aggregation import make as make_aggregation

RATES = {
    "fedadam": 0.1, "fedadam_star": 0.3, "fedams": 1e-3, "fedavg": 0.1, "fedcm": 0.3, "fedlada": 0.01,
    "fedlada_lamb": 0.03, "fedlamb": 0.01, "fedprox": 0.1, "localadam": 3e-3, "mime": 1e-3, "mimelamb": 0.01,
    "scaffold": 0.1,
}  # fmt: skip
HOSTILE = 0  # the hostile client's number
RARE, RARE_HOLDERS = 0, 3  # the class that only the first clients hold in the partition "rare class"
NEAR = 0.97  # the fraction of a limit that an attack uses
SPLITS = load("digits")


class RareClass:
    """IID, but for one class that only the first clients hold."""

    def split(self, labels: Any, clients: Any, seed: int, columns: Any = None, samples: Any = None) -> Any:
        """Share the samples."""
        order = np.random.default_rng(seed).permutation(len(labels))
        is_rare = labels[order] == RARE
        common, rare = np.array_split(order[~is_rare], clients), np.array_split(order[is_rare], RARE_HOLDERS)
        return [np.concatenate([common[c], *rare[c : c + 1]]) for c in range(clients)]


PARTITIONS = {
    "iid": partitions.IID(),
    "two classes": partitions.Classes(k=2),
    "Dirichlet 0.3": partitions.Dirichlet(alpha=0.3),
    "Dirichlet 0.5, unequal sizes": partitions.Dirichlet(alpha=0.5, sizes="natural"),
    "rare class": RareClass(),
}


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
        self.gradient: Any = None  # that of the hostile node's data, see `Seen`

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
            seen = Seen(others, broadcast, state, down, plan.number, self.limits, self.gradient)
            updates[HOSTILE] = self.attack(updates[HOSTILE], seen)
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
        kept = Sums(loss=sums.loss, weight=1.0, spread=sums.spread, weights=weights, aggregation=self.aggregation)
        for c, (update, share) in enumerate(zip(updates.values(), shares, strict=True)):
            relative = share / sum(shares) * len(shares)
            kept.add(undo_weighting(algorithm, update.up, relative), update.buffers, share / sum(shares))
            kept.keep(c, update.up, update.buffers)
            kept.steps += share / sum(shares) * update.steps
        return close_round(algorithm, layers, state, plan, down, kept, clients)


# --- attacks ---------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What an attack may use of a round; no real node knows the others' updates, and `ascend` does not use them."""

    others: list[Update]
    broadcast: outliers.Broadcast
    state: Any
    down: Any
    number: int
    limits: Limits
    gradient: Callable[[Tensor, int | None], tuple[Tensor, Tensor]]  # at a model, on the node's data or one class; loss


Attack = Callable[[Update, Seen], Update]


def moments(update: Update, seen: Seen) -> list[str]:
    """Return the fields that are second moments."""
    return [name for name in seen.broadcast.inherited(update.steps) if getattr(update.up, name) is not None]


def vectors(update: Update, seen: Seen) -> list[str]:
    """Return the fields that are not second moments."""
    return [n for n, v in update.up._asdict().items() if v is not None and n not in moments(update, seen)]


def times(factor: float, field: str = "") -> Attack:
    """Multiply one field by a factor, or all fields but second moments."""

    def attack(update: Update, seen: Seen) -> Update:
        fields = {name: factor * getattr(update.up, name) for name in ([field] if field else vectors(update, seen))}
        return update._replace(up=update.up._replace(**fields))

    return attack


def consistent(attack: Attack, algorithm: Any, lr: float) -> Attack:
    """Make the implied fields of an attack follow from its other fields."""

    def also(update: Update, seen: Seen) -> Update:
        changed = attack(update, seen)
        fields = algorithm.implied_fields(
            changed.up, seen.down, ClientInfo(seen.number, lr, seen.broadcast.layers, float(changed.steps))
        )
        return changed._replace(up=changed.up._replace(**fields))

    return also


def opposed(aside: str = "") -> Attack:
    """Send every field but second moments against the others' mean, just below the limit; the rest goes aside."""
    start: list[Tensor] = []

    def attack(update: Update, seen: Seen) -> Update:
        if seen.number == 1:
            start[:] = [seen.state.server.x]
        fields = {}
        for name in (n for n, v in update.up._asdict().items() if v is not None and n not in moments(update, seen)):
            rows = torch.stack([getattr(other.up, name) for other in seen.others])
            common = seen.broadcast.step(update.steps) if name == "delta" else None
            if common is not None:
                rows = rows - torch.stack([seen.broadcast.step(other.steps) for other in seen.others])
            norm, mean = NEAR * rows.norm(dim=1).median(), rows.mean(0)
            against = -mean / mean.norm()
            vector = seen.limits.times_against * norm * against
            if aside == "undo":
                away = start[0] - seen.state.server.x
                vector = seen.limits.times_against * norm * away / away.norm().clamp(min=1e-30)
            elif aside == "noise":
                away = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seen.number), dtype=mean.dtype)
                away = away - (away @ against) * against
                rest = math.sqrt(seen.limits.times_median**2 - seen.limits.times_against**2)
                vector = vector + rest * norm * away / away.norm().clamp(min=1e-30)
            fields[name] = vector if common is None else vector + common
        return update._replace(up=update.up._replace(**fields))

    return attack


def poisoned(kind: str) -> Attack:
    """Send second moments just below the limits in every round, spread in several ways, or zero."""

    def attack(update: Update, seen: Seen) -> Update:
        fields, updates = {}, {HOSTILE: update} | dict(enumerate(seen.others, start=1))
        usual = outliers.add_growth(updates, seen.broadcast)[HOSTILE].others
        before = seen.broadcast.growth_by_client[HOSTILE].own if HOSTILE in seen.broadcast.growth_by_client else 0.0
        left = outliers.GROWTH_SO_FAR * seen.limits.times_median * max(1.0, usual) - before
        times_usual = NEAR * max(0.0, min(outliers.SUM_OF_MOMENTS * seen.limits.times_median, left))
        for name in moments(update, seen):
            pieces = []
            base = seen.broadcast.inherited(update.steps)[name].double()
            rows = torch.stack(
                [getattr(o.up, name).double() - seen.broadcast.inherited(o.steps)[name] for o in seen.others]
            )
            for layer, added, began in zip(
                seen.broadcast.layers.names,
                torch.split(rows.clamp(min=0), seen.broadcast.layers.sizes, -1),
                torch.split(base, seen.broadcast.layers.sizes),
                strict=True,
            ):
                size = added.shape[1]
                usual = max(float(added.sum(1).median()), seen.broadcast.largest_growth.get(f"{name} of {layer}", 0.0))
                share = torch.zeros(size, dtype=torch.float64)
                if kind == "spread":
                    share[:] = 1
                elif kind == "smallest":
                    share[(added.mean(0) + began).argsort()[: max(1, size // 2)]] = 1
                sums = times_usual * usual
                largest = torch.maximum(added.amax(0), began).clamp(min=float(added.amax(1).median()))
                most = NEAR * outliers.ONE_MOMENT * seen.limits.times_median * largest
                pieces.append(torch.minimum(sums * share / share.sum().clamp(min=1), most))
            moment = torch.zeros_like(base) if kind == "zero" else base + torch.cat(pieces)
            fields[name] = moment.to(getattr(update.up, name).dtype)
        return update._replace(up=update.up._replace(**fields))

    return attack


def ascend(length: float, label: int | None = None) -> Attack:
    """Send the step that raises the loss of the predicted mean most, on all of the node's data or those of one class.

    The node takes its own honest step for the others' mean. `length` is how long the step may be, in norms of the
    honest one; 1.3 of these may point against it, or back to the start. One module alone may have twice as much.
    """
    against, iterations, start = 1.3, 30, []

    def bounded(step: Tensor, honest: Tensor, directions: list[Tensor], factor: float) -> Tensor:
        norm = factor * honest.norm()
        for direction in directions:
            unit = direction / direction.norm().clamp(min=1e-30)
            back = -(step @ unit)
            step = step + (back - back.clamp(max=against * norm)) * unit
        return step * (length * norm / step.norm().clamp(min=1e-30)).clamp(max=1)

    def attack(update: Update, seen: Seen) -> Update:
        x, sizes = seen.state.server.x, seen.broadcast.layers.group_sizes("module")
        start[:] = [x] if seen.number == 1 else start
        common = seen.broadcast.step(update.steps)
        common = torch.zeros_like(x) if common is None else common
        honest, clients = update.up.delta - common, len(seen.others) + 1
        others_alone = x + common + (clients - 1) / clients * honest
        step, best, highest = torch.zeros_like(x), torch.zeros_like(x), -math.inf
        for _ in range(iterations):
            gradient, loss = seen.gradient(others_alone + step / clients, label)
            if float(loss) > highest:
                best, highest = step, float(loss)
            far = 2 * length / math.sqrt(iterations) * honest.norm()
            step = step + far * gradient / gradient.norm().clamp(min=1e-30)
            for _ in range(3):  # so that the limits of the modules and of the whole hold together
                pieces = zip(torch.split(step, sizes), torch.split(honest, sizes), strict=True)
                step = torch.cat([bounded(piece, own, [own], outliers.PER_LAYER) for piece, own in pieces])
                step = bounded(step, honest, [honest, x - start[0]], 1.0)
        return update._replace(up=update.up._replace(delta=best + common))

    return attack


def many_examples(attack: Attack | None = None) -> Attack:
    """Claim as many examples, and their steps, as the limits allow, with another attack on top."""

    def claim(update: Update, seen: Seen) -> Update:
        factor = NEAR * seen.limits.times_examples
        update = update._replace(examples=int(update.examples * factor), steps=int(update.steps * factor))
        return update if attack is None else attack(update, seen)

    return claim


def poisoned_buffers(sign: float) -> Attack:
    """Send BatchNorm's statistics just below the limit."""

    def attack(update: Update, seen: Seen) -> Update:
        buffers = {}
        for name in update.buffers:
            rows = torch.stack([other.buffers[name] for other in seen.others])
            median = rows.median(0).values
            distance = (rows - median).abs()
            moved = (median - seen.broadcast.buffers[name]).abs()
            reference = torch.maximum(distance.amax(0), moved).clamp(min=float(distance.amax(1).median()))
            value = median + sign * 0.9 * seen.limits.times_median * reference
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
        "own data: raise the loss": (honestly(ascend(4.0)), {}),
        "own data: common class": (honestly(ascend(4.0, RARE)), {}),
        "own data: suppress a class": (honestly(ascend(2.0, RARE)), {"partition": "rare class"}),
        "many examples, weighted": (honestly(many_examples()), {"weighting": "examples"}),
        "many examples, weighted, flip": (honestly(many_examples(times(-1.0))), {"weighting": "examples"}),
    }
    if algorithm.inherited_moments(down, info):
        kinds = ("spread", "smallest", "zero")
        choices |= {f"second moments: {kind}": (poisoned(kind), {}) for kind in kinds}
    for field in algorithm.implied_fields(up, down, info):
        choices[f"{field} x -1"] = (times(-1.0, field), {})
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
    algorithm = lamina.create(name)
    server = Server(attack, weighting == "examples", limits or Limits(), aggregation)
    simulation = lamina.Simulation(
        model(batch_norm, seed), SPLITS.train, algorithm, test=SPLITS.test, clients=clients, lr=RATES[name], epochs=2,
        batch_size=16, weighting=weighting, partition=PARTITIONS[partition], engine="stacked", seed=seed,
        aggregation="median",  # so that the engine keeps the uploads; `close` takes their mean
    )  # fmt: skip
    own = SPLITS.train.subset(simulation.plan.clients.parts[HOSTILE])

    def gradient(x: Tensor, label: int | None) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(own)) if label is None else torch.nonzero(own.y == label).flatten()
        objective = simulation.objective
        return objective.gradient(x, objective.buffers, own.inputs(rows), own.y[rows], train=False)

    server.gradient = gradient
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
    parser.add_argument("--attack", default="", help="only attacks whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    same = {name: getattr(arguments, name) for name in ("rounds", "clients", "seed", "aggregation")}
    for name in arguments.algorithms:
        if arguments.honest:
            for partition in [kind for kind in PARTITIONS if kind != "two classes" or arguments.clients >= 5]:
                started = time.perf_counter()
                accuracy, refused = run(name, partition=partition, **same)
                refusals = "; ".join(f"{len(why)} x client {c}: {why[0]}" for c, why in sorted(refused.items()))
                print(f"{name:13} {partition:30} {accuracy:.3f} refused: {refusals or 'nobody'}"
                      f" ({time.perf_counter() - started:.0f} s)", flush=True)  # fmt: skip
            continue
        honest: dict[str, float] = {}
        for what, (attack, settings) in attacks(lamina.create(name), RATES[name]).items():
            if arguments.attack not in what:
                continue
            key = str(settings)
            if key not in honest:
                honest[key], _ = run(name, **same, **settings)
                print(f"{name:13} {'honest ' + key:35} {honest[key]:.3f}", flush=True)
            accuracy, refused = run(name, attack, **same, **settings)
            cost = 100 * (honest[key] - accuracy)
            refusals = f"refused {len(refused.pop(HOSTILE, []))} of {arguments.rounds}"
            refusals += f", honest refused: { {c: len(why) for c, why in refused.items()} }" if refused else ""
            print(f"{name:13} {what:35} {accuracy:.3f}, {cost:6.2f} points, {refusals}", flush=True)


if __name__ == "__main__":
    main()
