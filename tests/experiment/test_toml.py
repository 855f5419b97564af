"""Experiment files as text: files that extend others, complete copies, and TOML that is read back."""

import tomllib
from pathlib import Path

import pytest

from lamina.base.errors import BadInput
from lamina.experiment.config import load
from lamina.experiment.toml import as_toml, complete_text

PAPERS = Path(__file__).parents[2] / "src" / "lamina" / "papers"

BASE = """
[model]
name = "mlp"
hidden = 7
[train]
rounds = 9
epochs = 2
[compare]
algorithms = ["fedavg", "fedlamb"]
[compare.grid]
fedavg.lr = [0.1]
fedlamb.lr = [0.01]
[compare.options]
fedlamb.decay = 0.1
[[claim]]
text = "inherited"
kind = "order"
expect = ["fedlamb", "fedavg"]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


def write(folder, text, name="own.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_overrides_single_keys_of_the_file_it_extends(folder):
    experiment = load(write(folder, 'extends = "base.toml"\n[train]\nepochs = 3\n'))
    assert (experiment.train.rounds, experiment.train.epochs) == (9, 3)
    assert experiment.model.options() == {"hidden": 7}


def test_a_new_name_drops_the_inherited_options(folder):
    experiment = load(write(folder, 'extends = "base.toml"\n[model]\nname = "cnn"\n'))
    assert experiment.model.options() == {}
    same = load(write(folder, 'extends = "base.toml"\n[model]\nname = "mlp"\ndropout = 0.5\n'))
    assert same.model.options() == {"hidden": 7, "dropout": 0.5}


def test_a_new_data_set_keeps_what_does_not_depend_on_it(folder):
    kept = "clients = 5\nlocal_test = 0.25\nheldout_clients = 0.5\naugment = true\naugment_pad = 2\n"
    write(folder, f'[data]\nname = "table"\npath = "a.csv"\nlabel = "y"\nclient = "site"\n{kept}')
    changed = load(write(folder, 'extends = "own.toml"\n[data]\nname = "mnist"\n', "other.toml"))
    assert changed == load(write(folder, f'[data]\nname = "mnist"\n{kept}'))


@pytest.mark.parametrize("clients", ["[0, 2]", '["north"]'])
def test_a_new_data_set_drops_a_list_of_clients(folder, clients):
    path = write(folder, f"[data]\nlocal_test = 0.25\nheldout_clients = {clients}\n")
    data = load(path, ["data.name=mnist"]).data
    assert (data.heldout_clients, data.local_test) == (None, 0.25)


def test_local_steps_replace_inherited_epochs(folder):
    train = load(write(folder, 'extends = "base.toml"\n[train]\nlocal_steps = 5\n')).train
    assert (train.local_steps, train.epochs) == (5, 1)


def test_own_claims_come_before_inherited_ones(folder):
    own = '[[claim]]\ntext = "own"\nkind = "order"\nexpect = ["fedavg", "fedlamb"]\n'
    experiment = load(write(folder, f'extends = "base.toml"\n{own}'))
    assert [claim.text for claim in experiment.claim] == ["own", "inherited"]


def test_grids_and_options_are_inherited_only_for_algorithms_that_are_compared(folder):
    text = 'extends = "base.toml"\n[compare]\nalgorithms = ["fedavg"]\n[compare.grid]\nfedcm.lr = [0.2]\n'
    compare = load(write(folder, text)).compare
    assert set(compare.grid) == {"fedavg", "fedcm"}
    assert compare.options == {}


def test_later_files_win_and_chains_are_followed(folder):
    write(folder, 'extends = "base.toml"\n[train]\nrounds = 4\n', "middle.toml")
    write(folder, "[train]\nepochs = 8\n", "other.toml")
    experiment = load(write(folder, 'extends = ["middle.toml", "other.toml"]\n'))
    assert (experiment.train.rounds, experiment.train.epochs) == (4, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('extends = "nothing.toml"\n', "there is no file"),
        ("extends = 3\n", "neither the name of a file nor a list"),
        ('extends = "own.toml"\n', "extends this file again"),
        ('extends = "base.toml"\n[train]\nepoch = 3\n', "did you mean 'epochs'"),
    ],
)
def test_a_bad_extends_is_one_line(folder, text, reason):
    with pytest.raises(BadInput, match=reason) as caught:
        load(write(folder, text))
    assert "\n" not in str(caught.value)


def test_a_damaged_base_is_named(folder):
    write(folder, "[train\n", "broken.toml")
    with pytest.raises(BadInput, match=r"broken\.toml: not valid TOML"):
        load(write(folder, 'extends = "broken.toml"\n'))


@pytest.mark.parametrize("file", sorted(PAPERS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_complete_copy_is_the_same_experiment(file, tmp_path):
    copy = write(tmp_path, complete_text(file))
    assert "extends" not in copy.read_text()
    assert load(copy) == load(file)


def test_toml_is_read_back():
    tree = {"a": {"x": 1e-05, "y": [1, "two", True], "z": None, "b.c": {"k": 'q"uote', "n": float("inf")}}}
    del tree["a"]["z"]
    assert tomllib.loads(as_toml(tree)) == tree
