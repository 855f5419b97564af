"""`lamina audit`: what it prints, its exit codes, the user's secret, and errors in one line."""

import re

import pytest

from helpers import call
from lamina.channel.privacy import Noise
from lamina.privacy.accounting import Accountant

PRIVATE = """
extends = "small.toml"
[train]
rounds = 2
local_steps = 1
participation = 1.0
[privacy]
bound = 0.5
noise_multiplier = 2.0
delta = 1e-3
secret = "secret"
"""


@pytest.fixture
def private(here):
    (here / "private.toml").write_text(PRIVATE)
    return here


def test_an_audit_prints_what_is_accounted_for_and_what_is_seen(private, capsys):
    assert call("audit", "private.toml", "--runs", "30", "--seed", "3") == 0
    accounted, measured, scores, verdict = capsys.readouterr().out.splitlines()
    epsilon = Accountant(2.0, 1e-3, 8).epsilon(2)
    assert accounted == f"accounted: ε = {epsilon:.3g} at δ = 0.001 after 2 rounds, noise multiplier 2"
    shown = float(re.search(r"ε ≥ ([\d.]+) with 99% confidence", measured)[1])
    assert shown < epsilon
    assert scores.strip() == "(scores with a canary: 60, without: 60)"
    assert "proves neither the guarantee nor an error" in verdict
    assert {path.name for path in private.iterdir()} == {"small.toml", "private.toml"}  # no secret, no runs


def test_an_error_has_exit_code_1(private, capsys, monkeypatch):
    original = Noise.of_round
    monkeypatch.setattr(Noise, "of_round", lambda self, *arguments: original(self, *arguments) / 8)
    assert call("audit", "private.toml", "--runs", "30", "--rounds", "1", "--set", "algorithm=fedavg") == 1
    assert "More is seen than the guarantee allows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small.toml"], "'small.toml' has no [privacy]: there is nothing to audit"),
        (["private.toml", "--runs", "3"], "runs = 3 with 4 canaries each show next to nothing: take at least 25"),
        (["private.toml", "--runs", "0"], "--runs"),
        (["private.toml", "--set", "privacy.epsilon=1.0"], "privacy: epsilon = 1 allows no round"),
        (["nowhere.toml"], "cannot read the experiment file 'nowhere.toml'"),
    ],
)
def test_user_errors_are_one_line(private, capsys, arguments, message):
    assert call("audit", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
