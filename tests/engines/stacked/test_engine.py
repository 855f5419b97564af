"""The stacked engine gives the loop's trajectory: every algorithm, every kind of layer, ragged and partial."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import lamina
from lamina.data import Augment, Dataset
from small_simulations import PARTS, SHAPES, assert_as_in_the_loop, assert_same, reference, simulation, take_gpu_path

FULL = ("fedlamb", "scaffold", "mime")  # client state, and full gradients
MORE = ("fedsam", "fedsps", "localmuon")  # a second gradient, the loss, and functions of matrices
SLOW = ("resnet9", "resnet18", "resnet18_imagenet")
QUICK = [("fedlamb", "resnet9"), ("fedlamb", "resnet18")]
BELOW_BOUND = [("deltasgd", "resnet9"), ("fedsps", "resnet9")]  # on smaller models their step sizes are at their bound
OTHERS = [kind for kind in SHAPES if kind != "cnn"]


def pairs():
    """Every algorithm on the CNN and on one other model, and some on every model: a step does not see the model."""
    for (i, name), kind in itertools.product(enumerate(sorted(lamina.registry())), SHAPES):
        quick = kind == "cnn" or (name in FULL and kind not in SLOW) or (name, kind) in QUICK
        long = name in FULL or (name in MORE and kind not in SLOW) or (name, kind) in BELOW_BOUND
        if quick or long or kind == OTHERS[i % len(OTHERS)]:
            yield pytest.param(name, kind, marks=[] if quick else [pytest.mark.long])


@pytest.mark.parametrize(("name", "kind"), list(pairs()))
def test_every_algorithm_on_every_model(name, kind):
    # FedLADA starts from v = 1e-16: a gradient that is zero but for rounding (a bias before a norm, attention's key
    # bias) is then scaled up to a full step, differently in every engine. A larger start makes both comparable.
    larger = {"v_init": 1e-6} if name in ("fedlada", "localadam", "fedlada_lamb") else {}
    assert_as_in_the_loop(kind, lamina.create(name, **larger))


VARIANTS = {
    "fedlamb-authors": lamina.create("fedlamb", "authors"),
    "fedlamb-lazy": lamina.FedLamb(sync_every=2, decay=0.1, layers="module"),
    "fedlamb-average": lamina.FedLamb(momentum="average", second_moment="running"),
    "fedams-restart": lamina.FedAms(momentum="restart", v_seed="client"),
    "fedams-alone": lamina.FedAms(sync=False, v_seed="client"),
    "mime-original": lamina.create("mime", "mime"),
    "mimelamb-lazy": lamina.MimeLamb(sync_every=2, decay=0.01),
    "fedlada-per-client": lamina.FedLada(v_init=1e-6, amendment="per_client", v_seed="zero", server_lr=0.7),
    "fedlada-no-maximum": lamina.FedLada(v_init=1e-6, amsgrad=False, eps=1e-4),
    "fedlada-momentum": lamina.FedLada(v_init=1e-6, moment_correction="m"),
    "fedlada-amendment": lamina.FedLada(v_init=1e-6, ga_correction=True),
    "fedlada-vision": lamina.create("fedlada", "fedadamw_vision", ga_correction=True),
    "fedlada_lamb-corrected": lamina.FedLadaLamb(v_init=1e-6, moment_correction="m", ga_correction=True, decay=0.1),
    "scaffold-literal": lamina.Scaffold(scale=0.5, control="literal", decay=0.01),
    "fedcm-simulator": lamina.create("fedcm", "fl_simulator"),
    "localadam-alone": lamina.LocalAdam(sync=False, amsgrad=False),
}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS.keys())
def test_options(algorithm):
    assert_as_in_the_loop("mlp", algorithm, rounds=4)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mlp", "resnet9", "batch_norm", "transformer"])
def test_float32(kind):
    assert_as_in_the_loop(kind, "fedlamb", torch.float32, tolerance=1e-4)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("kind", ["cnn", "batch_norm"])
def test_chunks_change_nothing(kind, chunk):
    assert_as_in_the_loop(kind, "fedlamb" if chunk == 1 else "mimelamb", chunk=chunk)


@pytest.mark.parametrize(
    "more",
    [
        {"weighting": "examples"},
        {"clip": 0.05},
        {"local_steps": 5},
        {"epochs": 2, "batch_size": 5},
        {"sampling": "bernoulli"},
        {"clients": 6, "partition": "reallocate"},
        {"batch_size": 1000},
        {"batch_size": None},
    ],
    ids=str,
)
def test_protocols(more):
    assert_as_in_the_loop("mlp", "scaffold", **more)


@pytest.mark.parametrize("augmentation", [Augment(2), Augment(2, crop_probability=0.5, fill="mean")], ids=str)
def test_augmentation(augmentation):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=generator)
    data = Dataset(images, torch.arange(48) % 3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
    ends = []
    for engine in ("loop", "stacked"):
        run = lamina.Simulation(SHAPES["cnn"][0]().double(), data, "fedavg", clients=PARTS, batch_size=4, seed=2,
                                augmentation=augmentation, engine=engine, device="cpu")  # fmt: skip
        run.run(2)
        ends.append(run.state.server.x)
    assert torch.allclose(*ends, rtol=1e-10, atol=1e-12)


def test_frozen_and_tied_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.b.weight = self.a.weight
            self.c.weight.requires_grad_(False)

        def forward(self, x):
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    torch.manual_seed(0)
    model, x = Tied().double(), torch.randn(48, 8, dtype=torch.float64)
    ends = []
    for engine in ("loop", "stacked"):
        run = lamina.Simulation(model, (x, torch.arange(48) % 3), "fedlamb", clients=PARTS, engine=engine, device="cpu")
        run.run(2)
        ends.append(run.state.server.x)
    assert torch.allclose(*ends, rtol=1e-10, atol=1e-12)


def test_dropout_is_reproducible_and_independent_of_other_clients():
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    x = torch.randn(48, 8)
    data = (x[:1].expand(48, 8).clone(), torch.zeros(48, dtype=torch.long))  # every client holds the same sample
    ends = []
    for seed in (0, 0, 1):
        run = lamina.Simulation(
            model, data, "fedavg", clients=6, batch_size=8, seed=seed, engine="stacked", device="cpu"
        )
        history = run.run(2)
        ends.append(run.state.server.x)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    # identical data and weights: only independent masks can make the clients end in different places
    assert history[0]["consistency"] > 1e-8


def test_the_loop_can_replace_a_stacked_engine_in_mid_run():
    run, looping = simulation("mlp", "fedlamb", "stacked"), simulation("mlp", "fedlamb", "loop")
    run.run(1)
    run.engine = dataclasses.replace(looping.engine, objective=run.objective)
    run.run(1)
    assert_same(run.state, reference("mlp", "fedlamb", 2).state, 1e-9)


def test_client_state_may_live_elsewhere_than_the_model():
    run = simulation("mlp", "scaffold", "stacked")
    run.engine.memory.client_home = torch.device("cpu")
    run.run(2)
    assert_same(run.state, reference("mlp", "scaffold", 2).state, 1e-9)


@pytest.mark.parametrize("gpu_path", [False, True])
def test_a_full_gradient_by_batch_statistics_is_the_loops(gpu_path):
    """Without running statistics it matters which samples are evaluated together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(200, 8, dtype=torch.float64), torch.arange(200) % 3  # a client's 100 are more than one piece
    settings = {"clients": 2, "local_steps": 3, "batch_size": 8, "lr": 0.05, "device": "cpu"}
    runs = [lamina.Simulation(net.double(), data, "mime", engine=engine, **settings) for engine in ("loop", "stacked")]
    if gpu_path:
        take_gpu_path(runs[1])
    for run in runs:
        run.run(2)
    assert torch.allclose(runs[0].state.server.x, runs[1].state.server.x, rtol=1e-9, atol=1e-12)
