"""Small models around one kind of layer, and a comparison of the engines on them."""

import torch
from torch import nn

import lamina
from small_simulations import PARTS, form, take_gpu_path

SAMPLES = 48


class Recurrent(nn.Module):
    """A recurrent layer over the words of a sample, and a head on what it ends with."""

    def __init__(self, layer, features, start=False, **options):
        super().__init__()
        self.words = nn.Embedding(11, 4)
        self.layer = layer(4, 5, **options)
        self.head = nn.Linear(features, 3)
        self.start = start

    def forward(self, tokens):
        x = self.words(tokens)
        if not self.layer.batch_first:
            x = x.transpose(0, 1)
        start = torch.full((1, len(tokens), 5), 0.1, dtype=x.dtype) if self.start else None
        outputs, last = self.layer(x, start)
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        memory = last[1] if isinstance(last, tuple) else last
        return self.head(outputs.mean(1)) + memory.sum((0, 2)).unsqueeze(1) * 0.1


class Scaled(nn.Module):
    """A layer with parameters of its own, which it uses by broadcasting; a second input is meant for all samples."""

    def __init__(self, features, dropout=0.0):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full((features,), 0.5)), nn.Parameter(torch.zeros(1, features))
        self.slopes = nn.ParameterList([nn.Parameter(torch.full((1,), 0.3))])
        self.inner, self.dropout = nn.Linear(features, features), nn.Dropout(dropout)

    def forward(self, x, mask=None):
        x = x if mask is None else x * mask
        return self.dropout(self.inner(x * self.scale + self.shift)) + self.slopes[0] * x


class Masked(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.scaled, self.head = Scaled(6, **options), nn.Linear(6, 3)
        self.register_buffer("mask", torch.linspace(0, 1, 6).unsqueeze(0))

    def forward(self, x):
        return self.head(torch.tanh(self.scaled(x, mask=self.mask)))


class Places(nn.Module):
    """Position embeddings of one row of positions for all samples, as in Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Linear(8, 3)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).unsqueeze(0)
        return self.head(torch.tanh(self.words(tokens) + self.places(places)).mean(1))


def chain(*layers, features):
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


def data(shape=None):
    generator = torch.Generator().manual_seed(1)
    if shape is None:
        x = torch.randint(0, 11, (SAMPLES, 6), generator=generator)
    else:
        x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
    return x, torch.arange(SAMPLES) % 3


def run(model, samples, engine, rounds=2, gpu_path=False, **more):
    settings = {"clients": PARTS, "participation": 0.8, "batch_size": 4, "lr": 0.02, "device": "cpu", "seed": 3}
    simulation = lamina.Simulation(model, samples, "fedlamb", engine=engine, **settings | more)
    if gpu_path:
        take_gpu_path(simulation, channels_last=True)
    simulation.run(rounds)
    return simulation


def assert_as_in_the_loop(make, samples, expected="stacked", gpu_path=False, captured=True):
    torch.manual_seed(0)
    model = make().double()
    auto, loop = run(model, samples, "auto", gpu_path=gpu_path), run(model, samples, "loop")
    assert form(auto) == expected
    assert torch.allclose(auto.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-11)
    if captured and not gpu_path:
        apart = run(model, samples, "captured")
        assert torch.allclose(apart.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-11)
