"""The experiment: every attack against every defence (`grid`), scored, judged and kept (`result`)."""

from gradleak.audit.cells import Cell
from gradleak.audit.cost import Estimate, estimate
from gradleak.audit.grid import FINAL, Audit, Workers, builtin, default_attacks, final_network, from_settings
from gradleak.audit.private import AuditError
from gradleak.audit.result import AuditResult
from gradleak.core.folder import FolderInUse, Interrupted
from gradleak.core.listeners import Progress, Silent

__all__ = ["FINAL", "Audit", "AuditError", "AuditResult", "Cell", "Estimate", "FolderInUse", "Interrupted", "Workers"]
__all__ += ["Progress", "Silent", "builtin", "default_attacks", "estimate", "final_network", "from_settings"]
