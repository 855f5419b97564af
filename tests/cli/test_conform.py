"""`lamina conform`: what it prints, its exit codes, and errors in one line."""

import pytest

from helpers import call, said_in_one_line

MINE = """
def step(y, grad, lr):
    return y - lr * grad

def server(x, delta, server_lr, scale=1.0):
    return x + scale * server_lr * delta

number = 3
"""


@pytest.fixture
def mine(empty_folder):
    (empty_folder / "my_conformance_code.py").write_text(MINE)
    return "my_conformance_code"


def test_what_is_the_same_has_exit_code_0(mine, capsys):
    assert call("conform", "fedavg", f"{mine}:step", "--steps", 6, "--local-steps", 3) == 0
    ours, theirs, verdict, largest = capsys.readouterr().out.splitlines()
    assert ours == "ours:   fedavg(server_lr=1.0, decay=0.0), lr=0.1, local half"
    assert theirs == f"theirs: {mine}:step"
    assert verdict == "the same to 1e-12 over 6 steps (2 rounds)"
    assert largest.startswith("  largest relative difference of y: ")


def test_a_difference_is_named_and_has_exit_code_1(mine, capsys):
    assert call("conform", "fedavg", f"{mine}:server", "--theirs", "scale=0.5", "--set", "server_lr=0.8") == 1
    ours, theirs, verdict, share, ratio = capsys.readouterr().out.splitlines()
    assert "server_lr=0.8" in ours
    assert theirs == f"theirs: {mine}:server(scale=0.5)"
    assert verdict.startswith("differs first in round 1: x by ")
    assert share == "  that is 0.5 of the largest entry of our step"
    assert ratio == "  their step there is 0.5 times ours, in every coordinate"


def test_settings_and_presets_are_ours(mine, capsys):
    settings = ["--set", "preset=fedlada_paper", "--set", "lr=0.5", "--set", "aggregation=median", "--set", "decay=0.0"]
    assert call("conform", "fedavg", f"{mine}:server", *settings, "--set", "weighting=examples") == 0
    assert "lr=0.5, server half, aggregation median, by examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fedavg", "{mine}:number"], "is 3, which cannot be called"),
        (["fedavg", "{mine}:absent"], "cannot load the implementation"),
        (["fedavg", "no_such_module:step"], "No module named 'no_such_module'"),
        (["{mine}:step", "fedavg"], "the algorithm comes first: lamina conform fedavg my_conformance_code:step"),
        (["fedavgg", "{mine}:step"], "did you mean 'fedavg'"),
        (["fedavg", "{mine}:step", "--set", "beta1=0.8"], "fedavg has no option 'beta1'"),
        (["fedavg", "{mine}:step", "--set", "lr"], "--set 'lr' is not of the form name=value"),
        (["fedavg", "{mine}:step", "--set", "aggregation=medan"], "did you mean 'median'"),
        (["fedavg", "{mine}:step", "--theirs", "scale=3"], "takes no 'scale'"),
        (["fedavg", "{mine}:step", "--half", "client"], "is a local half, not a whole client"),
        (["fedavg", "{mine}:step", "--tolerance", "-1"], "tolerance = -1.0 is not a number > 0"),
        (["fedavg", "{mine}:step", "--steps", "0"], "--steps"),
        (["fedprox", "{mine}:step", "--mu", "0.2"], "no such option '--mu'; give it as --set mu=0.2; see"),
        (["fedprox", "{mine}:step", "--lr", "0.2"], "no such option '--lr'; give it as --set lr=0.2; see"),
        (["fedprox", "{mine}:step", "--rounds", "3"], "no such option '--rounds'; see lamina conform --help"),
    ],
)
def test_user_errors_are_one_line(mine, capsys, arguments, message):
    assert call("conform", *(word.format(mine=mine) for word in arguments)) == 2
    assert message in said_in_one_line(capsys)
