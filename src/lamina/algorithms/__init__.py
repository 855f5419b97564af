"""All algorithms: `create` makes one by name, `registry` lists the classes."""

from __future__ import annotations

import inspect
from typing import Any

from lamina.algorithms.contract import Algorithm, Card
from lamina.algorithms.declaration import option_places, options, registry
from lamina.algorithms.deltasgd import DeltaSgd
from lamina.algorithms.diloco import DiLoCo
from lamina.algorithms.fedadagrad import FedAdagrad
from lamina.algorithms.fedadam import FedAdam
from lamina.algorithms.fedadam_star import FedAdamStar
from lamina.algorithms.fedadamw import FedAdamW
from lamina.algorithms.fedams import FedAms
from lamina.algorithms.fedams_server import FedAmsServer
from lamina.algorithms.fedavg import FedAvg
from lamina.algorithms.fedavgm import FedAvgM
from lamina.algorithms.fedcm import FedCM
from lamina.algorithms.feddyn import FedDyn
from lamina.algorithms.fedexp import FedExp
from lamina.algorithms.fedlada import FedLada
from lamina.algorithms.fedlada_lamb import FedLadaLamb
from lamina.algorithms.fedlamb import FedLamb
from lamina.algorithms.fedlars import FedLars
from lamina.algorithms.fedlion import FedLion
from lamina.algorithms.fedmuon import FedMuon
from lamina.algorithms.fednova import FedNova
from lamina.algorithms.fedprox import FedProx
from lamina.algorithms.fedsam import FedSam
from lamina.algorithms.fedsps import FedSps
from lamina.algorithms.fedyogi import FedYogi
from lamina.algorithms.localadam import LocalAdam
from lamina.algorithms.localadamw import LocalAdamW
from lamina.algorithms.localmuon import LocalMuon
from lamina.algorithms.mime import Mime
from lamina.algorithms.mimelamb import MimeLamb
from lamina.algorithms.mofedsam import MoFedSam
from lamina.algorithms.scaffnew import Scaffnew
from lamina.algorithms.scaffold import Scaffold
from lamina.base.errors import BadInput, unknown
from lamina.base.registry import import_named, refuse_unknown_options

__all__ = [
    "BUILT_IN",
    "Algorithm",
    "Card",
    "DeltaSgd",
    "DiLoCo",
    "FedAdagrad",
    "FedAdam",
    "FedAdamStar",
    "FedAdamW",
    "FedAms",
    "FedAmsServer",
    "FedAvg",
    "FedAvgM",
    "FedCM",
    "FedDyn",
    "FedExp",
    "FedLada",
    "FedLadaLamb",
    "FedLamb",
    "FedLars",
    "FedLion",
    "FedMuon",
    "FedNova",
    "FedProx",
    "FedSam",
    "FedSps",
    "FedYogi",
    "LocalAdam",
    "LocalAdamW",
    "LocalMuon",
    "Mime",
    "MimeLamb",
    "MoFedSam",
    "Scaffnew",
    "Scaffold",
    "create",
    "find",
    "options",
    "registry",
]


BUILT_IN = frozenset(registry())
"""The names of lamina's own algorithms."""


def find(name: str) -> type[Algorithm]:
    """Return an algorithm class by name; ``package.module:Class`` finds one of your own.

    >>> find("fedlamb").card.title
    'Fed-LAMB'
    """
    if ":" in name:
        cls: Any = import_named("algorithm", name)
        if not (isinstance(cls, type) and issubclass(cls, Algorithm) and hasattr(cls, "card")):
            raise BadInput(f"'{name}' is not an algorithm class: decorate it with @lamina.algorithm")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise BadInput(f"the algorithm '{name}' is not complete: it lacks {missing}")
        return cls
    if name not in registry():
        raise unknown("algorithm", name, registry())
    return registry()[name]


def create(name: str, preset: str | None = None, **given: Any) -> Algorithm:
    """Make an algorithm by name, from its defaults, a preset and options, each overriding the one before.

    >>> create("fedlamb", decay=0.01).decay
    0.01
    """
    cls = find(name)
    values: dict[str, Any] = {}
    if preset is not None:
        presets = cls.card.presets
        if preset not in presets:
            raise unknown(f"preset of {name}", preset, presets) if presets else BadInput(f"{name} has no presets")
        values.update(presets[preset])
    values.update(given)
    refuse_unknown_options(name, values, list(options(cls)), ["name", "preset"], option_places())
    return cls(**values)
