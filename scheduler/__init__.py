"""What to run next: sequences, steps, the token budget and the order of work.

Pure Python and numpy: no torch and no asyncio, so that the policy can be simulated a million steps at a time.
"""

from maxsimd.scheduler.filling import StepLimits
from maxsimd.scheduler.forecast import ServiceRate, StepTimes, WaitErrors
from maxsimd.scheduler.image import ImageJob
from maxsimd.scheduler.payload import (
    DocumentPayload,
    Explained,
    JoinedTokens,
    Payload,
    PlacedImage,
    ResultSlot,
    Role,
    Tokens,
    Window,
)
from maxsimd.scheduler.policy import OLDEST_SHARE, OVERDUE_SHARE, Scheduler
from maxsimd.scheduler.sequence import CachedBatch, Chunk, Step, TokenSequence
from maxsimd.scheduler.waiting import WaitingRequest
from maxsimd.scheduler.weights import Share, share_of

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
