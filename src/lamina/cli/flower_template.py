"""Write a new Flower app from the template in ``lamina/flower/template``; this needs no Flower."""

from __future__ import annotations

import math
import re
from importlib import resources
from pathlib import Path

from lamina import models
from lamina.base.errors import BadInput, unknown
from lamina.data.readers import sources
from lamina.storage.files import check_writable, writing_to

FILES = (
    "pyproject.toml",
    "README.md",
    "gitignore",
    "package/__init__.py",
    "package/data.py",
    "package/federation.py",
)


def write_new_app(folder: Path, model: str | None, data: str, nodes: int) -> str:
    """Write a Flower app into a new or empty folder, and return the name of its package."""
    if model is not None and model not in models.registry():
        raise unknown("model", model, models.registry())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"'{folder}' is not an empty folder: choose a new one")
    check_writable(folder)
    values = _values(folder, model, data, nodes)
    root = resources.files("lamina").joinpath("flower", "template")
    variant = "package/model.own" if model is None else "package/model.named"
    for name in (*FILES, variant):
        text = root.joinpath(*f"{name}.in".split("/")).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace("{{" + key + "}}", value)
        target = {variant: "package/model.py", "gitignore": ".gitignore"}.get(name, name)
        path = folder / target.replace("package/", f"{values['package']}/")
        with writing_to(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return values["package"]


def _values(folder: Path, model: str | None, data: str, nodes: int) -> dict[str, str]:
    """Return what replaces the template's placeholders."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "federation"
    name = name if name[0].isalpha() else f"app-{name}"
    train = sources.load(data).train
    if train.classes is None:
        raise BadInput(f"'{data}' has no classes: the template is for classification; begin with another data set")
    shape = tuple(train.x.shape[1:])
    return {
        "name": name,
        "package": name.replace("-", "_") + "_app",  # never the name of something installed
        "publisher": "lamina",
        "model": model or "",
        "data": data,
        "shape": repr(shape),
        "inputs": str(math.prod(shape)),
        "classes": str(train.classes),
        "clients": str(nodes),
        "last": str(nodes - 1),
    }
