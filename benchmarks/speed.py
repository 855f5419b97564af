"""Seconds per round: lamina's engines beside a plain PyTorch loop, in one sitting, on the same work and threads.

    python benchmarks/speed.py W2 --rounds 5            # on a CPU: one thread each
    python benchmarks/speed.py W1 W3 --device cuda --precision bf16

The contenders are interleaved, one process, warm-up left out; the ratio is to the mean of the plain runs around them.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import workloads
from torch.nn import functional as F  # noqa: N812

from lamina.data.feed import Augment, prepare


def plain_loop(name: str, data: workloads.Dataset, device: str, rounds: int) -> list[float]:
    """What a user writes: one client after another, torch.optim.SGD (whatever the workload's algorithm), averaging."""
    w = workloads.WORKLOADS[name]
    model = workloads.model(w).to(device)
    local, x, y = copy.deepcopy(model), data.x.to(device), data.y.to(device)
    generator, seconds = np.random.default_rng(0), []
    for _ in range(rounds):
        started = time.perf_counter()
        start = model.state_dict()
        mean = {k: torch.zeros_like(v) for k, v in start.items()}
        for user in generator.choice(w.users, w.active, replace=False):
            local.load_state_dict(start)
            local.train()
            optimiser = torch.optim.SGD(local.parameters(), lr=w.lr)
            own = np.arange(user * w.per_user, (user + 1) * w.per_user)
            for _ in range(w.epochs):
                order = torch.from_numpy(generator.permutation(own)).to(device)
                for batch in order.split(w.batch):
                    images = x[batch]
                    if w.augment:
                        images = Augment()(images, torch.randint(0, 2**53, (len(batch),), device=device))
                    optimiser.zero_grad()
                    F.cross_entropy(local(prepare(images, data.mean, data.std)), y[batch]).backward()
                    optimiser.step()
            for k, v in local.state_dict().items():
                mean[k] += v / w.active
        model.load_state_dict(mean)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def lamina_engine(name: str, data: workloads.Dataset, device: str, rounds: int, **more: object) -> list[float]:
    simulation = workloads.simulation(name, data, device=device, **more)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        simulation.run(1)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=["W1", "W2", "W3"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    print(f"torch {torch.__version__}, {a.device}, {a.threads} thread(s), {a.precision}, median of {a.rounds} rounds")
    print(f"{'workload':10}{'contender':18}{'s per round':>12}{'speed-up':>10}")
    for name in a.workloads:
        data, n = workloads.data(workloads.WORKLOADS[name]), a.warmup + a.rounds
        before = plain_loop(name, data, a.device, n)[a.warmup :]
        found = {
            "lamina stacked": lamina_engine(name, data, a.device, n, engine="stacked", precision=a.precision),
            "lamina loop": lamina_engine(name, data, a.device, n, engine="loop"),
        }
        after = plain_loop(name, data, a.device, n)[a.warmup :]
        plain = statistics.median(before + after)
        print(f"{name:10}{'plain loop':18}{plain:12.3f}{1.0:10.2f}")
        for contender, seconds in found.items():
            median = statistics.median(seconds[a.warmup :])
            print(f"{name:10}{contender:18}{median:12.3f}{plain / median:10.2f}", flush=True)


if __name__ == "__main__":
    main()
