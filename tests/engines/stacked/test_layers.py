"""Every kind of layer in the stacked engine gives the loop's trajectory."""

import pytest
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


class Cells(nn.Module):
    """A cell that the model itself calls at every time step."""

    def __init__(self, cell, **options):
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(11, 4), cell(4, 5, **options), nn.Linear(5, 3)

    def forward(self, tokens):
        state = None
        for word in self.words(tokens).unbind(1):
            state = self.cell(word, state)
        return self.head(state[0] + state[1] if isinstance(state, tuple) else state)


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


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


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


WORDS = {
    "LSTM": lambda: Recurrent(nn.LSTM, 5, batch_first=True),
    "LSTM, two layers and directions": lambda: Recurrent(nn.LSTM, 10, num_layers=2, bidirectional=True, bias=False),
    "LSTM with a projection": lambda: Recurrent(nn.LSTM, 3, proj_size=3, batch_first=True),
    "GRU": lambda: Recurrent(nn.GRU, 10, bidirectional=True, batch_first=True),
    "GRU from a state": lambda: Recurrent(nn.GRU, 5, start=True),
    "RNN": lambda: Recurrent(nn.RNN, 5, num_layers=2, batch_first=True),
    "RNN with ReLU": lambda: Recurrent(nn.RNN, 5, nonlinearity="relu", batch_first=True),
    "LSTMCell": lambda: Cells(nn.LSTMCell),
    "LSTMCell without a bias": lambda: Cells(nn.LSTMCell, bias=False),
    "GRUCell": lambda: Cells(nn.GRUCell),
    "RNNCell": lambda: Cells(nn.RNNCell),
    "positions": Places,
}
TENSORS = {
    "Conv1d": (lambda: chain(nn.Conv1d(4, 6, 3, stride=2, groups=2), features=12), (4, 6)),
    "Conv3d": (lambda: chain(nn.Conv3d(2, 3, 2, padding=1, dilation=2), features=24), (2, 2, 2, 2)),
    "ConvTranspose1d": (lambda: chain(nn.ConvTranspose1d(4, 2, 3, groups=2, dilation=2), features=20), (4, 6)),
    "ConvTranspose2d": (
        lambda: chain(nn.ConvTranspose2d(2, 3, 3, 2, 1, output_padding=1), features=48),
        (2, 2, 2),
    ),
    "ConvTranspose3d": (lambda: chain(nn.ConvTranspose3d(2, 1, 2, bias=False), features=27), (2, 2, 2, 2)),
    "RMSNorm": (lambda: chain(nn.Linear(6, 6), nn.RMSNorm(6), features=6), (6,)),
    "RMSNorm over two axes": (lambda: chain(nn.RMSNorm((4, 6), eps=0.1), features=24), (4, 6)),
    "InstanceNorm1d": (lambda: chain(nn.InstanceNorm1d(4, affine=True), features=24), (4, 6)),
    "InstanceNorm2d": (lambda: chain(nn.InstanceNorm2d(2, affine=True), features=18), (2, 3, 3)),
    "InstanceNorm3d": (lambda: chain(nn.InstanceNorm3d(2, affine=True), features=24), (2, 2, 2, 3)),
    "BatchNorm3d": (lambda: chain(nn.Conv3d(2, 2, 1, bias=False), nn.BatchNorm3d(2), features=24), (2, 2, 2, 3)),
    "SMU": (lambda: chain(nn.Linear(6, 6), lamina.models.SMU(2.0), features=6), (6,)),
    "PReLU": (lambda: chain(nn.PReLU(4), features=24), (4, 6)),
    "PReLU with one slope": (lambda: chain(nn.Linear(6, 6), nn.PReLU(), features=6), (6,)),
    "a subclass of Linear": (lambda: chain(Doubled(6, 4), features=4), (6,)),
    "parameters of a module's own": (Masked, (6,)),
    "and dropout": (lambda: Masked(dropout=0.5), (6,)),
}


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


@pytest.mark.parametrize("make", WORDS.values(), ids=WORDS.keys())
def test_layers_of_words(make):
    assert_as_in_the_loop(make, data())


@pytest.mark.parametrize("kind", ["ConvTranspose2d", "and dropout"])
def test_the_path_of_a_gpu(kind):
    make, shape = TENSORS[kind]
    assert_as_in_the_loop(make, data(shape), gpu_path=True)


def test_a_recurrent_layer_on_the_path_of_a_gpu():
    assert_as_in_the_loop(WORDS["LSTM"], data(), gpu_path=True)


@pytest.mark.parametrize(("make", "shape"), TENSORS.values(), ids=TENSORS.keys())
def test_layers(make, shape):
    assert_as_in_the_loop(make, data(shape))


class Packed(Recurrent):
    """A packed sequence of whole samples."""

    def forward(self, tokens):
        lengths = torch.full((len(tokens),), tokens.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(self.words(tokens), lengths, batch_first=True)
        return self.head(self.layer(packed)[1][0][-1])


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Packed(nn.LSTM, 5, batch_first=True), None),
        (lambda: chain(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), features=24), (4, 6)),
        (lambda: Recurrent(nn.GRU, 5, num_layers=2, dropout=0.5, batch_first=True), None),
    ],
)
def test_options_without_a_stacked_form_run_in_the_loop(make, shape):
    assert_as_in_the_loop(make, data(shape), "loop", captured=shape is not None)  # the others draw or read values


def test_a_model_with_parameters_of_its_own_keeps_clients_apart():
    assert_as_in_the_loop(lambda: Scaled(6), data((6,)), "loop")


@pytest.mark.parametrize("make", [WORDS["LSTM"], Places], ids=["LSTM", "positions"])
def test_bfloat16(make, monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = make(), data()
    exact, rounded = (run(model, (x, y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.precision == "bf16"
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)


def test_bfloat16_of_own_and_frozen_parameters(monkeypatch):
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = Masked(), data((6,))
    model.scaled.inner.requires_grad_(False)
    exact, rounded = (run(model, (x.float(), y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.precision == "bf16"
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)


class Chosen(nn.Module):
    """Frozen parameters of all kinds: whole numbers, one axis in a layer that is trained, and in one that is not."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.tensor([257, 259, 263, 1, 2, 3]), requires_grad=False)
        self.norm, self.shared, self.head = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm.bias = nn.Parameter(torch.full((6,), 1.001), requires_grad=False)
        self.shared.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        wide = torch.cat([x, x.new_zeros(len(x), 300)], 1)
        return self.head(self.norm(self.shared(x)) + wide[:, self.order])


def test_bfloat16_rounds_frozen_parameters_as_it_rounds_trained_ones(monkeypatch):
    """Whole numbers stay: bfloat16 has no 257. So do vectors of layers that add them in float32, such as norms."""
    monkeypatch.setattr("lamina.engines.devices.has_bf16_instructions", lambda: True)
    torch.manual_seed(0)
    model, (x, y) = Chosen(), data((6,))
    exact, rounded = (run(model, (x.float(), y), "stacked", precision=precision) for precision in ("fp32", "bf16"))
    assert torch.allclose(exact.state.server.x, rounded.state.server.x, atol=0.05)
    frozen = rounded.engine.forward.frozen()
    assert {name: parameter.dtype for name, parameter in frozen.items()} == {
        "order": torch.int64,
        "norm.bias": torch.float32,
        "shared.weight": torch.bfloat16,
        "shared.bias": torch.bfloat16,
        "head.weight": torch.bfloat16,
    }
    assert torch.equal(frozen["order"], model.order)
    assert torch.equal(frozen["norm.bias"], model.norm.bias)


def test_frozen_layers_are_shared_by_all_clients():
    class Frozen(nn.Module):
        """Everything is frozen but one norm, the projection of an attention, and a bias."""

        def __init__(self):
            super().__init__()
            self.words, self.attention = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.scaled, self.norm, self.head = Scaled(8), nn.LayerNorm(8), nn.Linear(8, 3)
            for parameter in (*self.words.parameters(), *self.scaled.parameters(), self.head.weight):
                parameter.requires_grad_(False)
            self.attention.in_proj_weight.requires_grad_(False)
            self.attention.out_proj.bias.requires_grad_(False)

        def forward(self, tokens):
            x = self.scaled(self.words(tokens))
            return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))

    assert_as_in_the_loop(Frozen, data())
