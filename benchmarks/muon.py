"""Measure what Muon adds to a round: seconds beside the same round with another method.

    python benchmarks/muon.py --device cuda --precision bf16      # W3: ResNet-18, FedLADA and FedMuon
    python benchmarks/muon.py W2 --rounds 3                       # on a CPU

Rounds of both methods alternate in one process; a figure is the median over the rounds of the quotient of neighbours. A
second table gives the time and the floating-point operations of the Newton-Schulz iteration alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import workloads
from torch.utils.flop_counter import FlopCounterMode

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "baseline again": ("", {}),
    "fedavg": ("fedavg", {}),
    "localadamw": ("localadamw", {}),
    "localmuon": ("localmuon", {}),
    "fedmuon": ("fedmuon", {}),
    "fedmuon, bfloat16": ("fedmuon", {"arithmetic": "bfloat16"}),
}


def main() -> None:
    """Print a table: a method, seconds per round, and the quotient; then the cost of the iteration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="W3", choices=[*workloads.WORKLOADS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baseline", default="fedlada")
    parser.add_argument("--only", default="", help="methods whose names contain this")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    w = workloads.WORKLOADS[a.workload]
    train = workloads.data(w).to(a.device)

    def run_of(name: str, options: dict[str, Any]) -> Any:
        import lamina

        algorithm = lamina.create(name, **options)
        return workloads.simulation(a.workload, train, algorithm, device=a.device, precision=a.precision)

    baseline = run_of(a.baseline, {})
    seconds(lambda: baseline.run(1), a.device)
    print(f"{a.workload} on {a.device}, {a.precision}; {a.rounds} rounds each, beside {a.baseline}")
    for label, (name, options) in METHODS.items():
        if a.only in label:
            run = run_of(name or a.baseline, options)
            seconds(lambda run=run: run.run(1), a.device)  # compiles and captures
            rounds = [(seconds(lambda: baseline.run(1), a.device), seconds(lambda run=run: run.run(1), a.device))
                      for _ in range(a.rounds)]  # fmt: skip
            quotient = statistics.median(other / one for one, other in rounds)
            print(f"{label:20} {statistics.median(other for _, other in rounds):9.4f} s  x {quotient:.2f}", flush=True)
    iteration(w, baseline.engine.objective.layers, a)


def iteration(w: workloads.Workload, layers: Any, a: argparse.Namespace) -> None:
    """Print what the Newton-Schulz iteration of one step of all clients costs."""
    from lamina.algorithms import LocalMuon

    print(f"Newton-Schulz, in a step of {w.active} clients, not captured")
    u = torch.randn(w.active, layers.size, device=a.device)
    before = torch.backends.cuda.matmul.allow_tf32
    for label, tf32, arithmetic in (
        ("float32", False, "model"),
        ("tf32", True, "model"),
        ("bfloat16", True, "bfloat16"),
    ):
        if a.device == "cpu" and label == "tf32":
            continue
        torch.backends.cuda.matmul.allow_tf32 = tf32
        function = LocalMuon(arithmetic=arithmetic).orthogonal

        def work(f: Any = function) -> Any:
            return layers.map_matrices(f, u)

        seconds(work, a.device)  # warms up
        with FlopCounterMode(display=False) as counter:  # on shapes alone: it does not know products of mixed types
            layers.map_matrices(function, torch.empty(w.active, layers.size, device="meta"))
        flop = counter.get_total_flops()
        took = statistics.median(seconds(work, a.device) for _ in range(a.rounds))
        rate = flop / took / 1e12
        print(f"  {label:10} {1e3 * took:9.2f} ms, {flop / 1e9:5.0f} GFLOP, {rate:7.2f} TFLOP/s", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = before


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return how long some work takes."""
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
