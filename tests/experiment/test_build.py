"""Building an experiment: the model, its threads and clients, the target, and data held out to choose settings on."""

import numpy as np
import pytest
import torch

import lamina
from comparisons import DATA, OF_TWO_RATES
from lamina.base.errors import BadInput
from lamina.experiment import build
from lamina.experiment.config import parse
from lamina.experiment.objects import Objects
from lamina.rounds.schedules import Cosine

SMALL = {"model": {"name": "mlp", "hidden": 4}, "train": {"rounds": 3}, "run": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("option", "source"), [("seed", "train.seed"), ("classes", "the data"), ("input_shape", "the data")]
)
def test_an_option_of_the_model_that_follows_from_others_is_refused(option, source):
    experiment = parse({"model": {"name": "mlp", option: 3}})
    with pytest.raises(BadInput, match=f"model.{option} follows from {source}"):
        build.build_model(experiment, lamina.data.Dataset(*DATA))


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    def weights(seed, algorithm):
        experiment = parse({**SMALL, "algorithm": algorithm, "train": {"seed": seed}})
        return torch.cat([p.flatten() for p in build.build_model(experiment, lamina.data.Dataset(*DATA)).parameters()])

    assert torch.equal(weights(1, "fedavg"), weights(1, "fedlamb"))
    assert not torch.equal(weights(1, "fedavg"), weights(2, "fedavg"))


def test_small_models_get_one_thread_unless_the_file_says_otherwise(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    threads = [build.choose_threads(parse(SMALL), size) for size in (build.THREADED_FROM - 1, build.THREADED_FROM)]
    assert threads == [1, 6]
    assert build.choose_threads(parse({"run": {"threads": 3}}), 10) == 3


def test_the_default_number_of_clients_is_not_used_where_a_column_names_them():
    assert build.count_clients(parse({})) == 10
    assert build.count_clients(parse({"data": {"clients": 4}})) == 4
    by_column = parse({"data": {"partition": {"name": "by-column", "column": "site"}}})
    assert build.count_clients(by_column) is None


def test_the_default_target_is_an_accuracy():
    assert build.chosen_target(parse({}), "accuracy") == 0.9
    assert build.chosen_target(parse({}), "loss") is None
    assert build.chosen_target(parse({"compare": {"target": 0.2}}), "loss") == 0.2


def test_a_cosine_ends_with_the_rounds_unless_it_has_a_length_of_its_own():
    cosine = {"train": {"rounds": 7, "schedule": "cosine"}}
    assert build.build_schedule(parse(cosine)) == Cosine(rounds=7)
    cosine["train"]["schedule"] = {"name": "cosine", "rounds": 9}
    assert build.build_schedule(parse(cosine)) == Cosine(rounds=9)


def test_noise_that_is_given_does_not_depend_on_the_number_of_rounds():
    """So a private run can be resumed for more rounds, unless its noise was chosen for their number."""
    tree = {"data": {"name": "digits"}, "model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}}
    for given, rounds in [({"noise_multiplier": 1.0}, None), ({"epsilon": 4.0}, 30)]:
        privacy = {"bound": 1.0, "delta": 1e-5, **given}
        experiment = parse({**tree, "train": {"rounds": 30, "local_steps": 2}, "privacy": privacy})
        assert build.settings_of(experiment)["privacy"]["rounds"] == rounds


def test_a_resolved_configuration_has_every_default():
    experiment = parse({**SMALL, "algorithm": "fedlamb"}).with_objects(
        Objects(data=lamina.data.dataset.Splits(lamina.data.Dataset(*DATA), lamina.data.Dataset(*DATA)))
    )
    config = build.resolved(experiment, build.build(experiment))
    assert (config["data"]["clients"], config["train"]["lr"]) == (10, lamina.FedLamb.card.lr)
    assert config["algorithm"]["beta1"] == 0.9
    assert (config["run"]["device"], config["run"]["threads"], config["run"]["engine"]) == ("cpu", 1, "stacked")


@pytest.mark.parametrize("heldout", [[2], 0.3])
def test_a_client_that_never_trains_is_no_other_one_while_settings_are_chosen(heldout):
    """A client whose only sample is held out to choose on would change the numbers of all after it."""
    sites = np.repeat([0, 1, 2, 3], [1, 60, 60, 79])
    data = lamina.data.Dataset(*DATA, columns={"site": sites})
    seed = next(seed for seed in range(20) if 0 not in data.holdout(0.2, seed)[0].columns["site"])
    settings = {"partition": lamina.data.ByColumn("site"), "seed": seed + 1, **OF_TWO_RATES}  # tuning: one below
    with pytest.raises(lamina.BadInput, match=r"1 client \(0\) would have no sample .*give heldout_clients as values"):
        lamina.compare(torch.nn.Linear(4, 2), data, ["fedavg"], heldout_clients=heldout, **settings)
    lamina.compare(torch.nn.Linear(4, 2), data, ["fedavg"], heldout_clients=["2"], **settings)
