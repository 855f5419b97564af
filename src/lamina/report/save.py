"""Write a report: the HTML page, and figures and tables as files."""

from __future__ import annotations

from pathlib import Path

from lamina.experiment.runs.outputs import refuse_in_run_folder, write_output
from lamina.report import figures, page
from lamina.report.build import Report
from lamina.report.tables import to_csv
from lamina.storage.files import writing_to


def save_page(report: Report, path: Path) -> None:
    """Write the page; only an earlier report may be replaced."""
    text = page.html(report)
    _make_folder(path.parent, "--out")
    write_output(path, text.encode(), is_ours=lambda head: page.GENERATOR.encode() in head, kind="report")


def save_files(report: Report, folder: Path) -> list[Path]:
    """Write every figure as PDF, SVG and PNG, every table as CSV; return the files.

    Of existing files, only earlier figures and tables may be replaced.
    """
    _make_folder(folder, "--figures")
    files: list[Path] = []

    def write(name: str, data: bytes, kind: str, mark: str) -> None:
        def is_ours(ends: bytes) -> bool:
            return ends.startswith(mark.encode()) if kind == "table" else mark.encode() in ends

        files.append(folder / name)
        write_output(files[-1], data, is_ours=is_ours, kind=f"{kind} of a report", option="--figures")

    for table in report.tables():
        text = to_csv(table)
        write(f"{table.name}.csv", text.encode(), "table", text.partition(",")[0])
    for name, figure in figures.report_figures(report):
        for ending in figures.FORMATS:
            write(f"{name}.{ending}", figures.image_of(figure, ending), "figure", figures.MARK)
    return files


def _make_folder(folder: Path, option: str) -> None:
    refuse_in_run_folder(folder / "report", option)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
