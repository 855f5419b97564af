"""BlazeFL's federated averaging (blazefl.contrib): one client after another, or a pool of threads if there are several.

Batches are drawn as the plain loop draws them, without a DataLoader. Run as `python -m peers.blazefl`: as a script this
file would hide the package blazefl.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import contender
import torch
import workloads
from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer

from peers import torch_models

a = contender.arguments()
w, stored = workloads.WORKLOADS[a.workload], workloads.load(a.workload, a.data)


class Batches:
    """A client's batches in a new random order, in the place of a DataLoader."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch_size: int, generator: torch.Generator) -> None:
        self.x, self.y, self.batch_size, self.generator = x, y, batch_size, generator

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.y), generator=self.generator).to(self.y.device)
        return ((self.x[batch], self.y[batch]) for batch in order.split(self.batch_size))


class Users:
    """BlazeFL's `PartitionedDataset`, with all samples on the device."""

    def __init__(self) -> None:
        self.x = torch.from_numpy(workloads.normalised(stored[0])).to(a.device)
        self.y = torch.from_numpy(stored[1]).to(a.device)

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: torch.Generator) -> Batches:
        """Return the batches of one client."""
        user = workloads.owned(w, cid)
        return Batches(self.x[user], self.y[user], batch_size, generator)


class Models:
    """BlazeFL's `ModelSelector`."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        """Return a new model."""
        return torch_models.create(model_name)


def main() -> None:
    """Run BlazeFL and print its result."""
    parallel = a.threads > 1
    torch.set_num_threads(1 if parallel else a.threads)
    torch.manual_seed(0)
    watch = contender.Stopwatch(a.device)
    common = {"model_selector": Models(), "model_name": a.workload, "dataset": Users(), "device": a.device}
    common |= {"num_clients": w.users, "batch_size": w.batch, "seed": 0}
    rounds = a.warmup + a.rounds
    server = FedAvgBaseServerHandler(global_round=rounds, sample_ratio=w.active / w.users, **common)
    if parallel:
        clients = FedAvgThreadPoolClientTrainer(epochs=w.epochs, lr=w.lr, num_parallels=a.threads, **common)
    else:
        clients = FedAvgBaseClientTrainer(epochs=w.epochs, lr=w.lr, **common)
    processed = 0
    watch.lap()
    while not server.if_stop():
        cohort = server.sample_clients()
        clients.local_process(server.downlink_package(), cohort)
        for package in clients.uplink_package():
            processed += package.data_size
            server.load(package)
        watch.lap()
    contender.report(
        a,
        watch,
        parameters=sum(p.numel() for p in server.model.parameters()),
        samples=processed / rounds,
        accuracy=contender.accuracy(contender.torch_predict(server.model), *stored),
        version=f"blazefl {importlib.metadata.version('blazefl')}, torch {torch.__version__}",
    )


if __name__ == "__main__":
    main()
