"""Which of many engines scores which documents of a request, and what happens when one of them dies.

Pure Python and numpy, without clock, network or model: whoever sends the parts does the rest, so that all
of it can be simulated a million requests at a time.
"""

from maxsimd.scheduler.fleet.attempts import Attempts, Fail, FleetError, Send
from maxsimd.scheduler.fleet.cells import Cell, Reach, cells_of, reach_of
from maxsimd.scheduler.fleet.loads import Loads
from maxsimd.scheduler.fleet.merge import Merge
from maxsimd.scheduler.fleet.owners import Member, digest_of, ranked
from maxsimd.scheduler.fleet.plan import Documents, Part, Split, plan
from maxsimd.scheduler.fleet.retry_budget import RetryBudget
from maxsimd.scheduler.fleet.seen import Seen

__all__ = [
    "Attempts",
    "Cell",
    "Documents",
    "Fail",
    "FleetError",
    "Loads",
    "Member",
    "Merge",
    "Part",
    "Reach",
    "RetryBudget",
    "Seen",
    "Send",
    "Split",
    "cells_of",
    "digest_of",
    "plan",
    "ranked",
    "reach_of",
]
