"""What all contenders share: arguments, a stopwatch, and the line with the result. It imports only numpy."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import workloads

RESULT = "RESULT "  # the start of the line that speed.py reads; libraries may print other lines
JUDGED_SAMPLES = 2000


def arguments() -> argparse.Namespace:
    """Parse the command line of a contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(workloads.WORKLOADS))
    parser.add_argument("--data", type=Path, required=True, help="folder that workloads.save wrote to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


class Stopwatch:
    """A stopwatch that starts when it is created. The first lap is the set-up; each later lap is a round."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device.startswith("cuda")
        self.times = [time.perf_counter()]

    def lap(self) -> None:
        """End a lap; on a GPU, wait for its work first."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """The duration of every lap."""
        return np.diff(self.times).tolist()


def accuracy(predict: Callable[[np.ndarray], np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """Return the accuracy on a few training samples, which shows that the contender trained."""
    return float(np.mean(predict(workloads.normalised(x[:JUDGED_SAMPLES])) == y[:JUDGED_SAMPLES]))


def torch_predict(model: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that predicts classes with a torch module on any device."""
    import torch

    def predict(x: np.ndarray) -> np.ndarray:
        device = next(model.parameters()).device
        with torch.no_grad():
            batches = torch.from_numpy(x).split(500)
            return torch.cat([model.eval()(batch.to(device)).argmax(1).cpu() for batch in batches]).numpy()

    return predict


def report(
    a: argparse.Namespace,
    watch: Stopwatch,
    *,
    parameters: int,
    samples: float,
    accuracy: float,
    version: str,
    **more: Any,
) -> None:
    """Print the result. `samples` is the mean number of samples that a round processed, as counted."""
    setup, *rounds = watch.seconds
    assert len(rounds) == a.warmup + a.rounds, f"{len(rounds)} rounds were run, not {a.warmup + a.rounds}"
    result = {"setup": setup, "warmup": rounds[: a.warmup], "seconds": rounds[a.warmup :], "parameters": parameters}
    result |= {"samples": samples, "accuracy": accuracy, "version": version} | more
    print("\n" + RESULT + json.dumps(result), flush=True)
