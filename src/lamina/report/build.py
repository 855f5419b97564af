"""From run folders to a report: the page, and on request every figure and table as a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.errors import BadInput, nearest
from lamina.experiment.outputs import refuse_in_run_folder, write_output
from lamina.experiment.records import Record, find_records
from lamina.report import export, figures, tables
from lamina.report.curves import Curve, folder_name, group, without_repeats
from lamina.report.partition import Dealt, deal_again, describe
from lamina.report.rates import Response, rates_table, responses
from lamina.storage.files import cannot_write
from lamina.text import plural


@dataclass(frozen=True)
class Report:
    """Everything a report shows."""

    title: str
    curves: list[Curve]
    responses: list[Response]
    dealt: list[Dealt]
    targets: list[float]
    baseline: int  # which curve ratios refer to
    notes: list[str]  # what a reader should know

    def tables(self) -> list[tables.Table]:
        """Every table that has rows."""
        every = [
            tables.cost_table(self.curves, self.targets, self.baseline),
            tables.results_table(self.curves),
            rates_table(self.responses),
            *tables.config_tables(self.curves),
            *tables.runs_tables(self.curves),
        ]
        return [table for table in every if table.rows]


def build(
    folders: Sequence[Path], *, targets: Sequence[float] = (), baseline: str | None = None, title: str | None = None
) -> Report:
    """Read the runs and work out what the report says about them.

    Args:
        folders: Run folders, or folders of such folders, at any depth.
        targets: Test accuracies to reach; chosen from the results if there are none.
        baseline: The algorithm or curve that ratios refer to; FedAvg if it is there, else the first.
        title: The heading; else the data in words.
    """
    for target in targets:
        if not 0 < target <= 1:
            raise BadInput(f"--target {target:g}: must be an accuracy above 0 and up to 1, for example 0.9")
    runs = find_records(folders)
    runs, notes = without_repeats(runs)
    final = [run for run in runs if not run.tuning] or runs  # only tuning runs: they are what there is to show
    curves = group(final)
    notes += [
        f"{folder_name(run)}: {run.diverged or f'{len(run.history)} of {_in_all(run)}, not finished'}"
        for run in final
        if not run.complete
    ]
    found = responses(runs)
    notes += [response.warning for response in found if response.warning]
    data = dict.fromkeys(describe(run) for run in final)
    if len(data) > 1:
        notes.append("the runs differ in their data: compare only curves with the same")
    dealt, missing = deal_again(curves)
    return Report(
        title or " · ".join(list(data)[:3]) + (" …" if len(data) > 3 else ""),
        curves,
        found,
        dealt,
        sorted(set(targets)) or tables.default_targets(curves),
        _find_baseline(curves, baseline),
        notes + missing,
    )


def save_page(report: Report, path: Path) -> None:
    """Write the page; a file that is not an earlier report is not replaced."""
    from lamina.report import page

    text = page.html(report)
    refuse_in_run_folder(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write '{path}': {error.strerror or error}") from error
    write_output(path, text.encode(), is_ours=lambda head: page.GENERATOR.encode() in head, kind="report")


def save_files(report: Report, folder: Path) -> list[Path]:
    """Write every figure as PDF, SVG and PNG, every table as CSV and LaTeX; return the files.

    A file of the same name that is not an earlier figure or table is not replaced.
    """
    refuse_in_run_folder(folder / "figure", "--figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    files = []
    for table in report.tables():
        for ending, text in (("csv", export.to_csv(table)), ("tex", export.to_latex(table))):
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


def _rounds(run: Record) -> int:
    return int(run.config["train"]["rounds"])


def _in_all(run: Record) -> str:
    return plural(_rounds(run), "round")


def _find_baseline(curves: Sequence[Curve], name: str | None) -> int:
    if name is None:
        return tables.default_baseline(curves)
    for index, curve in enumerate(curves):
        if name in (curve.algorithm, curve.label):
            return index
    known = list(dict.fromkeys(curve.algorithm for curve in curves))
    raise BadInput(f"no run of the baseline '{name}'{nearest(name, known)} (algorithms: {', '.join(known)})")
