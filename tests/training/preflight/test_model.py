"""Models that cannot be trained, or not on these data, and models that change something in a forward pass."""

import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lamina
from kinds import TwoInputs, draw, integers
from lamina.base import limits

X, Y = draw(12, 4), integers(3, 12)


def simulate(model, data, **settings):
    return lamina.Simulation(model.double(), data, "fedavg", clients=2, device="cpu", **settings)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_in_one_line(kind):
    text = f"layer 'words' .{kind.__name__}. has max_norm=0.5, .* set max_norm=None, or freeze the weight"
    model = nn.Sequential(OrderedDict(words=kind(11, 3, max_norm=0.5)))
    with pytest.raises(lamina.BadInput, match=text):
        simulate(model, (integers(11, 12, 1), Y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_are_refused(dtype):
    with pytest.raises(lamina.BadInput, match=rf"are {str(dtype).removeprefix('torch.')}, .* use model\.float\(\)"):
        lamina.Simulation(nn.Linear(4, 3).to(dtype), (X.float(), Y), "fedavg", clients=2, device="cpu")


def test_frozen_parameters_in_half_precision_are_not():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8).bfloat16().requires_grad_(False), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x.bfloat16()).float())

    lamina.Simulation(Adapted(), (X.float(), Y), "fedavg", clients=2, device="cpu").run(1)


def test_a_model_that_starts_with_nan_is_refused():
    model = nn.Sequential(nn.Linear(4, 3))
    nn.init.constant_(model[0].bias[:1].data, float("nan"))
    with pytest.raises(lamina.BadInput, match=r"'0\.bias' holds a NaN"):
        simulate(model, (X, Y))


class EncoderDecoder(nn.Module):
    """Takes inputs as T5 does: without its decoder's ids, it fails."""

    def __init__(self):
        super().__init__()
        self.config, self.head = SimpleNamespace(is_encoder_decoder=True), nn.Linear(4, 3)

    def forward(self, input_ids, decoder_input_ids=None):
        if decoder_input_ids is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        return self.head(input_ids + decoder_input_ids)


def test_a_model_without_the_ids_of_its_decoder_says_how_to_give_them():
    for x in (X, {"input_ids": X}):
        with pytest.raises(lamina.BadInput, match=r"the model has a decoder: give x as .*'decoder_input_ids': …}"):
            simulate(EncoderDecoder(), (x, Y))
    speech = EncoderDecoder()
    speech.main_input_name = "input_features"
    with pytest.raises(lamina.BadInput, match=r"give x as \{'input_features': …, 'decoder_input_ids': …}"):
        simulate(speech, ({"input_ids": X}, Y))
    simulate(EncoderDecoder(), ({"input_ids": X, "decoder_input_ids": X}, Y)).run(1)


class NoTensor(nn.Linear):
    def forward(self, input):
        return {"hidden": super().forward(input)}


class AnyNames(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

    def forward(self, **inputs):
        return super().forward(inputs["x"])


@pytest.mark.parametrize(("make", "message"), [
    (lambda: simulate(TwoInputs(), (X, Y)), "cannot take the train data"),
    (lambda: simulate(AnyNames(), ({"a": X}, Y)), r"data.* it looks for 'x', .* not have \(test_model\.py:\d+\)"),
    (lambda: simulate(NoTensor(4, 3), (X, Y)), r"returns a dict .*take a tensor, '\.logits', .* receives all"),
])  # fmt: skip
def test_a_forward_pass_that_fails_is_explained(make, message):
    with pytest.raises(lamina.BadInput, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.int64, r"give features as floats, x\.astype"), (torch.float64, "")]
)
def test_integers_where_a_model_wants_floats_are_explained(dtype, advice):
    with pytest.raises(
        lamina.BadInput, match=rf"cannot take the train data, samples of shape \(5,\): .*{advice}"
    ) as error:
        simulate(nn.Linear(5 if dtype == torch.int64 else 4, 3), (torch.ones(12, 5, dtype=dtype), Y))
    assert ("integers" in str(error.value)) is bool(advice)


def test_a_scripted_model_is_refused_in_one_line():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Linear(4, 3))
    with pytest.raises(lamina.BadInput, match=r"the model cannot take the train data.*ScriptModules"):
        simulate(model, (X, Y))


def test_activations_that_do_not_fit_are_refused(monkeypatch):
    wide = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0), nn.Unflatten(0, (-1, 1)), Repeat(10**6), nn.Linear(10**6, 4))
    data, labels, free = torch.randn(40, 8), torch.arange(40) % 4, 200_000_000
    monkeypatch.setattr(limits, "available_bytes", lambda device=None: free)
    lamina.Simulation(wide, (data, labels), "fedavg", clients=4, batch_size=1, engine="loop")
    with pytest.raises(lamina.BadInput, match="an activation of 4 MB per sample, for 80 samples of the train data"):
        lamina.Simulation(wide, (data, labels), "fedavg", clients=1, batch_size=64, engine="loop")


class Repeat(nn.Module):
    """Many equal columns: large activations without parameters."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return x.repeat(1, self.columns)


@pytest.mark.parametrize("in_training", [False, True])
def test_a_forward_that_writes_into_its_parameters_is_refused(in_training):
    class Projected(nn.Linear):
        def forward(self, x):
            if self.training == in_training:
                with torch.no_grad():
                    self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = nn.Sequential(Projected(4, 3)).double()
    start = model[0].weight.clone()
    for engine in ("auto", "loop"):
        with pytest.raises(lamina.BadInput, match=r"forward pass writes into the parameter '0\.weight'"):
            simulate(model, (X, Y), engine=engine)
    assert torch.equal(model[0].weight, start)


class Running(nn.Module):
    """Subtracts a running mean, which it writes into its buffer, or replaces the buffer by."""

    def __init__(self, replaces):
        super().__init__()
        self.layer, self.replaces = nn.Linear(4, 3), replaces
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.replaces:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        return self.layer(x - self.mean)


class Remembering(nn.Module):
    """Keeps a number, a hidden state or the last outputs; `forward` uses all but the last."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.calls, self.hidden = nn.Linear(4, 3), kind, 0, None
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        outputs = self.drop(self.layer(x))
        if self.kind == "number" and self.training:
            self.calls += 1
        if self.kind == "hidden" and self.hidden is not None:
            outputs = outputs + self.hidden
        self.hidden = outputs.detach().mean(0)
        return outputs * (1 + self.calls)


def simulated(module, **settings):
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)) + 5, torch.arange(48) % 3
    return lamina.Simulation(module, data, "fedavg", clients=4, batch_size=8, lr=0.1, device="cpu", **settings)


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_a_buffer_that_a_forward_pass_replaces_is_refused(engine):
    simulation = simulated(Running(replaces=False), engine=engine)
    simulation.run(2)
    assert simulation.model.mean.min() > 0.5
    for module, name in ((Running(True), "mean"), (nn.Sequential(Running(True)), "0.mean")):
        with pytest.raises(lamina.BadInput, match=rf"new tensor to the buffer '{name}', .*self\.mean\.copy_"):
            simulated(module, engine=engine)


@pytest.mark.parametrize(("kind", "reported"), [("number", True), ("hidden", True), ("last outputs", False)])
def test_state_that_a_forward_pass_keeps_in_an_attribute_is_reported(kind, reported, caplog):
    simulated(Remembering(kind), engine="loop").run(1)
    messages = [record.getMessage() for record in caplog.records if "differ from call to call" in record.getMessage()]
    assert len(messages) == reported


def test_batch_norm_refuses_clients_of_one_sample_as_one_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(lamina.BadInput, match="one sample"):
        lamina.Simulation(model, (X.float(), Y), "fedavg", clients=[range(11), [11]], batch_size=None, device="cpu")
    lamina.Simulation(
        model, (X.float(), Y), "fedavg", clients=[range(6), range(6, 12)], batch_size=None, device="cpu"
    ).run(1)
