"""Flower's strategies as server halves."""

import logging

import pytest
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedMedian, FedYogi
from flwr.supercore.task_identity import TaskIdentity

import lamina


def test_a_strategy_is_a_class_an_object_or_a_factory():
    for theirs in (FedAvg, FedAvg(), lambda: FedAvg(), "flwr.serverapp.strategy:FedAvg"):
        assert lamina.conform("fedavg", theirs, steps=3).same


def test_its_clients_have_our_numbers_of_examples():
    assert lamina.conform("fedavg", FedAvg, weighting="examples", steps=3).same
    by_other_key = lamina.conform("fedavg", FedAvg(weighted_by_key="size"), weighting="examples", steps=3)
    assert by_other_key.same


def test_an_instance_begins_every_comparison_with_the_state_that_it_has():
    strategy = FedAvgM(server_momentum=0.9)
    assert all(lamina.conform("fedavgm", strategy, steps=3).same for _ in range(2))


def test_its_momentum_is_compared_with_ours():
    result = lamina.conform("fedavgm", FedAvgM, options={"server_momentum": 0.9}, steps=5)
    assert (result.same, result.quantities, result.others) == (True, ("x", "b"), ())
    by_default = lamina.conform("fedavgm", FedAvgM, steps=5)
    assert by_default.difference.place == "round 2"
    assert not any("random" in note for note in by_default.notes)  # Flower draws the names of its messages


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("fedavgm", FedAvgM), ("fedadam", FedAdam), ("fedyogi", FedYogi), ("fedadagrad", FedAdagrad)],
)
def test_the_flower_presets_are_its_strategies_with_their_defaults(name, strategy):
    assert lamina.conform(lamina.create(name, "flower"), strategy, steps=5).same
    assert not lamina.conform(name, strategy, steps=5).same


def test_a_strategy_whose_arrays_are_consumed_works():
    assert lamina.conform("fedavg", FedMedian, aggregation="median", clients=4, steps=3).same


def test_the_process_is_left_as_it_was():
    before = TaskIdentity._run_id, logging.getLogger("flwr").level
    lamina.conform("fedavg", FedAvg, steps=1)
    assert (TaskIdentity._run_id, logging.getLogger("flwr").level) == before


class Silent(FedAvg):
    def aggregate_train(self, server_round, replies):
        return None, None


class Broken(FedAvg):
    def aggregate_train(self, server_round, replies):
        raise KeyError("arrays")


class Old:
    def configure_fit(self):
        pass

    aggregate_fit = configure_fit


@pytest.mark.parametrize(
    ("theirs", "options", "message"),
    [
        (FedAvg, {"fraction_train": 0.7}, "FedAvg trains 2 of 3 clients: set fraction_train=1.0"),
        (FedAvg, {"eta": 1.0}, "FedAvg takes no 'eta'"),
        (FedAvg, {"min_train_nodes": "2"}, r"FedAvg fails: TypeError|cannot create FedAvg\(min_train_nodes='2'\)"),
        (
            FedAvg(),
            {"fraction_train": 0.5},
            r"FedAvg is an object, which takes no options \(fraction_train\): give its",
        ),
        (Silent, {}, "Silent returns no arrays from aggregate_train for 3 replies"),
        (Broken, {}, "Broken fails: KeyError: 'arrays'"),
        (Old, {}, "Old is a strategy of Flower's older API: give one of flwr.serverapp.strategy"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(theirs, options, message):
    with pytest.raises(lamina.BadInput, match=message):
        lamina.conform("fedavg", theirs, options=options, steps=1)


def test_a_strategy_is_no_local_half():
    with pytest.raises(lamina.BadInput, match="FedAvg is a server half, not a local half"):
        lamina.conform("fedavg", FedAvg, half="local")
