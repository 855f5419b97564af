"""An algorithm may ask for the gradient at a second point on the same batch; every engine gives it the same one."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lamina
import transcriptions as T  # noqa: N812
from flower_setup import Setup, small_model
from lamina.engines.stacked.independence import works_by_layer, works_by_row
from lamina.objective.layers import Layers
from lamina.rounds.ledger import WireCost, wire_cost
from objective.test_dropout import simulation as dropout_simulation
from paper_problem import INPUTS, LABELS, START, close, simulate
from second_gradients import ControlledSam, ControlVariate, FedSam, SamInEvenRounds, VarianceReduced
from small_simulations import assert_as_in_the_loop, assert_same, form, simulation, take_gpu_path

ALGORITHMS = [FedSam(), VarianceReduced(), ControlledSam(), SamInEvenRounds()]


# --- against the papers ---------------------------------------------------------------------------------------------


def transcribed(run, rounds, second_point, direction):
    """The rounds of a simulation in numpy: y <- y - lr * direction(g(y), g(second point), x), x <- x + mean (y - x)."""
    gradient = T.Gradient(INPUTS, LABELS, run.protocol.clip or np.inf)
    x = START
    for plan in map(run.plan.round, range(1, rounds + 1)):
        deltas = []
        for c in range(len(plan.cohort)):
            y = x
            for k in range(plan.steps[c]):
                g = gradient(y, plan.batch(c, k))
                second = gradient(second_point(y, g, x), plan.batch(c, k))
                y = y - plan.lr * direction(g, second, x)
            deltas.append(y - x)
        x = x + np.mean(deltas, axis=0)
    return x


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(
    ("algorithm", "second_point", "direction"),
    [
        (FedSam(), lambda y, g, x: y + 0.5 * g / np.sqrt(np.sum(g * g)), lambda g, second, x: second),
        (VarianceReduced(), lambda y, g, x: x, lambda g, second, x: g - second + 0.1 * x),
    ],
    ids=["fedsam", "variance reduced"],
)
def test_steps_are_those_of_the_formula(engine, clip, algorithm, second_point, direction):
    run = simulate(algorithm, engine, clip=clip)
    run.run(3)
    close(run.state.server.x, transcribed(run, 3, second_point, direction))


def test_the_second_gradient_at_x_is_the_control_variate():
    ends = []
    for algorithm in (VarianceReduced(), ControlVariate()):
        run = simulation("batch_norm", algorithm, "loop")
        run.run(2)
        ends.append(run.state)
    assert_same(ends[0], ends[1], 1e-12)


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu_path", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_the_stacked_engine_agrees_with_the_loop(algorithm, gpu_path):
    assert_as_in_the_loop("cnn", algorithm, gpu_path=gpu_path)
    assert_as_in_the_loop("batch_norm", algorithm, gpu_path=gpu_path, clip=0.5, chunk=2)


@pytest.mark.long
@pytest.mark.parametrize("gpu_path", [False, True])
@pytest.mark.parametrize("kind", ["dropout", "batch_norm", "raw"])
def test_both_gradients_have_the_same_dropout_masks(kind, gpu_path):
    engine = "captured" if kind == "raw" else "stacked"
    loop, run = (dropout_simulation(kind, name, FedSam()) for name in ("loop", engine))
    if gpu_path and engine == "stacked":
        take_gpu_path(run)
    for each in (loop, run):
        each.run(2)
    assert_same(run.state, loop.state, 1e-9)


class Noisy(nn.Module):
    """A layer that draws random numbers itself."""

    def forward(self, x):
        return x * torch.rand_like(x)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Noisy()], ids=["dropout", "own draws"])
def test_a_second_point_at_y_gives_the_same_gradient(layer):
    class Same(VarianceReduced):
        def second_point(self, local, down, grad, lr, layers):
            return local.y

        def step(self, local, down, grad, lr, layers, second_grad):
            if len(down.x) > 21:  # not in the rehearsal
                assert torch.equal(grad, second_grad)
            return super().step(local, down, grad, lr, layers, second_grad)

    model = nn.Sequential(nn.Linear(6, 8), layer, nn.BatchNorm1d(8), nn.Linear(8, 3))
    data = torch.randn(24, 6), torch.arange(24) % 3
    lamina.Simulation(model, data, Same(), clients=2, batch_size=4, engine="loop", device="cpu").run(1)


def test_only_the_first_pass_updates_the_buffers():
    sam, plain = (simulation("batch_norm", algorithm, "loop", lr=1e-300) for algorithm in (FedSam(), "fedavg"))
    for run in (sam, plain):
        run.run(1)
    for name, buffer in plain.state.buffers.items():
        torch.testing.assert_close(sam.state.buffers[name], buffer, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("gpu_path", [False, True])
def test_members_of_a_population_have_their_own_numbers(gpu_path):
    settings = [{"lr": 0.01}, {"lr": 0.02, "clip": 0.3}, {"lr": 0.01, "seed": 4}]
    radii = (0.1, 0.5, 1.0)

    def make():
        return [
            simulation("mlp", FedSam(rho=rho), "stacked", **options)
            for rho, options in zip(radii, settings, strict=True)
        ]

    members = make()
    population = lamina.Population(members)
    if gpu_path:
        take_gpu_path(members[0])
    population.run(2)
    for member, rho, options in zip(members, radii, settings, strict=True):
        alone = simulation("mlp", FedSam(rho=rho), "loop", **options)
        alone.run(2)
        assert_same(member.state, alone.state, 1e-9)


@pytest.mark.parametrize("algorithm", [FedSam(), VarianceReduced()], ids=["fedsam", "variance reduced"])
def test_a_federation_agrees_with_the_loop(algorithm, tmp_path):
    def model():
        return small_model(norm=True).double()

    setup = Setup(tmp_path, algorithm, model=model, rounds=2, batch_size=None, clip=0.5)
    setup.run()
    simulated = setup.simulation()
    simulated.run(2)
    weights = load_file(setup.out / "model.safetensors")
    for name, value in simulated.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


MODEL = Layers({"a.weight": (30, 8), "a.bias": (30,), "b.weight": (5, 30)}), torch.device("cpu")


# --- what engines and checks find out -------------------------------------------------------------------------------


def test_a_second_point_that_couples_layers_is_found():
    assert not works_by_layer(FedSam(), *MODEL)
    assert not works_by_layer(SamInEvenRounds(), *MODEL)  # although round 1 has no second point
    assert works_by_layer(VarianceReduced(), *MODEL)


def test_a_second_point_that_couples_rows_is_found():
    class Branches(FedSam):
        def second_point(self, local, down, grad, lr, layers):
            return local.y + grad if float(grad.norm()) > 1 else local.y

    class RarelyBranches(lamina.FedAvg):  # never in a test of few values, but perhaps in training
        def step(self, local, down, grad, lr, layers):
            return super().step(local, down, grad if grad.sum() > -1e30 else -grad, lr, layers)

    class ReadsAtTheEnd(lamina.FedAvg):
        def finish(self, local, down, client, info):
            float(local.y.sum())
            return super().finish(local, down, client, info)

    assert works_by_row(FedSam(), *MODEL)
    assert not works_by_row(Branches(), *MODEL)
    assert not works_by_row(RarelyBranches(), *MODEL)
    assert not works_by_row(ReadsAtTheEnd(), *MODEL)
    assert form(simulation("mlp", Branches(), "auto")) == "loop"


def test_members_of_a_population_need_the_same_gradients():
    class Optional(SamInEvenRounds):
        def needs(self, round):
            return lamina.Needs(second_gradient=self.rho > 0)

    with pytest.raises(lamina.BadInput, match="different needs"):
        lamina.Population([simulation("mlp", Optional(rho=rho), "stacked") for rho in (0.0, 0.5)])


def test_a_second_gradient_is_not_sent():
    assert wire_cost(FedSam()) == WireCost(down=1.0, up=1.0, client_state=0.0)


REFUSED = {
    "no second point": ({"second_point": lamina.Algorithm.second_point}, "needs asks .* second_point is missing"),
    "a point of another shape": ({"second_point": lambda *_: torch.zeros(3)}, r"second_point must .* of shape \[3\]"),
    "no point": ({"second_point": lambda *_: None}, "second_point must return a point like local.y.* found None"),
    "a point in place": (
        {"second_point": lambda self, local, down, grad, lr, layers: local.y.add_(grad)},
        "second_point writes into its arguments",
    ),
    "a step that does not take it": ({"step": lamina.FedAvg.step}, "step fails .* argument 'second_grad'"),
    "a step that writes into it": (
        {"step": lambda self, local, down, grad, lr, layers, second_grad: local._replace(y=second_grad.mul_(2.0))},
        "step writes into its arguments",
    ),
    "no needs": ({"needs": lamina.Algorithm.needs}, "step fails .* argument: 'second_grad'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_rehearsal_names_what_is_wrong(case):
    functions, message = REFUSED[case]
    with pytest.raises(lamina.BadInput, match=message):
        simulation("mlp", type("Own", (FedSam,), functions)(), "loop")


def test_a_second_gradient_that_is_not_finite_is_explained():
    class Far(FedSam):
        def second_point(self, local, down, grad, lr, layers):
            return local.y * 1e300 * 1e300

    for engine in ("loop", "stacked"):
        run = simulation("mlp", Far(), engine)
        with pytest.raises(lamina.Diverged, match=r"round 1: client \d \(local step 1 of \d\) went non-finite"):
            run.run(1)


def test_an_algorithm_without_a_second_point_says_so():
    with pytest.raises(NotImplementedError):
        lamina.FedAvg().second_point(None, None, torch.zeros(3), 0.1, None)
