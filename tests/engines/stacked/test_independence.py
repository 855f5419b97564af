"""What couples clients or members is found before a run: they would get other numbers together than each alone."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lamina
from lamina.algorithms.contract import Displacement, LocalModel, per_client
from lamina.engines.loop import Loop
from lamina.engines.stacked.independence import (
    ignores_order,
    number_without_column,
    work_together,
    works_by_layer,
    works_by_row,
)
from lamina.objective.layers import Layers
from per_layer import PerLayer, PerModule

MODEL = Layers({"a.weight": (30, 8), "a.bias": (30,), "b.weight": (5, 30)}), torch.device("cpu")
X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


class Count(NamedTuple):
    steps: torch.Tensor


class Counts(lamina.FedAvg):
    """Keeps one number per client."""

    def client_init(self, x, layers):
        return Count(per_client(x))


class NormOfAllUploads(lamina.FedAvg):
    def finish(self, local, down, client, info):
        delta = local.y - down.x
        return Displacement(delta / delta.norm()), client


class NormOfOneUpload(lamina.FedAvg):
    def finish(self, local, down, client, info):
        delta = local.y - down.x
        return Displacement(delta / delta.norm(dim=-1, keepdim=True)), client


class MeanAtTheStart(lamina.FedAvg):
    def begin(self, down, client, info):
        return LocalModel(down.x - down.x.mean())


class SumOfAllCounts(Counts):
    def finish(self, local, down, client, info):
        return super().finish(local, down, client, info)[0], Count(client.steps + client.steps.sum() + 1)


@pytest.mark.parametrize("coupled", [NormOfAllUploads, MeanAtTheStart, SumOfAllCounts])
def test_functions_that_mix_clients_at_the_start_or_the_end_are_found(coupled):
    assert not works_by_row(coupled(), *MODEL)


class Warms(Counts):
    """Looks its weight up by the number of rounds that a client took part in."""

    def finish(self, local, down, client, info):
        weight = torch.tensor([0.1, 0.5, 1.0]).to(down.x)[client.steps.long()]
        return Displacement((local.y - down.x) * weight), Count((client.steps + 1).clamp(max=2))


class Odds(Counts):
    """Keeps the logarithm of a weight: the weight itself would overflow for states of any size."""

    def finish(self, local, down, client, info):
        weight = client.steps.exp()
        return Displacement((local.y - down.x) * weight / (weight + 1)), Count(client.steps + 0.1)


@pytest.mark.parametrize("apart", [NormOfOneUpload, Counts, Warms, Odds])
def test_functions_that_treat_clients_apart_are_not(apart):
    assert works_by_row(apart(), *MODEL)


def test_such_a_run_is_the_loops():
    runs = [
        lamina.Simulation(nn.Linear(4, 2), (X, Y), NormOfAllUploads(), clients=4, engine=engine, lr=0.1, device="cpu")
        for engine in ("auto", "loop")
    ]
    assert isinstance(runs[0].engine, Loop)
    with pytest.raises(lamina.BadInput, match="other results for several clients"):
        lamina.Simulation(nn.Linear(4, 2), (X, Y), NormOfAllUploads(), engine="stacked", lr=0.1, device="cpu")


@lamina.algorithm("doubling", title="Doubling", reference="none", lr=0.1)
class Doubling(lamina.FedAvg):
    beta: lamina.Number = lamina.option(0.2, "beta", low=0.0, high=1.0)

    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad * (2 if self.beta > 0.5 else 1))


@lamina.algorithm("rooted", title="Rooted", reference="none", lr=0.1)
class Rooted(Doubling):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad * math.sqrt(self.beta))


@pytest.mark.parametrize("kind", [Doubling, Rooted])
def test_members_that_branch_on_a_number_are_not_stacked(kind):
    assert not work_together(kind(beta=0.2), kind(beta=0.8))
    assert number_without_column(kind()) == "beta"
    with pytest.raises(lamina.BadInput, match="a branch on the option"):
        lamina.Population([simulation(kind(beta=beta)) for beta in (0.2, 0.8)])


@pytest.mark.parametrize("name", sorted(lamina.algorithms.BUILT_IN))
def test_numbers_of_our_algorithms_may_be_columns(name):
    assert number_without_column(lamina.create(name)) == ""


def test_a_tuning_runs_such_members_one_by_one():
    tuned = lamina.tune(nn.Linear(4, 2), (X, Y), Doubling(), rounds=2, clients=4, lr=0.1, grid={"beta": [0.2, 0.8]})
    assert len(tuned.to_pandas()) == 2


@lamina.algorithm("scaled", title="Scaled", lr=0.1)
class Scaled(lamina.FedAvg):
    by_norm: bool = lamina.option(False, "divide by the norm of all rows")

    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * (grad / grad.norm() if self.by_norm else grad))


def test_an_engine_is_not_lent_to_an_algorithm_that_it_does_not_fit():
    alive = simulation(Scaled())  # its engine is lent as long as it exists
    assert not isinstance(alive.engine, Loop)
    other = simulation(Scaled(by_norm=True))
    assert isinstance(other.engine, Loop)
    assert not isinstance(simulation(lamina.FedAvg()).engine, Loop)


def simulation(algorithm):
    return lamina.Simulation(nn.Linear(4, 2), (X, Y), algorithm, clients=4, lr=0.1, device="cpu")


# --- coordinates by number ------------------------------------------------------------------------------------------


class Slices(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * torch.cat([grad[..., :140], 0.1 * grad[..., 140:]], -1))


class Counts140(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        is_first = torch.arange(grad.shape[-1], device=grad.device) < 140
        return LocalModel(local.y - lr * torch.where(is_first, grad, 0.1 * grad))


class AsksForTheSize(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - (lr if grad.shape[-1] < 100 else 0.1 * lr) * grad)


class OneCoordinate(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        change = lr * grad
        return LocalModel(local.y - torch.cat([change[..., :-1], 2 * change[..., -1:]], -1))


class TopOfAll(lamina.FedAvg):
    """Fails for a layer with fewer than ten elements."""

    def step(self, local, down, grad, lr, layers):
        least = grad.abs().topk(10, dim=-1).values[..., -1:]
        return LocalModel(local.y - lr * torch.where(grad.abs() >= least, grad, 0.0))


class TopOfMany(TopOfAll):
    """Fails for a model with fewer than 50 parameters."""

    def step(self, local, down, grad, lr, layers):
        least = grad.abs().kthvalue(grad.shape[-1] - 49, dim=-1, keepdim=True).values
        return LocalModel(local.y - lr * torch.where(grad.abs() >= least, grad, 0.0))


class Narrows(lamina.FedAvg):
    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad - 0.1 * lr * grad.narrow(-1, 5, 10).mean(-1, keepdim=True))


class NarrowsRows(lamina.FedAvg):
    """Fails if a row has its own axis, which sends it to the loop."""

    def step(self, local, down, grad, lr, layers):
        return LocalModel(local.y - lr * grad - 0.1 * lr * torch.dot(grad, grad))


BY_NUMBER = [Slices, Counts140, AsksForTheSize, OneCoordinate, TopOfAll, TopOfMany, Narrows, NarrowsRows]


@pytest.mark.parametrize("kind", BY_NUMBER)
def test_an_algorithm_that_treats_coordinates_by_number_runs_as_in_the_loop(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    auto, loop = (
        lamina.Simulation(model, (X.double(), Y), kind(), clients=4, batch_size=5, lr=0.3, engine=e, device="cpu")
        for e in ("auto", "loop")
    )
    auto.run(3)
    loop.run(3)
    torch.testing.assert_close(auto.state.server.x, loop.state.server.x, rtol=1e-10, atol=1e-12)
    assert not works_by_layer(kind(), *MODEL)


class Shifts(lamina.FedAvg):
    def begin(self, down, client, info):
        return LocalModel(down.x + 0.1 * torch.arange(down.x.shape[-1], device=down.x.device))


def test_another_order_of_convolution_kernels_is_only_for_those_that_ignore_it():
    model = Layers({"a.weight": (6, 8, 3, 3), "a.bias": (6,), "b.weight": (5, 6)}), torch.device("cpu")
    assert not ignores_order(Slices(), *model)
    assert not ignores_order(Shifts(), *model)
    assert ignores_order(Slices(), *MODEL)  # it has no convolution
    assert ignores_order(NormOfOneUpload(), *model)
    for name in sorted(lamina.algorithms.BUILT_IN):
        kind = type(lamina.create(name))
        assert ignores_order(type("Theirs", (kind,), {"__module__": "theirs"})(), *model), name


def test_answers_follow_the_model_the_functions_and_the_options(monkeypatch):
    small = Layers({"weight": (3, 4)}), torch.device("cpu")
    assert works_by_layer(AsksForTheSize(), *small)
    assert not works_by_layer(AsksForTheSize(), *MODEL)
    assert works_by_row(Scaled(), *MODEL)
    assert not works_by_row(Scaled(by_norm=True), *MODEL)
    monkeypatch.setattr(Scaled, "step", NormOfAllUploads.step)
    assert works_by_row(Scaled(by_norm=True), *MODEL)


def test_every_algorithm_of_ours_works_layer_by_layer():
    whole = {"fedsam", "mofedsam", "deltasgd", "fedsps"}  # they use norms of whole vectors
    ours = {name: works_by_layer(lamina.create(name), *MODEL) for name in lamina.registry()}
    assert {name for name, by_layer in ours.items() if not by_layer} == whole
    assert not works_by_layer(lamina.create("fedlamb", layers="module"), *MODEL)
    assert not works_by_layer(lamina.create("fedlamb", layers="model"), *MODEL)


@pytest.mark.parametrize(("kind", "by_layer"), [(PerLayer, True), (PerModule, False)])
def test_a_step_by_layer_is_found_where_a_layer_is_a_tensor(kind, by_layer):
    assert works_by_layer(kind(), *MODEL) is by_layer
