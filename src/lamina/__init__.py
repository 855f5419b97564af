"""lamina: layer-wise, locally adaptive federated optimisation for PyTorch.

>>> import torch, lamina
>>> x, y = torch.randn(300, 8), torch.randint(0, 4, (300,))
>>> simulation = lamina.Simulation(torch.nn.Linear(8, 4), (x, y), lamina.FedLamb(), clients=10)
>>> simulation.run(3)[-1]["round"]
3
"""

from __future__ import annotations

import os as _os

# OpenMP threads that wait by spinning make a shared machine many times slower. libgomp reads this once, when it is
# loaded, so it must be set before torch is imported; a value of the user's own is left alone.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib as _importlib
import pkgutil as _pkgutil
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from lamina.algorithms import *  # noqa: F403
    from lamina.api.names import *  # noqa: F403

__version__ = "0.2.0"
_PARTS = ("data", "schedules", "aggregation", "losses", "models")  # modules of further public names
_MODULES = frozenset(module.name for module in _pkgutil.iter_modules(__path__)) - {"__main__"}  # noqa: F405


def _public_name(name: str) -> _Any:
    """Import a module or a public name when it is first used: the command line can then answer without torch."""
    if name in _MODULES:
        return _importlib.import_module(f"lamina.{name}")
    if not name.startswith("__") or name == "__all__":
        api = _importlib.import_module("lamina.api.names")
        if hasattr(api, name):
            return getattr(api, name)
    homes = [home for home in _PARTS if not name.startswith("_") and hasattr(_public_name(home), name)]
    hint = f"; it is lamina.{homes[0]}.{name}" if homes else ""
    raise AttributeError(f"module 'lamina' has no attribute '{name}'{hint}", name=name, obj=_sys.modules[__name__])


if not _TYPE_CHECKING:  # a type checker knows the names and should report others
    __getattr__ = _public_name


def __dir__() -> list[str]:
    return sorted(_public_name("__all__"))
