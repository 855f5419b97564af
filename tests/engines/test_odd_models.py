"""Models that few people build: they train in every engine, or one line says what to do."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lamina
from lamina.storage.checkpoint import pack
from small_simulations import form

LABELS = torch.arange(48) % 3


class Unreached(nn.Module):
    """Two layers, of which the loss reaches one; with `raw`, the other one is a list of parameters."""

    def __init__(self, raw):
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.ParameterList([torch.ones(2, 2)]) if raw else nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


class Recomputed(nn.Module):
    """A model with a part that, with activation checkpointing, runs again in the backward pass."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(5, 4), nn.Linear(4, 3), reentrant
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())

    def forward(self, x):
        x = self.first(x)
        x = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.last(x)


class Twice(nn.Module):
    """One module under two names, and a weight that two other modules share."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.a, self.b = nn.Linear(5, 5, bias=False), inner, inner
        self.last, self.tied = nn.Linear(5, 3), nn.Linear(5, 5)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.last(self.tied(self.b(torch.tanh(self.a(self.first(x))))))


class Scaled(nn.Module):
    """A parameter without axes."""

    def __init__(self, alone=False):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Identity() if alone else nn.Linear(5, 5)

    def forward(self, x):
        return self.first(x)[:, :3] * self.scale


class Words(nn.Module):
    def __init__(self, kind=nn.Embedding, **options):
        super().__init__()
        self.places, self.words, self.head = nn.Embedding(6, 8), kind(11, 8, **options), nn.Linear(8, 3)

    def forward(self, tokens):
        places = self.places(torch.arange(tokens.shape[1]).expand(tokens.shape)).mean(1)
        embedded = self.words(tokens)
        return self.head(torch.tanh((embedded.mean(1) if embedded.dim() == 3 else embedded) + places))


def numbers():
    return torch.randn(48, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), LABELS


def tokens():
    return torch.randint(0, 11, (48, 6), generator=torch.Generator().manual_seed(1)), LABELS


def simulation(model, data, engine="auto", algorithm="fedavg", **more):
    parts = [range(13), range(13, 20), range(20, 32), range(32, 48)]
    settings = {"clients": parts, "batch_size": 5, "lr": 0.05, "device": "cpu", "seed": 3}
    return lamina.Simulation(model, data, algorithm, engine=engine, **settings | more)


def assert_all_engines_agree(model, data, forms, algorithms=("scaffold", "mimelamb")):
    """The forms give the loop's result; "auto" takes the stacked one if there is one, else the loop."""
    model = model.double()
    for algorithm in algorithms:
        loop = simulation(model, data, "loop", algorithm)
        loop.run(2)
        for name in forms:
            run = simulation(model, data, "auto" if name == "stacked" else name, algorithm)
            assert form(run) == name
            run.run(2)
            assert torch.allclose(run.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-12), (algorithm, name)
            for key, value in run.model.state_dict().items():
                assert torch.allclose(value, loop.model.state_dict()[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("raw", [False, True])
def test_a_parameter_that_the_loss_does_not_reach(raw):
    torch.manual_seed(0)
    assert_all_engines_agree(Unreached(raw), numbers(), ("stacked", "captured"))


def test_a_model_that_the_loss_does_not_reach_is_refused():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(5, 3)

        def forward(self, x):
            return x[:, :3]

    for engine in ("auto", "loop"):
        with pytest.raises(lamina.BadInput, match="no gradient: the loss does not depend on any trainable parameter"):
            simulation(Constant().double(), numbers(), engine).run(1)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_activation_checkpointing_recomputes_with_the_current_weights(engine):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        plain, recomputed, x = Recomputed(), Recomputed(reentrant=False), torch.randn(48, 5)
    recomputed.load_state_dict(plain.state_dict())
    settings = {"clients": 3, "lr": 0.5, "seed": 2, "device": "cpu"}
    ends = []
    for model, own_engine in ((plain, "loop"), (recomputed, engine)):
        run = lamina.Simulation(model, (x, LABELS), "fedlamb", engine=own_engine, **settings)
        run.run(3)
        ends.append(run.state.server.x)
        assert torch.equal(run.objective.module.part[1].running_mean, torch.zeros(4))  # it is not written into
    assert torch.equal(*ends)


def test_reentrant_activation_checkpointing_is_refused_in_one_line():
    run = lamina.Simulation(Recomputed(reentrant=True), (torch.randn(48, 5), LABELS), "fedavg", device="cpu")
    with pytest.raises(lamina.BadInput, match=r"^activation checkpointing .* use_reentrant=False\)$"):
        run.run(1)


def test_a_transformer_with_parameters_in_its_outermost_class():
    """Mime asks for gradients in evaluation mode, in which torch's layers have a fast path without one."""

    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.place = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 6, 4))
            self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.patch, self.head = nn.Linear(1, 4), nn.Linear(4, 3)

        def forward(self, x):
            tokens = torch.cat([self.first.expand(len(x), -1, -1), self.patch(x.unsqueeze(2))], 1) + self.place
            return self.head(self.encoder(tokens)[:, 0])

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_all_engines_agree(Vision(), numbers(), ("captured",), ("mimelamb",))
    assert torch.backends.mha.get_fastpath_enabled()


def test_one_module_under_two_names():
    torch.manual_seed(0)
    assert_all_engines_agree(Twice(nn.Linear(5, 5)), numbers(), ("stacked", "captured"))


def test_one_batch_norm_under_two_names():
    torch.manual_seed(0)
    twice, data = Twice(nn.BatchNorm1d(5)).double(), numbers()
    runs = [simulation(twice, data, engine, batch_size=8, clients=4) for engine in ("loop", "stacked")]
    for run in runs:
        run.run(2)
        model = run.model
        assert model.a is model.b
        assert model.first.weight is model.tied.weight
        assert isinstance(model.a.weight, nn.Parameter)
        assert "b.running_mean" in model.state_dict()
        pack(model.state_dict(), round="2")
        model(data[0])
    loop, stacked = (run.model.state_dict() for run in runs)
    assert all(torch.allclose(loop[key], stacked[key], rtol=1e-9, atol=1e-12) for key in loop)


def test_a_buffer_that_two_modules_share():
    class Shared(nn.Module):
        """Both norms write into one pair of statistics."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, 3)
            self.double()  # before they are shared: it gives every module a buffer of its own
            self.b.running_mean, self.b.running_var = self.a.running_mean, self.a.running_var

        def forward(self, x):
            return self.head(self.b(torch.tanh(self.a(x))))

    torch.manual_seed(0)
    model, data, ends = Shared(), numbers(), []
    for engine in ("loop", "auto"):
        run = simulation(model, data, engine, batch_size=8, clients=4)
        run.run(2)
        assert torch.equal(run.model.a.running_mean, run.model.b.running_mean)
        assert not torch.equal(run.model.a.running_mean, model.a.running_mean)
        ends.append(torch.cat([run.state.server.x, run.model.a.running_mean, run.model.a.running_var]).detach())
    assert torch.equal(model.a.running_mean, torch.zeros(5, dtype=torch.float64))
    assert torch.allclose(*ends, rtol=1e-9, atol=1e-12)
    one_step = simulation(model, data, clients=1, batch_size=48)
    one_step.run(1)
    model.train()(data[0])  # what torch itself makes of one batch
    assert torch.allclose(one_step.model.a.running_mean, model.a.running_mean, rtol=1e-9)


@pytest.mark.parametrize("alone", [False, True])
def test_a_parameter_without_axes(alone):
    torch.manual_seed(0)
    assert_all_engines_agree(Scaled(alone), numbers(), ("captured",), ("fedavg", "mimelamb", "fedlada_lamb"))


def test_trust_ratios_and_groups_of_a_parameter_without_axes():
    model = Scaled().double()
    runs = [
        simulation(model, numbers(), engine, lamina.FedLamb(layers="module", decay=0.1), trust_ratios=True)
        for engine in ("loop", "captured")
    ]
    histories = [run.run(2) for run in runs]
    assert [c for c in histories[0].columns if c.startswith("trust")] == ["trust_ratio/model", "trust_ratio/first"]
    for name in ("trust_ratio/model", "train_loss"):
        assert histories[0].column(name) == pytest.approx(histories[1].column(name), rel=1e-9)


def test_a_lazy_layer_is_refused_in_one_line():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(lamina.BadInput, match=r"parameter '0\.weight' has no shape yet .* call the model on a sample"):
        simulation(lazy, numbers())
    lazy.double()(numbers()[0][:1])
    simulation(lazy, numbers()).run(1)


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        (nn.Embedding, ("stacked", "captured")),
        pytest.param(
            nn.EmbeddingBag, ("stacked", "captured"), marks=pytest.mark.filterwarnings("ignore:There is a perf")
        ),
    ],
)
def test_sparse_embeddings(kind, forms):
    torch.manual_seed(0)
    sparse, dense = Words(kind, sparse=True), Words(kind)
    dense.load_state_dict(sparse.state_dict())
    assert_all_engines_agree(sparse, tokens(), forms, ("fedavg",))
    ends = [simulation(model.double(), tokens(), "loop") for model in (sparse, dense)]
    for run in ends:
        run.run(2)
    assert torch.allclose(ends[0].state.server.x, ends[1].state.server.x, rtol=1e-12)
    assert ends[0].model.words.sparse


def test_a_frozen_embedding_may_have_a_max_norm():
    torch.manual_seed(0)
    model = Words(max_norm=0.5).double()
    model.words.weight.requires_grad_(False)
    ends = []
    for engine in ("auto", "loop"):
        run = simulation(model, tokens(), engine)
        assert form(run) == "loop"
        run.run(2)
        ends.append(run.state.server.x)
    assert torch.equal(*ends)


def test_a_model_that_cannot_be_copied_is_refused_in_one_line():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.utils.weight_norm(nn.Linear(5, 3)).double()
    with pytest.raises(lamina.BadInput, match=r"cannot be copied .*parametrizations.weight_norm.* give a function"):
        simulation(model, numbers())


class KeepsActivations(nn.Linear):
    def forward(self, x):
        self.kept = [super().forward(x)]
        return self.kept[0]


@pytest.mark.parametrize("layer", [lambda: nn.utils.spectral_norm(nn.Linear(5, 3)), lambda: KeepsActivations(5, 3)])
def test_the_model_of_a_run_without_test_data_can_be_copied(layer):
    """The last forward pass was a training step, whose graph torch refuses to copy."""
    run = simulation(layer().double(), numbers(), test=None, engine="loop")
    run.run(1)
    inputs = torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(run.model(inputs), run.model(inputs))


def test_scripted_models_are_compared():
    """A second run looks for an engine of the first one's, if their models are alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        first, second = (nn.Sequential(torch.jit.script(nn.Linear(5, 3).double())) for _ in range(2))
    one = simulation(first, numbers())
    two = simulation(second, numbers())
    assert one.objective.difference(two.objective)
