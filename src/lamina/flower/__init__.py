"""A real federation: every algorithm of lamina on Flower, the same object that was simulated.

`Federation` describes it; ``federation.server_app()`` and ``federation.client_app()`` are the two apps Flower runs.
"""

from __future__ import annotations

import logging

from lamina.base.errors import missing_extra

try:
    from importlib.metadata import version

    import flwr  # noqa: F401
except ImportError as error:
    raise missing_extra("Flower", "flower", "lamina.flower") from error

TESTED = "1.41.0"
if version("flwr") != TESTED:
    logging.getLogger(__name__).warning(
        "lamina.flower was tested with Flower %s, and this is %s: pip install -e '.[flower]' brings the tested one",
        TESTED,
        version("flwr"),
    )

from lamina.flower.checks import Limits  # noqa: E402
from lamina.flower.federation import Federation  # noqa: E402
from lamina.flower.server import Stopped  # noqa: E402

__all__ = ["Federation", "Limits", "Stopped"]
