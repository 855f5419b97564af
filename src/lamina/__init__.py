"""lamina: layer-wise, locally adaptive federated optimisation for PyTorch.

>>> import torch, lamina
>>> x, y = torch.randn(300, 8), torch.randint(0, 4, (300,))
>>> simulation = lamina.Simulation(torch.nn.Linear(8, 4), (x, y), lamina.FedLamb(), clients=10)
>>> simulation.run(3)[-1]["round"]
3
"""

from __future__ import annotations

import os as _os

from lamina import interrupt as _interrupt  # noqa: F401 (first: it guards the imports that follow)

# OpenMP threads that wait by spinning make a shared machine many times slower. libgomp reads this once, when it is
# loaded, so it must be set before torch is imported; a value of the user's own is left alone.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lamina import aggregation, data, models, schedules
from lamina.algorithms import *  # noqa: F403
from lamina.algorithms import __all__ as _algorithm_names
from lamina.algorithms.contract import ClientInfo, Needs, Number, ServerInfo, algorithm, hyper
from lamina.data.dataset import Dataset
from lamina.errors import BadInput, Diverged, LaminaError, MissingExtra
from lamina.history import History
from lamina.layers import Layers
from lamina.population import Population
from lamina.simulation import Simulation

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "ClientInfo",
    "Dataset",
    "Diverged",
    "History",
    "LaminaError",
    "Layers",
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
    "models",
    "schedules",
    *_algorithm_names,
]
