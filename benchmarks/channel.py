"""Measure what codecs and differential privacy add to a round: seconds beside the same round without them.

    python benchmarks/channel.py                       # W2 on a CPU, one thread
    python benchmarks/channel.py W3 --device cuda --precision bf16 --rounds 10

Rounds with and without a codec alternate in one process; a figure is the median over the rounds of the quotient of
neighbours. The run "none again" is a second one without a codec: its quotient shows the noise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import workloads

CHANNELS: dict[str, dict[str, Any]] = {
    "none again": {},
    "bf16": {"channel": "bf16"},
    "fp16": {"channel": "fp16"},
    "qsgd 8": {"channel": "qsgd"},
    "qsgd 4, feedback": {"channel": {"codec": {"name": "qsgd", "bits": 4}, "feedback": True}},
    "sign, feedback": {"channel": {"codec": "sign", "feedback": True}},
    "topk 1 %, feedback": {"channel": {"codec": "topk", "feedback": True}},
    "randk 1 %, feedback": {"channel": {"codec": "randk", "feedback": True}},
    "sketch 10 %": {"channel": "sketch"},
    "down bf16": {"channel": {"down": "bf16"}},
    "privacy": {"privacy": {"bound": 1.0, "noise_multiplier": 1.0, "delta": 1e-4}},
}


def main() -> None:
    """Print a table: a channel, seconds per round, and the quotient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="W2", choices=[*workloads.WORKLOADS])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="channels whose names contain this")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    w = workloads.WORKLOADS[a.workload]
    train = workloads.data(w).to(a.device)
    steps = w.epochs * -(-w.per_user // w.batch)  # the same number for all users, as privacy wants it
    settings = {"device": a.device, "precision": a.precision, "epochs": None, "local_steps": steps}
    plain = workloads.simulation(a.workload, train, **settings)
    seconds(plain, a.device)
    print(f"{a.workload} on {a.device}, {a.precision}, {a.threads} threads; {a.rounds} rounds each")
    with tempfile.TemporaryDirectory() as folder:
        for name, more in CHANNELS.items():
            if a.only and a.only not in name:
                continue
            if "privacy" in more:
                more = {"privacy": {**more["privacy"], "secret": str(Path(folder) / "secret")}}
            run = workloads.simulation(a.workload, train, **settings | more)
            seconds(run, a.device)
            pairs = [(seconds(plain, a.device), seconds(run, a.device)) for _ in range(a.rounds)]
            with_it = statistics.median(other for _, other in pairs)
            quotient = statistics.median(other / one for one, other in pairs)
            print(f"{name:20} {with_it:9.4f} s {100 * (quotient - 1):+7.1f} %", flush=True)


def seconds(run: Any, device: str) -> float:
    """Return how long one more round takes."""
    start = time.perf_counter()
    run.run(1)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
