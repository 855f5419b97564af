"""Members of a population keep the settings they have alone; what cannot differ is refused by name."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

import lamina
from lamina.algorithms.primitives import clip_by_norm
from lamina.data import Augment, Dataset
from lamina.objective.fingerprint import alike
from small_simulations import PARTS, assert_same, take_gpu_path

IMAGES = torch.randint(0, 256, (48, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(48) % 3


def net(hidden=6, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 3)).double()


def simulation(model=None, data=None, algorithm="fedavg", **more):
    data = Dataset(IMAGES, LABELS) if data is None else data
    settings = {"clients": PARTS, "participation": 0.6, "batch_size": 4, "lr": 0.1, "seed": 3, "device": "cpu"}
    return lamina.Simulation(net() if model is None else model, data, algorithm, **settings | more)


def assert_each_is_as_if_alone(make, settings, *, graphed=False):
    members, alone = ([make(**own) for own in settings] for _ in range(2))
    if graphed:
        take_gpu_path(members[0])
    population = lamina.Population(members)
    for _ in range(3):
        population.run(1)
    for member, own in zip(members, alone, strict=True):
        own.run(3)
        assert_same(member.state, own.state, 1e-12)
        assert member.history[-1]["train_loss"] == pytest.approx(own.history[-1]["train_loss"], rel=1e-12)
    ends = [own.state.server.x for own in alone]
    assert not any(torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


@pytest.mark.long
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("limits", [(None, 0.1, 0.3), (0.1, None), (0.2, 0.1)])
def test_members_clip_by_their_own_norm(limits, graphed):
    assert_each_is_as_if_alone(simulation, [{"clip": limit} for limit in limits], graphed=graphed)


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("name", ["fedcm", "scaffold"])
def test_members_clip_their_direction_by_their_own_norm(name, graphed):
    members = [{"algorithm": lamina.create(name, clip_direction=limit), "clip": 0.05} for limit in (0.1, 0.3)]
    assert_each_is_as_if_alone(simulation, members, graphed=graphed)


@pytest.mark.parametrize("algorithm", ["fedlamb", "scaffold"])
def test_members_weigh_clients_in_their_own_way(algorithm):
    make = functools.partial(simulation, algorithm=algorithm, lr=0.01)
    assert_each_is_as_if_alone(make, [{"weighting": "clients"}, {"weighting": "examples"}])


def test_members_have_their_own_protocol():
    protocols = [{"participation": 1.0}, {"epochs": 2}, {"local_steps": 3}, {"sampling": "bernoulli"}, {"lr": 0.2}]
    assert_each_is_as_if_alone(simulation, protocols)


class UsesParticipation(lamina.FedAvg):
    """Scales the server's step by the share of clients that take part."""

    def update(self, server, up, info):
        return super().update(server, up._replace(delta=up.delta * info.participation), info)


def test_servers_see_the_participation_of_their_own_member():
    make = functools.partial(simulation, algorithm=UsesParticipation())
    assert_each_is_as_if_alone(make, [{"participation": 0.4}, {"participation": 1.0}])


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"data": Dataset(IMAGES, (LABELS + 1) % 3)}, "their training data have different labels or targets"),
        ({}, {"data": Dataset(IMAGES.flip(0), LABELS)}, "they have different training data"),
        ({}, {"data": Dataset(IMAGES.double() / 255, LABELS)}, "they have different training data"),
        (
            {},
            {"data": Dataset(IMAGES, LABELS, mean=(0.5,), std=(1.0,))},
            r"their training data differ in mean \(None and \(0.5,\)\)",
        ),
        (
            {"data": Dataset(IMAGES, LABELS, mean=(0.5,), std=(1.0,))},
            {"data": Dataset(IMAGES, LABELS, mean=(0.5,), std=(0.5,))},
            r"differ in std \(\(1.0,\) and \(0.5,\)\)",
        ),
        ({}, {"augmentation": Augment(1)}, r"they differ in augmentation \(None and Augment\(pad=1, "),
        ({"augmentation": Augment(1)}, {"augmentation": Augment(1, flip=False)}, "they differ in augmentation"),
        ({}, {"precision": "tf32"}, r"they differ in precision \(fp32 and tf32\)"),
        ({}, {"deterministic": True}, r"they differ in deterministic \(False and True\)"),
        ({}, {"trust_ratios": True}, r"they differ in trust_ratios \(False and True\)"),
        ({}, {"aggregation": "median"}, "they differ in aggregation"),
        ({}, {"batch_size": 5}, r"they differ in batch_size \(4 and 5\)"),
        ({}, {"loss": lambda outputs, targets: outputs[:, 0] ** 2}, "they have different losses"),
        ({}, {"model": net().float()}, "different types"),
        ({}, {"algorithm": "fedlamb"}, "different algorithms"),
        (
            {"algorithm": "fedlamb"},
            {"algorithm": lamina.FedLamb(sync_every=2)},
            "their algorithms synchronise after different numbers of rounds",
        ),
        ({}, {"engine": "loop"}, r"they run on different engines \(stacked and loop\)"),
    ],
)
def test_what_members_cannot_differ_in_is_refused_by_name(first, second, message):
    start = "simulations 0 and 2 cannot be stacked: .*"
    with pytest.raises(lamina.BadInput, match=start + message):
        lamina.Population([simulation(**first), simulation(**first, seed=4), simulation(**second)])


@dataclasses.dataclass(frozen=True)
class Limited(lamina.FedAvg):
    """Clips the whole gradient in its step: layers are coupled unless there is no limit."""

    limit: float = float("inf")

    def step(self, local, down, grad, lr, layers):
        return super().step(local, down, clip_by_norm(grad, self.limit), lr, layers)


def test_an_option_that_couples_layers_is_refused():
    with pytest.raises(lamina.BadInput, match="layer by layer"):
        lamina.Population([simulation(algorithm=Limited()), simulation(algorithm=Limited(limit=0.01))])
    lamina.Population([simulation(algorithm=Limited(limit=0.02)), simulation(algorithm=Limited(limit=0.01))])


# --- models -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A model with plain attributes of several kinds."""

    def __init__(self, scale=1.0, activation=F.relu, seed=0, **more):
        super().__init__()
        self.body = net(seed=seed)
        self.scale, self.activation, self.more = scale, activation, more

    def forward(self, x):
        return self.body(self.activation(x.flatten(1)).reshape(x.shape)) * self.scale


def times(factor):
    return lambda x: factor * x


class Settings:
    """Settings of a user's own class, which prints all of them alike."""

    def __init__(self, width):
        self.width = width

    def __repr__(self):
        return "Settings"


def hooked(factor):
    model = Net()
    model.body[1].register_forward_hook(lambda layer, inputs, output: factor * output)
    return model


def nested(scale):
    return nn.Sequential(net(), nn.Sequential(Scaled(scale)))


class Scaled(nn.Module):
    """Multiplies by a plain number."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


PAIRS = {
    "a number": (lambda: Net(scale=1.0), lambda: Net(scale=2.0)),
    "a function": (lambda: Net(activation=F.relu), lambda: Net(activation=torch.tanh)),
    "a lambda's closure": (lambda: Net(activation=times(1.0)), lambda: Net(activation=times(2.0))),
    "another lambda": (lambda: Net(activation=lambda x: x), lambda: Net(activation=lambda x: -x)),
    "a tensor": (lambda: Net(scale=torch.ones(3)), lambda: Net(scale=torch.full((3,), 2.0))),
    "an object": (lambda: Net(settings=Settings(3)), lambda: Net(settings=Settings(4))),
    "a partial": (
        lambda: Net(activation=functools.partial(F.leaky_relu, negative_slope=0.1)),
        lambda: Net(activation=functools.partial(F.leaky_relu, negative_slope=0.2)),
    ),
    "a hook": (lambda: hooked(1.0), lambda: hooked(2.0)),
    "deep inside": (lambda: nested(1.0), lambda: nested(2.0)),
    "a bound method": (lambda: Net(call=Scaled(1.0).forward), lambda: Net(call=Scaled(2.0).forward)),
    "weights outside": (lambda: Net(extra=[nn.Linear(1, 1)]), lambda: Net(extra=[nn.Linear(1, 1)])),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", PAIRS)
def test_models_are_compared_by_what_they_hold(kind):
    one, two = PAIRS[kind]
    if kind != "weights outside":
        assert alike(one(), one(), weights=False)  # built again from the same code
    assert not alike(one(), two(), weights=False)
    with pytest.raises(lamina.BadInput, match="their models differ in their layers or attributes"):
        lamina.Population([simulation(one()), simulation(two())])
    first = simulation(one())
    assert simulation(two()).engine.forward is not first.engine.forward


def test_models_made_anew_are_one_model_with_other_weights():
    makers = [
        lambda seed: Net(seed=seed, activation=times(2.0), settings=Settings(3)),
        lambda seed: lamina.models.create("cnn", (1, 28, 28), 3, seed=seed),
        lambda seed: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda seed: parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda seed: nn.GRU(4, 3),
    ]
    for make in makers:
        assert alike(make(0), make(1), weights=False)
    assert not alike(nn.GRU(4, 3), nn.GRU(4, 3, batch_first=True), weights=False)
    lamina.Population([simulation(makers[0](seed), seed=seed) for seed in (0, 1)]).run(1)


def test_a_layer_used_twice_is_not_two_layers():
    shared = nn.Dropout(0.5)
    one = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    two = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2), nn.Dropout(0.5))
    assert not alike(one, two, weights=False)


def test_layers_kept_in_evaluation_mode_are_compared():
    def model(frozen):
        made = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        made[2].train(not frozen)
        return made

    with pytest.raises(lamina.BadInput, match="evaluation mode"):
        lamina.Population([simulation(model(frozen), batch_size=6, clients=4) for frozen in (False, True)])


def test_losses_are_compared_by_what_they_hold():
    def weighted(first):
        return nn.CrossEntropyLoss(weight=torch.tensor([first, 1.0, 1.0], dtype=torch.float64), reduction="none")

    assert_each_is_as_if_alone(simulation, [{"loss": weighted(2.0), "seed": seed} for seed in (3, 4)])
    with pytest.raises(lamina.BadInput, match="different losses"):
        lamina.Population([simulation(loss=weighted(2.0)), simulation(loss=weighted(3.0))])


def test_what_cannot_be_compared_is_different():
    loop = [1.0]
    loop.append(loop)
    other = [1.0]
    other.append(other)
    assert alike(loop, other)  # ends, too
    assert alike(float("nan"), float("nan"))
    assert not alike(1, 1.0)
    assert not alike((x for x in "ab"), (x for x in "ab"))
    assert not alike(object(), 3)


def test_members_that_run_client_by_client_end_as_if_alone():
    settings = {"algorithm": "fedlamb", "engine": "loop"}
    together = lamina.Population([simulation(**settings, lr=lr) for lr in (0.01, 1e30)])
    together.run(2)
    alone = simulation(**settings, lr=0.01)
    alone.run(2)
    assert torch.equal(together.simulations[0].state.server.x, alone.state.server.x)
    assert list(together.diverged) == [1]


def test_stop_iteration_of_on_round_ends_all_members_after_its_round():
    def stop(i, row):
        if (i, row["round"]) == (0, 2):
            raise StopIteration

    population = lamina.Population([simulation(lr=lr) for lr in (0.01, 0.1)])
    assert [history.column("round") for history in population.run(5, stop)] == [[1, 2], [1, 2]]
    assert [len(history) for history in population.run(1)] == [3, 3]
