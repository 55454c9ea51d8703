"""The experiment: every attack against every defence (`grid`), scored, judged and kept (`result`).

grid, cells        the plan: `Audit` and its cells
private, recorded  where targets come from: simulated clients, or a recording
execution          one cell, from the clients' uploads to its rows
scoring, rows      scores, and the rows that keep them
cost, runfile      what a run will cost; run.toml
store, result      the folder of a run, and what it says
summary, intervals, ruling, verdict   lines of the table, their intervals, their words, the headline
formats            tables, JUnit, notebooks
comparison         two runs side by side
assumptions        what the attacker knew, and what that is worth
gate               a client's check of its own update before it is sent
"""

from gradleak.audit.cells import Cell
from gradleak.audit.cost import estimate
from gradleak.audit.grid import FINAL, Audit, Workers, builtin, final_network, from_settings
from gradleak.audit.private import AuditError
from gradleak.audit.result import AuditResult
from gradleak.auto.defaults import default_attacks
from gradleak.core.durations import Estimate
from gradleak.core.folder import FolderInUse, Interrupted
from gradleak.core.listeners import Progress, Silent

__all__ = ["FINAL", "Audit", "AuditError", "AuditResult", "Cell", "Estimate", "FolderInUse", "Interrupted", "Workers"]
__all__ += ["Progress", "Silent", "builtin", "default_attacks", "estimate", "final_network", "from_settings"]
