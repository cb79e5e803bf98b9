"""How scattered blocks become flat: gather plans, buckets, staging buffers and their life cycle."""

from .arena import StagingArena
from .buckets import DEFAULT_BUCKETS, Buckets
from .buffer import BufferState, DeviceMemory, StagingBuffer
from .gather_part import GatherPart
from .layout import ALIGNMENT, MARK_CHANNELS, MASKED, TILE_CHANNELS, TOKEN_MULTIPLE, Place, StagingLayout
from .plan import GatherPlan
from .residency import Residency, ResidentCopy

__all__ = [
    "ALIGNMENT",
    "DEFAULT_BUCKETS",
    "MARK_CHANNELS",
    "MASKED",
    "TILE_CHANNELS",
    "TOKEN_MULTIPLE",
    "Buckets",
    "BufferState",
    "DeviceMemory",
    "GatherPart",
    "GatherPlan",
    "Place",
    "Residency",
    "ResidentCopy",
    "StagingArena",
    "StagingBuffer",
    "StagingLayout",
]
