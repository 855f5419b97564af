"""Write a report: the HTML page, and figures and tables as files."""

from __future__ import annotations

from pathlib import Path

from lamina.experiment.outputs import refuse_in_run_folder, write_output
from lamina.report import figures, page
from lamina.report.build import Report
from lamina.report.tables import to_csv, to_latex
from lamina.storage.files import writing_to


def save_page(report: Report, path: Path) -> None:
    """Write the page; only an earlier report may be replaced."""
    text = page.html(report)
    _make_folder(path.parent, "--out")
    write_output(path, text.encode(), is_ours=lambda head: page.GENERATOR.encode() in head, kind="report")


def save_files(report: Report, folder: Path) -> list[Path]:
    """Write every figure as PDF, SVG and PNG, every table as CSV and LaTeX; return the files.

    Of existing files, only earlier figures and tables may be replaced.
    """
    _make_folder(folder, "--figures")
    files = []
    for table in report.tables():
        for ending, text in (("csv", to_csv(table)), ("tex", to_latex(table))):
            first = text.partition("," if ending == "csv" else "\n")[0].encode()  # the same in every such table
            files.append(folder / f"{table.name}.{ending}")
            write_output(
                files[-1],
                text.encode(),
                is_ours=lambda ends, first=first: ends.startswith(first),  # type: ignore[misc]
                kind="table of a report",
                option="--figures",
            )
    return files + figures.save_figures(folder, report.curves, report.responses, report.dealt)


def _make_folder(folder: Path, option: str) -> None:
    refuse_in_run_folder(folder / "report", option)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
