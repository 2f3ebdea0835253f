"""Chooses what runs next: sequences, steps, the token budget and the order of work.

Python and numpy only, without torch and asyncio, so that a million steps can be simulated.
"""

from maxsimd.scheduler.scheduler import OLDEST_SHARE as OLDEST_SHARE
from maxsimd.scheduler.scheduler import OVERDUE_SHARE as OVERDUE_SHARE
from maxsimd.scheduler.scheduler import Scheduler as Scheduler
from maxsimd.scheduler.scheduler import ServiceRate as ServiceRate
from maxsimd.scheduler.scheduler import StepLimits as StepLimits
from maxsimd.scheduler.scheduler import StepTimes as StepTimes
from maxsimd.scheduler.scheduler import WaitErrors as WaitErrors
from maxsimd.scheduler.sequence import CachedBatch as CachedBatch
from maxsimd.scheduler.sequence import Chunk as Chunk
from maxsimd.scheduler.sequence import DocumentPayload as DocumentPayload
from maxsimd.scheduler.sequence import Explained as Explained
from maxsimd.scheduler.sequence import ImageJob as ImageJob
from maxsimd.scheduler.sequence import JoinedTokens as JoinedTokens
from maxsimd.scheduler.sequence import Payload as Payload
from maxsimd.scheduler.sequence import PlacedImage as PlacedImage
from maxsimd.scheduler.sequence import ResultSlot as ResultSlot
from maxsimd.scheduler.sequence import Role as Role
from maxsimd.scheduler.sequence import Step as Step
from maxsimd.scheduler.sequence import Tokens as Tokens
from maxsimd.scheduler.sequence import TokenSequence as TokenSequence
from maxsimd.scheduler.sequence import Window as Window
from maxsimd.scheduler.waiting import Share as Share
from maxsimd.scheduler.waiting import WaitingRequest as WaitingRequest
from maxsimd.scheduler.waiting import share_of as share_of
