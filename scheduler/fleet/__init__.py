"""Divides the documents of a request among many engines, and goes on when one of them dies. Without clock,
network or model, so a million requests can be simulated."""

from maxsimd.scheduler.fleet.attempts import Attempts, FleetError, RetryBudget, Send
from maxsimd.scheduler.fleet.members import Cell, Member, Reach, cells_of, digest_of, ranked, reach_of
from maxsimd.scheduler.fleet.plan import Loads, Part, Planner, Seen, Split, plan

__all__ = [
    "Attempts",
    "Cell",
    "FleetError",
    "Loads",
    "Member",
    "Part",
    "Planner",
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
