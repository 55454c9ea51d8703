"""Audit cells on a Ray cluster: each cell is a Ray task, and only the driver writes results.

    with distributed.RayWorkers("auto") as workers:
        audit.run("runs/first", workers=workers)

If a worker dies, its cell is given to another, up to `retries` times; workers.jsonl in the folder of the run says so.
Results come from one attempt only, so that nothing counts twice. A cell draws random numbers from its own key, so its
rows are those of a run without Ray, up to the rounding of the machines.

The private data and the model travel to the workers: use clusters that may see them. Needs the package `ray` (extra
`fl-sim`).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradleak.audit.cells import Cell
    from gradleak.audit.execution import Runner
    from gradleak.audit.store import Arrays
    from gradleak.core.files import Row
    from gradleak.core.listeners import Progress

USER_MODULES = "gradleak_user_"  # files that the command line loaded (cli/references.py); no worker can import those
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray keeps to 127.0.0.1, on Linux too


class RayMissing(ModuleNotFoundError):
    """Ray is not installed."""


class NoCluster(ValueError):
    """No cluster at the address, or none with the CPUs and GPUs that a cell needs."""


@dataclass
class RayWorkers:
    """A cluster that audits run their cells on; a context manager.

    address   "auto": the cluster that RAY_ADDRESS names or that runs on this machine, else a new one that ends with the
              run and listens on 127.0.0.1 only; or HOST:PORT, ray://HOST:PORT
    cpus      per cell; also its number of threads
    gpus      per cell; 0.5 lets two cells share a GPU. If above 0, give the engine device "auto" or "cuda"
    retries   of a cell whose worker died
    options   for `ray.init`
    """

    address: str = "auto"
    cpus: float = 1.0
    gpus: float = 0.0
    retries: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    _own: bool = False

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0 or self.retries < 0:
            raise ValueError(
                f"A cell needs cpus above 0, gpus and retries from 0; given {self.cpus}, {self.gpus}, {self.retries}."
            )

    def __enter__(self) -> RayWorkers:
        ray = _ray()
        if not ray.is_initialized():
            place = {} if self.address == "auto" else {"address": self.address}
            if place:
                _somebody_there(self.address)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            alone = not place and _starts_its_own()
            try:
                with _loopback() if alone else nullcontext():
                    ray.init(**{"log_to_driver": False, "logging_level": "WARNING", **place, **self.options})
            except (ConnectionError, ValueError, RuntimeError) as problem:
                raise NoCluster(
                    f"There is no Ray cluster at {self.address} ({str(problem).splitlines()[0]}). Start one with `ray "
                    "start --head`, or use --ray auto."
                ) from None
            self._own = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            _ray().shutdown()
            self._own = False

    def run(
        self,
        runner: Runner,
        work: Sequence[tuple[Cell, tuple[int, ...]]],
        progress: Progress,
        log: Callable[[dict[str, Any]], None],
    ) -> Iterator[tuple[Cell, list[Row], Arrays | None]]:
        """The rows and arrays of every cell, as they finish. `log` receives a line for each attempt."""
        ray = _ray()
        for cell, rounds in work:
            runner.prepare(cell, rounds)  # trains here once, not on every worker
        shipped = ray.put(_packed(runner))
        remote = ray.remote(_attempt).options(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)
        waiting = deque((cell, rounds, 1) for cell, rounds in work)
        flying: dict[Any, tuple[Cell, tuple[int, ...], int]] = {}
        numbers, room = {cell.key: n for n, (cell, _) in enumerate(work)}, self._room()
        try:
            while waiting or flying:
                while waiting and len(flying) < room:
                    cell, rounds, attempt = waiting.popleft()
                    reference = remote.remote(shipped, _packed(cell), rounds, sys.path, self.cpus)
                    flying[reference] = cell, rounds, attempt
                    if attempt == 1:
                        progress.cell(cell, numbers[cell.key])
                ready, _ = ray.wait(list(flying), num_returns=1, timeout=1.0)
                for reference in ready:
                    cell, rounds, attempt = flying.pop(reference)
                    line = {"cell": cell.key, "attempt": attempt}
                    try:
                        rows, arrays, where = ray.get(reference)
                    except ray.exceptions.RayTaskError as problem:  # of shipping or of reading: not of the attack
                        log({**line, "status": "failed", "reason": _first(problem)})
                        yield cell, runner.failed(cell, problem), None
                    except ray.exceptions.RayError as problem:
                        log({**line, "status": "worker died", "reason": _first(problem)})
                        if attempt > self.retries:
                            yield cell, runner.failed(cell, problem), None
                            continue
                        progress.note(f"{cell}: its worker died; attempt {attempt + 1} of {self.retries + 1}.")
                        waiting.appendleft((cell, rounds, attempt + 1))
                    else:
                        log({**line, "status": rows[0]["status"], **where})
                        yield cell, rows, arrays
        finally:
            for reference in flying:
                ray.cancel(reference, force=True)

    def _room(self) -> int:
        """Number of cells that fit on the cluster at once."""
        resources = _ray().cluster_resources()
        room = resources.get("CPU", 0.0) / self.cpus
        if self.gpus:
            room = min(room, resources.get("GPU", 0.0) / self.gpus)
        if room < 1:
            raise NoCluster(
                f"No worker has what a cell needs ({self.cpus:g} CPUs, {self.gpus:g} GPUs): the cluster has "
                f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs in all."
            )
        return int(room)


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        message = "Ray is not installed: pip install 'gradleak[fl-sim]', or leave --ray out."
        raise RayMissing(message, name="ray") from None
    return ray


def _starts_its_own() -> bool:
    """Whether `ray.init()` starts a cluster here, since neither RAY_ADDRESS nor this machine has one."""
    from ray._private import services

    address_of: Any = services.get_ray_address_from_environment  # typed as if it took no None
    return address_of(None, None) is None


@contextmanager
def _loopback() -> Iterator[None]:
    """A cluster that starts inside this context listens on 127.0.0.1 only.

    `ray.init(_node_ip_address="127.0.0.1")` is not enough: on Linux Ray replaces it with the machine's outer address
    and listens on all interfaces. The variable makes 127.0.0.1 that address; Ray reads it when it is imported.
    """
    from ray._private import ray_constants

    before, outer = os.environ.get(LOOPBACK), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[LOOPBACK], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = outer
        if before is None:
            del os.environ[LOOPBACK]
        else:
            os.environ[LOOPBACK] = before


def _somebody_there(address: str) -> None:
    """Raise at once if nobody answers; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as problem:
        raise NoCluster(
            f"Nobody answers at {address!r} ({problem}). Write auto, HOST:PORT or ray://HOST:PORT; `ray start --head` "
            "starts a cluster and says its address."
        ) from None


def _packed(thing: Any) -> bytes:
    """Pickle for a worker that has gradleak installed, but not the files given on the command line."""
    from ray import cloudpickle

    modules = [module for name, module in list(sys.modules.items()) if name.startswith(USER_MODULES)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(thing))
    except (TypeError, ValueError, AttributeError, ImportError) as problem:
        raise ValueError(
            f"The audit cannot be sent to workers ({type(problem).__name__}: {problem}): something in task, data, "
            "attacks or analyses cannot be pickled, such as an open file. Run it without --ray."
        ) from problem
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@lru_cache(maxsize=1)
def _unpacked(content: bytes) -> Any:
    from ray import cloudpickle

    return cloudpickle.loads(content)


def _attempt(
    runner: bytes, cell: bytes, rounds: tuple[int, ...], path: list[str], cpus: float
) -> tuple[list[Row], Arrays | None, dict[str, Any]]:
    """Run one cell on a worker. The driver's import path is added, for modules beside its script."""
    from ray import cloudpickle

    sys.path += [place for place in path if place not in sys.path]
    torch.set_num_threads(max(1, int(cpus)))
    began = time.perf_counter()
    rows, arrays = _unpacked(runner).attempt(cloudpickle.loads(cell), rounds, lambda fraction: None)
    home = None if arrays is None else {name: value.detach().cpu() for name, value in arrays.items()}
    where = {"pid": os.getpid(), "node": os.uname().nodename, "seconds": round(time.perf_counter() - began, 3)}
    return rows, home, where


def _first(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"
