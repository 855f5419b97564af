"""Write a new Flower app from the template in ``lamina/flower/template``; this needs no Flower."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.storage.files import check_writable, writing_to

FILES = (
    "pyproject.toml",
    "README.md",
    "gitignore",
    "package/__init__.py",
    "package/data.py",
    "package/federation.py",
    "package/model.py",
)


def write_new_app(folder: Path, nodes: int) -> str:
    """Write a Flower app into a new or empty folder, and return the name of its package."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"'{folder}' is not an empty folder: choose a new one")
    check_writable(folder)
    values = _values(folder, nodes)
    root = resources.files("lamina").joinpath("flower", "template")
    for name in FILES:
        text = root.joinpath(*f"{name}.in".split("/")).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace("{{" + key + "}}", value)
        target = ".gitignore" if name == "gitignore" else name.replace("package/", f"{values['package']}/")
        path = folder / target
        with writing_to(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return values["package"]


def _values(folder: Path, nodes: int) -> dict[str, str]:
    """Return what replaces the template's placeholders."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "federation"
    name = name if name[0].isalpha() else f"app-{name}"
    return {
        "name": name,
        "package": name.replace("-", "_") + "_app",  # never the name of something installed
        "clients": str(nodes),
        "supernodes": plural(nodes, "SuperNode"),
        **_nodes(nodes),
    }


def _nodes(count: int) -> dict[str, str]:
    """Return how the README lists the nodes; of more than three, the first two and the last.

    >>> _nodes(2)["public_keys"], _nodes(9)["public_keys"]
    ('`node-0.pub` and `node-1.pub`', '`node-0.pub`, `node-1.pub`, …, `node-8.pub`')
    """
    shown = [*range(count)] if count <= 3 else [0, 1, count - 1]
    keys = [f"`node-{node}.pub`" for node in shown]
    table = [f'"<id of node {node}>": {node}' for node in shown]
    if count > 3:
        keys.insert(2, "…")
        table.insert(2, "…")
    last = ", " if count > 3 else " and "
    return {
        "public_keys": last.join([", ".join(keys[:-1]), keys[-1]]) if count > 1 else keys[0],
        "table": "{" + ", ".join(table) + "}",
    }
