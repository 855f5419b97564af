"""Small models and simulations that the tests of all engines share.

The functions from `form` on are the only ones that know attributes of an engine besides `run_round`.
"""

import pytest
import torch
from torch import nn

import lamina
from lamina import models
from lamina.engines.stacked.graphs import Graphs

PARTS = [range(13), range(13, 20), range(20, 31), range(31, 36), range(36, 48)]  # ragged: K = 4, 2, 3, 2, 3


class Transformer(nn.Module):
    """Token and position embeddings, one pre-norm encoder layer, a causal mask, mean pooling."""

    def __init__(self, classes=3, words=11, length=6, width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        self.register_buffer("order", torch.arange(length))

    def forward(self, tokens):
        x = self.words(tokens) + self.places(self.order.expand(len(tokens), -1))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.norm(self.encoder(x, src_mask=mask)).mean(1))


class Attention(nn.Module):
    """Cross-attention with the time axis first, its weights asked for, and a padding mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, bias=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):  # [N, T, 4]
        h = self.embed(x).transpose(0, 1)
        padding = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool)
        padding[:, -1] = True
        mixed, weights = self.attention(h, h.flip(0), h, key_padding_mask=padding)
        return self.head(mixed.mean(0) + weights.mean((1, 2)).unsqueeze(1))


def batch_norm_net():
    # The gradients of the biases before a norm are zero but for rounding, which no engine may scale up to a full step.
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        *(nn.Linear(16, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 3)),
    )


SHAPES = {
    "mlp": (lambda: models.create("mlp", (3, 8, 8), 3, hidden=5, seed=0), (3, 8, 8)),
    "cnn": (lambda: models.create("small_cnn", (3, 8, 8), 3, seed=0), (3, 8, 8)),
    "resnet9": (lambda: models.create("resnet9", (3, 8, 8), 3, width=4, seed=0), (3, 8, 8)),
    "resnet18": (lambda: models.create("resnet18", (3, 8, 8), 3, width=4, seed=0), (3, 8, 8)),
    "resnet18_imagenet": (
        lambda: models.create("resnet18", (3, 16, 16), 3, width=4, stem="imagenet", seed=0),
        (3, 16, 16),
    ),
    "batch_norm": (batch_norm_net, (3, 8, 8)),
    "transformer": (Transformer, None),
    "attention": (Attention, (5, 4)),
}


def problem(kind, dtype=torch.float64):
    """A model and 48 random samples that fit it."""
    make, shape = SHAPES[kind]
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = make().to(dtype)
    if shape is None:
        x = torch.randint(0, 11, (48, 6), generator=generator)
    else:
        x = torch.randn(48, *shape, generator=generator, dtype=dtype)
    return model, (x, torch.arange(48) % 3)


def simulation(kind, algorithm, engine, dtype=torch.float64, **more):
    model, data = problem(kind, dtype)
    if kind == "batch_norm":  # no batch of one sample
        more = {"batch_size": 6, "clients": [range(12), range(12, 20), range(20, 30), range(30, 48)]} | more
    settings = {"clients": PARTS, "participation": 0.6, "batch_size": 4, "lr": 0.01, "device": "cpu",
                "seed": 3, "engine": engine, "trust_ratios": True}  # fmt: skip
    return lamina.Simulation(model, data, algorithm, **settings | more)


def noise(seed=0, **settings):
    """A small network on random samples, stacked unless the settings say otherwise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(48, 8), torch.arange(48) % 3
    settings = {"clients": 6, "participation": 0.5, "batch_size": 4, "device": "cpu", "engine": "stacked"} | settings
    return lamina.Simulation(settings.pop("net", net), data, settings.pop("algorithm", "fedavg"), seed=seed, **settings)


def assert_same(a, b, tolerance):
    """Server, buffers and client states agree, relative to the size of each vector."""

    def close(x, y, what):
        scale = float(y.abs().max()) or 1.0
        assert float((x - y).abs().max()) <= tolerance * scale, what

    for name, x, y in zip(a.server._fields, a.server, b.server, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            close(x, y, name)
    for name in a.buffers:
        close(a.buffers[name].double(), b.buffers[name].double(), name)
    stateful = {i for i, c in b.clients.items() if any(v is not None for v in c)}
    assert {i for i, c in a.clients.items() if any(v is not None for v in c)} == stateful
    for i in stateful:
        for name, x, y in zip(a.clients[i]._fields, a.clients[i], b.clients[i], strict=True):
            if y is not None:
                close(x, y, f"client {i} {name}")


_REFERENCES = {}


def reference(kind, algorithm, rounds, dtype=torch.float64, **more):
    """Return a simulation that the loop has run. Tests share the ones that are equal."""
    key = repr((kind, algorithm, rounds, dtype, more))
    if key not in _REFERENCES:
        _REFERENCES[key] = simulation(kind, algorithm, "loop", dtype, **more)
        _REFERENCES[key].run(rounds)
    return _REFERENCES[key]


def assert_as_in_the_loop(
    kind, algorithm, dtype=torch.float64, tolerance=1e-9, rounds=2, chunk=None, gpu_path=False, **more
):
    """Run the stacked engine, and compare its states and the columns of its history with the loop's."""
    loop = reference(kind, algorithm, rounds, dtype, **more)
    stacked = simulation(kind, algorithm, "stacked", dtype, **more)
    if gpu_path:
        take_gpu_path(stacked, channels_last=True)
    if chunk:
        set_chunk(stacked, chunk)
    stacked.run(rounds)
    assert_same(stacked.state, loop.state, tolerance)
    for name in ("bytes_down", "bytes_up", "steps"):
        assert stacked.history.column(name) == loop.history.column(name)
    relative = 1e-6 if tolerance < 1e-6 else 1e-2
    for name in loop.history.columns:
        if name.startswith(("train_loss", "trust", "update_norm", "consistency")):
            expected = pytest.approx(loop.history.column(name), rel=relative, abs=1e-12)
            assert stacked.history.column(name) == expected, name


def form(run):
    """Return how the clients of a run are trained: "stacked", "captured" or "loop"."""
    return run.engine.name


def set_chunk(run, clients):
    """Train so many clients at a time; None: as many as fit."""
    if clients is not None:
        run.engine.memory.rows_that_fit = lambda problem, batch, graphs: clients


def take_gpu_path(run, channels_last=False):
    """Use the buffers and in-place writes of a GPU on a CPU, without a graph."""
    run.engine.graphs, run.engine.begins_early = Graphs(), True
    if channels_last:
        run.engine.forward.layout = run.objective.layers.channels_last()
