"""Measure what Figure 6 of Sun et al. 2023 sketches: ``python reproduction/toy.py`` prints a table and draws a figure.

The figure is a drawing of two clients (m = 2) with three local steps (K = 3), without functions or numbers. It says: if
the clients mix the last round's pseudo-gradient into their steps, a server that runs Adam moves to a point where that
pseudo-gradient is far from the true gradient ("matching dislocation"). A smaller server rate reduces the error, but is
slow. Here the clients have random quadratics f_i(x) = (x - x_i)' A_i (x - x_i) / 2 in two dimensions. All problems run
side by side, along a leading axis of the algorithms' vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from figures import save
from matplotlib.figure import Figure
from torch import Tensor
from words import markdown

from lamina import algorithms
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.objective.layers import Layers
from lamina.report.figures import COLOURS, STYLE

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "lada-fig6-toy.png"
LAYERS = Layers({"x": (2,)})
CLIENTS, STEPS, ALPHA, LR = 2, 3, 0.1, 0.02
PROBLEMS, ROUNDS = 200, 500
FIRST, LAST = (
    21,
    50,
)  # rounds of the gap in the table: before, the mix of the amended methods is still near its zero start
NEAR = 0.05  # of the first distance to the optimum
ADAM: dict[str, Any] = {"v_init": 1e-2, "tau": 0.0, "beta1": 0.9, "beta2": 0.99}  # the paper's FedAdam
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedCM": ("fedcm", {"alpha": ALPHA}),
    "FedAdam, server rate 0.1": ("fedadam_star", {**ADAM, "alpha": 1.0, "server_lr": 0.1}),
    **{
        f"FedAdam(*), server rate {rate:g}": ("fedadam_star", {**ADAM, "alpha": ALPHA, "server_lr": rate})
        for rate in (1.0, 0.1, 0.01, 0.001)
    },
}


class Problems(NamedTuple):
    """Random problems: diagonals of A_i and optima x_i, [problems, clients, 2], and starting points [problems, 2]."""

    curvatures: Tensor
    optima: Tensor
    starts: Tensor

    @property
    def optimum(self) -> Tensor:
        """Return the minimum of the mean objective F."""
        return (self.curvatures * self.optima).sum(1) / self.curvatures.sum(1)

    def gradients(self, y: Tensor) -> Tensor:
        """Return each client's gradient at its own point: [problems, clients, 2]."""
        return self.curvatures * (y - self.optima)


class Path2D(NamedTuple):
    """Points after each round, and the pseudo-gradient that the next round mixes in: [rounds, problems, 2]."""

    points: Tensor
    pseudo_gradients: Tensor


def draw_problems(count: int = PROBLEMS, seed: int = 0) -> Problems:
    """Draw curvatures between 1 and 10, optima around 0 and starts three times as far out."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, CLIENTS, 2)
    curvatures = 10 ** torch.rand(shape, generator=generator, dtype=torch.float64)
    optima = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Problems(curvatures, optima, 3 * torch.randn(shape[0], 2, generator=generator, dtype=torch.float64))


def run(method: str, problems: Problems, rounds: int = ROUNDS) -> Path2D:
    """Run a method on all problems at once, by the functions of its algorithm; the clients are the second axis."""
    name, options = METHODS[method]
    algorithm = algorithms.create(name, **options)
    server = algorithm.init(problems.starts.unsqueeze(1), LAYERS)
    points, pseudo_gradients = [], []
    for r in range(1, rounds + 1):
        server_info = ServerInfo(r, LR, LAYERS, 1.0, STEPS)
        down = algorithm.broadcast(server, server_info)
        client = algorithm.client_init(server.x, LAYERS)
        info = ClientInfo(r, LR, LAYERS, STEPS)
        local = algorithm.begin(down, client, info)
        for _ in range(STEPS):
            local = algorithm.step(local, down, problems.gradients(local.y), LR, LAYERS)
        up, _ = algorithm.finish(local, down, client, info)
        mean = type(up)(*(field.mean(1, keepdim=True) for field in up))
        server = algorithm.update(server, mean, server_info)
        points.append(server.x[:, 0])
        pseudo_gradients.append(server.momentum[:, 0])
    return Path2D(torch.stack(points), torch.stack(pseudo_gradients))


def gaps(problems: Problems, path: Path2D) -> Tensor:
    """Return |pseudo-gradient - gradient of F| / |gradient of F| at the new points: [rounds, problems]."""
    mean_curvature = problems.curvatures.mean(1)
    gradient = mean_curvature * (path.points - problems.optimum)
    return (path.pseudo_gradients - gradient).norm(dim=-1) / gradient.norm(dim=-1)


def distances(problems: Problems, path: Path2D) -> Tensor:
    """Return the distances from the optimum, in multiples of the first one: [rounds, problems]."""
    first = (problems.starts - problems.optimum).norm(dim=-1)
    return (path.points - problems.optimum).norm(dim=-1) / first


def settled(distance: Tensor) -> Tensor:
    """Return the rounds after which a problem stays near its optimum; infinity if it does not: [problems]."""
    rounds = torch.arange(1, len(distance) + 1, dtype=torch.float64).unsqueeze(1)
    last_far = torch.where(distance > NEAR, rounds, 0.0).amax(0)
    return torch.where(last_far < len(distance), last_far + 1, torch.inf)


def table(problems: Problems) -> str:
    """Return the medians over the problems of both measures, for each method, as a Markdown table."""
    rows = []
    for method in METHODS:
        path = run(method, problems)
        gap = gaps(problems, path)[FIRST - 1 : LAST].median(0).values.median()
        needed = float(settled(distances(problems, path)).median())
        name = method.replace("*", "\\*")
        rows.append([name, f"{gap:.2f}", f"{needed:.0f}" if needed <= ROUNDS else f"more than {ROUNDS}"])
    return markdown(
        ["method", f"gap in rounds {FIRST} to {LAST}", f"rounds to {100 * NEAR:g} % of the first distance"], rows
    )


def picture(problems: Problems) -> Figure:
    """Draw both measures over the rounds: medians over the problems."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        for method, colour in zip(METHODS, COLOURS, strict=False):
            path = run(method, problems, rounds=200)
            for axes, values in ((left, gaps(problems, path)), (right, distances(problems, path))):
                axes.plot(range(1, 201), values.median(1).values, color=colour, label=method)
        left.set_ylabel("|pseudo-gradient - gradient| / |gradient|")
        right.set_ylabel("distance from the optimum / first distance")
        for axes in (left, right):
            axes.set_xlabel("round")
            axes.set_yscale("log")
            axes.grid(alpha=0.25)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    drawn = draw_problems()
    print(table(drawn))
    save(picture(drawn), PICTURE, "reproduction/toy.py")
