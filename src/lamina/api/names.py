"""The names that ``import lamina`` offers. `lamina/__init__.py` imports this module when one of them is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lamina import data, models
from lamina.algorithms import *  # noqa: F403
from lamina.algorithms import __all__ as _algorithm_names
from lamina.algorithms.contract import ClientInfo, Needs, Number, ServerInfo
from lamina.algorithms.declaration import algorithm, option
from lamina.api.simulation import Simulation
from lamina.base.errors import BadInput, Diverged, LaminaError, MissingExtra
from lamina.base.warnings_once import print_warnings_once
from lamina.data.dataset import Dataset
from lamina.objective import losses
from lamina.objective.layers import Layers
from lamina.rounds import aggregation, schedules
from lamina.rounds.clock import Clock
from lamina.training.audit import audit
from lamina.training.history import History
from lamina.training.metrics import Metric
from lamina.training.population import Population

if TYPE_CHECKING:
    from lamina.api.results import compare, tune
    from lamina.api.trained import load
    from lamina.conformance import conform

print_warnings_once()

__all__ = [
    "BadInput",
    "ClientInfo",
    "Clock",
    "Dataset",
    "Diverged",
    "History",
    "LaminaError",
    "Layers",
    "Metric",
    "MissingExtra",
    "Needs",
    "Number",
    "Population",
    "ServerInfo",
    "Simulation",
    "aggregation",
    "algorithm",
    "audit",
    "compare",
    "conform",
    "data",
    "load",
    "option",
    "losses",
    "models",
    "schedules",
    "tune",
    *_algorithm_names,
]


def __getattr__(name: str) -> Any:
    """Import comparisons, tuning and loading when they are first used: a simulation needs neither nor matplotlib."""
    modules = {"compare": "api.results", "tune": "api.results", "load": "api.trained", "conform": "conformance"}
    if name in modules:
        return getattr(importlib.import_module(f"lamina.{modules[name]}"), name)
    raise AttributeError(f"module 'lamina.api.names' has no attribute '{name}'")
