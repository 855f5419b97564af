"""The plain PyTorch loop: one client after another with torch.optim.SGD, then the mean of their weights.

It trains the clients that lamina's round plan selects. Images are normalised once, beforehand, unless they are
augmented. torch keeps its defaults: on a GPU, convolutions use TF32.
"""

from __future__ import annotations

import copy

import contender
import numpy as np
import torch
import workloads
from torch.nn import functional as F  # noqa: N812

from lamina.data.feed import Augment, prepare


def main() -> None:
    """Run the loop and print its result."""
    a = contender.arguments()
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    w, stored = workloads.WORKLOADS[a.workload], workloads.load(a.workload, a.data)

    watch = contender.Stopwatch(a.device)
    x = torch.from_numpy(stored[0] if w.augment else workloads.normalised(stored[0])).to(a.device)
    y = torch.from_numpy(stored[1]).to(a.device)
    pixel_mean, pixel_std = (workloads.PIXEL_MEAN,) * w.shape[0], (workloads.PIXEL_STD,) * w.shape[0]
    model = workloads.model(w).to(a.device)
    local, generator, processed = copy.deepcopy(model), np.random.default_rng(0), 0
    watch.lap()
    for number in range(1, a.warmup + a.rounds + 1):
        cohort = workloads.cohort(w, number)
        start = model.state_dict()
        mean = {k: torch.zeros_like(v) for k, v in start.items()}
        for user in cohort:
            local.load_state_dict(start)
            local.train()
            optimiser = torch.optim.SGD(local.parameters(), lr=w.lr)
            samples = np.arange(user * w.per_user, (user + 1) * w.per_user)
            for _ in range(w.epochs):
                order = torch.from_numpy(generator.permutation(samples)).to(a.device)
                for batch in order.split(w.batch):
                    images = x[batch]
                    if w.augment:
                        images = Augment()(images, torch.randint(0, 2**53, (len(batch),), device=a.device))
                        images = prepare(images, pixel_mean, pixel_std)
                    optimiser.zero_grad()
                    F.cross_entropy(local(images), y[batch]).backward()
                    if w.clip is not None:
                        torch.nn.utils.clip_grad_norm_(local.parameters(), w.clip)
                    optimiser.step()
                    processed += len(batch)
            for k, v in local.state_dict().items():
                mean[k] += v / len(cohort)
        model.load_state_dict(mean)
        watch.lap()

    contender.report(
        a,
        watch,
        parameters=sum(p.numel() for p in model.parameters()),
        samples=processed / (a.warmup + a.rounds),
        accuracy=contender.accuracy(contender.torch_predict(model), *stored),
        version=f"torch {torch.__version__}",
    )


if __name__ == "__main__":
    main()
