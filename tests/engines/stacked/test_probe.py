"""Models whose result depends on the batch as a whole: whatever the engine, the trajectory is the loop's."""

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from lamina.engines.stacked.probe import PROBE_BATCH, PROBE_CLIENTS, probe_samples
from small_simulations import form

SAMPLES = 64
LATE = 40  # the odd things happen from this sample on


class Words(nn.Module):
    """The mean of embedded tokens, perhaps scaled by a parameter of the model's own."""

    def __init__(self, scaled=False, **options):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8, **options), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.full((8,), 1.5)) if scaled else 1.0

    def forward(self, tokens):
        return self.head(torch.tanh(self.words(tokens) * self.scale).mean(1))


class Bag(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 8, **options), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.bag(tokens)))


class Lookup(nn.Module):
    """A table of its own, with the padding token given to the function."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(11, 8)), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(F.embedding(tokens, self.table, padding_idx=0)).mean(1))


class Changing(nn.Module):
    """`change` sees the inputs and what the first layer makes of them."""

    def __init__(self, change, only_in_training=False):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.change, self.only_in_training = change, only_in_training

    def forward(self, x):
        h = self.first(x)
        if self.training or not self.only_in_training:
            h = self.change(x, h)
        return self.last(h)


def text():
    tokens = torch.randint(1, 11, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    tokens[LATE:, -2:] = 0
    return tokens, torch.arange(SAMPLES) % 3


def table():
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).clamp(max=2.9)
    x[:4] -= 3.0
    x[LATE, 0] = 4.0
    return x, torch.arange(SAMPLES) % 3


def simulation(model, data, engine="auto", algorithm="fedavg", **more):
    settings = {"clients": [range(12), range(12, 29), range(29, 45), range(45, 64)], "batch_size": 5, "lr": 0.1}
    return lamina.Simulation(model, data, algorithm, engine=engine, device="cpu", seed=2, **settings | more)


def assert_as_in_the_loop(model, data, expected):
    """Assert which form is taken, and that it gives the loop's trajectory."""
    torch.manual_seed(0)
    model = model().double()
    run, loop = simulation(model, data, algorithm="fedlamb"), simulation(model, data, "loop", "fedlamb")
    assert form(run) == expected
    loop.run(2)
    others = [] if expected == "loop" else [run]
    with contextlib.suppress(lamina.BadInput):  # if it reads values
        others.append(simulation(model, data, "captured", "fedlamb"))
    for other in others:
        other.run(2)
        assert torch.allclose(other.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Words(padding_idx=0), "stacked"),
        (lambda: Words(padding_idx=-1, sparse=True), "stacked"),
        (lambda: Words(scaled=True, padding_idx=0), "stacked"),
        (lambda: Words(scaled=True, sparse=True), "stacked"),
        (Lookup, "loop"),
        (lambda: Words(scale_grad_by_freq=True), "loop"),
        (lambda: Words(scaled=True, scale_grad_by_freq=True), "loop"),
        (lambda: Bag(padding_idx=0), "stacked"),
        (lambda: Bag(sparse=True, mode="sum"), "stacked"),
        (lambda: Bag(padding_idx=0, mode="max"), "stacked"),
        (lambda: Bag(scale_grad_by_freq=True), "loop"),
    ],
)
def test_embeddings(model, expected):
    assert_as_in_the_loop(model, text(), expected)


def test_padding_has_no_gradient():
    model = Words(padding_idx=0).double()
    for engine in ("stacked", "captured", "loop"):
        run = simulation(model, text(), engine)
        run.run(1)
        assert torch.equal(run.model.words.weight[0], model.words.weight[0])
        assert not torch.equal(run.model.words.weight[1:], model.words.weight[1:])


BRANCHES = {
    "bool": lambda x, h: torch.tanh(h) if x.max() > 3 else torch.relu(h),
    "of a layer's output": lambda x, h: torch.tanh(h) if (h.abs() > 100).any() else torch.relu(h),
    "item": lambda x, h: torch.tanh(h) if x.mean().item() > 0 else torch.relu(h),
    "int": lambda x, h: h[:, : 8 - int(x.max())].mean(1, keepdim=True) + h,
    "numpy": lambda x, h: torch.tanh(h) if x.detach().numpy().max() > 3 else torch.relu(h),
    "tolist": lambda x, h: torch.tanh(h) if max(x[:, 0].tolist()) > 3 else torch.relu(h),
    "equal": lambda x, h: torch.tanh(h) if torch.equal(x, x.clamp(max=3)) else torch.relu(h),
    "shape": lambda x, h: torch.tanh(h) if len(x[x > 3]) else torch.relu(h),
    "nonzero": lambda x, h: torch.tanh(h) if (x > 3).nonzero().numel() else torch.relu(h),
}


@pytest.mark.long
@pytest.mark.parametrize("change", BRANCHES.values(), ids=BRANCHES.keys())
@pytest.mark.parametrize("only_in_training", [False, True])
def test_a_forward_that_branches_on_values_runs_in_the_loop(change, only_in_training):
    assert_as_in_the_loop(lambda: Changing(change, only_in_training), table(), "loop")


@pytest.mark.parametrize(
    "change",
    [
        lambda _, x: x * (1 + (x.abs().max() > 1e6).float()),
        lambda _, x: torch.where(x.mean() > 1e6, 2 * x, x),
        lambda _, x: x / x.abs().amax(0).clamp(min=1e6),
        lambda _, x: x * (x[0] > 1e6).any(),
    ],
)
def test_a_limit_on_a_whole_batch_that_no_sample_reaches_yet_is_found(change):
    assert form(simulation(Changing(change).double(), table())) == "loop"


def test_a_branch_in_evaluation_is_found_too():
    class Evaluated(nn.Module):
        def forward(self, x):
            return x if self.training or x.max() < 3 else torch.relu(x)

    assert form(simulation(nn.Sequential(Evaluated(), nn.Linear(5, 3)).double(), table())) == "loop"


def test_a_branch_on_a_weight_is_found_too():
    class Bounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x) if self.layer.weight.norm() < 100 else x[:, :3]

    assert form(simulation(Bounded().double(), table())) == "loop"


def test_a_loss_that_branches_runs_in_the_loop():
    def loss(outputs, targets):
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses if losses.max() < 100 else losses / 2

    model = nn.Linear(5, 3).double()
    assert form(simulation(model, table(), loss=loss)) == "loop"


COUPLINGS = {
    "mean": lambda x, h: h - h.mean(0),
    "largest value": lambda x, h: torch.where(x.max() > 3, torch.tanh(h), torch.relu(h)),
    "sum of the batch": lambda x, h: torch.where(x.mean() > 0, torch.tanh(h), torch.relu(h)),
    "scale": lambda x, h: h / x.abs().max().clamp(min=3.0),
    "order": lambda x, h: h * (h.argsort(0).argsort(0) + 1),
}


@pytest.mark.long
@pytest.mark.parametrize("change", COUPLINGS.values(), ids=COUPLINGS.keys())
def test_samples_that_differ_show_a_module_that_mixes_them(change):
    assert_as_in_the_loop(lambda: Changing(change), table(), "loop")


HARMLESS = {
    "shapes": lambda x, h: h.view(len(x), -1)[:, : x.shape[1] + 3],
    "masks": lambda x, h: h.masked_fill(h > 2, 2.0) + torch.where(h > 0, h, 0.0),
    "positions": lambda x, h: h[:, torch.tensor([1, 0, 2, 3, 4, 5, 7, 6])],
    "a constant": lambda x, h: h * (2.0 if bool(torch.tensor(3.0) > 2) else 1.0),
    "largest of a sample": lambda x, h: h / x.abs().amax(1, keepdim=True).clamp(min=3.0),
}


@pytest.mark.long
@pytest.mark.parametrize("m", range(2, 9))
def test_a_forward_that_depends_on_places_in_the_batch_keeps_clients_apart(m):
    def by_position(x, h):
        return h * (1 + torch.arange(len(x)) % m).unsqueeze(1)

    def by_size(x, h):
        return h * (1 + len(x) % m)

    assert_as_in_the_loop(lambda: Changing(by_position), table(), "loop")
    assert_as_in_the_loop(lambda: Changing(by_size), table(), "loop")


@pytest.mark.long
@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_treats_samples_one_by_one_stays_stacked(change):
    assert_as_in_the_loop(lambda: Changing(change), table(), "stacked")


def test_a_transformer_stays_stacked():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, 8, padding_idx=0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, tokens):
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
            padding = torch.zeros_like(tokens, dtype=torch.float64).masked_fill(tokens == 0, float("-inf"))
            return self.head(self.encoder(self.words(tokens), mask=mask, src_key_padding_mask=padding).mean(1))

    torch.manual_seed(0)
    model = Encoder().double()
    run, loop = (simulation(model, text(), engine) for engine in ("auto", "loop"))
    run.run(1)
    loop.run(1)
    assert form(run) == "stacked"
    assert torch.allclose(run.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        (Changing(BRANCHES["bool"]), table(), r"computes one value over all samples .* \(max\) \(test_probe.py:\d+\)"),
        (Changing(BRANCHES["tolist"]), table(), r"reads a tensor's values \(tolist\) \(test_probe.py:\d+\)"),
        (
            Changing(lambda x, h: F.dropout(h) * h.max(), only_in_training=True),
            table(),
            r"computes one value over all samples .* \(max\) \(test_probe.py:\d+\)",
        ),
        (Words(scale_grad_by_freq=True), text(), r"uses embedding with scale_grad_by_freq \(test_probe.py:\d+\)"),
        (Lookup(), text(), r"uses embedding with padding_idx \(test_probe.py:\d+\)"),
    ],
)
def test_one_line_says_why_the_loop_is_taken(model, data, reason, caplog):
    with caplog.at_level("INFO", logger="lamina"):
        simulation(model.double(), data)
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("lamina")]
    assert re.fullmatch(f"engine loop: the model or the loss {reason}, so clients cannot share a batch", line)
    with pytest.raises(lamina.BadInput, match=reason):
        simulation(model.double(), data, "stacked")


def test_the_samples_of_the_probe_are_the_extreme_ones():
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    x[700, 1], x[800, 1], x[900] = 100.0, -100.0, float("nan")
    batches = probe_samples(x).reshape(PROBE_CLIENTS, PROBE_BATCH)
    means = x[batches].mean((1, 2)).tolist()
    assert means[0] == max(means)
    assert means[-1] == min(means)
    assert {700, 800} <= set(batches[1].tolist())
    assert not {700, 800} & set(batches[2].tolist())
    assert 900 not in batches


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (2,), (1, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.uint16, torch.int64, torch.bool])
def test_a_small_data_set_can_be_probed(samples, shape, dtype):
    chosen = probe_samples(torch.ones(samples, *shape).to(dtype))
    assert len(chosen) == PROBE_CLIENTS * PROBE_BATCH
    assert set(chosen.tolist()) <= set(range(samples))
