"""Dropout masks depend only on (seed, round, client, step, layer): every engine and every company draws the same."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import lamina
from kinds import Functional
from lamina.objective import dropout
from lamina.objective.dropout import set_streams, with_streams
from small_simulations import PARTS, assert_same, form, set_chunk, take_gpu_path


class Encoder(nn.Module):
    """A transformer layer with dropout in four places, one of them on the attention weights."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x):  # [N, T, 4]
        h = self.embed(x)
        h = self.layer(h) if self.batch_first else self.layer(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


class Attention(nn.Module):
    """Attention whose weights are used, with the time axis first and a padding mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4)

    def forward(self, x):
        h = self.embed(x).transpose(0, 1)
        padding = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool)
        padding[:, -1] = True
        mixed, weights = self.attention(h, h.flip(0), h, key_padding_mask=padding)
        return self.head(mixed.mean(0)) + weights[:, 0, :3]


class Twice(nn.Module):
    """One dropout layer, called twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(8, 8), nn.Linear(8, 3), nn.Dropout(0.5)

    def forward(self, x):
        return self.two(self.drop(self.drop(self.one(x)).tanh()))


class Raw(nn.Module):
    """A parameter used directly."""

    def __init__(self):
        super().__init__()
        self.weight, self.drop, self.head = nn.Parameter(torch.randn(8, 6)), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(x @ self.weight).relu())


MODELS = {
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 7), nn.Dropout(0.5), nn.Tanh(), nn.Linear(7, 3)), (8,)),
    "inplace": (lambda: nn.Sequential(nn.Linear(8, 7), nn.Dropout(0.5, inplace=True), nn.Linear(7, 3)), (8,)),
    "dropout1d": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(25, 3)), (5, 4)),
    "dropout2d": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 5, 3), nn.Dropout2d(0.4), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(80, 9), nn.Dropout(0.2), nn.Linear(9, 3)),
        ),
        (2, 6, 6),
    ),
    "alpha": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 5, 3), nn.FeatureAlphaDropout(0.4), nn.SELU(), nn.Flatten()),
            *(nn.Linear(80, 9), nn.AlphaDropout(0.2), nn.Linear(9, 3)),
        ),
        (2, 6, 6),
    ),
    "batch_norm": (
        lambda: nn.Sequential(nn.Linear(8, 6, bias=False), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 3)),
        (8,),
    ),
    "twice": (Twice, (8,)),
    "encoder": (Encoder, (5, 4)),
    "encoder, time first": (lambda: Encoder(batch_first=False), (5, 4)),
    "attention": (Attention, (5, 4)),
    "raw": (Raw, (8,)),
    "functional": (Functional, (5, 4)),
}


def simulation(kind="dropout", engine="auto", algorithm="fedavg", **more):
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    model = make().double()
    data = (torch.randn(48, *shape, dtype=torch.float64), torch.arange(48) % 3)
    clients = PARTS if kind != "batch_norm" else [range(12), range(12, 20), range(20, 30), range(30, 48)]
    settings = {"clients": clients, "participation": 0.6, "batch_size": 4 if clients is PARTS else 6, "lr": 0.1}
    return lamina.Simulation(model, data, algorithm, device="cpu", engine=engine, **settings | {"seed": 3} | more)


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_every_engine_draws_the_masks_of_the_loop(kind):
    loop = simulation(kind, "loop")
    loop.run(2)
    assert form(simulation(kind)) == "stacked"
    auto, chunked, as_on_a_gpu, captured = (simulation(kind, name) for name in (*["stacked"] * 3, "captured"))
    set_chunk(chunked, 2)
    take_gpu_path(as_on_a_gpu)
    for run in (auto, chunked, as_on_a_gpu, captured):
        run.run(2)
        assert_same(run.state, loop.state, 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dropout", "dropout2d", "encoder", "raw", "functional"])
def test_a_member_of_a_population_draws_the_masks_it_would_draw_alone(kind):
    alone = {seed: simulation(kind, "loop", seed=seed) for seed in (3, 4, 5)}
    for run in alone.values():
        run.run(2)
    for seeds in ((3,), (4, 3), (5, 3, 4)):
        members = [simulation(kind, seed=seed) for seed in seeds]
        lamina.Population(members).run(2)
        for seed, member in zip(seeds, members, strict=True):
            assert_same(member.state, alone[seed].state, 1e-9)
    assert not torch.equal(alone[3].state.server.x, alone[4].state.server.x)


@pytest.mark.parametrize("kind", ["dropout", "functional"])
def test_the_two_gradients_of_mime_see_one_mask(kind):
    """g(y) - g(x) at the first step, where y = x, is zero only under one mask."""
    mime = lamina.create("mime", "mime")
    loop, auto = simulation(kind, "loop", mime, lr=0.01), simulation(kind, algorithm=mime, lr=0.01)
    assert form(auto) == "stacked"
    loop.run(3)
    auto.run(3)
    assert_same(auto.state, loop.state, 1e-9)


class Own(nn.Module):
    """Draws random numbers in its forward."""

    def __init__(self, draw, always=False):
        super().__init__()
        self.fc, self.draw, self.always = nn.Linear(8, 3), draw, always

    def forward(self, x):
        return self.fc(self.draw(x)) if self.training or self.always else self.fc(x)


@pytest.mark.parametrize(
    ("draw", "always"),
    [
        (lambda x: F.dropout(x, 0.5), True),  # also when the module is evaluated
        (lambda x: F.dropout(x, 0.5) + torch.rand(()), False),
        (lambda x: x * (random.random() < 2), False),
        (nn.RReLU(), False),
    ],
)
def test_a_module_that_draws_itself_runs_in_the_loop(draw, always, caplog):
    data = (torch.randn(48, 8), torch.arange(48) % 3)
    settings = {"clients": PARTS, "batch_size": 4, "device": "cpu", "seed": 1}
    with caplog.at_level(logging.INFO, logger="lamina"):
        run = lamina.Simulation(Own(draw, always), data, "fedavg", **settings)
    assert form(run) == "loop"
    assert "engine loop: the module's forward draws random numbers itself" in caplog.text
    for engine in ("stacked", "captured"):
        with pytest.raises(lamina.BadInput, match="draws random numbers itself"):
            lamina.Simulation(Own(draw, always), data, "fedavg", engine=engine, **settings)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize(
    "draw",
    [lambda x: F.dropout(x, 0.5), lambda x: x * random.random(), lambda x: x * np.random.rand()],  # noqa: NPY002
)
def test_a_module_that_draws_itself_is_reproducible(draw, always, engine):
    torch.manual_seed(0)
    model, data = Own(draw, always), (torch.randn(48, 8), torch.arange(48) % 3)
    ends = []
    for global_seed, seed in ((1, 0), (2, 0), (2, 1)):
        for seed_generator in (torch.manual_seed, random.seed, np.random.seed):
            seed_generator(global_seed)
        before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        settings = {"test": data, "clients": PARTS, "device": "cpu", "seed": seed, "engine": engine}
        run = lamina.Simulation(model, data, "mime", **settings)
        losses = run.run(2).column("loss")
        after = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        assert after == before  # nobody else's numbers depend on the run
        ends.append((run.state.server.x.tolist(), losses))
    assert ends[0] == ends[1] != ends[2]


def test_masks_have_the_right_rate_and_scale_and_differ_between_layers_calls_clients_and_streams():
    net, layers = with_streams(nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.3)]).train())
    ones = torch.ones(2, 50_000)
    set_streams(layers, torch.tensor([5, 6]))
    first, again, other = net[0](ones), net[0](ones), net[1](ones)
    for mask in (first, again, other):
        assert (mask == 0).double().mean() == pytest.approx(0.3, abs=0.007)
        assert mask[mask != 0].unique().tolist() == pytest.approx([1 / 0.7])
    set_streams(layers, torch.tensor([7, 6]))
    later = net[0](ones)
    assert torch.equal(later[1], first[1])
    pairs = [(first, again), (first, other), (again, other), (first[0], first[1]), (first[0], later[0])]
    for one, two in pairs:  # independent: both dropped as often as chance has it
        assert ((one == 0) & (two == 0)).double().mean() == pytest.approx(0.09, abs=0.007)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_or_everything_is_dropped(p):
    net, layers = with_streams(nn.Sequential(nn.Dropout(p), nn.Dropout2d(p)).train())
    set_streams(layers, torch.tensor([5]))
    assert torch.equal(net(torch.ones(3, 4, 5, 2)), torch.full((3, 4, 5, 2), 1 - p))


def test_alpha_dropout_keeps_mean_and_variance():
    net, layers = with_streams(nn.Sequential(nn.AlphaDropout(0.3)).train())
    set_streams(layers, torch.tensor([5]))
    out = net(torch.randn(1, 400_000, generator=torch.Generator().manual_seed(0)))
    assert float(out.mean()) == pytest.approx(0, abs=0.02)
    assert float(out.std()) == pytest.approx(1, abs=0.02)


def test_the_written_out_attention_is_torchs():
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double().train()
    written, layers = with_streams(plain)
    assert written is not plain
    assert len(layers) == 1
    plain.dropout = written.dropout = 0.0
    x, y = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
    causal, padding = torch.ones(5, 4).triu(1).bool(), torch.tensor([[False] * 3 + [True]] * 3)
    for options in ({}, {"attn_mask": causal}, {"key_padding_mask": padding}, {"average_attn_weights": False}):
        for own, expected in zip(written(x, y, y, **options), plain(x, y, y, **options), strict=True):
            assert torch.allclose(own, expected, rtol=1e-12)


def test_the_model_keeps_torchs_own_layers():
    run = simulation("dropout2d")
    run.run(1)
    assert [type(layer) for layer in run.model][1] is nn.Dropout2d


class Checkpointed(nn.Module):
    """[n, 5, 4] -> [n, 3]; may run a part of its forward pass again in the backward pass."""

    def __init__(self, drop, recompute, with_weights=True):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(20, 3).double(), drop
        self.recompute, self.with_weights = recompute, with_weights

    def part(self, x):
        x = self.one(x) if self.with_weights else x
        if isinstance(self.drop, nn.MultiheadAttention):
            return self.drop(x, x, x, need_weights=False)[0].tanh()
        return (self.drop(x) if isinstance(self.drop, nn.Module) else self.drop(x, self.training)).tanh()

    def forward(self, x):
        x = x if self.with_weights else self.one(x)
        return self.two((checkpoint(self.part, x, use_reentrant=False) if self.recompute else self.part(x)).flatten(1))


class OwnAttention(nn.MultiheadAttention):
    """A subclass, which is left to torch."""


def attention(kind):
    torch.manual_seed(0)
    return kind(4, 2, dropout=0.5, batch_first=True, dtype=torch.float64)


aten = torch.ops.aten  # torch's own, which lamina does not look at
RECOMPUTED = {  # and what draws the same masks from torch's generator
    "layer": (lambda: nn.Dropout(), lambda: lambda x, on: aten.dropout(x, 0.5, on)),
    "function": (lambda: lambda x, on: F.dropout(x, 0.5, on), lambda: lambda x, on: aten.dropout(x, 0.5, on)),
    "attention": (lambda: attention(nn.MultiheadAttention), lambda: attention(OwnAttention)),
    "attention, function": (
        lambda: lambda x, on: F.scaled_dot_product_attention(x, x, x, None, 0.5 * on),
        lambda: lambda x, on: aten.scaled_dot_product_attention(x, x, x, None, 0.5 * on),
    ),
}


def checkpointed(engine, *options):
    torch.manual_seed(0)
    data = (torch.randn(48, 5, 4, dtype=torch.float64), torch.arange(48) % 3)
    torch.manual_seed(1)
    return lamina.Simulation(
        Checkpointed(*options), data, "fedavg", clients=PARTS, batch_size=4, lr=0.1, seed=3, device="cpu", engine=engine
    )


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_dropout_that_is_recomputed_is_torchs(kind, with_weights):
    drop, by_torch = (make() for make in RECOMPUTED[kind])
    expected = checkpointed("loop", by_torch, False, with_weights)
    expected.run(1)
    for engine in ("auto", "loop"):
        run = checkpointed(engine, drop, True, with_weights)
        assert form(run) == "loop"
        run.run(1)
        assert_same(run.state, expected.state, 1e-12)


def test_a_recomputed_mask_is_found_even_if_it_drops_next_to_nothing():
    run = checkpointed("auto", lambda x, on: F.dropout(x, 1e-9, on), True, False)
    assert form(run) == "loop"
    assert "activation checkpointing" in run.engine.why


def test_attention_adds_a_float32_mask_in_bfloat16():
    module, (written,) = with_streams(nn.MultiheadAttention(8, 2, dropout=1e-9, batch_first=True).bfloat16())
    set_streams([written], torch.tensor([1]))
    x, hidden = torch.randn(3, 5, 8).bfloat16(), torch.ones(5, 5).triu(1).bool()
    masks = (hidden, torch.zeros(5, 5).masked_fill(hidden, float("-inf")))
    assert torch.equal(*(module(x, x, x, attn_mask=mask)[0] for mask in masks))


def test_dropout_in_place_stays_in_place_where_there_is_a_kernel():
    module, (layer,) = with_streams(nn.Dropout(0.5, inplace=True))
    layer.kernel = lambda x, *numbers: x + 1
    set_streams([layer], torch.tensor([1]))
    x = torch.ones(8)
    assert module(x) is x
    assert set(x.tolist()) == {0.0, 2.0}


class Attends(nn.Module):
    def __init__(self, p, need_weights):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True), nn.Linear(8, 3)
        self.need_weights = need_weights

    def forward(self, x):
        return self.head((x + self.attention(x, x, x, need_weights=self.need_weights)[0]).mean(1))


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_that_drops_everything_gives_its_bias(need_weights):
    """With dropout 1, only the bias of the output projection is left, in every engine."""
    torch.manual_seed(0)
    model, x = Attends(1.0, need_weights).double(), torch.randn(24, 5, 8, dtype=torch.float64)
    ends = []
    for engine in ("loop", "auto"):
        run = lamina.Simulation(model, (x, torch.arange(24) % 3), "fedavg", clients=3, batch_size=4, lr=0.1,
                                engine=engine, device="cpu")  # fmt: skip
        run.run(2)
        ends.append(run.model.attention)
        assert torch.equal(ends[-1].in_proj_weight, model.attention.in_proj_weight)
        assert torch.equal(ends[-1].out_proj.weight, model.attention.out_proj.weight)
        assert not torch.equal(ends[-1].out_proj.bias, model.attention.out_proj.bias)
    torch.testing.assert_close(ends[0].out_proj.bias, ends[1].out_proj.bias)


@pytest.mark.parametrize("shape", [(2, 7, 31), (6, 5), (12, 3, 3)])
@pytest.mark.parametrize("clients", [1, 2])
def test_masks_that_are_drawn_in_blocks_are_those_of_one_piece(shape, clients, monkeypatch):
    layer = dropout.StreamDropout(0.3)
    layer.streams = torch.tensor([3, -5])[:clients]
    whole = layer.kept(shape, 0.3)
    monkeypatch.setattr(dropout, "BLOCK_WORDS", 8)
    layer.calls = 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(layer.kept(shape, 0.3), whole)
