"""Declarations of algorithms: names, checks, and the values that options accept."""

import re
from typing import get_type_hints

import pytest

import lamina
from lamina import BadInput, algorithms
from lamina.algorithms import declaration
from lamina.algorithms.contract import Number
from lamina.algorithms.declaration import registry


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("fedlamb", "decay_form", "'ratio' or 'l2' or 'decoupled'"),
        ("fedlamb", "sync", "true or false"),
        ("fedlamb", "sync_every", "a whole number >= 1"),
        ("fedlamb", "beta1", "a number >= 0 and <= 1"),
        ("fedlamb", "m_init", "a number"),
        ("fedavg", "server_lr", "a number > 0"),
    ],
)
def test_what_an_option_accepts_in_words(name, option, words):
    assert declaration.allowed(registry()[name], option) == words


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: algorithms.create("fedlamb", momentum="cary"), "'carry' or 'restart' or 'average'"),
        (lambda: algorithms.create("fedlamb", sync_every=1.5), "sync_every = 1.5 is not a whole number >= 1"),
        (lambda: algorithms.create("fedlamb", sync=1), "true or false"),
        (lambda: algorithms.create("fedavg", server_lr="big"), "server_lr = 'big'"),
    ],
)
def test_values_that_an_option_does_not_accept_are_refused_in_one_line(call, text):
    with pytest.raises(BadInput, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


NOT_NEGATIVE = (
    "tau",
    "root_eps",
    "v_init",
    "v_hat_init",
    "decay",
    "eps",
    "phi_min",
    "delta",
    "theta_init",
    "scale",
    "rho",
)
POSITIVE = ("server_lr", "clip_direction", "phi_max", "muon_scale", "gamma", "c")
SHARES = ("beta", "beta1", "beta2", "momentum", "p")
RANGES = {  # of every numeric option: a value that is too low, and one that is too high, if there are such values
    **dict.fromkeys([*NOT_NEGATIVE, "scale"], (-1e-9, None)),
    **dict.fromkeys(POSITIVE, (0.0, None)),
    **dict.fromkeys(SHARES, (-1e-9, 1.001)),
    **dict.fromkeys(["eps_decay", "alpha"], (0.0, 1.001)),
    **dict.fromkeys(["m_init", "lower_bound"], (None, None)),
    "sync_every": (0, None),
    ("fedprox", "mu"): (-1e-9, None),
    ("fednova", "mu"): (-1e-9, None),
    ("fedavgm", "mu"): (-1e-9, 1.001),
    ("diloco", "mu"): (-1e-9, 1.001),
    ("fedadamw", "alpha"): (-1e-9, 1.001),  # 0 is Local AdamW
    ("fedmuon", "alpha"): (-1e-9, 1.001),
    ("feddyn", "alpha"): (0.0, None),
}


@pytest.mark.parametrize("name", sorted(algorithms.BUILT_IN))
def test_numbers_out_of_their_range_are_refused_in_one_line(name):
    cls = registry()[name]
    numeric = [n for n, hint in get_type_hints(cls).items() if n in declaration.options(cls) and hint in (int, Number)]
    assert numeric
    for option in numeric:
        low, high = RANGES.get((name, option)) or RANGES[option]
        infinite = () if option in ("clip_direction", "phi_max") else (float("inf"), float("-inf"))
        for value in (low, high, float("nan"), *infinite):
            if value is not None:
                with pytest.raises(
                    BadInput, match=rf"^\w+: {option} = {re.escape(repr(value))} is not .*number"
                ) as caught:
                    algorithms.create(name, **{option: value})
                assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "less", "text"),
    [
        ("fedavgm", {"mu": 1.0, "damped": True}, {"mu": 0.9}, "mu = 1 multiplies every displacement by 0 if damped"),
        (
            "fedadamw",
            {"alpha": 1.0, "local_weight": "complement"},
            {"alpha": 0.9},
            "alpha = 1 leaves out the clients' own steps with",
        ),
        ("fedmuon", {"alpha": 1.0}, {"alpha": 0.9}, "alpha = 1 leaves out the clients' own steps"),
        ("localmuon", {"beta": 1.0}, {"beta": 0.9}, "beta = 1 never lets a gradient into the momentum"),
        ("fednova", {"momentum": 0.9, "mu": 0.1}, {"mu": 0.0}, "for momentum or for mu, not for both: set one of them"),
    ],
)
def test_numbers_that_make_no_method_are_refused_in_one_line(name, given, less, text):
    with pytest.raises(BadInput, match=text) as caught:
        algorithms.create(name, **given)
    assert "\n" not in str(caught.value)
    algorithms.create(name, **given | less)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: lamina.FedLamb(deacy=0.1),
            "FedLamb has no option 'deacy'; did you mean 'decay'\\? .its options: beta1",
        ),
        (lambda: lamina.FedLamb(weight_decay=0.1), "did you mean 'decay'"),
        (
            lambda: lamina.FedAvg(momentum=0.9),
            "FedAvg has no option 'momentum': FedAvg with momentum on the server is FedAvgM .its 'mu'.; 'momentum' is",
        ),
        (
            lambda: algorithms.create("fedavg", mu=0.9),
            "fedavg has no option 'mu': 'mu' is an option of DiLoCo, FedAvgM, FedNova, FedProx .its",
        ),
        (lambda: lamina.FedAvg(lr=0.9), "'lr' is a setting of training, Simulation.*train.lr in a file"),
        (lambda: lamina.FedAvg(learning_rate=0.9), "'lr' is a setting of training"),
        (lambda: lamina.FedAvg(num_epochs=2), "'epochs' is a setting of training"),
        (lambda: lamina.FedAvg(private=["head.*"]), "'private' is a setting of training"),
        (lambda: lamina.FedAvg(privat=["head.*"]), "'private' is a setting of training"),
        (lambda: lamina.FedLamb(aggregation="median"), "'aggregation' is a setting of training"),
    ],
)
def test_an_unknown_option_names_the_nearest_one_or_who_has_it(call, text):
    with pytest.raises(BadInput, match=text):
        call()


def test_settings_of_training_are_named_as_training_has_them():
    from lamina.rounds.settings import TrainSettings

    assert set(declaration.TRAINING_SETTINGS) <= set(TrainSettings.names())


@pytest.mark.usefixtures("clean_registry")
def test_a_name_cannot_be_taken_twice_and_own_checks_are_kept():
    fedavg = registry()["fedavg"]

    def make(name):
        @declaration.algorithm(name, title="Own", reference="-", lr=0.1)
        class Own(fedavg):
            label: str = declaration.option("x", "a text option")

            def check(self):
                super().check()
                if self.label == "bad":
                    raise BadInput("own check")

        return Own

    with pytest.raises(BadInput, match="an algorithm named 'fedavg' exists already"):
        make("fedavg")
    cls = make("own")
    assert cls(label="y").label == "y"
    with pytest.raises(BadInput, match="own check"):
        cls(label="bad")
    with pytest.raises(BadInput, match="label = 3 is not a text"):
        cls(label=3)


@pytest.mark.usefixtures("clean_registry")
def test_a_check_under_pythons_name_is_refused():
    """`__post_init__` would replace the check of every option."""
    with pytest.raises(BadInput, match="the algorithm 'own' has a function __post_init__: call it check"):
        declaration.algorithm("own", title="Own", lr=0.1)(type("Own", (lamina.FedAvg,), {"__post_init__": print}))


def test_numbers_that_torch_cannot_hold_are_refused():
    with pytest.raises(BadInput, match="decay"):
        lamina.create("fedavg", decay=2**63)
