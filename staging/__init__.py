"""How scattered blocks become flat: gather plans, buckets, staging buffers and their life cycle."""

from .arena import StagingArena
from .buckets import DEFAULT_BUCKETS, Buckets
from .buffer import BufferState, DeviceMemory, StagingBuffer
from .layout import ALIGNMENT, TOKEN_MULTIPLE, StagingLayout
from .plan import GatherPlan

__all__ = [
    "ALIGNMENT",
    "DEFAULT_BUCKETS",
    "TOKEN_MULTIPLE",
    "Buckets",
    "BufferState",
    "DeviceMemory",
    "GatherPlan",
    "StagingArena",
    "StagingBuffer",
    "StagingLayout",
]
