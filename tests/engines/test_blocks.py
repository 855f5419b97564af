"""A step in blocks is the step on whole vectors, to the last bit; a step with a reduction is not taken in blocks."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lamina
from lamina.algorithms.contract import ClientInfo, LocalModel, Model, ServerInfo
from lamina.engines import blocks
from lamina.engines.blocks import Segments, Step
from lamina.objective.layers import Layers

LAYERS = Layers({"a.weight": (70, 50), "a.bias": (70,), "b.weight": (10, 71)})
WITH_REDUCTIONS = {  # norms, means over layers, functions of matrices
    "deltasgd", "fedlada_lamb", "fedlamb", "fedlars", "fedmuon", "fedsps", "localmuon", "mimelamb",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 256)


def start(algorithm, dtype=torch.float32, round=1):
    """Return the broadcast and the local state at the start of a round."""
    x, needs = torch.randn(LAYERS.size, generator=torch.Generator().manual_seed(0), dtype=dtype), algorithm.needs(round)
    server_info = ServerInfo(round, 1e-2, LAYERS, mean_gradient=x if needs.control_variate else None)
    down = algorithm.broadcast(algorithm.init(x, LAYERS), server_info)
    info = ClientInfo(round, 1e-2, LAYERS, full_gradient=x if needs.full_gradient else None)
    return down, algorithm.begin(down, algorithm.client_init(x, LAYERS), info)


def steps(step, local, down, needs, count=4):
    """Return the local states of some steps."""
    generator, like, states = torch.Generator().manual_seed(1), local.y, []

    def draw(size):
        return torch.randn(size, generator=generator, dtype=like.dtype)

    for k in range(count):
        more = {"loss": draw(1).abs()} if needs.loss else {}
        more |= {"second_grad": draw(LAYERS.size)} if needs.second_gradient else {}
        local = step(local, down, draw(LAYERS.size) * 10.0**-k, 1e-2, LAYERS, **more)
        states.append(local)
    return states


def same(one, other):
    """Return whether two records are equal to the last bit."""
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def copies(record):
    return type(record)(*(None if value is None else value.clone() for value in record))


def in_segments(step):
    """Return the step with its gradient in segments."""

    def call(local, down, grad, *arguments, **more):
        return step(local, down, Segments(list(LAYERS.unflatten(grad).values())), *arguments, **more)

    return call


def taken_in_blocks(recordings):
    """Return whether steps are repeated in blocks, once two are recorded."""
    ((first, second),) = recordings.values()
    return first is not None and second is not None


PRESETS = [
    (name, preset)
    for name in sorted(lamina.algorithms.BUILT_IN)
    for preset in ["", *sorted(lamina.create(name).card.presets)]
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_our_steps_in_blocks_are_the_steps_on_whole_vectors(name, preset, dtype):
    algorithm = lamina.create(name, **(lamina.create(name).card.presets[preset] if preset else {}))
    has_reduction = name in WITH_REDUCTIONS or algorithm.clips_direction
    for round in (1, 2):
        down, local = start(algorithm, dtype, round)
        before, needs, recordings = (copies(down), copies(local)), algorithm.needs(round), {}
        whole = steps(algorithm.step, local, down, needs)
        in_blocks = steps(Step(algorithm, recordings, may_overwrite=True), local, down, needs)
        assert same(in_blocks[-1], whole[-1])
        apart = steps(in_segments(Step(algorithm, {}, may_overwrite=True)), local, down, needs)
        assert same(apart[-1], whole[-1])
        assert same(down, before[0])  # what was not allocated by the steps is not written
        assert same(local, before[1])
        kept = steps(Step(algorithm, recordings, may_overwrite=False), local, down, needs)
        assert all(same(one, other) for one, other in zip(kept, whole, strict=True))
        assert taken_in_blocks(recordings) != has_reduction


@pytest.mark.parametrize("lengths", [[5], [256], [1000], [100, 156, 300], [1, 255, 256, 512, 3], [0, 7, 0, 600, 1]])
def test_segments_are_read_block_by_block(lengths):
    vector = torch.arange(sum(lengths))
    segments = Segments(torch.split(vector, lengths))
    assert segments.length == len(vector)
    assert torch.equal(segments.joined(), vector)
    for size in (1, 64, 256, 2000):
        blocks = [block.clone() for block in segments.blocks(size)]
        assert list(map(len, blocks)) == list(map(len, torch.split(vector, size)))
        assert torch.equal(torch.cat(blocks), vector)


class KeptGradient(NamedTuple):
    y: Tensor
    last: Tensor


class KeepsGradient(lamina.FedAvg):
    def begin(self, down, client, info):
        return KeptGradient(down.x, torch.zeros_like(down.x))

    def step(self, local, down, grad, lr, layers):
        return KeptGradient(local.y - lr * (grad + local.last), grad)


def test_a_gradient_in_segments_can_be_kept():
    algorithm = KeepsGradient()
    down, local = start(algorithm)
    step = in_segments(Step(algorithm, {}, may_overwrite=True))
    ended = steps(step, local, down, algorithm.needs(1))[-1]
    assert same(ended, steps(algorithm.step, local, down, algorithm.needs(1))[-1])


def test_states_are_overwritten_only_if_nobody_reads_them():
    algorithm = lamina.create("fedlada")
    down, local = start(algorithm)
    recordings = {}
    for may_overwrite in (True, False):
        step = Step(algorithm, recordings, may_overwrite=may_overwrite)
        *_, third, fourth = steps(step, local, down, algorithm.needs(1))
        assert (third.y is fourth.y) == may_overwrite


def test_a_short_model_is_not_recorded(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", LAYERS.size)
    algorithm, recordings = lamina.create("fedlada"), {}
    down, local = start(algorithm)
    steps(Step(algorithm, recordings, may_overwrite=True), local, down, algorithm.needs(1))
    assert recordings == {}


def test_another_learning_rate_is_recorded_again():
    algorithm, recordings = lamina.create("fedavg"), {}
    down, local = start(algorithm)
    step = Step(algorithm, recordings, may_overwrite=True)
    for lr in (0.1, 0.1, 0.2, 0.2):
        assert same(step(local, down, down.x, lr, LAYERS), algorithm.step(local, down, down.x, lr, LAYERS))


class Own(lamina.FedAvg):
    """A user's algorithm."""

    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * self.direction(grad, layers))


class Norm(Own):
    def direction(self, grad, layers):
        return grad / torch.linalg.vector_norm(grad)


class Sum(Own):
    def direction(self, grad, layers):
        return grad - grad.sum()


class Order(Own):
    def direction(self, grad, layers):
        return grad.flip(-1)


class Running(Own):
    def direction(self, grad, layers):
        return grad.cumsum(-1) / 100


class Branch(Own):
    def direction(self, grad, layers):
        return grad if grad[-1] > 0 else 2 * grad


class Position(Own):
    def direction(self, grad, layers):
        return grad * torch.linspace(0, 1, grad.shape[-1], dtype=grad.dtype)


class ByLayer(Own):
    def direction(self, grad, layers):
        return grad * layers.spread(torch.arange(3, dtype=grad.dtype))


class InPlace(Own):
    def direction(self, grad, layers):
        return grad.mul(3.0).add_(1.0)


MASK = torch.arange(LAYERS.size) % 2


class Mask(Own):
    def direction(self, grad, layers):
        return grad * MASK


class ByNumpy(Own):
    def direction(self, grad, layers):
        return grad * float(abs(grad.numpy()).max())


class Matrix(Own):
    def direction(self, grad, layers):
        return torch.where(layers.where_matrix(grad, -grad) > 0, grad, 0.0)


@pytest.mark.parametrize("kind", [Norm, Sum, Order, Running, Branch, Position, ByLayer, InPlace, Matrix, Mask, ByNumpy])
def test_a_step_with_another_operation_is_taken_on_whole_vectors(kind):
    algorithm, recordings = kind(), {}
    down, local = start(algorithm)
    states = steps(Step(algorithm, recordings, may_overwrite=True), local, down, algorithm.needs(1))
    assert same(states[-1], steps(algorithm.step, local, down, algorithm.needs(1))[-1])
    assert not taken_in_blocks(recordings)


class Random(Own):
    def direction(self, grad, layers):
        return grad * torch.rand(1)


class OwnRandom(Own):
    def direction(self, grad, layers):
        return grad * random.random()


@pytest.mark.parametrize("kind", [Random, OwnRandom])
def test_a_random_step_draws_again_in_every_step(kind):
    algorithm, recordings, ends = kind(), {}, []
    down, local = start(algorithm)
    for step in (algorithm.step, Step(algorithm, recordings, may_overwrite=True)):
        torch.manual_seed(0)
        random.seed(0)
        ends.append(steps(step, local, down, algorithm.needs(1))[-1])
    assert same(*ends)
    assert not taken_in_blocks(recordings)


class Size(Own):
    def direction(self, grad, layers):
        return grad / grad.shape[-1] ** 0.5 * (2 if layers.size > 1000 else 3)


class Many(Own):
    def direction(self, grad, layers):
        low = torch.where(grad.abs() > 0.5, grad, torch.tensor(0.25)).clamp(-1.5, 1.5)
        return low.tanh() * torch.exp(-(grad**2)) + torch.addcmul(grad, low, grad, value=0.1).sign().sqrt().nan_to_num(
            1
        )


@pytest.mark.parametrize("kind", [Size, Many])
def test_elementwise_steps_of_users_are_taken_in_blocks(kind):
    algorithm, recordings = kind(), {}
    down, local = start(algorithm)
    states = steps(Step(algorithm, recordings, may_overwrite=True), local, down, algorithm.needs(1))
    assert same(states[-1], steps(algorithm.step, local, down, algorithm.needs(1))[-1])
    assert taken_in_blocks(recordings)


class Past(NamedTuple):
    y: Tensor
    last: Tensor
    older: Tensor
    grad: Tensor
    twice: Tensor


class KeepsThePast(lamina.FedAvg):
    """Fields change places, and one vector is two fields."""

    def begin(self, down, client, info):
        return Past(*[down.x] * 5)

    def step(self, local, down, grad, lr, layers):
        y = local.y - lr * (grad + local.last - local.older)
        total = local.grad + grad
        return Past(y - local.twice * lr, local.y, local.last, total, total)


def test_fields_may_change_places():
    algorithm, recordings = KeepsThePast(), {}
    down, local = start(algorithm)
    states = steps(Step(algorithm, recordings, may_overwrite=True), local, down, algorithm.needs(1), count=6)
    assert same(states[-1], steps(algorithm.step, local, down, algorithm.needs(1), count=6)[-1])
    assert taken_in_blocks(recordings)
    assert same(down, Model(start(algorithm)[0].x))


@pytest.mark.parametrize("name", ["fedlada", "fedsam", "mime", "scaffold"])
def test_a_run_in_blocks_is_the_run_on_whole_vectors(name, monkeypatch):
    generator = np.random.default_rng(0)
    data = generator.normal(size=(60, 8)).astype("float32"), generator.integers(0, 3, 60)

    def trained(size):
        monkeypatch.setattr(blocks, "BLOCK", size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 3))
        simulation = lamina.Simulation(
            model, data, name, clients=6, participation=0.5, batch_size=5, local_steps=3, seed=1, engine="loop",
            clip=1.0, private=["2.bias"],
        )  # fmt: skip
        simulation.run(3, progress=False)
        state = simulation.state
        return *state.server, *(value for c in sorted(state.clients) for value in state.clients[c] if value is not None)

    taken = []
    monkeypatch.setattr(blocks.Recording, "repeat", lambda *a, f=blocks.Recording.repeat: taken.append(1) or f(*a))
    in_blocks = trained(100)
    assert taken
    whole = trained(10**6)
    assert all(torch.equal(one, other) for one, other in zip(in_blocks, whole, strict=True) if isinstance(one, Tensor))


@pytest.mark.parametrize("name", ["fedavg", "fedlada", "localadam"])
def test_the_gradients_of_all_parameters_stay_apart_for_the_step(name, monkeypatch):
    """Nothing but the step reads them here: there is no clipping, for example."""
    generator = np.random.default_rng(0)
    data = generator.normal(size=(60, 8)).astype("float32"), generator.integers(0, 3, 60)

    def trained(size):
        monkeypatch.setattr(blocks, "BLOCK", size)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 3))
        settings = {"clients": 6, "participation": 0.5, "batch_size": 5, "local_steps": 3, "engine": "loop"}
        simulation = lamina.Simulation(model, data, name, **settings)
        simulation.run(3, progress=False)
        return simulation.state.server.x

    monkeypatch.setattr(blocks.Segments, "joined", lambda self, f=blocks.Segments.joined: joined.append(1) or f(self))
    joined = []
    in_blocks = trained(100)
    assert len(joined) == 2  # only to record
    assert torch.equal(in_blocks, trained(10**6))
