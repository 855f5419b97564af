"""A real federation: every algorithm of lamina on Flower, the same object that was simulated.

`Federation` describes it; ``federation.server_app()`` and ``federation.client_app()`` are the two apps Flower runs.
"""

from __future__ import annotations

from lamina.base.errors import missing_extra

try:
    from importlib.metadata import version

    import flwr  # noqa: F401
except ImportError as error:
    raise missing_extra("Flower", "flower", "lamina.flower") from error

SUPPORTED = ("1.41", "1.42")  # as in pyproject.toml; other versions may lack what lamina.flower.internals uses
installed = version("flwr")
if ".".join(installed.split(".")[:2]) not in SUPPORTED:
    raise missing_extra(f"Flower {' or '.join(SUPPORTED)}, not {installed}", "flower", "lamina.flower")

from lamina.flower.checks import Limits  # noqa: E402
from lamina.flower.federation import Federation  # noqa: E402
from lamina.flower.server import Stopped  # noqa: E402

__all__ = ["Federation", "Limits", "Stopped"]
