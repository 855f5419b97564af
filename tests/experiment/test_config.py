"""Experiments: overrides, what an experiment compares, and one line for whatever is wrong."""

import pytest

from lamina.base.errors import BadInput
from lamina.experiment.config import load, parse, parse_override
from lamina.experiment.objects import Objects
from lamina.experiment.trials import reproduction


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=0.5", (("train", "lr"), 0.5)),
        (" model.hidden = [3, 4]", (("model", "hidden"), [3, 4])),
        ("algorithm.name=fedlada", (("algorithm", "name"), "fedlada")),
        ("run.out=a=b", (("run", "out"), "a=b")),
        ("run.out=", (("run", "out"), "")),
    ],
)
def test_the_value_of_an_override_is_toml_or_a_bare_word(override, expected):
    assert parse_override(override) == expected


@pytest.mark.parametrize("override", ["train.lr", "=3", "train.=3", ".lr=3", "train.lr=" + "9" * 5000])
def test_an_override_without_a_key_or_a_value_is_one_line(override):
    with pytest.raises(BadInput, match="--set") as caught:
        parse_override(override)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"run": {"lr": 0.1}}, "mine.toml: [run] has no key 'lr'; did you mean 'train.lr'?"),
        ({"tran": {}}, "mine.toml: the file has no key 'tran'; did you mean 'train'?"),
        ({"privacy": {"bound": 1, "delta": 1e-5, "epsilons": [8]}}, "[privacy] has no key 'epsilons'; did you mean"),
        ({"compare": 3}, "mine.toml: compare = 3: must be a table"),
        ({"privacy": True}, "mine.toml: privacy = True: must be a table, such as { bound = 1.0, epsilon = 8,"),
        ({"privacy": {"delta": 1e-5}}, "mine.toml: [privacy] needs 'bound'"),
        ({"privacy": {"max_norm": 1, "delta": 1e-5}}, "[privacy] has no key 'max_norm'; did you mean 'bound'?"),
        ({"privacy": {"bound": True, "delta": 1e-5}}, "mine.toml: privacy: bound = True: give a number above 0"),
        ({"privacy": {"bound": {}, "delta": 1e-5}}, "mine.toml: privacy: bound = {}: give a number above 0"),
        ({"privacy": {"bound": {"v": "1"}, "delta": 1e-5}}, "mine.toml: privacy: bound.v = '1' is not a number > 0"),
        ({"channel": {"codec": "topk", "share": 0.1}}, "[channel] has no key 'share': give it with the codec's name"),
        ({"channel": {"name": "topk"}}, "[channel] has no key 'name': a codec is named by codec = 'topk'"),
        ({"channel": "qsgd"}, "mine.toml: channel = 'qsgd': must be a table, such as { codec = \"qsgd\" }"),
        ({"compare": {"algorithms": "fedavg"}}, "compare.algorithms = 'fedavg': must be a list, ['fedavg']"),
        ({"train": {"lr": 0, "rounds": 0}}, "(and 1 more)"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(tree, line):
    with pytest.raises(BadInput) as caught:
        parse(tree, "mine.toml")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_values_and_objects_make_another_experiment_and_leave_the_first_alone():
    experiment = parse({"train": {"rounds": 3}})
    changed = experiment.changed(train={"rounds": 5}, run={"engine": "loop"})
    assert (changed.train.rounds, changed.run.engine) == (5, "loop")
    assert experiment == parse({"train": {"rounds": 3}})
    with_objects = experiment.with_objects(Objects(settings={"loss": print}))
    assert experiment.objects.is_empty
    assert not with_objects.objects.is_empty
    assert with_objects.train == experiment.train


def test_a_label_of_a_comparison_may_name_another_algorithm():
    options = {"small steps": {"name": "fedlamb", "decay": 0.1}, "fedavg": {"server_lr": 0.5}}
    compare = parse({"compare": {"algorithms": ["small steps", "fedavg"], "options": options}}).compare
    assert [compare.algorithm_of(label) for label in compare.algorithms] == ["fedlamb", "fedavg"]


def test_claims_are_no_part_of_a_run():
    assert "claim" not in load(next(iter(reproduction.papers().values()))).model_dump()


def test_one_metric_needs_no_list():
    assert parse({"train": {"metrics": "f1"}}).train.metrics == ["f1"]
