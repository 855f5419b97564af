"""Build a report from run folders: its targets, notes and partitions."""

import json

import pytest

from lamina import BadInput
from lamina.report import build, figures, tables
from run_folders import EVIL, write_run


def test_regression_has_losses_and_no_targets(tmp_path):
    folder = write_run(tmp_path / "a", [None, None])
    rows = [json.dumps({"round": i, "loss": loss}) for i, loss in enumerate((0.5, 0.25, 0.3), 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    report = build.build([tmp_path])
    assert tables.results_table(report.curves).rows[0][2:4] == ["0.350", "0.250"]  # final, best
    assert report.targets == []
    assert "cost-to-target" not in [table.name for table in report.tables()]


def test_runs_with_another_first_metric_are_noted(two, tmp_path):
    folder = write_run(tmp_path / "other", [None])
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "loss": 0.5}) + "\n")
    notes = build.build([two, tmp_path / "other"]).notes
    assert "some runs have another first metric (loss), but all are judged by 'accuracy' here" in notes


def test_the_partitions_of_the_first_seeds_are_shown_once_each(tmp_path):
    two_clients, other = [[3, 0, 1], [0, 2, 2]], [[1, 2, 1], [2, 0, 2]]
    for place, lr, seed, counts in [("a", 0.1, 0, two_clients), ("b", 0.1, 1, other), ("c", 0.2, 0, two_clients),
                                    ("d", 0.3, 5, other), ("e", 0.4, 0, None)]:  # fmt: skip
        folder = write_run(tmp_path / place, [0.5], lr=lr, seed=seed)
        if counts is not None:  # runs of data without classes have no such file
            (folder / "partition.json").write_text(json.dumps({"class_counts": counts}))
    report = build.build([tmp_path])
    named = "digits, classes (k=2), 8 clients, seed"
    assert report.dealt == [(f"{named} 0", two_clients), (f"{named} 5", other)]
    assert not any("split" in note or "partition" in note for note in report.notes)
    drawn = dict(figures.report_figures(report))["partition-1"]
    assert [bar.get_height() for bar in drawn.axes[0].patches] == [4, 4]
    assert drawn.axes[1].images[0].get_array().tolist() == [[3, 0], [0, 2], [1, 2]]


@pytest.mark.parametrize("content", [{"class_counts": [[EVIL]]}, {"class_counts": [[1], [2, 3]]}, {}, []])
def test_a_partition_without_numbers_is_refused_in_one_line(content, tmp_path):
    folder = write_run(tmp_path / "a", [0.5])
    (folder / "partition.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"partition\.json' does not hold samples by client and class"):
        build.build([tmp_path])


def test_a_damaged_folder_is_named(tmp_path):
    write_run(tmp_path / "a", [0.5])
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(BadInput, match=r"it has no config\.json"):
        build.build([tmp_path])


def test_labels_name_the_curves_of_their_folders(tmp_path):
    write_run(tmp_path / "a", [0.5])
    for lr in (0.2, 0.3):
        write_run(tmp_path / "b" / f"lr{lr}", [0.5], lr=lr)
    write_run(tmp_path / "c", [0.5], seed=1)  # without labels, one curve with a
    report = build.build([tmp_path / "a", tmp_path / "b", tmp_path / "c"], labels=["mine", "theirs", "again"])
    names = ["mine", "theirs, FedAvg (Fed-SGD), lr 0.2", "theirs, FedAvg (Fed-SGD), lr 0.3", "again"]
    assert [curve.name for curve in report.curves] == names
    with pytest.raises(BadInput, match=r"^1 label for 2 folders: give one each"):
        build.build([tmp_path / "a", tmp_path / "b"], labels=["mine"])
