"""Sections that name something: options, short forms, natural clients, and what is refused."""

import pytest

from lamina.base.errors import BadInput
from lamina.data.feed import Augment
from lamina.experiment.config import load, parse
from lamina.experiment.sections import Named, augment_keys

TABLE = """
[data]
name = "table"
path = "rows.csv"
label = "grade"
client = "clinic"
test = 0.25
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.toml").write_text(TABLE)
    return tmp_path


def test_a_name_alone_is_short_for_a_table_and_a_table_may_leave_the_name_out():
    assert parse({"data": {"partition": "classes"}}).data.partition == Named(name="classes")
    model = parse({"model": {"hidden": 7}}).model
    assert (model.name, model.options()) == ("mlp", {"hidden": 7})


@pytest.mark.parametrize("given", [0, 1.0, True, [], [-1], [1, "north"], "north"])
def test_clients_that_cannot_be_held_out_are_refused(given):
    with pytest.raises(BadInput, match="must be a fraction above 0 and below 1, or a list of clients' numbers"):
        parse({"data": {"heldout_clients": given}})


@pytest.mark.parametrize("given", [0.25, [0, 2], ["north"]])
def test_held_out_clients_are_a_fraction_numbers_or_values(given):
    assert parse({"data": {"heldout_clients": given}}).data.heldout_clients == given


def test_the_keys_of_an_augmentation_describe_it():
    keys = augment_keys(Augment(pad=2, fill="mean"))
    data = parse({"data": keys}).data
    assert (data.augment, data.augment_pad, data.augment_fill) == (True, 2, "mean")
    assert augment_keys(None) == {}
    assert parse({"data": augment_keys("my_module:noise")}).data.augment == "my_module:noise"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"name": "table", "label": "y"}, "[data] needs the key 'path' for table"),
        ({"name": "table", "path": "a.csv", "label": "y", "clint": "z"}, "did you mean 'client'?"),
        ({"name": "table", "path": "a.csv", "label": 3}, "data.label = 3: must be text"),
        ({"name": "table", "path": "a.csv", "label": "y", "task": "guess"}, "'classification' or 'regression'"),
        ({"name": "images", "path": "a", "size": 3}, "must be a list of whole numbers"),
        ({"name": "arrays", "path": "a", "test": True}, "must be text or a number"),
        ({"name": "digits", "path": "a"}, "[data] has no key 'path'"),
        ({"name": "tabel", "path": "a"}, "did you mean 'table'?"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(data, expected):
    with pytest.raises(BadInput) as refused:
        parse({"data": data})
    assert expected in str(refused.value)


def test_natural_clients_are_the_partition_unless_another_is_given(folder):
    natural = {"name": "arrays", "path": "x", "client": "user"}
    assert parse({"data": natural}).data.partition.options() == {"column": "user"}
    assert parse({"data": natural | {"partition": "iid"}}).data.partition.name == "iid"
    (folder / "child.toml").write_text('extends = "table.toml"\n[data]\nname = "arrays"\npath = "x"\n')
    assert load("child.toml").data.options() == {"path": "x"}
