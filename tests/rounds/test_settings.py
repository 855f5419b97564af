"""The protocol record: which parts of a run depend on a setting, and settings that exclude each other."""

import dataclasses
import json
from typing import get_args, get_type_hints

import numpy as np
import pytest

import lamina
from lamina.channel.channel import Channel
from lamina.channel.privacy import Privacy
from lamina.data.feed import Augment
from lamina.rounds.aggregation import Median
from lamina.rounds.clients import Clients
from lamina.rounds.clock import Clock
from lamina.rounds.plan import Demand, Plan
from lamina.rounds.schedules import Cosine
from lamina.rounds.settings import SERVER_ONLY, UNPLANNED, TrainArguments, TrainSettings
from small_linear import simulate

# another value of every setting
OTHER = {
    "lr": 0.2,
    "schedule": Cosine(10),
    "participation": 0.5,
    "sampling": "bernoulli",
    "cohort_cap": 2,
    "min_separation": 2,
    "batch_size": 3,
    "epochs": 2,
    "local_steps": 5,
    "clip": 1.0,
    "weighting": "examples",
    "aggregation": Median(),
    "channel": Channel("sign"),
    "privacy": Privacy(1.0, 1e-3, noise_multiplier=1.0),
    "loss": "mse",
    "augmentation": Augment(),
    "private": ("head.*",),
    "clock": Clock(step_seconds=1.0, deadline=2.5),
    "seed": 1,
}
# what a setting needs beside it
BESIDE = {"cohort_cap": {"sampling": "bernoulli"}, "min_separation": {"participation": 0.5}}


def alternatives(hint):
    return set(get_args(hint)) or {hint}


def test_the_keyword_arguments_are_the_fields():
    arguments, fields = get_type_hints(TrainArguments), get_type_hints(TrainSettings)
    assert list(arguments) == list(fields) == list(OTHER)
    for name, hint in fields.items():
        assert alternatives(hint) <= alternatives(arguments[name]), name


@pytest.mark.parametrize("name", OTHER)
def test_settings_that_do_not_make_another_plan_leave_the_rounds_alone(name):
    parts = [np.arange(0, 9), np.arange(9, 16), np.arange(16, 30), np.arange(30, 34)]
    base = TrainSettings(0.1, **{"participation": 0.75, "batch_size": 4} | BESIDE.get(name, {}))
    plans = [
        Plan(Clients(parts, samples=34), each, Demand(0, 0, lamina.FedAvg().needs))
        for each in (base, dataclasses.replace(base, **{name: OTHER[name]}))
    ]
    one, other = ([(p.cohort.tolist(), p.index.tolist()) for p in map(plan.round, (1, 2, 3))] for plan in plans)
    assert (one == other) == plans[0].same_rounds(plans[1]) == (name not in TrainSettings.names(UNPLANNED))


def test_a_client_gets_every_setting_that_is_not_the_servers():
    local_settings = {name: OTHER[name] for name in TrainSettings.names(SERVER_ONLY) if name != "epochs"}
    received = TrainSettings.from_local_record(json.loads(json.dumps(TrainSettings(**local_settings).local_record(1))))
    assert received == TrainSettings(**local_settings)


@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_beside_local_steps_are_refused(epochs):
    with pytest.raises(lamina.BadInput, match=r"epochs = . and local_steps = 4.*give one of them"):
        simulate(epochs=epochs, local_steps=4)
    with pytest.raises(lamina.BadInput, match="give one of them"):
        TrainSettings(lr=0.1, epochs=epochs, local_steps=4)
