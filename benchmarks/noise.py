"""What the noise of differential privacy does to second moments: accuracy, and how much of the server's v is noise.

Digits, an MLP, 100 clients of which 50 take part in a round. All noise multipliers, rates and seeds of a method train
as one population; each method gets the rate that is best for it at each multiplier, on the test data. A second moment
is compared with that of the run of the same rate and seed without noise, coordinate by coordinate.

    python benchmarks/noise.py                       # a quarter of an hour on a busy machine of two cores
    python benchmarks/noise.py "Fed-LAMB" --rounds 20
"""

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import nn

import lamina
from lamina.channel.privacy import Noise, Privacy

CLIENTS, COHORT, BOUND = 100, 50, 0.5
MULTIPLIERS = (0.0, 0.3, 1.0, 3.0)
EARLY_ROUND = 10


@dataclass
class Method:
    """A method with the values that are tried of one setting."""

    algorithm: str
    values: tuple[float, ...]
    tried: str = "lr"  # or an option of the algorithm
    moment: str | None = None  # the server's second moment
    bound: float | dict[str, float] = BOUND
    settings: dict[str, float] = field(default_factory=dict)
    debias: bool = False  # whether the server subtracts the variance of the noise


ADAM, LAMB, LADA = (0.001, 0.003, 0.01, 0.03), (0.01, 0.03, 0.1, 0.3), (0.01, 0.03, 0.1, 0.3)
METHODS = {
    "FedAvg": Method("fedavg", (0.03, 0.1, 0.3, 1.0)),
    "FedAdam": Method("fedadam", ADAM, "server_lr", "v", settings={"lr": 0.3}),
    "FedAdam, debias": Method("fedadam", ADAM, "server_lr", "v", settings={"lr": 0.3}, debias=True),
    "Fed-LAMB": Method("fedlamb", LAMB, moment="v_hat"),
    "Fed-LAMB, v bounded by 0.01": Method("fedlamb", LAMB, moment="v_hat", bound={"delta": BOUND, "v": 0.01}),
    "Fed-LAMB, v bounded by 0.0001": Method("fedlamb", LAMB, moment="v_hat", bound={"delta": BOUND, "v": 1e-4}),
    "FedLADA": Method("fedlada", LADA, moment="v"),
    "FedLADA, v bounded by 0.01": Method("fedlada", LADA, moment="v", bound={"delta": BOUND, "v_hat": 0.01}),
    "FedLADA, v bounded by 0.0001": Method("fedlada", LADA, moment="v", bound={"delta": BOUND, "v_hat": 1e-4}),
}


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def simulate(method, splits, multiplier, value, seed, rounds):
    """Return a run whose noise has the given multiplier; 0 clips alone."""
    # the guarantee is not computed here: noise that is given is taken as it is
    noise = Noise(f"{multiplier} {value} {seed}".encode(), multiplier / COHORT)
    privacy = Privacy(method.bound, 1e-3, noise_multiplier=1.0, secret_cohorts=False, debias=method.debias, noise=noise)
    settings = {"local_steps": 5, "batch_size": 8, "participation": COHORT / CLIENTS, **method.settings}
    options = {"name": method.algorithm}
    (settings if method.tried == "lr" else options)[method.tried] = value
    return lamina.Simulation(
        network, splits, options, clients=CLIENTS, privacy=privacy, seed=seed, evaluate_every=rounds, device="cpu",
        **settings,
    )  # fmt: skip


def measure(method, splits, seeds, rounds):
    """Return for every multiplier: accuracy, the value that was best, and v ÷ v without noise early and at the end."""
    keys = list(itertools.product(MULTIPLIERS, method.values, range(seeds)))
    runs = {key: simulate(method, splits, *key, rounds) for key in keys}
    population = lamina.Population(list(runs.values()))
    moments = {}
    for number in range(1, rounds + 1):
        population.run_round(evaluate=number == rounds)
        if method.moment and number in (min(EARLY_ROUND, rounds), rounds):
            moments[number] = {key: getattr(run.state.server, method.moment).clone() for key, run in runs.items()}
    lost = {keys[i] for i in population.diverged}
    accuracy = {k: 0.0 if k in lost else run.history.last("accuracy") for k, run in runs.items()}
    results = []
    for multiplier in MULTIPLIERS:
        means = {v: sum(accuracy[multiplier, v, s] for s in range(seeds)) / seeds for v in method.values}
        best = max(means, key=means.get)
        accuracies = [accuracy[multiplier, best, s] for s in range(seeds)]
        ratios = {
            number: torch.stack([of[multiplier, best, s] / of[0.0, best, s].clamp(min=1e-30) for s in range(seeds)])
            for number, of in moments.items()
        }
        results.append((multiplier, accuracies, best, ratios))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}; default: all")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.methods:
        if name not in METHODS:
            parser.error(f"unknown method '{name}': {', '.join(METHODS)}")
    splits = lamina.data.load("digits")
    print(f"| method | noise | accuracy | {EARLY_ROUND} rounds: v ÷ | end: v ÷ | end: noise owns | best |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.methods or METHODS:
        started, method = time.perf_counter(), METHODS[name]
        for multiplier, accuracies, best, ratios in measure(method, splits, arguments.seeds, arguments.rounds):
            mean, least, most = (100 * f(accuracies) for f in (statistics.fmean, min, max))
            early, late, owned = "", "", ""
            if ratios and multiplier:
                early, late = (f"{ratios[n].median():.3g}" for n in (min(ratios), max(ratios)))
                owned = f"{(ratios[max(ratios)] > 2).double().mean():.0%}"
            cells = name, f"{multiplier:g}", f"{mean:.1f} ({least:.1f}–{most:.1f})", early, late, owned
            print("|", " | ".join(cells), "|", method.tried, f"{best:g} |", flush=True)
        print(f"<!-- {time.perf_counter() - started:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
