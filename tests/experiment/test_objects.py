"""Objects in place of names: what a run's configuration says of them."""

import pytest
import torch

from comparisons import DATA
from lamina.data import Classes, Dataset
from lamina.data.dataset import Splits
from lamina.experiment.build import build, resolved
from lamina.experiment.config import parse
from lamina.experiment.objects import Objects


def splits(shift=0.0):
    x, y = DATA
    return Splits(Dataset(x + shift, y), Dataset(x, y))


def linear(classes=2, width=1):
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, classes))


def config_of(objects, seed=0):
    tree = {"train": {"rounds": 1, "lr": 0.1, "seed": seed}, "run": {"device": "cpu"}, "algorithm": "fedavg"}
    experiment = parse(tree).with_objects(objects)
    return resolved(experiment, build(experiment))


@pytest.mark.parametrize(
    "given", [{"data": splits()}, {"model": linear}, {"partition": Classes(1)}, {"settings": {"loss": print}}]
)
def test_any_object_makes_objects_that_are_not_empty(given):
    assert Objects().is_empty
    assert not Objects(**given).is_empty


def test_equal_data_have_equal_digests_and_other_data_another_one():
    first, again, other = (
        config_of(Objects(data=splits(shift), model=linear))["data"]["content"] for shift in (0.0, 0.0, 0.5)
    )
    assert first == again
    assert first != other


def test_the_digest_of_a_function_is_of_its_model_and_not_of_the_seed():
    first, other_seed = (config_of(Objects(data=splits(), model=linear), seed) for seed in (0, 1))
    assert first["model"]["values"] == other_seed["model"]["values"]
    wider = config_of(Objects(data=splits(), model=lambda classes=2: linear(classes, 3)))
    assert first["model"]["values"] != wider["model"]["values"]


def test_the_digest_of_a_module_is_of_its_weights():
    torch.manual_seed(0)
    module = linear()
    before = config_of(Objects(data=splits(), model=module))["model"]["values"]
    assert config_of(Objects(data=splits(), model=module))["model"]["values"] == before
    with torch.no_grad():
        module[0].bias += 1
    assert config_of(Objects(data=splits(), model=module))["model"]["values"] != before


def test_a_partition_and_a_loss_are_described():
    def own_loss(outputs, labels):
        return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")

    config = config_of(Objects(data=splits(), model=linear, partition=Classes(1), settings={"loss": own_loss}))
    other = config_of(Objects(data=splits(), model=linear, partition=Classes(2)))
    assert config["train"]["loss"].endswith("own_loss")
    assert config["data"]["partition"]["values"] != other["data"]["partition"]["values"]
