"""FedMuon and Local Muon against their transcription, on tensors that the small network does not have."""

from __future__ import annotations

from types import SimpleNamespace as Options
from typing import Any

import numpy as np
import pytest
import torch

import lamina
import more_transcriptions
from lamina.algorithms.contract import ClientInfo, ServerInfo
from lamina.algorithms.declaration import options
from paper_problem import close, local_run, make

SHAPES = {
    "patches": (12, 3, 5, 2),  # a kernel whose filters are not square, and whose matrix is wide
    "norm": (12,),
    "tall": (40, 2, 3, 3),
    "tokens": (2, 7, 4),  # a batch of matrices
    "head": (3, 12),
    "bias": (3,),
}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
PARTS = [slice(end - size, end) for size, end in zip(SIZES, np.cumsum(SIZES), strict=True)]
STEPS, LR = 3, 0.05


@pytest.mark.parametrize("name", ["localmuon", "fedmuon"])
@pytest.mark.parametrize(
    "given", [{}, {"conv_scale": "flattened"}, {"muon_on": "hidden"}, {"nesterov": False, "decay": 0.3}], ids=str
)
def test_muon_of_kernels_and_batches_follows_the_pseudo_code(
    name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client, two rounds: x after each, and what FedMuon carries over."""
    monkeypatch.setattr(more_transcriptions, "SHAPES", SHAPES)
    monkeypatch.setattr(more_transcriptions, "TENSORS", PARTS)
    algorithm, layers = make(name, given), lamina.Layers(SHAPES)
    grads = np.random.default_rng(0).standard_normal((2 * STEPS, sum(SIZES)))
    x = np.random.default_rng(1).standard_normal(sum(SIZES))
    remaining = iter(grads)
    rnd = Options(cohort=[0], samples=[np.arange(1)], steps=np.array([float(STEPS)]), lr=LR, batch=lambda c, k: None)
    chosen = {n: getattr(algorithm, n) for n in options(type(algorithm))} | {"by_examples": False}
    expected = getattr(more_transcriptions, name)(x, [rnd, rnd], lambda y, batch: next(remaining), Options(**chosen))

    server = algorithm.init(torch.from_numpy(x), layers)
    for r, record in enumerate(expected, 1):
        infos = ServerInfo(r, LR, layers, 1.0, STEPS), ClientInfo(r, LR, layers, STEPS)
        given_grads = torch.from_numpy(grads[(r - 1) * STEPS : r * STEPS])
        client = algorithm.client_init(server.x, layers)
        up, *_ = local_run(algorithm, server, client, given_grads, infos)
        server = algorithm.update(server, up, infos[0])
        for field, value in record.server.items():
            close(getattr(server, field), value, f"round {r}, {field}")
