"""Methods whose step needs matrices (FedMuon), or the loss of its batch (FedSPS): the same in every engine."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lamina
from flower_setup import Setup, small_model
from lamina.engines.stacked.independence import works_by_layer, works_by_row
from lamina.objective.layers import Layers
from small_simulations import assert_as_in_the_loop, assert_same, simulation, take_gpu_path

METHODS = {
    "fedmuon": {"lr": 0.02},
    "localmuon hidden": {"lr": 0.02, "muon_on": "hidden"},
    "fedsps": {"lr": 1.0, "c": 3.0},
    "deltasgd": {"lr": 0.1},
    "deltasgd consecutive": {"lr": 0.1, "gradients": "consecutive"},
}
MODEL = (
    Layers({"a.weight": (30, 8, 3, 3), "a.bias": (30,), "b.weight": (5, 30), "c.weight": (4, 5)}),
    torch.device("cpu"),
)
every_method = pytest.mark.parametrize("method", METHODS)


def of(method):
    options = {name: value for name, value in METHODS[method].items() if name != "lr"}
    return lamina.create(method.split()[0], **options), METHODS[method]["lr"]


@pytest.mark.parametrize("gpu_path", [False, True])
@every_method
def test_the_stacked_engine_agrees_with_the_loop(method, gpu_path):
    algorithm, lr = of(method)
    assert_as_in_the_loop("cnn", algorithm, gpu_path=gpu_path, lr=lr, clip=2.0)


@pytest.mark.long
@pytest.mark.parametrize("gpu_path", [False, True])
@every_method
def test_chunks_and_buffers_make_no_difference(method, gpu_path):
    algorithm, lr = of(method)
    if method != "localmuon hidden":  # with three matrices at least
        assert_as_in_the_loop("batch_norm", algorithm, gpu_path=gpu_path, lr=lr, chunk=2, weighting="examples")


@pytest.mark.long
@pytest.mark.parametrize("gpu_path", [False, True])
@pytest.mark.parametrize(
    ("name", "values"),
    [("fedmuon", [{"muon_scale": 0.5}, {"alpha": 0.2, "decay": 0.3}]), ("fedsps", [{"c": 1.0}, {"lower_bound": 0.3}])],
)
def test_members_of_a_population_have_their_own_numbers(name, values, gpu_path):
    settings = [{"lr": 0.02}, {"lr": 0.1, "seed": 4}]
    pairs = list(zip(values, settings, strict=True))
    members = [simulation("mlp", lamina.create(name, **more), "stacked", **options) for more, options in pairs]
    population = lamina.Population(members)
    if gpu_path:
        take_gpu_path(members[0])
    population.run(2)
    for member, (more, options) in zip(members, pairs, strict=True):
        alone = simulation("mlp", lamina.create(name, **more), "loop", **options)
        alone.run(2)
        assert_same(member.state, alone.state, 1e-9)


@pytest.mark.parametrize("method", ["fedmuon", "fedsps"])
@pytest.mark.parametrize("private", [["3.*"], ["*.bias"]], ids=str)
def test_private_parts(method, private):
    """A client keeps a matrix, or no matrix at all."""
    algorithm, lr = of(method)
    data, ends = (torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3), []
    for engine in ("loop", "stacked"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 3)).double()
        run = lamina.Simulation(
            model, data, algorithm, clients=3, batch_size=4, private=private, engine=engine, device="cpu", lr=lr
        )
        run.run(2)
        ends.append(run.state)
    assert_same(ends[1], ends[0], 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedmuon", "fedsps"])
def test_a_federation_agrees_with_the_loop(method, tmp_path):
    algorithm, lr = of(method)
    setup = Setup(tmp_path, algorithm, model=lambda: small_model(norm=True).double(), rounds=2, batch_size=None, lr=lr)
    setup.run()
    simulated = setup.simulation()
    simulated.run(2)
    weights = load_file(setup.out / "model.safetensors")
    for name, value in simulated.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def test_what_engines_find_out():
    assert works_by_layer(lamina.FedMuon(), *MODEL)
    assert works_by_layer(lamina.LocalMuon(muon_on="hidden"), *MODEL)
    assert not works_by_layer(lamina.FedSps(), *MODEL)
    assert not works_by_layer(lamina.DeltaSgd(), *MODEL)
    for algorithm in (lamina.FedMuon(), lamina.FedSps(), lamina.DeltaSgd(), lamina.DeltaSgd(gradients="consecutive")):
        assert works_by_row(algorithm, *MODEL)


class Whole(lamina.FedAvg):
    """Steps by a loss and a gradient that it mixes over clients."""

    def needs(self, round):
        return lamina.Needs(loss=True)

    def step(self, local, down, grad, lr, layers, loss):
        return super().step(local, down, grad * (loss / loss.sum()), lr, layers)


def test_a_loss_that_couples_rows_is_found():
    assert not works_by_row(Whole(), *MODEL)
    assert works_by_layer(Whole(), *MODEL)  # every layer gets the same loss
