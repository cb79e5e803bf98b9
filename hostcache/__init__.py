"""Where KV lives: geometry, memory region, block pool, block tables, prefix cache, swap, state files and scheduler."""

from .balloon import Balloon
from .block_cache import BlockCache, UnbackedCache
from .blocks import BlockPool
from .cache import PagedKVCache
from .dma_heap import HeapRegion
from .extents import ExtentPool
from .fence import Fence
from .geometry import BLOCK_TOKENS, KVGeometry
from .memory_budget import MemoryBudget, memory_budgets, scarcest_budget
from .prefix import Namespace, PrefixCache, PrefixHit, PrefixNode
from .prefix_caches import PrefixCaches
from .prefix_store import PrefixStore
from .pressure import PressureLadder, PressureLevel, PressureLimits, PressureReading
from .pressure_response import PressureResponse, PressureStats
from .pressure_watch import PressureWatch
from .region import Region
from .request import FinishReason, Request, RequestState
from .scheduler import Scheduler, SchedulerConfig, SchedulerStats
from .step import Chunk, StepPlan
from .swap import SwapSpace, SwapStats, SwapTicket
from .table import BlockTable
from .window import AttentionWindow

__all__ = [
    "BLOCK_TOKENS",
    "AttentionWindow",
    "Balloon",
    "BlockCache",
    "BlockPool",
    "BlockTable",
    "Chunk",
    "ExtentPool",
    "Fence",
    "FinishReason",
    "HeapRegion",
    "KVGeometry",
    "MemoryBudget",
    "Namespace",
    "PagedKVCache",
    "PrefixCache",
    "PrefixCaches",
    "PrefixHit",
    "PrefixNode",
    "PrefixStore",
    "PressureLadder",
    "PressureLevel",
    "PressureLimits",
    "PressureReading",
    "PressureResponse",
    "PressureStats",
    "PressureWatch",
    "Region",
    "Request",
    "RequestState",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "StepPlan",
    "SwapSpace",
    "SwapStats",
    "SwapTicket",
    "UnbackedCache",
    "memory_budgets",
    "scarcest_budget",
]
