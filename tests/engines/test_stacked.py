"""The stacked engine gives the loop's trajectory: every algorithm, every kind of layer, ragged and partial."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms import FedAvg
from lamina.algorithms.primitives import clip_by_norm
from lamina.data import Augment, Dataset
from lamina.engines.loop import Loop
from lamina.engines.stacked import convolution, memory
from lamina.engines.stacked import engine as stacked_engine
from lamina.engines.stacked.engine import Member
from lamina.engines.stacked.forward import choose_forward
from lamina.engines.stacked.graphed import GraphedSteps
from lamina.engines.stacked.modules import PlainMaxPool2d, stack
from lamina.engines.stacked.steps import Steps, works_by_layer, works_by_row
from lamina.engines.state import Sums
from small_simulations import PARTS, SHAPES, assert_same, simulation


def compare(kind, algorithm, dtype=torch.float64, tolerance=1e-9, rounds=3, chunk=None, graphed=False, **more):
    loop = simulation(kind, algorithm, "loop", dtype, **more)
    stacked = simulation(kind, algorithm, "stacked", dtype, **more)
    stacked.engine.always_graphed, stacked.engine.compiled = graphed, False
    if graphed:
        stacked.engine.forward.layout = stacked.objective.layers.channels_last()
    if chunk:
        stacked.engine.rows_per_chunk = chunk
    loop.run(rounds)
    stacked.run(rounds)
    assert_same(stacked.state, loop.state, tolerance)
    for name in ("bytes_down", "bytes_up", "steps"):
        assert stacked.history.column(name) == loop.history.column(name)
    for name in [
        c for c in loop.history.columns if c.startswith(("train_loss", "trust", "update_norm", "consistency"))
    ]:
        assert stacked.history.column(name) == pytest.approx(
            loop.history.column(name), rel=1e-6 if tolerance < 1e-6 else 1e-2, abs=1e-12
        )


RESNETS = ("resnet9", "resnet18", "resnet18_imagenet")  # slow, and an algorithm's step does not see the model
PAIRS = [
    pytest.param(name, kind, marks=[pytest.mark.long] if kind in RESNETS and name != "fedlamb" else [])
    for name, kind in itertools.product(lamina.registry(), SHAPES)
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_algorithm_on_every_model(name, kind):
    # FedLADA starts from v = 1e-16: a gradient that is zero but for rounding (a bias before a norm, attention's key
    # bias) is then blown up to a full step, in every engine its own. A larger start makes the comparison meaningful.
    larger = {"v_init": 1e-6} if name in ("fedlada", "localadam", "fedlada_lamb") else {}
    compare(kind, lamina.create(name, **larger))


VARIANTS = {
    "fedlamb-authors": lamina.create("fedlamb", "authors"),
    "fedlamb-lazy": lamina.FedLamb(sync_every=2, lazy="accumulate", decay=0.1, layers="module"),
    "fedlamb-average": lamina.FedLamb(momentum="average", second_moment="running", bias_correction=True),
    "fedams-restart": lamina.FedAms(momentum="restart", bias_correction=True, v_seed="client"),
    "mime-original": lamina.create("mime", "mime"),
    "mimelamb-lazy": lamina.MimeLamb(sync_every=2, decay=0.01, decay_on="matrices"),
    "fedlada-per-client": lamina.FedLada(v_init=1e-6, amendment="per_client", v_seed="zero", server_lr=0.7),
    "scaffold-literal": lamina.Scaffold(scale=0.5, control="literal", decay=0.01),
    "fedcm-simulator": lamina.create("fedcm", "fl_simulator"),
    "localadam-alone": lamina.LocalAdam(sync=False, amsgrad=False),
}


@pytest.mark.parametrize("algorithm", VARIANTS.values(), ids=VARIANTS.keys())
def test_options(algorithm):
    compare("cnn", algorithm, rounds=4)


@pytest.mark.parametrize("kind", ["mlp", "resnet18", "batch_norm", "transformer"])
def test_float32(kind):
    compare(kind, "fedlamb", torch.float32, tolerance=1e-4)


@pytest.mark.parametrize("name", lamina.registry())
def test_the_path_of_the_gpu(name):
    """The same buffers and in-place writes as on a GPU, without the graph."""
    compare("cnn", lamina.create(name), graphed=True)
    compare("batch_norm", lamina.create(name), graphed=True, clip=0.5)


def test_the_path_of_the_gpu_keeps_one_graph_while_the_number_of_steps_varies(monkeypatch):
    made = []

    def counted(*arguments, **options):
        made.append(1)
        return GraphedSteps(*arguments, **options)

    monkeypatch.setattr(stacked_engine, "GraphedSteps", counted)
    run = simulation("cnn", "fedlamb", "stacked", clients=[range(13), range(13, 24), range(24, 48)], participation=0.3)
    run.engine.always_graphed, run.engine.compiled = True, False
    reference = simulation(
        "cnn", "fedlamb", "loop", clients=[range(13), range(13, 24), range(24, 48)], participation=0.3
    )
    run.run(6)
    reference.run(6)
    assert {int(run.plan.round(r).steps.max()) for r in range(1, 7)} == {3, 4, 6}
    rounds = [run.plan.round(r) for r in range(1, 7)]
    kinds = {(plan.steps.max() > 4, bool((plan.filled == 1).any()), bool((plan.filled < 4).any())) for plan in rounds}
    assert len(kinds) < 6  # room for 4 or for 8 steps, a lone sample or none, short batches or none
    assert len(made) == len(kinds)
    assert_same(run.state, reference.state, 1e-9)


def test_the_path_of_the_gpu_with_control_variates():
    compare("cnn", lamina.create("mime", "mime"), graphed=True)


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("kind", ["cnn", "batch_norm"])
def test_chunks_change_nothing(kind, chunk):
    compare(kind, "fedlamb", chunk=chunk)
    compare(kind, "mimelamb", chunk=chunk)


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
    compare("cnn", "scaffold", **more)
    compare("mlp", "fedlada", **more)


def test_augmentation():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8, generator=generator)
    data = Dataset(images, torch.arange(48) % 3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
    ends = []
    for engine in ("loop", "stacked"):
        run = lamina.Simulation(SHAPES["cnn"][0]().double(), data, "fedavg", clients=PARTS, batch_size=4, seed=2,
                                augmentation=Augment(2), engine=engine, device="cpu")  # fmt: skip
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


# --- populations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedlamb", "mimelamb", "fedlada", "scaffold", "fedadam"])
def test_a_member_of_a_population_is_the_run_alone(name):
    numbers = {"fedlamb": "decay", "mimelamb": "decay", "fedlada": "alpha", "scaffold": "scale", "fedadam": "server_lr"}
    grid = [(lr, value, seed) for lr in (0.01, 0.03) for value in (0.05, 0.1) for seed in (3, 4)]
    alone = [
        simulation("cnn", lamina.create(name, **{numbers[name]: value}), "loop", lr=lr, seed=seed)
        for lr, value, seed in grid
    ]
    together = [
        simulation("cnn", lamina.create(name, **{numbers[name]: value}), "stacked", lr=lr, seed=seed)
        for lr, value, seed in grid
    ]
    for run in alone:
        run.run(3)
    engine = together[0].engine
    for chunk in (None, 7):
        engine.rows_per_chunk = chunk
        states = [
            run.state if chunk is None else lamina.engines.state.State.start(run.algorithm, run.objective, 5)
            for run in together
        ]
        for r in (1, 2, 3):
            outcomes = engine.run_members(
                [
                    Member(run.algorithm, s, run.plan.round(r), run.protocol)
                    for run, s in zip(together, states, strict=True)
                ]
            )
            states = [state for state, _ in outcomes]
        for run, state in zip(alone, states, strict=True):
            assert_same(state, run.state, 1e-9)


def test_a_diverging_member_is_reported_and_the_others_go_on():
    rates = (0.01, 1e200, 0.02)
    runs = [simulation("mlp", "fedavg", "stacked", lr=lr) for lr in rates]
    states = [run.state for run in runs]
    outcomes = runs[0].engine.run_members(
        [Member(r.algorithm, s, r.plan.round(1), r.protocol) for r, s in zip(runs, states, strict=True)]
    )
    assert isinstance(outcomes[1], lamina.Diverged)
    assert outcomes[1].round == 1
    for i in (0, 2):
        alone = simulation("mlp", "fedavg", "loop", lr=rates[i])
        alone.run(1)
        assert_same(outcomes[i][0], alone.state, 1e-9)


def test_divergence_is_named_as_the_loop_names_it():
    errors = []
    for engine in ("loop", "stacked"):
        run = simulation("cnn", "fedavg", engine, torch.float32, lr=1e15)
        with pytest.raises(lamina.Diverged) as caught:
            run.run(5)
        errors.append(caught.value)
    assert (errors[0].round, errors[0].layer) == (errors[1].round, errors[1].layer)


# --- which form is taken ----------------------------------------------------------------------------------------


class Direct(nn.Module):
    """Parameters used outside any layer: no stacked form, but vmap can."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3) / 3)

    def forward(self, x):
        return torch.tanh(x) @ self.w


class Sneaky(nn.Module):
    """A layer's weight used directly: stacks without complaint, but wrongly; the probe must notice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(x) * (1 + (x @ self.fc.weight.transpose(-1, -2)).mean())


class Recurrent(nn.Module):
    """An LSTM: neither stacked nor vmap."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x.reshape(len(x), 2, 4))[0][:, -1])


@pytest.mark.parametrize(("model", "form"), [(Direct, "vmap"), (Recurrent, "loop")])
def test_fallbacks_give_the_same_result_and_say_why(model, form, caplog):
    torch.manual_seed(0)
    net, x = model().double(), torch.randn(48, 8, dtype=torch.float64)
    data = (x, torch.arange(48) % 3)
    with caplog.at_level("INFO", logger="lamina"):
        auto = lamina.Simulation(net, data, "fedlamb", clients=PARTS, batch_size=4, device="cpu")
    assert len([r for r in caplog.records if r.name.startswith("lamina")]) == 1
    taken = "loop" if isinstance(auto.engine, Loop) else auto.engine.forward.name
    assert taken == form
    loop = lamina.Simulation(net, data, "fedlamb", clients=PARTS, batch_size=4, device="cpu", engine="loop")
    auto.run(2)
    loop.run(2)
    assert torch.allclose(auto.state.server.x, loop.state.server.x, rtol=1e-9, atol=1e-12)
    with pytest.raises(lamina.BadInput, match="engine='stacked' is not possible"):
        lamina.Simulation(net, data, "fedlamb", clients=PARTS, device="cpu", engine="stacked")


def test_a_large_model_on_a_cpu_has_a_chunk_for_itself():
    data = (torch.randn(48, 8), torch.arange(48) % 3)
    for net, rows in ((nn.Linear(8, 40_000), 1), (nn.Linear(8, 100), 4660)):
        run = lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu")
        member = Member(run.algorithm, run.state, run.plan.round(1), run.protocol)
        assert memory.rows_that_fit(run.engine, member) == rows  # 16 MB / (900 parameters x 4 bytes)


def test_a_module_that_mixes_samples_or_clients_is_not_stacked():
    torch.manual_seed(0)
    net, x = Sneaky().double(), torch.randn(8, 8, dtype=torch.float64)
    forward, why = choose_forward(lamina.objective.Objective(net), (x, torch.arange(8) % 3), "fp32")
    assert forward is None or forward.name != "stacked"
    assert why


class OwnStatistics(nn.Module):
    """Keeps a running mean of its own, over the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.8).add_(0.2 * x.detach().mean(0))
        return self.fc(x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_module_that_keeps_statistics_of_its_own_runs_in_the_loop(dropout):
    torch.manual_seed(0)
    net, x = nn.Sequential(OwnStatistics(), nn.Dropout(dropout)).double(), torch.randn(48, 8, dtype=torch.float64)
    auto = lamina.Simulation(net, (x, torch.arange(48) % 3), "fedavg", clients=PARTS, batch_size=4, device="cpu")
    assert isinstance(auto.engine, Loop)
    for engine in ("stacked", "vmap"):
        with pytest.raises(
            lamina.BadInput, match=r"computes one value over all samples of a batch|training changes the buffer"
        ):
            lamina.Simulation(net, (x, torch.arange(48) % 3), "fedavg", clients=PARTS, device="cpu", engine=engine)


def test_a_cpu_without_bf16_instructions_computes_in_fp32_and_says_so(caplog, monkeypatch):
    net, data = nn.Linear(8, 3), (torch.randn(48, 8), torch.arange(48) % 3)
    monkeypatch.setattr("lamina.devices.has_bf16_instructions", lambda: False)
    run = lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", precision="bf16")
    assert run.precision == run.engine.forward.precision == "fp32"
    assert "this CPU has no bf16 instructions, so the run uses fp32" in caplog.text


def test_bf16_is_never_dropped_in_silence(caplog, monkeypatch):
    monkeypatch.setattr("lamina.devices.has_bf16_instructions", lambda: True)
    net, data = nn.Linear(8, 3), (torch.randn(48, 8), torch.arange(48) % 3)
    with pytest.raises(lamina.BadInput, match="bf16"):
        lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", engine="loop", precision="bf16")
    lamina.Simulation(Recurrent(), data, "fedavg", clients=PARTS, device="cpu", precision="bf16")
    assert "precision='bf16' needs stacked layers" in caplog.text
    with pytest.raises(lamina.BadInput, match="did you mean 'bf16'"):
        lamina.Simulation(net, data, "fedavg", clients=PARTS, device="cpu", precision="bf61")


def test_the_path_of_the_gpu_refuses_a_lone_sample_too():
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    data = (torch.randn(48, 8), torch.arange(48) % 3)
    run = lamina.Simulation(net, data, "fedavg", clients=8, partition="reallocate", participation=0.5, batch_size=11,
                            device="cpu", engine="stacked")  # 48 samples over 4 clients: 12 = 11 + 1  # fmt: skip
    run.engine.always_graphed, run.engine.compiled = True, False
    with pytest.raises(lamina.BadInput, match="BatchNorm cannot train on a batch of one sample"):
        run.run(1)


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


def test_stacked_engines_can_be_replaced_by_the_loop_in_mid_run():
    run, reference = simulation("cnn", "fedlamb", "stacked"), simulation("cnn", "fedlamb", "loop")
    run.run(2)
    run.engine = dataclasses.replace(reference.engine, objective=run.objective)
    run.run(2)
    reference.run(4)
    assert_same(run.state, reference.state, 1e-9)


# --- the forms of a convolution ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("padding", "kernel"), [((0, 0), (3, 3)), ((1, 1), (3, 3)), ((2, 1), (5, 2))])
def test_a_grouped_convolution_is_one_per_client(padding, kernel):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 5, 4, *kernel, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 5, dtype=torch.float64)
    out = convolution.grouped(x, w, b, (1, 1), padding, (1, 1), 1)
    expected = convolution.one_by_one(x, w, b, (1, 1), padding, (1, 1), 1)
    assert torch.allclose(out, expected, rtol=1e-12)
    seed = torch.randn_like(expected)
    for a, b in zip(torch.autograd.grad(out, (x, w), seed), torch.autograd.grad(expected, (x, w), seed), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_grouped_with_stride_and_groups():
    torch.manual_seed(0)
    x, w = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64), torch.randn(3, 6, 2, 3, 3, dtype=torch.float64)
    settings = (None, (2, 1), (1, 1), (1, 2), 2)
    assert torch.allclose(convolution.grouped(x, w, *settings), convolution.one_by_one(x, w, *settings), rtol=1e-12)


def test_only_plain_max_pooling_has_a_kernel_of_ours():
    stacked = stack(nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1)))
    assert [type(layer) is PlainMaxPool2d for layer in stacked] == [True, False, False]
    x = torch.randn(2, 3, 7, 9)
    assert torch.equal(stacked[0](x), nn.functional.max_pool2d(x, 2))


# --- local state in parts -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class WholeNorm(FedAvg):
    """Normalises the whole gradient: its step couples all layers."""

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, grad / torch.linalg.vector_norm(grad, dim=-1, keepdim=True), lr, layers)


@dataclasses.dataclass(frozen=True, eq=False)
class ClipsInside(FedAvg):
    """Clips the whole gradient in its own step: couples layers, but only when the gradient is long."""

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, clip_by_norm(grad, 100.0), lr, layers)


def test_an_algorithm_that_couples_layers_gets_whole_vectors():
    assert not works_by_layer(ClipsInside())
    assert all(works_by_layer(lamina.create(name)) for name in lamina.algorithms.registry())
    assert not works_by_layer(lamina.create("fedlamb", layers="module"))
    assert not works_by_layer(WholeNorm())
    ends = {}
    for engine in ("stacked", "loop"):
        run = simulation("cnn", WholeNorm(), engine)
        run.run(2)
        ends[engine] = run.state
    assert_same(ends["stacked"], ends["loop"], 1e-9)


def test_parameters_that_are_added_share_a_gradient_and_get_a_step_each():
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))

        def forward(self, x):
            return x @ (self.a + self.b)

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(48, 5, generator=generator, dtype=torch.float64), torch.arange(48) % 3
    made = []
    for engine in ("loop", "vmap"):
        torch.manual_seed(0)
        run = lamina.Simulation(Added().double(), data, "fedavg", clients=PARTS, lr=0.1, device="cpu", engine=engine)
        run.run(3)
        made.append(run.state)
    assert_same(made[1], made[0], 1e-9)


def test_clipping_looks_at_the_whole_gradient():
    ends = {}
    for engine in ("stacked", "loop"):
        run = simulation("cnn", "fedavg", engine, clip=0.05)
        run.run(2)
        ends[engine] = run.state
    assert_same(ends["stacked"], ends["loop"], 1e-9)


@pytest.mark.parametrize("graphed", [False, True])
def test_a_member_that_diverges_leaves_its_rows_idle(graphed):
    """One of five members diverges in round 1: the captured step is used on, and the others end as if alone."""
    rates, decays = (0.01, 1e30, 0.02, 0.03, 0.04), (0.0, 0.1, 0.2, 0.3, 0.4)

    def member(i):
        return simulation("cnn", lamina.create("fedlamb", decay=decays[i]), "stacked", torch.float32, lr=rates[i])

    population = lamina.Population([member(i) for i in range(5)])
    engine = population.simulations[0].engine
    engine.always_graphed, engine.compiled = graphed, False
    population.run(3)
    assert list(population.diverged) == [1]
    assert len(engine._graphs) == (1 if graphed else 0)
    for i in (0, 2, 3, 4):
        alone = member(i)
        alone.run(3)
        assert torch.allclose(population.simulations[i].state.server.x, alone.state.server.x, rtol=1e-4, atol=1e-6)


class Branching(lamina.algorithms.FedAvg):
    """Stops where the gradient is small: for every client alone that is fine."""

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, grad if grad.norm() > 1 else 0 * grad, lr, layers)


class BranchingOnRows(lamina.algorithms.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, grad if grad.norm(dim=-1) > 1 else 0 * grad, lr, layers)


@pytest.mark.parametrize("kind", [Branching, BranchingOnRows])
def test_an_algorithm_that_branches_on_values_runs_in_the_loop(kind, caplog):
    with caplog.at_level("INFO"):
        run = simulation("cnn", kind(), "auto")
    assert isinstance(run.engine, Loop)
    assert "running client by client: several clients' step is not each one's own step" in caplog.text
    with pytest.raises(lamina.BadInput, match="engine='stacked' is not possible here: several clients' step"):
        simulation("cnn", kind(), "stacked")


@pytest.mark.parametrize("name", lamina.registry())
def test_every_algorithm_of_ours_works_row_by_row(name):
    assert works_by_row(lamina.create(name))
    for preset in lamina.algorithms.find(name).card.presets:
        assert works_by_row(lamina.create(name, preset))


def out_of_memory(*_arguments, **_options):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to. If reserved but unallocated ...")


@pytest.mark.parametrize("before", [0, 2])  # steps that go well: Mime-LAMB's full gradients are the first
@pytest.mark.parametrize("name", ["scaffold", "mimelamb"])  # with state of the clients; with full gradients
def test_a_chunk_that_does_not_fit_the_memory_is_halved(name, before, monkeypatch, caplog):
    holds, sizes = 3, []

    def step(self, local, down, buffers, index, *more):
        sizes.append(len(index))
        ended = usual(self, local, down, buffers, index, *more)
        if len(index) > holds and len(sizes) > before:
            out_of_memory()
        return ended

    run, alone = (
        simulation("cnn", name, engine, clients=[range(i, i + 9) for i in range(0, 45, 9)], participation=1.0)
        for engine in ("stacked", "loop")
    )
    usual = Steps.step
    monkeypatch.setattr(Steps, "step", step)
    run.engine.rows_per_chunk = 5
    run.run(3)
    alone.run(3)
    assert sizes[: before + 1] == [5] * (before + 1)
    assert set(sizes[before + 1 :]) == {3, 2}
    assert [line for line in caplog.messages if "memory" in line] == [
        "5 clients at a time do not fit the GPU's memory: from here on at most 3"
    ]
    assert run.engine.rows_per_chunk == 5  # what was asked for
    assert_same(run.state, alone.state, 1e-9)

    holds = 0
    with pytest.raises(lamina.errors.BadInput, match="too small for one client: take smaller batches, or a CPU"):
        run.run(4)


@pytest.mark.parametrize(
    ("place", "what", "which"),
    [
        (GraphedSteps, "__init__", 1),
        (stacked_engine.Stacked, "_means", 2),  # without those that have diverged
        (stacked_engine.Stacked, "_explain", 2),
        (Sums, "plus", 2),
        (torch, "clone", 5),
    ],
)
def test_wherever_the_memory_runs_out_nothing_is_counted_twice(place, what, which, monkeypatch, caplog):
    """One call fails in the first round of four members, two of which diverge."""

    def population():
        made = lamina.Population(
            [
                simulation("batch_norm", lamina.create("scaffold", decay=decay), "stacked", lr=lr, participation=1.0)
                for lr, decay in ((0.01, 0.0), (0.02, 0.1), (1e200, 0.2), (1e200, 0.3))
            ]
        )
        engine = made.simulations[0].engine
        engine.always_graphed, engine.compiled = True, False
        engine.rows_per_chunk = 16
        return made, engine

    reference, _ = population()
    reference.run(2)
    calls = []

    def fails_once(*arguments, **options):
        calls.append(1)
        if len(calls) == which:
            out_of_memory()
        return usual(*arguments, **options)

    usual = getattr(place, what)
    monkeypatch.setattr(place, what, fails_once)
    run, engine = population()
    run.run(2)
    assert "16 clients at a time do not fit the GPU's memory: from here on at most 8" in caplog.text
    assert engine.compiled is False
    assert list(run.diverged) == list(reference.diverged) == [2, 3]
    for one, other in zip(run.simulations[:2], reference.simulations[:2], strict=True):
        assert_same(one.state, other.state, 1e-9)
        for row, expected in zip(one.history, other.history, strict=True):
            assert row["consistency"] == pytest.approx(expected["consistency"], rel=1e-9)
            assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-9)


def test_memory_that_runs_out_is_no_fault_of_the_compiler(monkeypatch, caplog):
    run = simulation("cnn", "fedlamb", "stacked")
    run.engine.always_graphed, run.engine.compiled = True, True
    monkeypatch.setattr(stacked_engine, "GraphedSteps", out_of_memory)
    with pytest.raises(lamina.errors.BadInput, match="too small for one client"):
        run.run(1)
    assert "torch.compile fails" not in caplog.text
    assert run.engine.compiled is True


def test_one_client_fits_once_what_others_hold_is_given_back(monkeypatch):
    """Chunks of four and of one: the second captured step does not fit beside the first, but alone."""
    run, reference = (simulation("cnn", "fedlamb", "stacked", participation=1.0) for _ in range(2))
    run.engine.always_graphed, run.engine.compiled = True, False
    reference.run(2)

    def beside_none(*arguments, **options):
        if run.engine._graphs:
            out_of_memory()
        return GraphedSteps(*arguments, **options)

    monkeypatch.setattr(stacked_engine, "GraphedSteps", beside_none)
    run.engine.rows_per_chunk = 4
    run.run(2)
    assert_same(run.state, reference.state, 1e-9)


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 78.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_say_that_the_memory_ran_out(error, is_it):
    assert memory.is_out_of_memory(error) is is_it


def test_a_compiler_that_fails_is_said_and_done_without(monkeypatch, caplog):
    def fails(*_arguments, **_settings):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fails)
    run, usual = simulation("cnn", "fedlamb", "stacked"), simulation("cnn", "fedlamb", "stacked")
    run.engine.always_graphed, run.engine.compiled = True, True
    run.run(2)
    assert "torch.compile fails on this model, so it runs uncompiled: no compiler here" in caplog.text
    usual.run(2)
    assert_same(run.state, usual.state, 1e-9)


def test_client_state_may_live_elsewhere_than_the_model():
    run, usual = simulation("cnn", "scaffold", "stacked"), simulation("cnn", "scaffold", "stacked")
    run.engine.client_home = torch.device("cpu")
    run.run(3)
    usual.run(3)
    assert_same(run.state, usual.state, 1e-12)


def test_the_memory_of_a_row_is_measured():
    """Linear(8, 64)-ReLU-Linear(64, 3): the saved activations grow by the batch, the vectors do not."""
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    run = lamina.Simulation(net, (torch.randn(64, 8), torch.arange(64) % 3), "fedavg", clients=2, device="cpu")
    small, large = (memory.row_bytes(run.engine, batch) for batch in (8, 32))
    p = sum(t.numel() for t in net.parameters())
    assert small >= memory.VECTORS * 4 * p
    assert large - small >= 2 * 24 * 64 * 4  # at least the hidden layer of 24 more samples, twice


# --- what members of a population share ---------------------------------------------------------------------------


def noise(seed=0, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(48, 8), torch.arange(48) % 3
    settings = {"clients": 6, "participation": 0.5, "batch_size": 4, "device": "cpu", "engine": "stacked"} | settings
    return lamina.Simulation(settings.pop("net", net), data, settings.pop("algorithm", "fedavg"), seed=seed, **settings)


def test_members_that_differ_in_rates_alone_share_one_plan(monkeypatch):
    made = []
    plan_round = lamina.plan.Plan.round

    def counted(self, number):
        made.append((self.protocol.seed, number))
        return plan_round(self, number)

    parts = [list(range(i, 48, 6)) for i in range(6)]
    members = [noise(lr=0.1), noise(lr=0.2, schedule="constant"), noise(1, lr=0.1), noise(lr=0.1, clients=parts)]
    alone = [noise(lr=0.1), noise(lr=0.2), noise(1, lr=0.1), noise(lr=0.1, clients=parts)]
    population = lamina.Population(members)
    with monkeypatch.context() as patch:
        patch.setattr(lamina.plan.Plan, "round", counted)
        population.run(3)
    assert len(made) == 3 * 3  # the first two share theirs; another seed and other clients have their own
    for member, own in zip(members, alone, strict=True):
        own.run(3)
        assert torch.allclose(member.state.server.x, own.state.server.x, rtol=1e-5, atol=1e-7)


def test_models_that_differ_cannot_be_stacked():
    tanh = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(lamina.BadInput, match=r"their models differ in '1' \(ReLU and Tanh\)"):
        lamina.Population([noise(), noise(net=tanh)])

    class Shifted(nn.Module):
        def __init__(self, shift, frozen):
            super().__init__()
            self.linear = nn.Linear(8, 3)
            self.register_buffer("shift", torch.full((8,), shift))
            self.mixing = nn.Linear(8, 8, bias=False).requires_grad_(False)
            self.mixing.weight.data.fill_(frozen)

        def forward(self, x):
            return self.linear(self.mixing(x) + self.shift)

    for other, what in ((Shifted(2.0, 1.0), "buffers"), (Shifted(1.0, 2.0), "frozen parameters")):
        with pytest.raises(lamina.BadInput, match=f"different {what}"):
            lamina.Population([noise(net=Shifted(1.0, 1.0)), noise(net=other)])


def test_a_simulation_lends_its_engine_to_one_of_the_same_model_only(monkeypatch):
    monkeypatch.setattr("lamina.devices.has_bf16_instructions", lambda: True)
    first = noise(lr=0.1)
    like, own = noise(1, lr=0.2, engine=first), noise(1, lr=0.2)
    assert like.engine.forward is first.engine.forward
    like.run(2), own.run(2)
    assert torch.equal(like.state.server.x, own.state.server.x)
    tanh = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    assert noise(net=tanh, engine=first).engine.forward is not first.engine.forward
    mse = noise(engine=first, loss=lambda outputs, targets: outputs[:, 0] ** 2)
    assert mse.engine.forward is not first.engine.forward
    looping = noise(engine="loop")
    assert isinstance(noise(engine=looping).engine, Loop)
    with pytest.raises(lamina.BadInput, match="needs stacked layers"):
        noise(engine=looping, precision="bf16")


@pytest.mark.parametrize("graphed", [False, True])
def test_a_full_gradient_by_batch_statistics_is_the_loops(graphed):
    """Without running statistics it matters which samples are evaluated together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(200, 8, dtype=torch.float64), torch.arange(200) % 3  # a client's 100 are more than one piece
    runs = [
        lamina.Simulation(copy.deepcopy(net).double(), data, "mime", clients=2, batch_size=8, lr=0.05, device="cpu",
                          engine=engine)
        for engine in ("loop", "stacked")
    ]  # fmt: skip
    runs[1].engine.always_graphed, runs[1].engine.compiled = graphed, False
    for run in runs:
        run.run(2)
    assert torch.allclose(runs[0].state.server.x, runs[1].state.server.x, rtol=1e-9, atol=1e-12)
