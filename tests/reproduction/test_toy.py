"""The toy problem of FedLADA's Figure 6: it follows the algorithms, measures what it says, and is on the page."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lamina

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "reproduction"))  # as a script there has it

import page  # noqa: E402
import toy  # noqa: E402


@pytest.mark.parametrize("method", ["FedCM", "FedAdam(*), server rate 0.1"])
def test_a_problem_is_a_linear_regression(method):
    """Two samples a = sqrt(A_jj) e_j, b = a' x_i per client: their mean squared error is (x - x_i)' A (x - x_i) / 2."""
    problems = toy.draw_problems(3)
    path = toy.run(method, problems, rounds=12)
    for i in range(3):
        roots = problems.curvatures[i].sqrt()
        inputs, targets = torch.cat([torch.diag(root) for root in roots]), (roots * problems.optima[i]).view(-1, 1)
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        model.weight.data = problems.starts[i].view(1, 2).clone()
        name, options = toy.METHODS[method]
        simulation = lamina.Simulation(
            model, (inputs, targets), lamina.create(name, **options), clients=[[0, 1], [2, 3]], participation=1.0,
            batch_size=2, local_steps=toy.STEPS, lr=toy.LR, loss="mse", device="cpu", engine="loop",
        )  # fmt: skip
        for r in range(12):
            simulation.run(1)
            np.testing.assert_allclose(path.points[r, i], simulation.state.server.x, rtol=1e-10)
            np.testing.assert_allclose(path.pseudo_gradients[r, i], simulation.state.server.momentum, rtol=1e-10)


def test_the_measures_by_hand():
    """F = ((x - 1)^2 + 3 (x + 1)^2) / 4 + y^2 / 2 has its optimum at -1/2 and the gradient 2 (x + 1/2), y."""
    curvatures = torch.tensor([[[1.0, 1.0], [3.0, 1.0]]], dtype=torch.float64)
    optima = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]], dtype=torch.float64)
    problems = toy.Problems(curvatures, optima, torch.tensor([[9.5, 0.0]], dtype=torch.float64))
    points = torch.tensor([[[1.5, 0.0]], [[-0.4, 0.0]], [[-0.5, 0.6]], [[-0.5, 0.3]]], dtype=torch.float64)
    pseudo = torch.tensor([[[4.0, 3.0]], [[0.0, 0.0]], [[0.0, 0.3]], [[0.0, 0.3]]], dtype=torch.float64)
    path = toy.Path2D(points, pseudo)
    assert problems.optimum.tolist() == [[-0.5, 0.0]]
    assert toy.gaps(problems, path)[:, 0].tolist() == pytest.approx([0.75, 1.0, 0.5, 0.0])
    distance = toy.distances(problems, path)
    assert distance[:, 0].tolist() == pytest.approx([0.2, 0.01, 0.06, 0.03])
    assert toy.settled(distance).tolist() == [4]  # near in round 2, far again in round 3
    assert toy.settled(distance[:3]).tolist() == [float("inf")]


def test_the_page_has_the_table():
    assert toy.PICTURE.is_file()
    assert toy.table(toy.draw_problems()).strip() in (page.PAGES / "toy.md").read_text(encoding="utf-8")
