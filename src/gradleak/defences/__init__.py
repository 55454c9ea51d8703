"""Defences, one paper per file.

`get("pruning", keep=0.1)` makes one by name, `names()` lists them. Every file of this folder is loaded; the classes
below are also names of this module.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from gradleak.core import registry
from gradleak.defences.agp import AGP as AGP
from gradleak.defences.clipping import Clipping as Clipping
from gradleak.defences.dp_fedavg import DPFedAvg as DPFedAvg
from gradleak.defences.dp_lewis import DPFedAvgLewis as DPFedAvgLewis
from gradleak.defences.dp_lewis import DPSecAdam as DPSecAdam
from gradleak.defences.dp_sgd import DPSGD as DPSGD
from gradleak.defences.fedasam import FedASAM as FedASAM
from gradleak.defences.fedgf import FedGF as FedGF
from gradleak.defences.fedsai import FedSAI as FedSAI
from gradleak.defences.fedsam import FedSAM as FedSAM
from gradleak.defences.gaussian import LocalGaussian as LocalGaussian
from gradleak.defences.geyer import Geyer as Geyer
from gradleak.defences.ldp_secadam import LocalDPSecAdam as LocalDPSecAdam
from gradleak.defences.mixup import MixUp as MixUp
from gradleak.defences.pgd import PGD as PGD
from gradleak.defences.pruning import Pruning as Pruning
from gradleak.defences.secadam import SecAdam as SecAdam
from gradleak.defences.seclion import SecLion as SecLion
from gradleak.defences.soteria import Soteria as Soteria
from gradleak.defences.tip import TIP as TIP
from gradleak.defences.tip_dp_baseline import TIPBaseline as TIPBaseline
from gradleak.defences.withholding import Withholding as Withholding
from gradleak.scenario.defence import Defence

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def get(name: str, **settings: Any) -> Defence:
    """The named defence with these settings; an unknown name or setting is an error with the nearest ones."""
    defence: Defence = registry.get("defence", name, **settings)
    return defence


def names() -> list[str]:
    """Of every registered defence."""
    return [entry.name for entry in registry.entries("defence")]
