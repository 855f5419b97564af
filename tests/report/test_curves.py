"""The curves of a report: which runs are one curve, and how curves are named."""

from lamina.experiment.runs.records import find_records
from lamina.report.curves import differing, without_repeats
from run_folders import curves_in, write_run


def test_runs_are_grouped_by_all_but_the_seed_and_where_they_ran(tmp_path):
    write_run(tmp_path / "a", [0.5], seed=0)
    write_run(tmp_path / "b", [0.5], seed=1, run={"device": "cuda:0", "engine": "loop", "threads": 2})
    write_run(tmp_path / "c", [0.5], run={"precision": "bf16"})
    write_run(tmp_path / "d", [0.5], data={"partition": {"name": "dirichlet", "alpha": 0.3}})
    write_run(tmp_path / "e", [0.5], data={"partition": {"name": "dirichlet", "alpha": 0.5}})
    labels = [curve.name for curve in curves_in(tmp_path)]
    assert [len(curve.records) for curve in curves_in(tmp_path)] == [2, 1, 1, 1]
    assert labels[0] == "FedAvg (Fed-SGD), classes, k 2, precision fp32"
    assert labels[1] == "FedAvg (Fed-SGD), classes, k 2, precision bf16"
    assert labels[2:] == [f"FedAvg (Fed-SGD), dirichlet, alpha {alpha}, precision fp32" for alpha in (0.3, 0.5)]


def test_an_algorithms_options_are_compared_with_its_own_kind(tmp_path):
    for alpha in (0.1, 0.2):
        write_run(tmp_path / f"lada{alpha}", [0.5], algorithm="fedlada", options={"alpha": alpha})
    write_run(tmp_path / "avg", [0.5])
    assert [c.name for c in curves_in(tmp_path)] == ["FedAvg (Fed-SGD)", "FedLADA, alpha 0.1", "FedLADA, alpha 0.2"]


def test_codecs_and_noise_are_named_in_words_and_the_noise_of_single_seeds_is_not(tmp_path):
    for seed in (0, 1):
        privacy = {"bound": 1.0, "delta": 1e-5, "epsilon": 8.0, "noise_multiplier": 3.1, "noise_id": f"id{seed}"}
        write_run(tmp_path / f"private{seed}", [0.5], seed=seed, privacy=privacy)
    for feedback in (True, False):
        channel = {"codec": [{"name": "qsgd", "bits": 4, "bucket": 512}], "fields": {}, "feedback": feedback}
        write_run(tmp_path / f"coarse{feedback}", [0.5], channel=channel)
    write_run(tmp_path / "plain", [0.5])
    curves = {curve.name: len(curve.records) for curve in curves_in(tmp_path)}
    assert curves == {
        f"FedAvg (Fed-SGD){what}": seeds
        for what, seeds in {
            "": 1,
            ", qsgd 4 bits, feedback": 1,
            ", qsgd 4 bits, no feedback": 1,
            ", epsilon 8": 2,
        }.items()
    }


def test_without_a_budget_the_noise_is_named(tmp_path):
    """Its multiplier is recorded in both cases, so it differs as well."""
    for name, epsilon, multiplier in (("budget", 8.0, 3.1), ("less", None, 1.0), ("more", None, 2.5)):
        privacy = {"bound": 1.0, "delta": 1e-5, "epsilon": epsilon, "noise_multiplier": multiplier}
        write_run(tmp_path / name, [0.5], privacy=privacy)
    names = {curve.records[0].folder.name: curve.name for curve in curves_in(tmp_path)}
    assert names == {
        "budget": "FedAvg (Fed-SGD), epsilon 8, noise_multiplier 3.1",
        "less": "FedAvg (Fed-SGD), noise_multiplier 1",
        "more": "FedAvg (Fed-SGD), noise_multiplier 2.5",
    }


def test_a_repeated_run_counts_once(tmp_path):
    write_run(tmp_path / "short", [0.5], rounds=3)
    write_run(tmp_path / "long", [0.5, 0.6, 0.7])
    kept, lines = without_repeats(find_records([tmp_path]))
    assert [run.folder.name for run in kept] == ["long"]
    assert len(lines) == 1
    assert "short" in lines[0]


def test_differing():
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}]) == ["b", "c"]


def test_different_experiments_are_told_apart_in_one_short_line(tmp_path):
    """Of the many settings that differ, a label names only those that tell curves apart."""
    own = {"name": "own", "clients": 9, "content": "0123", "partition": {"name": "iid"}}
    other = {"name": "digits", "clients": 3, "partition": {"name": "dirichlet", "alpha": 0.5, "sizes": "natural"}}
    long = {"local_steps": 7, "batch_size": 64, "participation": 0.125, "loss": "a_loss_with_a_long_name"}
    for name, data, train in (("a", own, {}), ("b", other, long), ("c", other, {**long, "clip": 0.25})):
        write_run(tmp_path / name, [0.5], data=data, train=train)
    assert [curve.name for curve in curves_in(tmp_path)] == [
        "FedAvg (Fed-SGD), own", "FedAvg (Fed-SGD), digits", "FedAvg (Fed-SGD), digits, clip 0.25"
    ]  # fmt: skip


def test_curves_that_only_a_digest_tells_apart_are_named_by_their_folder(tmp_path):
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, [0.5], model={"name": "Net", "values": name})
    assert [curve.name for curve in curves_in(tmp_path)] == [
        "FedAvg (Fed-SGD) (runs/first)", "FedAvg (Fed-SGD) (runs/second)"
    ]  # fmt: skip
