"""Measure what hostile nodes cost a federation of ten on the digits, with the plain mean and with robust means.

    python benchmarks/attacks.py                                        # one hostile node, IID data
    python benchmarks/attacks.py --hostile 2 --partition dirichlet --seeds 3
    python benchmarks/attacks.py --case "suppress a class"              # only the attacks whose name contains this
    python benchmarks/attacks.py --cost                                 # what the means cost without an attack
    python benchmarks/attacks.py --honest                               # how far honest nodes are from the median

A cell is the test accuracy (%) with mean / trimmed_mean / median / centred_clipping; — is a run that diverged, and with
* the server refused an update. The clients are trained by the stacked engine; the server's part of a round is the
federation's: its comparison of the answers, then the aggregation.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lamina
from lamina.data import load, partitions
from lamina.engines.stacked import engine as stacked
from lamina.engines.state import RoundSums, close_round
from lamina.flower import Limits
from lamina.flower.checks import Update
from lamina.flower.judge import sizes_of, stand_out
from lamina.rounds.aggregation import make as make_aggregation

AGGREGATIONS = ("mean", "trimmed_mean", "median", "centred_clipping")
ALGORITHMS = ("fedavg", "scaffold", "fedams", "fedlamb", "mimelamb", "fedlada")
RATES = {
    "fedadam": 0.1, "fedadam_star": 0.3, "fedams": 1e-3, "fedavg": 0.1, "fedcm": 0.3, "fedlada": 0.01,
    "fedlada_lamb": 0.03, "fedlamb": 0.01, "fedprox": 0.1, "localadam": 3e-3, "mime": 1e-3, "mimelamb": 0.01,
    "scaffold": 0.1,
}  # fmt: skip
CLIENTS = 10
RARE_CLASS, RARE_HOLDERS = 0, 3  # the class that only the first clients hold in the partition "rare class"
LIMIT = 0.97 * (Limits().times_median or math.inf)  # times the median: how far attacks go
ASCENT_STEPS = 30
SPLITS = load("digits")


class RareClass:
    """IID, except for one class that only the first clients hold."""

    def split(self, labels: Any, clients: Any, seed: int, columns: Any = None, samples: Any = None) -> Any:
        """Share the samples."""
        order = np.random.default_rng(seed).permutation(len(labels))
        is_rare = labels[order] == RARE_CLASS
        common, rare = np.array_split(order[~is_rare], clients), np.array_split(order[is_rare], RARE_HOLDERS)
        return [np.concatenate([common[c], *rare[c : c + 1]]) for c in range(clients)]


PARTITIONS = {
    "iid": partitions.IID(),
    "rare class": RareClass(),
    "dirichlet": partitions.Dirichlet(alpha=0.5),
    "dirichlet, unequal sizes": partitions.Dirichlet(alpha=0.5, sizes="natural"),
    "dirichlet 0.3": partitions.Dirichlet(alpha=0.3),
    "two classes": partitions.Classes(k=2),
    "dirichlet 0.1, unequal sizes": partitions.Dirichlet(alpha=0.1, sizes="natural"),
}


# --- attacks ---------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What an attack may use of a round; no real node knows the others' updates, and `ascend` does not use them."""

    others: list[Update]
    x: Tensor
    start: Tensor  # the model before round 1
    lr: float
    moments: list[str]  # the fields that are second moments
    gradient: Callable[[Tensor], tuple[Tensor, Tensor]]  # at a model, on the node's data or its largest class; and loss
    random: torch.Generator


def multiply(update: Update, seen: Seen, factor: float, only: str = "") -> Update:
    """Multiply one field, or all except second moments."""
    names = [only] if only else [n for n, v in update.up._asdict().items() if v is not None and n not in seen.moments]
    return update._replace(up=update.up._replace(**{name: factor * getattr(update.up, name) for name in names}))


def claim_examples(update: Update, seen: Seen, factor: float) -> Update:
    """Claim as many examples, with their local steps, as the limit allows; the update is multiplied by a factor."""
    claim = {"examples": int(LIMIT * update.examples), "steps": math.ceil(LIMIT * update.steps)}
    return multiply(update, seen, factor)._replace(**claim)


def move(update: Update, seen: Seen, aim: str) -> Update:
    """Send the longest step that the limit allows: against the others' mean, back to the start, or noise."""
    deltas = torch.stack([other.up.delta for other in seen.others])
    noise = torch.randn(seen.x.shape, generator=seen.random)
    direction = {"against": -deltas.mean(0), "back": seen.start - seen.x, "noise": noise}[aim]
    length = LIMIT * deltas.norm(dim=1).median() / direction.norm().clamp(min=1e-30)
    return update._replace(up=update.up._replace(delta=length * direction))


def enlarge_moments(update: Update, seen: Seen, share: float) -> Update:
    """Send second moments as large as the limit allows, all in a share of the coordinates: where they are smallest."""
    fields = {}
    for name in seen.moments:
        rows = torch.stack([getattr(other.up, name) for other in seen.others])
        poison = torch.zeros_like(rows[0])
        poison[rows.mean(0).argsort()[: math.ceil(share * len(poison))]] = 1.0
        fields[name] = LIMIT * rows.norm(dim=1).median() * poison / poison.norm()
    return update._replace(up=update.up._replace(**fields))


def enlarge_statistics(update: Update, seen: Seen) -> Update:
    """Send BatchNorm statistics that are nearly as large as the limit allows."""
    return update._replace(buffers={name: 0.9 * LIMIT * value for name, value in update.buffers.items()})


def ascend(update: Update, seen: Seen, length: float) -> Update:
    """Send the step that raises the loss of the predicted mean most, found by gradient ascent on the node's own data.

    The node takes its own honest step for the mean of the others. `length` is how long the step may be, in norms of the
    honest one. SCAFFOLD's control variate follows from the step.
    """
    honest, clients = update.up.delta, len(seen.others) + 1
    step = best = torch.zeros_like(honest)
    highest = -math.inf
    for _ in range(ASCENT_STEPS):
        gradient, loss = seen.gradient(seen.x + ((clients - 1) * honest + step) / clients)
        if float(loss) > highest:
            best, highest = step, float(loss)
        far = 2 * length / math.sqrt(ASCENT_STEPS) * honest.norm()
        step = step + far * gradient / gradient.norm().clamp(min=1e-30)
        step = step * (length * honest.norm() / step.norm().clamp(min=1e-30)).clamp(max=1)
    fields = {"delta": best}
    if hasattr(update.up, "delta_c"):
        fields["delta_c"] = update.up.delta_c - (best - honest) / (seen.lr * update.steps)
    return update._replace(up=update.up._replace(**fields))


class Case(NamedTuple):
    """An attack, settings of its simulation, and the algorithms that it concerns."""

    attack: Callable[..., Update] | None
    settings: Mapping[str, Any] = MappingProxyType({})
    algorithms: tuple[str, ...] = ALGORITHMS


ADAPTIVE, NORM, RARE = ("fedams", "fedlamb", "fedlada"), {"batch_norm": True}, {"partition": "rare class"}
CASES = {
    "no attack": Case(None),
    "the opposite step": Case(partial(multiply, factor=-1.0)),
    "the step × −10": Case(partial(multiply, factor=-10.0)),
    "the step × −50": Case(partial(multiply, factor=-50.0)),
    "97 × the examples, weighted by them": Case(partial(claim_examples, factor=1.0), {"weighting": "examples"}),
    "the same with the opposite step": Case(partial(claim_examples, factor=-1.0), {"weighting": "examples"}),
    "second moments × 97": Case(partial(enlarge_moments, share=1.0), {}, ADAPTIVE),
    "the same on the smaller half": Case(partial(enlarge_moments, share=0.5), {}, ADAPTIVE),
    "the opposite control variate": Case(partial(multiply, factor=-1.0, only="delta_c"), {}, ("scaffold",)),
    "no attack, with BatchNorm": Case(None, NORM, ("fedavg", "fedlamb")),
    "BatchNorm statistics × 87": Case(enlarge_statistics, NORM, ("fedavg", "fedlamb")),
    "against the others × 97": Case(partial(move, aim="against")),
    "noise × 97": Case(partial(move, aim="noise")),
    "back to the start × 97": Case(partial(move, aim="back")),
    "raise the loss of its own data": Case(partial(ascend, length=4.0)),
    "suppress a class": Case(partial(ascend, length=2.0), {"suppress": True}),
    "no attack, a class on three nodes": Case(None, RARE),
    "suppress that class": Case(partial(ascend, length=2.0), {"suppress": True, **RARE}),
}


# --- runs ------------------------------------------------------------------------------------------------------------


def run(
    name: str,
    attack: Callable[..., Update] | None = None,
    *,
    hostile: int = 1,
    partition: str = "iid",
    aggregation: str = "mean",
    rounds: int = 15,
    seed: int = 0,
    weighting: Any = "clients",
    batch_norm: bool = False,
    suppress: bool = False,
) -> tuple[float, dict[int, int], dict[str, float]]:
    """Return the accuracy (%, mean of the last three rounds), refusals by client, and the largest size over the median.

    The first `hostile` clients attack. With `suppress`, their gradients are those of their largest class.
    """
    refused: dict[int, int] = {}
    ratios: dict[str, float] = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = [nn.BatchNorm1d(64)] if batch_norm else []
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *norm, nn.ReLU(), nn.Linear(64, 10))
    simulation = lamina.Simulation(
        model, SPLITS.train, name, test=SPLITS.test, clients=CLIENTS, lr=RATES[name], epochs=2, batch_size=16,
        weighting=weighting, partition=PARTITIONS[partition], engine="stacked", seed=seed,
        aggregation="median",  # so that the engine keeps the uploads, which `close` combines
    )  # fmt: skip
    objective, parts, random = simulation.objective, simulation.plan.clients.parts, torch.Generator().manual_seed(seed)

    def gradient_of(client: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        own = SPLITS.train.subset(parts[client])
        largest = RARE_CLASS if partition == "rare class" else int(own.y.mode().values)
        rows = torch.nonzero(own.y == largest).flatten() if suppress else torch.arange(len(own))
        return lambda x: objective.gradient(x, objective.buffers, own.inputs(rows), own.y[rows], train=False)

    def close(algorithm: Any, layers: Any, state: Any, plan: Any, down: Any, sums: RoundSums, clients: Any) -> Any:
        """Stand in for the engine's `close_round`."""
        updates = {
            int(plan.cohort[c]): Update(up, buffers, int(plan.examples[c]), int(plan.steps[c]), 0.0)
            for c, (up, buffers) in sorted(sums.uploads.items())
        }
        honest = list(updates.values())[hostile:]
        moments = [name for name in algorithm.non_negative if getattr(honest[0].up, name) is not None]
        for client in range(hostile if attack is not None else 0):
            seen = Seen(honest, state.server.x, objective.start, plan.lr, moments, gradient_of(client), random)
            updates[client] = attack(updates[client], seen)
        sizes = sizes_of(updates)
        for what, values in sizes.items():
            median = statistics.median(values.values())
            ratios[what] = max(ratios.get(what, 0.0), max(values.values()) / median if median else 0.0)
        for client in stand_out(sizes, Limits().times_median):
            refused[client] = refused.get(client, 0) + 1
            del updates[client]
        by_examples = weighting == "examples"
        shares = np.array([one.examples if by_examples else 1 for one in updates.values()], dtype=float)
        kept = RoundSums(weights=(shares / shares.sum()).tolist(), aggregation=make_aggregation(aggregation))
        for c, (up, buffers, _, steps, *_) in enumerate(updates.values()):
            kept.add_client(c, algorithm, up, buffers, loss=0.0, steps=steps, by_examples=by_examples)
        return close_round(algorithm, layers, state, plan, down, kept, clients)

    stacked.close_round = close
    try:
        history = simulation.run(rounds)
    except lamina.Diverged:
        return math.nan, refused, ratios
    finally:
        stacked.close_round = close_round
    return 100 * statistics.mean(row["accuracy"] for row in history[-3:]), refused, ratios


def cell(name: str, seeds: int, **settings: Any) -> str:
    """Return the accuracies of all aggregations, each the mean over the seeds."""
    words = []
    for aggregation in AGGREGATIONS:
        runs = [run(name, aggregation=aggregation, seed=seed, **settings) for seed in range(seeds)]
        mean = statistics.mean(accuracy for accuracy, _, _ in runs)
        words.append(("—" if math.isnan(mean) else f"{mean:.0f}") + "*" * any(refused for _, refused, _ in runs))
    return " / ".join(words)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in {"--hostile": 1, "--seeds": 1, "--rounds": 15}.items():
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--partition", default="iid", choices=PARTITIONS)
    parser.add_argument("--case", default="", help="only the rows whose name contains this")
    for flag in ("--cost", "--honest"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # that the accuracy falls is no news
    if given.honest:
        for name, partition in itertools.product(RATES, PARTITIONS):
            batch_norm = partition in ("iid", "dirichlet", "dirichlet 0.3")  # elsewhere a batch may have one sample
            settings = {"partition": partition, "batch_norm": batch_norm, "rounds": given.rounds}
            runs = [run(name, seed=seed, **settings)[2] for seed in range(given.seeds)]
            largest = ", ".join(f"{what} {max(ratios[what] for ratios in runs):.3g}" for what in runs[0])
            print(f"{name}, {partition}: {largest}", flush=True)
        return
    cases = CASES
    if given.cost:
        cases = {name: CASES["no attack"]._replace(settings={"partition": name}) for name in PARTITIONS}
    elif given.partition != "iid":
        cases = {what: case for what, case in CASES.items() if "partition" not in case.settings}
    chosen = {what: case for what, case in cases.items() if given.case in what}
    if not chosen:
        parser.error(f"no row contains '{given.case}'; there are: {'; '.join(cases)}")
    titles = [lamina.create(name).card.title for name in ALGORITHMS]
    print("| | " + " | ".join(titles) + " |\n|---" + "|---" * len(titles) + "|")
    for what, case in chosen.items():
        settings = {name: getattr(given, name) for name in ("partition", "hostile", "rounds")} | dict(case.settings)
        cells = [
            cell(n, given.seeds, attack=case.attack, **settings) if n in case.algorithms else "" for n in ALGORITHMS
        ]
        print(f"| {what} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
