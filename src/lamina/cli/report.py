"""``lamina report``: finished or running runs as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lamina.base.text import plural
from lamina.cli.base import Quiet, Runs, app, echo, interruptible
from lamina.cli.time import read_clock


@app.command()
@interruptible("the report is not written")
def report(
    folders: Runs,
    out_file: Annotated[Path, typer.Option("--out", help="the page")] = Path("report.html"),
    targets: Annotated[
        list[float] | None,
        typer.Option("--target", help="value of the metric to reach on the test data, e.g. 0.9; may be repeated"),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", help="name of a RUN's curve; once for each RUN, in their order")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="heading of the page")] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="also a folder of figures (PDF, SVG, PNG) and tables (CSV)")
    ] = None,
    clock: Annotated[
        str | None, typer.Option("--clock", help="also time the runs on a network: as for lamina time")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write curves, tables, learning rates and configurations of runs as one page that opens anywhere."""
    from lamina.report.build import build
    from lamina.report.save import save_files, save_page

    timed = None if clock is None else read_clock(clock)
    contents = build(folders, targets=targets or [], title=title, labels=labels or [], clock=timed)
    save_page(contents, out_file)
    files = save_files(contents, figures) if figures is not None else []
    for line in contents.notes:
        echo(f"note: {line}")
    echo(f"report in {out_file}")
    if figures is not None:
        echo(f"{plural(len(files), 'file')} of figures and tables in {figures}/")
