"""Figures: lines, labels and file formats."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from lamina import History
from lamina.experiment.runs.records import Record
from lamina.experiment.trials.trial import Trial
from lamina.report import build, figures
from lamina.report.figures import rates_figure
from lamina.report.rates import Response
from run_folders import LONG_RUN_ROUNDS, curves_in, write_long_run, write_run


def test_a_figure_in_every_format(tmp_path):
    write_run(tmp_path / "runs" / "a", [None, 0.5, None, 0.7], algorithm="fedavg$_{x")  # no mathematics in a name
    write_run(tmp_path / "runs" / "b", [None])  # never evaluated: nothing to draw
    write_run(tmp_path / "runs" / "c", [0.6], lr=0.2)  # a line of one point
    curves = curves_in(tmp_path / "runs")
    drawn = figures.curve_figure(curves, figures.described("accuracy"), "bytes")
    assert [line.get_ydata().tolist() for line in drawn.axes[0].lines] == [[50, 70], [60]]
    assert drawn.axes[0].lines[0].get_xdata().tolist() == pytest.approx([10e-3, 20e-3])
    images = [figures.image_of(drawn, ending) for ending in figures.FORMATS]
    assert [image[:5] for image in images] == [b"%PDF-", b"<?xml", b"\x89PNG\r"]
    assert [figures.image_of(drawn, ending) for ending in figures.FORMATS] == images  # the same figure, the same file


def test_a_figure_draws_the_ends_of_a_long_run(tmp_path):
    long_run = write_long_run(tmp_path / "long")
    (line,) = figures.curve_figure(build.build([long_run]).curves, figures.described("accuracy"), "round").axes[0].lines
    rounds = np.asarray(line.get_xdata())
    assert (rounds[0], rounds[-1], len(rounds)) == (1, LONG_RUN_ROUNDS, figures.MOST_ROUNDS_DRAWN)


@pytest.mark.parametrize(
    "rates",
    [[0.1, 0.11, 0.12], [0.02, 0.03, 0.05, 0.07], [0.01 * 1.2**i for i in range(14)], [1e-5 * 3**i for i in range(13)],
     [0.1], [0.001, 0.1, 0.1001, 0.1002, 1]],
)  # fmt: skip
def test_the_labels_of_learning_rates_do_not_overlap(rates):
    runs = [
        Record(Path(), {"train": {"rounds": 1}}, History([{"round": 1, "accuracy": 0.5 + lr / 1e3}]), {})
        for lr in rates
    ]
    tried = [(lr, Trial("", {}, [run], 1)) for lr, run in zip(rates, runs, strict=True)]
    figure = rates_figure([Response("FedAvg", "test", tried)])
    figure.draw_without_rendering()
    axis = figure.axes[0].xaxis
    low, high = axis.get_view_interval()
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    boxes = sorted(
        tick.label1.get_window_extent().extents[[0, 2]].tolist()
        for tick in ticks
        if tick.label1.get_text() and low <= tick.get_loc() <= high
    )
    assert boxes
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(boxes))


def test_metrics_are_drawn_against_the_seconds_of_a_clock_where_there_is_one(two, tmp_path):
    assert figures.axes_of(curves_in(two)) == ["round", "bytes", "seconds"]
    write_run(tmp_path / "timed", [0.5, 0.9, 0.7], seed=9, clock=4.0)
    curves = curves_in(tmp_path / "timed")
    assert figures.axes_of(curves) == ["round", "bytes", "seconds", "clock_seconds"]
    (line,) = figures.curve_figure(curves, figures.described("accuracy"), "clock_seconds").axes[0].lines
    assert line.get_xdata().tolist() == [4.0, 8.0, 12.0]
