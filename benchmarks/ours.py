"""lamina on one workload: a simulation, or a population where the workload is one."""

from __future__ import annotations

import contender
import torch
import workloads

import lamina
from lamina import Population, Simulation  # noqa: F401  (imported before the watch starts, as the peers are)


def main() -> None:
    """Run lamina and print its result."""
    a = contender.arguments()
    torch.set_num_threads(a.threads)
    w, stored = workloads.WORKLOADS[a.workload], workloads.load(a.workload, a.data)

    watch = contender.Stopwatch(a.device)
    train = workloads.data(w, *stored).to(a.device)
    settings = {"device": a.device, "engine": a.engine, "precision": a.precision}
    if w.members == 1:
        members = [workloads.simulation(a.workload, train, **settings)]
        runner = members[0]
    else:
        runner = workloads.population(a.workload, train, **settings)
        members = runner.simulations
    watch.lap()
    for _ in range(a.warmup + a.rounds):
        runner.run(1)
        watch.lap()

    # A member that diverged has finished fewer rounds: the table then says that it did other work.
    processed = sum(int(m.plan.round(number).filled.sum()) for m in members for number in range(1, m.state.round + 1))
    engine = members[0].engine
    judged = members[len(members) // 2].model  # in a population: one with a middle rate
    contender.report(
        a,
        watch,
        parameters=sum(p.numel() for p in judged.parameters()),
        samples=processed / (a.warmup + a.rounds),
        accuracy=contender.accuracy(contender.torch_predict(judged), *stored),
        version=f"lamina {lamina.__version__}, torch {torch.__version__}",
        engine=engine.forward.name if hasattr(engine, "forward") else "loop",
    )


if __name__ == "__main__":
    main()
