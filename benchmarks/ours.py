"""lamina on one workload: a simulation, or a population where the workload is one."""

from __future__ import annotations

import contender
import torch
import workloads

import lamina


def main() -> None:
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

    # a member that diverged stands still, and its samples are missing here: the table then shows the mismatch
    last = [m.plan.round(m.state.round) for m in members if m.state.round == a.warmup + a.rounds]
    processed = sum(
        len(plan.batch(c, k)) for plan in last for c in range(len(plan.cohort)) for k in range(plan.steps[c])
    )
    engine = members[0].engine
    judged = members[len(members) // 2].model  # of a population: a middle rate
    contender.report(
        a,
        watch,
        parameters=sum(p.numel() for p in judged.parameters()),
        samples=processed,
        accuracy=contender.accuracy(contender.torch_predict(judged), *stored),
        version=f"lamina {lamina.__version__}, torch {torch.__version__}",
        engine=engine.forward.name if hasattr(engine, "forward") else "loop",
    )


if __name__ == "__main__":
    main()
