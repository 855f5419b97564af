"""The files of a report: all figures and tables are written, and nothing of the user's is replaced."""

import itertools

import pytest

from lamina import BadInput
from lamina.report import figures
from lamina.report.build import build
from lamina.report.save import save_files, save_page
from run_folders import write_run


@pytest.fixture
def report(two, monkeypatch):
    """A report with the first of its figures in one format: drawing all of them takes seconds."""
    report = build([two])
    drawn = list(itertools.islice(figures.report_figures(report), 1))
    monkeypatch.setattr(figures, "FORMATS", ("svg",))
    monkeypatch.setattr(figures, "report_figures", lambda report: drawn)
    return report


def test_every_table_and_figure_is_a_file_and_may_be_written_again(report, tmp_path):
    folder = tmp_path / "new" / "figures"
    files = save_files(report, folder)
    names = {f"{table.name}.csv" for table in report.tables()}
    names |= {f"{name}.svg" for name, _ in figures.report_figures(report)}
    assert {path.name for path in files} == names == {path.name for path in folder.iterdir()}
    before = {path: path.read_bytes() for path in files}
    assert save_files(report, folder) == files
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.parametrize("name", ["results.csv", "accuracy-by-round.svg"])
def test_a_file_of_the_users_is_not_replaced_by_a_table_or_figure(report, tmp_path, name):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / name).write_text("mine")
    with pytest.raises(BadInput, match=name):
        save_files(report, tmp_path / "figures")
    assert (tmp_path / "figures" / name).read_text() == "mine"


def test_a_page_replaces_only_an_earlier_page(report, tmp_path):
    page = tmp_path / "new" / "page.html"
    save_page(report, page)
    first = page.read_bytes()
    save_page(report, page)
    assert page.read_bytes() == first
    page.write_text("mine")
    with pytest.raises(BadInput, match="is there and is no report"):
        save_page(report, page)
    assert page.read_text() == "mine"


def test_nothing_is_written_into_a_runs_folder_not_even_a_folder(report, tmp_path):
    run = write_run(tmp_path / "run", [0.5])
    before = sorted(run.iterdir())
    for save, place in ((save_page, run / "new" / "page.html"), (save_files, run / "new")):
        with pytest.raises(BadInput, match="is inside the run folder"):
            save(report, place)
    assert sorted(run.iterdir()) == before
