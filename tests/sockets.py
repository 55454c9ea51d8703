"""Where processes listen, by what Linux says under /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"
LOOPBACK = {
    "0100007F",  # 127.0.0.1, as a little-endian machine writes it
    "00000000000000000000000001000000",  # ::1
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
}


def open_to_others(pids: Iterable[int]) -> set[str]:
    """Addresses, as /proc writes them, at which these processes listen and which others than this machine reach."""
    held = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTEN and words[9] in held and words[1].partition(":")[0] not in LOOPBACK:
                    found.add(words[1])
    return found


def _sockets(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(entry)
                if name.startswith("socket:["):
                    found.append(name[len("socket:[") : -1])
    return found


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:  # grows while it is walked
        found += children.get(one, [])
    return found
