"""What to run next: sequences, steps, the token budget and the order of work.

Pure Python and numpy: no torch and no asyncio, so that the policy can be simulated a million steps at a time.
"""

from maxsimd.scheduler.forecast import ServiceRate, StepTimes, WaitErrors
from maxsimd.scheduler.scheduler import OLDEST_SHARE, OVERDUE_SHARE, Scheduler, StepLimits
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
