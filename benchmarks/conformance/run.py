"""Run the comparisons whose packages this Python has, and store what the command printed in results.json.

    python benchmarks/conformance/run.py            # all packages that are installed here
    python benchmarks/conformance/run.py optax pfl  # these

The rows of packages that are not installed stay as they are. `page.py` writes the tables of
docs/reference/conformance.md.
"""

import contextlib
import io
import json
import os
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
sys.path.insert(0, str(HERE))

from cases import CASES  # noqa: E402


def run(case):
    """Return the exit code of a case's command and the lines that it printed."""
    from lamina import cli

    printed, problems, code = io.StringIO(), io.StringIO(), 0
    cli.out.file, cli.err.file, cli.out.width = printed, problems, 1000
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(problems):
            code = cli.run_command(["conform", *case.words])
    finally:
        cli.out.file = cli.err.file = None
    return {"exit_code": code, "lines": (printed.getvalue() + problems.getvalue()).splitlines()}


def installed(package):
    """Return a package's version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def stored():
    """Return the stored results by command."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main(packages):
    """Run the cases and store their results, in the order of the table."""
    results = stored()
    for case in CASES:
        version = installed(case.package)
        if version is None or (packages and case.package not in packages):
            continue
        results[case.command] = {"package": case.package, "version": version, "what": case.what, **run(case)}
        print(f"{case.package} {version}  {case.what}:", *results[case.command]["lines"][2:], sep="\n    ", flush=True)
        if results[case.command]["exit_code"] not in (0, 1):
            sys.exit(f"{case.command}\n{results[case.command]['lines']}")
    kept = {case.command: results[case.command] for case in CASES if case.command in results}
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.chdir(HERE)
    main(sys.argv[1:])
