"""What public models do with their parameters, on a GPU: captured stacked steps give the loop's trajectory."""

import pytest
import torch

import lamina
from idioms import STACKED, data
from small_simulations import PARTS, form

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

# the solver of orthogonal weights cannot be captured
CAPTURED = {name: idiom for name, idiom in STACKED.items() if name != "orthogonal weights"}


def run(idiom, engine, algorithm="fedlada", **more):
    make, kind = idiom
    torch.manual_seed(0)
    settings = {"clients": PARTS, "batch_size": 4, "lr": 0.001, "device": "cuda", "seed": 3, "engine": engine} | more
    simulation = lamina.Simulation(make(), data(kind, dtype=torch.float32), algorithm, **settings)
    simulation.run(2)
    return simulation


def difference(one, other):
    """Return how far two runs end apart, in units of how far the second one moved."""
    moved = (other.state.server.x - other.objective.start).norm()
    return float((one.state.server.x - other.state.server.x).norm() / moved)


@pytest.mark.parametrize("idiom", CAPTURED.values(), ids=CAPTURED.keys())
def test_idioms_are_stacked(idiom):
    stacked, loop = run(idiom, "stacked"), run(idiom, "loop")
    assert form(stacked) == "stacked"
    assert difference(stacked, loop) < 5e-3


@pytest.mark.parametrize("idiom", CAPTURED.values(), ids=CAPTURED.keys())
def test_bfloat16(idiom):
    rounded, exact = run(idiom, "stacked", precision="bf16"), run(idiom, "loop")
    assert rounded.precision == "bf16"
    assert difference(rounded, exact) < 0.5


@pytest.mark.parametrize("algorithm", ["scaffold", "mime", "fedlamb"])
def test_other_algorithms(algorithm):
    assert difference(run(CAPTURED["ViT"], "stacked", algorithm), run(CAPTURED["ViT"], "loop", algorithm)) < 5e-3


def test_members_of_a_population_use_their_own_parameters():
    make, kind = CAPTURED["ViT"]

    def member(lr):
        torch.manual_seed(0)
        settings = {"clients": PARTS, "batch_size": 4, "lr": lr, "device": "cuda", "engine": "stacked"}
        return lamina.Simulation(make(), data(kind, dtype=torch.float32), "fedlada", **settings)

    alone, together = member(0.001), lamina.Population([member(0.001), member(0.005)])
    alone.run(2)
    together.run(2)
    assert difference(together.simulations[0], alone) < 5e-3
