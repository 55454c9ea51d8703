"""Defences, one paper per file."""

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
