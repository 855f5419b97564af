"""Write the tables and commands of docs/reference/conformance.md from results.json.

python benchmarks/conformance/page.py
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reference" / "conformance.md"
sys.path.insert(0, str(HERE))

from cases import CASES  # noqa: E402
from run import stored  # noqa: E402


def verdict(lines):
    """Return what the command printed for one cell: the verdict, and the notes on the step."""
    _, _, line, *more = lines
    found = re.fullmatch(r"differs first in (.*): (\w+) by (\S+), .*", line)
    if found is None:
        return line.replace("the same", "**the same**", 1)
    place, quantity, size = found.groups()
    notes = []
    for note in more:
        if part := re.fullmatch(r"  that is (\S+) of the largest entry of our step", note):
            notes.append(f"{part[1]} × our step")
        if ratio := re.fullmatch(r"  their step there is (\S+) times ours, .*", note):
            notes.append(f"their step is {ratio[1]} × ours")
    return f"**differs** first in {place}: {quantity} by {size}" + "".join(f"; {note}" for note in notes)


def section(package, results):
    """Return the table of a package and its commands."""
    rows = [(case, results[case.command]) for case in CASES if case.package == package and case.command in results]
    table = [f"| | {package} {rows[0][1]['version']} | verdict |", "|---|---|---|"]
    table += [f"| {n} | {case.what} | {verdict(result['lines'])} |" for n, (case, result) in enumerate(rows, 1)]
    commands = [f"lamina conform {case.command}  # {n}" for n, (case, _) in enumerate(rows, 1)]
    return "\n".join([*table, "", "```sh", *commands, "```"])


def filled(page, results):
    """Return the page with its generated parts."""
    for package in dict.fromkeys(case.package for case in CASES):
        pattern = rf"(<!-- {package}: page.py -->\n).*?(<!-- end -->)"
        text = section(package, results).replace("\\", r"\\")
        page, count = re.subn(pattern, rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL)
        assert count == 1, f"the page has {count} places for {package}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), stored()))
