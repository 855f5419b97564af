"""Measure what a user's own model gets: lamina beside a plain PyTorch loop, on models as other people write them.

    python benchmarks/zoo.py                            # on a CPU: 10 of 20 clients × 4 steps × batch 16, one thread
    python benchmarks/zoo.py vit lstm --threads 4
    python benchmarks/zoo.py --device cuda              # 10 of 100 clients × 20 steps × batch 32, bf16 in both

Both train FedLADA's work: Adam steps on the clients' batches, then the mean. The plain loop is what people write by
hand: `load_state_dict`, torch's Adam (fused on a GPU), `backward`, and on a GPU autocast to bfloat16. Rounds of both
alternate in one process; the fastest of each counts. `start` is the time from the model and the arrays to the end of
round 1, less one round. Models of transformers and peft are left out where these are not installed.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: waiting threads that spin disturb the others

import torch
import zoo_models
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import lamina

LARGE = ("gpt2", "gpt2-lora")  # on a GPU only, with fewer clients, steps and samples
COLUMNS = "{:12} {:>12} {:9} {:>10} {:>10} {:>7} {:>8}  {}"


class Setting(NamedTuple):
    """The size of a round."""

    clients: int
    active: int
    steps: int
    batch: int

    @property
    def per_client(self) -> int:
        """Samples of a client: its batches repeat after four."""
        return 4 * self.batch


ON_A_GPU, ON_A_CPU = Setting(100, 10, 20, 32), Setting(20, 10, 4, 16)
OF_A_LARGE_MODEL = Setting(8, 4, 5, 4)


def plain_round(case: zoo_models.Case, size: Setting, device: str) -> Callable[[], None]:
    """Return a function that runs one round as a plain loop over the clients."""
    model = copy.deepcopy(case.module).to(device).train()
    x, y = _map(lambda values: values.to(device), case.inputs), case.targets.to(device)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(inputs: Any, targets: Tensor) -> Tensor:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        outputs = getattr(outputs, "logits", outputs)
        if case.loss == "causal_lm":
            return F.cross_entropy(outputs[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())
        if case.loss == "mse":
            return F.mse_loss(outputs[:, 0].float(), targets)
        return F.cross_entropy(outputs.float(), targets)

    def run() -> None:
        total = {name: torch.zeros_like(value, dtype=torch.float) for name, value in start.items()}
        for client in range(size.active):
            model.load_state_dict(start)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimiser = torch.optim.Adam(trained, lr=1e-3, fused=device == "cuda")
            for step in range(size.steps):
                first = step * size.batch
                index = torch.arange(first, first + size.batch, device=device) % size.per_client
                index += client * size.per_client
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    value = loss(_map(lambda values, index=index: values[index], x), y[index])
                optimiser.zero_grad()
                value.backward()
                optimiser.step()
            for name, weights in model.state_dict().items():
                total[name] += weights.float() / size.active

    return run


def our_round(case: zoo_models.Case, size: Setting, device: str, engine: str) -> tuple[Callable[[], None], Any]:
    """Return a function that runs one round of lamina, and the simulation."""
    ids = [list(range(c * size.per_client, (c + 1) * size.per_client)) for c in range(size.clients)]
    simulation = lamina.Simulation(
        copy.deepcopy(case.module), (case.inputs, case.targets), "fedlada", clients=ids, loss=case.loss,
        participation=size.active / size.clients, batch_size=size.batch, local_steps=size.steps, device=device,
        precision="bf16" if device == "cuda" else "fp32", engine=engine, evaluate_every=10**8,
    )  # fmt: skip
    return lambda: simulation.run(1, progress=False), simulation


def measure(name: str, device: str, engine: str, rounds: int) -> dict[str, Any]:
    """Return a row of the table."""
    size = OF_A_LARGE_MODEL if name in LARGE else ON_A_GPU if device == "cuda" else ON_A_CPU
    torch.manual_seed(0)
    case = zoo_models.CASES[name](zoo_models.Data(size.clients * size.per_client))
    parameters = sum(p.numel() for p in case.module.parameters() if p.requires_grad)
    plain = plain_round(case, size, device)
    _seconds(plain, device)  # warm
    began = time.perf_counter()
    ours, simulation = our_round(case, size, device, engine)
    _seconds(ours, device)
    first = time.perf_counter() - began
    ours_seconds, plain_seconds = [], []
    for _ in range(rounds):
        plain_seconds.append(_seconds(plain, device))
        ours_seconds.append(_seconds(ours, device))
    best, best_plain = min(ours_seconds), min(plain_seconds)
    used = simulation.engine
    return {
        "model": name, "parameters": parameters, "engine": used.name, "why": used.why, "plain": best_plain,
        "lamina": best, "ratio": best_plain / best, "start": first - best,
    }  # fmt: skip


def main() -> None:
    """Measure the models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*zoo_models.CASES, []], help="all unless named")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each model")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    logging.basicConfig(level=logging.ERROR)
    where = torch.cuda.get_device_name() if a.device == "cuda" else f"{a.threads} thread(s) of a CPU"
    print(f"{where}, torch {torch.__version__}, {'bf16' if a.device == 'cuda' else 'fp32'} in both")
    print(COLUMNS.format("model", "parameters", "engine", "plain, s", "lamina, s", "ratio", "start, s", "why"))
    chosen = a.models or [name for name in zoo_models.CASES if a.device == "cuda" or name not in LARGE]
    for name in chosen:
        try:
            row = measure(name, a.device, a.engine, a.rounds)
        except ImportError as error:
            print(f"{name:12} left out: {error}")
            continue
        cells = [f"{row[key]:.4f}" for key in ("plain", "lamina")]
        cells += [f"{row['ratio']:.2f}", f"{row['start']:.2f}", row["why"]]
        line = COLUMNS.format(name, f"{row['parameters']:,}", row["engine"], *cells)
        print(json.dumps(row) if a.json else line.rstrip(), flush=True)
        if a.device == "cuda":
            torch.cuda.empty_cache()


def _seconds(work: Callable[[], None], device: str) -> float:
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _map(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    return {k: function(v) for k, v in values.items()} if isinstance(values, dict) else function(values)


if __name__ == "__main__":
    sys.exit(main())
