"""An augmentation of the user's own gives the same numbers in every engine, and follows the round plan."""

import pytest
import torch
from torch import nn

import lamina
from small_simulations import take_gpu_path

X = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(45) % 3
CLIENTS = [range(0, 7), range(7, 20), range(20, 45)]  # short last batches, and clients with fewer steps
SETTINGS = {"clients": CLIENTS, "batch_size": 4, "lr": 0.1, "device": "cpu", "seed": 2}


def noise(batch, generator):
    return batch + torch.randn(batch.shape, generator=generator)


def centre(batch, generator):
    """Depend on the whole batch, so that padding or another client's samples would show."""
    return batch - batch.mean(0) + torch.rand((), generator=generator)


def in_place(batch, generator):
    return batch.mul_(torch.rand(batch.shape, generator=generator))


def shuffled(batch, generator):
    return {name: x[:, torch.randperm(x.shape[1], generator=generator)] for name, x in batch.items()}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, one, other):
        return self.layer(one - other)


def rows(history):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in history]


def simulate(augmentation, engine="loop", algorithm="fedlamb", model=None, data=(X, Y), **more):
    torch.manual_seed(0)
    settings = SETTINGS | {"augmentation": augmentation, "engine": engine} | more
    return lamina.Simulation(model or nn.Linear(6, 3), data, algorithm, test=data, **settings)


ENGINES = pytest.mark.parametrize(
    ("engine", "is_gpu_path"), [("stacked", False), ("stacked", True), ("captured", False)]
)


@ENGINES
@pytest.mark.parametrize("function", [noise, centre, in_place])
def test_engines_agree(function, engine, is_gpu_path):
    expected, run = simulate(function), simulate(function, engine)
    if is_gpu_path:
        take_gpu_path(run)
    for row, other in zip(expected.run(3), run.run(3), strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert run.engine.name == engine
    assert expected.history[-1]["train_loss"] != simulate(None).run(3)[-1]["train_loss"]


@pytest.mark.parametrize("engine", ["captured", "stacked"])
def test_a_dict_of_inputs(engine):
    data = ({"one": X, "other": X.flip(0)}, Y)
    model = Named()
    expected, run = (simulate(shuffled, kind, model=model, data=data) for kind in ("loop", engine))
    assert expected.run(2)[-1]["loss"] == pytest.approx(run.run(2)[-1]["loss"], rel=1e-5)


@ENGINES
def test_two_gradients_of_a_step_see_the_same_draw(engine, is_gpu_path):
    """Mime subtracts the gradient of the same batch at the server's model, and has a gradient over all data."""
    algorithm = lamina.create("mime", "mime")
    expected, run = simulate(noise, algorithm=algorithm), simulate(noise, engine, algorithm=algorithm)
    if is_gpu_path:
        take_gpu_path(run)
    assert expected.run(2)[-1]["loss"] == pytest.approx(run.run(2)[-1]["loss"], rel=1e-5)


def test_the_draws_follow_seed_round_client_and_step():
    seen = []

    def watched(batch, generator):
        seen.append((len(batch), generator.initial_seed()))
        return batch

    run = simulate(watched)
    seen.clear()  # of the checks before round 1
    run.run(2)
    sizes = [4, 3] + [4, 4, 4, 1] + [4] * 6 + [1]
    assert [size for size, _ in seen] == sizes * 2
    assert len({seed for _, seed in seen}) == len(seen)
    first = list(seen)
    again = simulate(watched)
    seen.clear()
    again.run(2)
    assert seen == first
    other = simulate(watched, seed=3)
    seen.clear()
    other.run(2)
    assert not {seed for _, seed in seen} & {seed for _, seed in first}


def test_a_population_draws_as_its_members_do_alone():
    members = [simulate(noise, "stacked", seed=seed) for seed in (0, 1)]
    lamina.Population(members).run(2)
    for seed, member in enumerate(members):
        alone = simulate(noise, seed=seed).run(2)
        assert member.history[-1]["loss"] == pytest.approx(alone[-1]["loss"], rel=1e-5)


def test_it_gets_normalised_images():
    seen = []

    def watched(batch, generator):
        seen.append(batch)
        return batch

    images = lamina.Dataset(torch.full((8, 1, 2, 2), 255, dtype=torch.uint8), Y[:8], mean=(0.5,), std=(0.25,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    simulate(watched, model=model, data=images, clients=2).run(1)
    assert all(bool((batch == 2).all()) and batch.dtype == torch.float32 for batch in seen)


def test_a_run_resumes_with_the_same_function_only(tmp_path):
    def scale(factor):
        return lambda batch, generator: batch * factor * torch.rand(batch.shape, generator=generator)

    twice, whole = scale(2.0), simulate(scale(2.0))
    simulate(twice, out=tmp_path / "r").run(1)
    assert rows(simulate(twice, out=tmp_path / "r").run(2)) == rows(whole.run(2))
    with pytest.raises(lamina.BadInput, match="augmentation"):
        simulate(scale(3.0), out=tmp_path / "r").run(3)


def test_an_experiment_file_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_noise.py").write_text(
        "import torch\n\n"
        "def noise(batch, generator):\n    return batch + torch.randn(batch.shape, generator=generator)\n"
    )
    run = simulate("my_noise:noise")
    assert rows(run.run(1)) == rows(simulate(noise).run(1))
    with pytest.raises(lamina.BadInput, match="cannot load the augmentation 'my_noise:nose'"):
        simulate("my_noise:nose")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda batch, generator: batch + torch.randn(batch.shape), "draw all random numbers from it"),
        (lambda batch, generator: batch[:1], r"must return what it is given.*\[\d, 6\], not .*\[1, 6\]"),
        (lambda batch, generator: batch.double(), "must return what it is given"),
        (lambda batch, generator: None, "not a NoneType"),
        (lambda batch, generator: (batch, batch), "must return what it is given"),
        (lambda batch, generator: batch / 0, "the augmentation returns values that are NaN or infinite"),
        (lambda batch: batch, r"fails: TypeError: .* 2 were given.*; define it as function\(batch, generator\)"),
        (3, "augmentation is 3, which changes no samples"),
        ("noise", r"named 'package\.module:name', not 'noise'"),
    ],
)  # fmt: skip
def test_what_is_no_augmentation_is_refused(function, expected):
    with pytest.raises(lamina.BadInput, match=expected):
        simulate(function)
