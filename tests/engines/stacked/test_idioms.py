"""What public models do with their parameters is stacked, and gives the loop's trajectory."""

import pytest
import torch

import lamina
from idioms import IN_THE_LOOP, STACKED, data
from small_simulations import PARTS, form, take_gpu_path


def run(idiom, engine, gpu_path=False, dtype=torch.float64, **more):
    make, kind = idiom
    torch.manual_seed(0)
    # the batches of all clients have as many samples as a sentence has words
    settings = {"clients": PARTS, "batch_size": 4, "lr": 0.02, "device": "cpu", "seed": 3, "engine": engine} | more
    simulation = lamina.Simulation(make().to(dtype), data(kind, dtype=dtype), "fedlada", **settings)
    if gpu_path:
        take_gpu_path(simulation, channels_last=True)
    simulation.run(2)
    return simulation


@pytest.mark.parametrize("idiom", STACKED.values(), ids=STACKED.keys())
def test_idioms_are_stacked(idiom):
    auto, loop = run(idiom, "auto"), run(idiom, "loop")
    assert form(auto) == "stacked"
    moved = (loop.state.server.x - loop.objective.start).norm()
    assert moved > 0
    assert (auto.state.server.x - loop.state.server.x).norm() < 1e-9 * moved


@pytest.mark.long
@pytest.mark.parametrize("name", ["ViT", "nanoGPT", "time on the first axis", "weight norm"])
def test_the_path_of_a_gpu(name):
    stacked, loop = run(STACKED[name], "stacked", gpu_path=True), run(STACKED[name], "loop")
    moved = (loop.state.server.x - loop.objective.start).norm()
    assert (stacked.state.server.x - loop.state.server.x).norm() < 1e-9 * moved


@pytest.mark.long
@pytest.mark.parametrize("idiom", STACKED.values(), ids=STACKED.keys())
def test_bfloat16(idiom, monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    runs = [run(idiom, "stacked", dtype=torch.float32, precision=precision) for precision in ("fp32", "bf16")]
    exact, rounded = (each.state.server.x for each in runs)
    assert (rounded - exact).norm() < 0.5 * (exact - runs[0].objective.start).norm()


@pytest.mark.parametrize("idiom", IN_THE_LOOP.values(), ids=IN_THE_LOOP.keys())
def test_values_and_random_numbers_keep_clients_apart(idiom):
    assert form(run(idiom, "auto")) == "loop"


def test_members_of_a_population_use_their_own_parameters():
    make, kind = STACKED["ViT"]

    def member(lr):
        torch.manual_seed(0)
        return lamina.Simulation(
            make().double(), data(kind), "fedlada", clients=PARTS, batch_size=4, lr=lr, device="cpu"
        )

    alone, together = member(0.01), lamina.Population([member(0.01), member(0.05)])
    alone.run(2)
    together.run(2)
    torch.testing.assert_close(together.simulations[0].state.server.x, alone.state.server.x, rtol=1e-9, atol=1e-11)
