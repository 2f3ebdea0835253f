"""Chooses what runs next: sequences, steps, the token budget and the order of work.

Python and numpy only, without torch and asyncio, so that a million steps can be simulated.
"""

from maxsimd.scheduler.scheduler import (
    OLDEST_SHARE,
    OVERDUE_SHARE,
    Scheduler,
    ServiceRate,
    StepLimits,
    StepTimes,
    WaitErrors,
)
from maxsimd.scheduler.sequence import (
    CachedBatch,
    Chunk,
    DocumentPayload,
    Explained,
    ImageJob,
    JoinedTokens,
    Payload,
    PlacedImage,
    ResultSlot,
    Role,
    Step,
    Tokens,
    TokenSequence,
    Window,
)
from maxsimd.scheduler.waiting import Share, WaitingRequest, share_of

__all__ = [
    "OLDEST_SHARE",
    "OVERDUE_SHARE",
    "CachedBatch",
    "Chunk",
    "DocumentPayload",
    "Explained",
    "ImageJob",
    "JoinedTokens",
    "Payload",
    "PlacedImage",
    "ResultSlot",
    "Role",
    "Scheduler",
    "ServiceRate",
    "Share",
    "Step",
    "StepLimits",
    "StepTimes",
    "TokenSequence",
    "Tokens",
    "WaitErrors",
    "WaitingRequest",
    "Window",
    "share_of",
]
