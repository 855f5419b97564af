"""Sphinx configuration of the documentation: ``make docs`` builds it into docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path

import lamina

sys.path.insert(0, str(Path(__file__).parent))

project = "lamina"
author = "The lamina authors"
copyright = f"{author}, Apache-2.0"
version = release = lamina.__version__

extensions = [
    "myst_nb",  # Markdown pages and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings in Google style
    "generated",  # tables made from lamina itself: generated.py, in this folder
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"lamina {release}"
html_static_path: list[str] = []
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

nb_execution_mode = "force"  # notebooks are stored without outputs and run in every build
nb_execution_raise_on_error = True
nb_execution_timeout = 120

default_role = "code"  # a name in `single backticks` in a docstring
autodoc_typehints = "none"  # signatures show names and defaults; the text says what they mean
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

nitpicky = True  # a reference that leads nowhere is a warning, and warnings are errors
