"""The recipes of docs/how-to/personal-models.md do what the page says, in every engine."""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import lamina
from lamina import algorithms

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "personal-models.md"


@pytest.fixture(scope="module")
def scope():
    """What the page's examples define."""
    names = {"__name__": "example"}
    with mock.patch.dict(algorithms.registry()):  # an example's algorithm stays in the example
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
    return names


def test_clients_are_better_off_with_parts_of_their_own(scope):
    settings, data = scope["settings"], (scope["x"], scope["y"])
    one_model = lamina.Simulation(scope["Network"], data, "fedavg", **settings, evaluate_every=20).run(20)[-1]
    assert one_model["client_accuracy_mean"] < 0.5
    shared_norms = lamina.Simulation(
        scope["Network"], (scope["scans"], scope["kinds"]), "fedavg", **settings, evaluate_every=20
    ).run(20)[-1]
    assert scope["fedbn"].history[-1]["client_accuracy_mean"] > 0.8 > 0.7 > shared_norms["client_accuracy_mean"]
    for name, least in {"simulation": 0.8, "fedrep": 0.7, "ditto": 0.7, "apfl": 0.6}.items():
        row = scope[name].history[-1]
        assert row["client_accuracy_mean"] > least > 0.5 > row["shared_client_accuracy_mean"], name
    assert (
        scope["recommender"].history[-1]["client_r2_mean"]
        > 0.8
        > 0
        > scope["recommender"].history[-1]["shared_client_r2_mean"]
    )


@pytest.mark.long
def test_the_numbers_are_the_same_in_all_engines(scope):
    settings, module, data = scope["settings"], scope["Network"]().double(), (scope["x"].double(), scope["y"])
    for name in ("FedRep", "Ditto", "Apfl"):
        private = {"private": ["head.*"]} if name == "FedRep" else {}
        runs = [
            lamina.Simulation(module, data, scope[name](), engine=engine, **private, **settings)
            for engine in ("loop", "stacked", "captured")
        ]
        for run in runs:
            run.run(2)
        for client in range(10):
            (expected, _), *others = (run.client_parameters(client) for run in runs)
            for x, _ in others:
                torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-11)
