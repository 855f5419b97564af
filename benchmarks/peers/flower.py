"""Flower's simulation (Ray backend): ClientApp and ServerApp with FedAvg, the message API of flwr >= 1.21.

As many actors as threads, one thread each. A client reads its part of a memory-mapped file; its batches are drawn as
the plain loop draws them, without a DataLoader, so that what is measured is Flower's own cost. Settings that are read
when flwr and ray are imported (no telemetry, where they keep their files) come from speed.py.
"""

from __future__ import annotations

import contender
import flwr
import numpy as np
import ray
import torch
import workloads
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F  # noqa: N812

from peers import torch_models

a = contender.arguments()
w = workloads.WORKLOADS[a.workload]
client_app, server_app = ClientApp(), ServerApp()
watch, outcome = contender.Stopwatch(a.device), {"samples": 0.0}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    model = torch_models.create(a.workload)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = workloads.owned(w, int(context.node_config["partition-id"]))
    x, y = (array[own] for array in workloads.load(a.workload, a.data, mapped=True))
    x, y = torch.from_numpy(np.array(workloads.normalised(x))), torch.from_numpy(np.array(y))
    optimiser = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
    model.train()
    processed = 0
    for _ in range(w.epochs):
        for batch in torch.randperm(len(x)).split(w.batch):
            optimiser.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
            processed += len(batch)
    counts = MetricRecord({"num-examples": len(x), "processed": processed})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counts}), reply_to=message)


def add_counts(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    outcome["samples"] = sum(reply["metrics"]["processed"] for reply in replies)
    return MetricRecord({})


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    model = torch_models.create(a.workload)

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
        watch.lap()  # FedAvg evaluates before the first round and after every aggregation
        return MetricRecord({})

    strategy = FedAvg(
        fraction_train=w.active / w.users,
        fraction_evaluate=0.0,
        min_train_nodes=w.active,
        min_evaluate_nodes=0,
        min_available_nodes=w.users,
        train_metrics_aggr_fn=add_counts,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": w.lr}),
        num_rounds=a.warmup + a.rounds,
        evaluate_fn=after_round,
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    outcome["model"] = model


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=w.users,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": a.threads},
        },
    )
    contender.report(
        a,
        watch,
        parameters=sum(p.numel() for p in outcome["model"].parameters()),
        samples=outcome["samples"],
        accuracy=contender.accuracy(
            contender.torch_predict(outcome["model"]), *workloads.load(a.workload, a.data, mapped=True)
        ),
        version=f"flwr {flwr.__version__}, ray {ray.__version__}, torch {torch.__version__}",
    )
