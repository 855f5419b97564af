"""One small problem per kind of input, target and model output, for the tests of all engines."""

import dataclasses
import importlib.util

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina

PARTS = [list(range(7)), list(range(7, 12)), list(range(12, 24))]  # ragged
SAMPLES = 24


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def integers(most, *shape):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(2))


class TwoInputs(nn.Module):
    """A tuple of inputs, the second of which are integers; a tuple out."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(7, 3)

    def forward(self, numbers, kind):
        hidden = torch.cat([numbers, self.table(kind)], 1)
        return self.head(hidden), hidden


class Text(nn.Module):
    """Token ids and a mask by name; the mean over real tokens; an object with .logits, or a dict of it."""

    def __init__(self, as_dict):
        super().__init__()
        self.table, self.head, self.as_dict = nn.Embedding(9, 4), nn.Linear(4, 2), as_dict

    def forward(self, input_ids, attention_mask=None):
        mask = attention_mask.unsqueeze(2).to(self.head.weight.dtype)
        logits = self.head((self.table(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))
        return {"logits": logits} if self.as_dict else Result(logits)


class Result:
    def __init__(self, logits):
        self.logits = logits


class Tokens(nn.Module):
    """Logits [n, tokens, vocabulary]."""

    def __init__(self, words):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, words)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


class Recurrent(nn.Module):
    """[n, 5, 3] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 3, batch_first=True, bidirectional=True), nn.RNN(6, 3)]
        )

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)[0]
        return self.layers[2](x.transpose(0, 1))[0][-1]


class Norms(nn.Module):
    """[n, 4] -> [n, 3], with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(1, 4))
        self.norm, self.channels = nn.RMSNorm(4), nn.InstanceNorm1d(2, affine=True)
        self.slope, self.head = nn.PReLU(2), nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(x * self.scale + self.shift).reshape(-1, 2, 2)
        return self.head(self.slope(self.channels(x)).flatten(1))


class Scale(nn.Module):
    """A parameter of its own, and dropout called as a function."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        return F.dropout(x * self.scale, 0.3, self.training)


class Functional(nn.Module):
    """[n, 5, 4] -> [n, 3], with dropout in a layer, in functions, and on the weights of an attention."""

    def __init__(self):
        super().__init__()
        self.drop, self.into = nn.Dropout(0.2), nn.Linear(4, 12, bias=False)
        self.scale, self.head = Scale(), nn.Linear(4, 3)

    def forward(self, x):
        x = self.into(F.dropout(self.drop(x), 0.3, self.training))
        q, k, v = x.unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)  # [n, heads, 5, 2]
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4 if self.training else 0.0, is_causal=True)
        return self.head(self.scale(mixed.transpose(1, 2).flatten(2)).mean(1))


class Bag(nn.Module):
    """Bags of words [n, 6] -> [n, 3]."""

    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.bag(ids))


def convolutions():
    """[n, 2, 3, 4, 4] -> [n, 3]."""
    return nn.Sequential(
        nn.Conv3d(2, 3, 2), nn.ReLU(), nn.ConvTranspose3d(3, 2, 2), nn.Flatten(2), nn.Conv1d(2, 3, 5, stride=3),
        nn.ReLU(), nn.ConvTranspose1d(3, 2, 3), nn.Unflatten(2, (1, -1)), nn.ConvTranspose2d(2, 3, (2, 1)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Heads(nn.Module):
    """Two heads on one body, returned in some form."""

    def __init__(self, form):
        super().__init__()
        self.body, self.kind, self.size, self.form = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 1), form

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.form(self.kind(hidden), self.size(hidden).squeeze(1))


@dataclasses.dataclass
class TwoAnswers:
    kind: torch.Tensor
    size: torch.Tensor
    note: str = "not a tensor"


def of_heads(kind, size, kinds, sizes):
    return F.cross_entropy(kind, kinds, reduction="none") + (size - sizes) ** 2


def spread(outputs, targets):
    """A loss of the whole batch: its samples push each other away from their mean."""
    centred = outputs - outputs.mean(0)
    return F.cross_entropy(outputs, targets) + 0.1 * torch.log1p(centred.square().sum() * len(targets))


def two_targets():
    return integers(3, SAMPLES), draw(SAMPLES)


def hugging_face(name, adapters=False):
    """Return the function that makes a small transformer."""

    def make():
        from models import test_transformers

        module = getattr(test_transformers, name)()
        return test_transformers.with_adapters(module) if adapters else module

    return make


def ignored(targets):
    """Some positions without a class, and one sample with none at all."""
    targets = targets.clone()
    targets.flatten(1)[:, ::3] = -100
    targets[5] = -100
    return targets


def sequences():
    return [integers(8, 2 + i % 4).tolist() for i in range(SAMPLES)]


def text_data():
    return lamina.Dataset({"input_ids": sequences()}, ["spam" if i % 3 else "ham" for i in range(SAMPLES)])


def conv(out):
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, out, 1))


def linear(out):
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, out))


def own_loss(outputs, targets):
    """The pinball loss of the 0.9 quantile."""
    error = targets - outputs.squeeze(1)
    return torch.maximum(0.9 * error, -0.1 * error)


KINDS = {
    "tuple": (TwoInputs, lambda: ((draw(SAMPLES, 4), integers(5, SAMPLES)), integers(3, SAMPLES)), "cross_entropy"),
    "dict": (lambda: Text(False), text_data, "cross_entropy"),
    "dict_out": (lambda: Text(True), text_data, lamina.losses.CrossEntropy(weight=[1.0, 3.0], label_smoothing=0.1)),
    "segmentation": (
        lambda: conv(3), lambda: (draw(SAMPLES, 2, 5, 5), ignored(integers(3, SAMPLES, 5, 5))), "cross_entropy"
    ),
    "weighted_maps": (
        lambda: conv(3), lambda: (draw(SAMPLES, 2, 5, 5), ignored(integers(3, SAMPLES, 5, 5))),
        lamina.losses.CrossEntropy(weight=[1.0, 2.0, 0.5]),
    ),
    "binary_maps": (
        lambda: conv(1), lambda: (draw(SAMPLES, 2, 5, 5), ignored(integers(2, SAMPLES, 1, 5, 5))), "bce"
    ),
    "tokens": (
        lambda: Tokens(4), lambda: (integers(9, SAMPLES, 6), ignored(integers(4, SAMPLES, 6))), "token_cross_entropy"
    ),
    "causal_lm": (lambda: Tokens(9), lambda: (integers(9, SAMPLES, 6), integers(9, SAMPLES, 6)), "causal_lm"),
    "padded_lm": (lambda: Tokens(9), lambda: (sequences(), sequences()), "causal_lm"),
    "soft": (lambda: linear(3), lambda: (draw(SAMPLES, 4), draw(SAMPLES, 3).softmax(1)), "cross_entropy"),
    "multi_label": (
        lambda: linear(3), lambda: (draw(SAMPLES, 4), ignored(integers(2, SAMPLES, 3)).double()),
        lamina.losses.BinaryCrossEntropy([1.0, 2.0, 4.0]),
    ),
    "nll": (
        lambda: nn.Sequential(linear(3), nn.LogSoftmax(1)), lambda: (draw(SAMPLES, 4), integers(3, SAMPLES)), "nll"
    ),
    "mae": (lambda: linear(2), lambda: (draw(SAMPLES, 4), draw(SAMPLES, 2)), "mae"),
    "huber": (lambda: linear(1), lambda: (draw(SAMPLES, 4), 3 * draw(SAMPLES)), "huber"),
    "tuple_targets": (
        lambda: Heads(lambda kind, size: (kind, [size])), lambda: (draw(SAMPLES, 4), two_targets()),
        lambda outputs, targets: of_heads(outputs[0], outputs[1][0], *targets),
    ),
    "dict_targets": (
        lambda: Heads(lambda kind, size: {"kind": kind, "size": size}),
        lambda: (draw(SAMPLES, 4), dict(zip(("kinds", "sizes"), two_targets(), strict=True))),
        lambda outputs, targets: of_heads(**outputs, **targets),
    ),
    "object_out": (
        lambda: Heads(TwoAnswers), lambda: (draw(SAMPLES, 4), two_targets()),
        lambda outputs, targets: of_heads(outputs.kind, outputs.size, *targets),
    ),
    "per_batch": (
        lambda: linear(3), lambda: (draw(SAMPLES, 4), integers(3, SAMPLES)), lamina.losses.per_batch(spread)
    ),
    "own": (lambda: linear(1), lambda: (draw(SAMPLES, 4), draw(SAMPLES)), own_loss),
}  # fmt: skip


LAYERS = {
    "recurrent": (Recurrent, lambda: (draw(SAMPLES, 5, 3), integers(3, SAMPLES)), "cross_entropy"),
    "convolutions": (convolutions, lambda: (draw(SAMPLES, 2, 3, 4, 4), integers(3, SAMPLES)), "cross_entropy"),
    "norms": (lambda: nn.Sequential(Norms()), lambda: (draw(SAMPLES, 4), integers(3, SAMPLES)), "cross_entropy"),
    "functional": (Functional, lambda: (draw(SAMPLES, 5, 4), integers(3, SAMPLES)), "cross_entropy"),
    "bag": (Bag, lambda: (integers(9, SAMPLES, 6), integers(3, SAMPLES)), "cross_entropy"),
}
KINDS |= LAYERS
TRANSFORMERS = {  # one in full, one with adapters; models/test_transformers.py has more
    "bert": (hugging_face("bert"), lambda: (integers(20, SAMPLES, 8), integers(3, SAMPLES)), "cross_entropy"),
    "llama_adapters": (
        hugging_face("llama", adapters=True), lambda: (integers(20, SAMPLES, 8), integers(20, SAMPLES, 8)), "causal_lm"
    ),
}  # fmt: skip
if all(importlib.util.find_spec(package) for package in ("transformers", "peft")):
    KINDS |= TRANSFORMERS


def model(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KINDS[kind][0]().double()


def algorithm_for(kind):
    """FedLADA; for attention FedAvg, because the gradient of a key's bias is rounding errors around zero."""
    return "fedavg" if kind in TRANSFORMERS else "fedlada"


def simulation(kind, engine="stacked", algorithm=None, **settings):
    _, data, loss = KINDS[kind]
    engine = "captured" if (kind, engine) == ("per_batch", "stacked") else engine  # it has no stacked form
    return lamina.Simulation(
        model(kind), data(), algorithm or algorithm_for(kind), test=data(), clients=PARTS, loss=loss,
        engine=engine,
        **{"batch_size": 4, "participation": 0.7, "lr": 0.05, "seed": 3, "device": "cpu", **settings},
    )  # fmt: skip
