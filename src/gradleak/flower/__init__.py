"""Flower: record what a server saw, defend clients, train by the same client rule. Needs the extra `fl`.

Tap             wraps any strategy: writes Observations for `gradleak audit --observations`
train           a client's answer by `LocalTraining`, with any defence
UploadDefence   a client mod for defences that act on the upload alone
Gate            a client mod that attacks the reply before it leaves: allow, noise or block
Defended        wraps FedAvg: the server's part of a defence
recognised      Flower's own wrappers for differential privacy: what they do and prove
Secure...       secure aggregation over Flower's messages
InProcess       a grid without processes, for tests and notebooks

docs/flower.md
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    import flwr  # noqa: F401
except ImportError as problem:
    raise ModuleNotFoundError(
        "gradleak.flower needs Flower, which is not installed: pip install 'gradleak[fl]'.", name="flwr"
    ) from problem

from gradleak.flower.client import UploadDefence, keep_truth, train
from gradleak.flower.gate import Gate
from gradleak.flower.grid import InProcess
from gradleak.flower.privacy import Recognised, recognised
from gradleak.flower.recording import Recording, SensitiveRecording, rows_of
from gradleak.flower.records import FlowerError
from gradleak.flower.server import Defended
from gradleak.flower.tap import Tap

_SECURE = ("Agreement", "SecureAggregation", "SecureClient")  # loaded on first use: they need the extra `secure` too

__all__ = ["Defended", "FlowerError", "Gate", "InProcess", "Recognised", "Recording", "SensitiveRecording", "Tap"]
__all__ += ["UploadDefence", "keep_truth", "recognised", "rows_of", "train", *_SECURE]


def __getattr__(name: str) -> Any:
    if name in _SECURE:
        return getattr(import_module("gradleak.flower.secure"), name)
    raise AttributeError(f"module 'gradleak.flower' has no attribute {name!r}")
