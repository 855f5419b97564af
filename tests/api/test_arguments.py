"""Arguments mean the same in Python and in experiment files, and batch_size=None is the whole client."""

import dataclasses
import inspect

import numpy as np
import pytest
import torch

import lamina
from lamina.experiment import config
from lamina.experiment.build import build
from lamina.experiment.toml import as_toml
from lamina.experiment.trials.tune import with_settings
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.settings import TrainSettings
from lamina.training.training import RunOptions
from small_linear import simulate, weights

# --- arguments of Python and of experiment files -------------------------------------------------------------------


def test_each_of_epochs_and_local_steps_alone_is_fine():
    assert simulate(local_steps=4).plan.round(1).steps.tolist() == [4, 4, 4]
    assert simulate(epochs=2, batch_size=5).plan.round(1).steps.tolist() == [4, 4, 4]
    assert simulate(batch_size=5).plan.round(1).steps.tolist() == [2, 2, 2]
    one, other = simulate(local_steps=4), simulate(local_steps=4, seed=1)
    assert one.plan.same_rounds(one.plan)
    assert not one.plan.same_rounds(other.plan)


def test_a_file_and_a_simulation_have_the_same_run_options():
    arguments = inspect.signature(lamina.Simulation).parameters
    for option in dataclasses.fields(RunOptions):
        assert config.Run.model_fields[option.name].default == option.default
        assert (arguments[option.name].default or None) == (option.default or None)


def test_numbers_of_numpy_become_numbers_of_python(tmp_path):
    simulation = simulate(lr=np.float32(0.5), batch_size=np.int32(5), seed=np.int64(1), out=tmp_path / "run")
    simulation.run(1)
    same = simulate(lr=0.5, batch_size=5, seed=1, out=tmp_path / "run")
    assert [row["round"] for row in same.run(1)] == [1]


def test_a_mistyped_argument_is_named():
    with pytest.raises(lamina.BadInput, match="no setting 'client'; did you mean 'clients'"):
        simulate(client=3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"learning_rate": 0.1}, "no setting 'learning_rate'; did you mean 'lr'"),
        ({"rounds": 3}, r"no setting 'rounds': give it to run, simulation.run\(rounds=…\)"),
        ({"callbacks": []}, r"simulation.run\(on_round=…\)"),
        ({"optimizer": "adam"}, "did you mean 'algorithm'"),
        ({"weight_decay": 0.1}, r"give it to the algorithm, lamina.FedLamb\(decay=…\)"),
        ({"mu": 0.1}, "'mu' is an option of DiLoCo, FedAvgM, FedNova, FedProx"),
        ({"resume": True}, r"no setting 'resume'; help\(lamina.Simulation\) lists them"),
        (
            {"partition": {"name": "dirichlet", "alhpa": 0.3}},
            "partition 'dirichlet' has no option 'alhpa'; did you mean",
        ),
        ({"partition": {"name": "iid", "k": 3}}, "'k' is an option of classes"),
        ({"partition": {"alpha": 0.3}}, "partition is {'alpha': 0.3}: give a name, a table"),
        ({"partition": lamina.data.Dirichlet}, "partition is the class Dirichlet: give a name"),
        ({"schedule": lamina.schedules.Cosine}, "schedule is the class Cosine: give a name"),
        ({"aggregation": lamina.aggregation.Median}, "aggregation is the class Median: give a name"),
        ({"augmentation": 3}, "augmentation is 3, which changes no samples: give lamina.data.Augment"),
        ({"augmentation": {"pad": 4}}, "augmentation is {'pad': 4}, which"),
        ({"augmentation": lamina.data.Augment}, "augmentation is the class Augment"),
        (
            {"loss": torch.nn.CrossEntropyLoss},
            "loss is the class CrossEntropyLoss: give loss='cross_entropy', or an inst",
        ),
        ({"loss": torch.nn.MultiMarginLoss}, r"give an instance, MultiMarginLoss\(reduction='none'\)"),
        ({"loss": lamina.losses.CrossEntropy}, r"give an instance, CrossEntropy\(\)"),
        ({"loss": torch.nn.functional.cross_entropy}, "one value per sample.*use loss='cross_entropy'"),
    ],
)
def test_a_plausible_mistake_is_one_line_that_says_what_to_give(arguments, text):
    with pytest.raises(lamina.BadInput, match=text) as error:
        simulate(**arguments)
    assert "\n" not in str(error.value)


def test_tables_mean_the_same_as_in_a_file():
    tables = {
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "schedule": {"name": "cosine", "rounds": 9},
        "aggregation": {"name": "trimmed_mean", "share": 0.4},
        "batch_size": "full",
    }
    objects = {
        "partition": lamina.data.Dirichlet(0.5),
        "schedule": lamina.schedules.Cosine(9),
        "aggregation": lamina.aggregation.TrimmedMean(0.4),
        "batch_size": None,
    }
    data = (torch.randn(60, 4), torch.arange(60) % 3)
    one, other = (
        lamina.Simulation("mlp", data, algorithm, clients=3, device="cpu", **arguments)
        for algorithm, arguments in (
            ({"name": "fedlamb", "decay": 0.1}, tables),
            (lamina.FedLamb(decay=0.1), objects),
        )
    )
    assert one.run(2).column("train_loss") == other.run(2).column("train_loss")
    assert torch.equal(weights(one), weights(other))
    small = lamina.Simulation({"name": "mlp", "hidden": 2}, data, device="cpu")
    assert small.model(data[0]).shape == (60, 3)
    assert sum(parameter.numel() for parameter in small.model.parameters()) == (4 * 2 + 2) + (2 * 3 + 3)
    with pytest.raises(lamina.BadInput, match=r"model\.seed follows from train\.seed"):
        lamina.Simulation({"name": "mlp", "seed": 2}, data, device="cpu")


def test_an_experiment_file_with_epochs_and_local_steps_is_refused():
    with pytest.raises(lamina.BadInput, match=r"train.*epochs and local_steps.*take one out") as error:
        config.parse({"train": {"epochs": 1, "local_steps": 4}})
    assert "\n" not in str(error.value)
    experiment = config.parse({"train": {"local_steps": 4}})
    assert build(experiment).plan.round(1).steps.tolist() == [4] * 5
    assert experiment.model_dump()["train"]["epochs"] == 1  # as in the folders of earlier runs


OFF = [{"augment_pad": 2}, {"augment_flip": False}, {"augment_pad": 4}, {"augment_crop_probability": 0.5}]


@pytest.mark.parametrize("given", [*OFF, {"augment_fill": "mean"}])
def test_options_of_an_augmentation_that_is_not_switched_on_are_refused(given):
    (key,) = given
    with pytest.raises(lamina.BadInput, match=f"^experiment: data: {key} needs augment = true.* or take {key} out$"):
        config.parse({"data": given})
    for augment in (True, False):  # false: somebody switched it off on purpose
        assert config.parse({"data": {**given, "augment": augment}}).data.augment is augment
    config.parse(config.parse({}).model_dump())  # as in the folders of runs


def test_local_steps_on_the_command_line_replace_the_epochs_of_the_file(tmp_path):
    file = tmp_path / "e.toml"
    file.write_text("[train]\nepochs = 2\n")
    assert config.load(file, ["train.local_steps=4"]).train.local_steps == 4
    with pytest.raises(lamina.BadInput, match="take one out"):
        config.load(file, ["train.epochs=3", "train.local_steps=4"])
    file.write_text("[train]\nlocal_steps = 2\n")
    assert config.load(file, ["train.epochs=4"]).train.local_steps is None
    assert with_settings(config.load(file), {"train.epochs": 3}).train.epochs == 3


# --- the whole client as one batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_no_batch_size_is_one_batch_of_all_a_client_has(engine):
    parts = [range(5), range(5, 15), range(15, 30)]
    full = simulate(clients=parts, batch_size=None, epochs=2, engine=engine)
    assert full.plan.round(1).filled.tolist() == [[5, 5], [10, 10], [15, 15]]
    assert torch.equal(weights(full), weights(simulate(clients=parts, batch_size=15, epochs=2, engine=engine)))


def test_a_client_alone_gets_its_whole_data_too():
    plan = Plan(Clients.elsewhere(3), TrainSettings(lr=0.1, batch_size=None, local_steps=2))
    alone = plan.round_of(1, np.array([1]), [np.arange(5, 15)])
    together = plan.round_of(1, np.array([0, 1]), [np.arange(15), np.arange(5, 15)])
    assert alone.batch(0, 1).tolist() == together.batch(1, 1).tolist()
    assert sorted(alone.batch(0, 1)) == list(range(5, 15))


def test_an_experiment_file_says_full(tmp_path):
    experiment = config.parse({"train": {"batch_size": "full", "participation": 1.0}})
    assert build(experiment).protocol.batch_size is None
    again = tmp_path / "again.toml"
    again.write_text(as_toml(experiment.model_dump(exclude_unset=True)))
    assert config.load(again) == experiment
    for wrong in (0, "half", 2.5, True):
        with pytest.raises(
            lamina.BadInput, match=r'train.batch_size = .*whole number from 1 to \d+, or "full"'
        ) as error:
            config.parse({"train": {"batch_size": wrong}})
        assert "\n" not in str(error.value)
