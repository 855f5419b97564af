"""The names that ``import lamina`` offers. `lamina/__init__.py` imports this module when one of them is first used."""

from __future__ import annotations

from lamina import aggregation, data, losses, models, schedules
from lamina.algorithms import *  # noqa: F403
from lamina.algorithms import __all__ as _algorithm_names
from lamina.algorithms.contract import ClientInfo, Needs, Number, ServerInfo, algorithm, hyper
from lamina.data.dataset import Dataset
from lamina.errors import BadInput, Diverged, LaminaError, MissingExtra
from lamina.history import History
from lamina.layers import Layers
from lamina.metrics import Metric
from lamina.population import Population
from lamina.simulation import Simulation

__all__ = [
    "BadInput",
    "ClientInfo",
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
    "data",
    "hyper",
    "losses",
    "models",
    "schedules",
    *_algorithm_names,
]
