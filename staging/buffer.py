"""One staging buffer and its life."""

from __future__ import annotations

import enum
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hostcache.cache import PagedKVCache
from hostcache.errors import OutsideArena, UsageError, WrongState

from ._gather import ffi, lib
from .layout import FP16_BYTES, StagingLayout
from .plan import GatherPlan

__all__ = ["BufferState", "DeviceMemory", "StagingBuffer"]


class BufferState(enum.Enum):
    """Who may touch a buffer's bytes."""

    FREE = "free"  # nobody
    FILLING = "filling"  # the host
    READY = "ready"  # nobody: synced, waiting for a core
    IN_FLIGHT = "in flight"  # the device; the host reads `out` once the job has ended


class DeviceMemory(Protocol):
    """How the device gets to see the arena's bytes, and the host the device's: cache maintenance on a board."""

    def sync_to_device(self, offset: int, nbytes: int) -> None:
        """Make `nbytes` at `offset` of the arena visible to the device as they are now."""

    def sync_from_device(self, offset: int, nbytes: int) -> None:
        """Make what the device wrote to `nbytes` at `offset` of the arena visible to the host."""


class StagingBuffer:
    """A fixed piece of the arena that carries one job's operands to the device and its result back.

        FREE --acquire--> FILLING --sync_to_device--> READY --launch--> IN_FLIGHT --release--> FREE

    `release` is allowed from every state but FREE, so that whatever fails, the buffer comes back. Queries, mask and
    result live beside K and V: one state covers every byte a job touches.

    Made by `StagingArena`; obtained from `StagingArena.acquire`, already FILLING.

    Attributes:
        index: the buffer's number in the arena.
        memory: uint8; the arena's bytes that belong to this buffer.
        state: where it is in its life.

    Example:
        >>> from unittest.mock import Mock  # in place of a device
        >>> import numpy as np
        >>> from hostcache import KVGeometry, PagedKVCache, Region
        >>> from staging import DeviceMemory, GatherPlan, StagingArena, StagingLayout
        >>> geometry = KVGeometry(layers=1, kv_heads=1, head_dim=8)
        >>> cache = PagedKVCache.create(geometry, nbytes=1 << 20)
        >>> table = cache.table()
        >>> table.append(20)
        >>> layout = StagingLayout(batch=1, kv_heads=1, tokens=32, rows=4, head_dim=8, mask_rows=1)
        >>> plan = GatherPlan.build(geometry, cache.blocks, table.ids[None], np.array([20], np.int32), layout)
        >>> buffer = StagingArena(Region.anonymous(4096), buffers=1, device=Mock(DeviceMemory)).acquire()
        >>> buffer.fill(cache, plan, layer=0)
        >>> buffer.sync_to_device()  # now launch, sync_from_device, read buffer.out, release
        >>> buffer.keys.shape, buffer.state
        ((1, 32, 8), <BufferState.READY: 'ready'>)
    """

    def __init__(self, index: int, offset: int, memory: NDArray[np.uint8], device: DeviceMemory) -> None:
        self.index = index
        self.memory = memory
        self.state = BufferState.FREE
        self._offset = offset  # of `memory` in the arena
        self._device = device
        self._pointer = ffi.from_buffer("uint8_t[]", memory, require_writable=True)
        self._layout: StagingLayout | None = None  # set by fill, for as long as the buffer is not FREE

    def require(self, state: BufferState) -> None:
        """Do nothing if the buffer is in `state`.

        Raises:
            WrongState: it is in another.
        """
        if self.state is not state:
            raise WrongState(
                f"staging buffer {self.index} is {self.state.value}, this needs it {state.value}",
                buffer=self.index,
                state=self.state,
                needed=state,
            )

    def acquire(self) -> None:
        """FREE -> FILLING. For the arena; everybody else calls `StagingArena.acquire`."""
        self.require(BufferState.FREE)
        self.state = BufferState.FILLING

    def fill(self, cache: PagedKVCache, plan: GatherPlan, layer: int) -> None:
        """Copy K and V of one layer out of the cache, as fp16, and zero what lies behind them.

        Nobody may give up the plan's blocks meanwhile: other Python threads run. Afterwards the buffer holds bytes of
        its own.

        Raises:
            WrongState: the buffer is not being filled, or was filled already.
            UsageError: the plan was made for another cache, there is no such layer, or the cache is closed.
            OutsideArena: the plan's operands are larger than a buffer.
        """
        self.require(BufferState.FILLING)
        if self._layout is not None:
            raise WrongState(f"staging buffer {self.index} was filled already: sync or release it", buffer=self.index)
        prepared, layout = plan.in_c, plan.layout
        if prepared.checked is not cache:
            _check_plan(cache, plan)
            prepared.checked = cache
        if not 0 <= layer < plan.geometry.layers:
            raise UsageError(f"layer {layer} is outside 0..{plan.geometry.layers - 1}", layer=layer)
        if layout.nbytes > len(self.memory):
            raise OutsideArena(
                f"{layout.nbytes} bytes of operands do not fit a staging buffer of {len(self.memory)}: "
                "stage fewer sequences at once",
                asked=layout.nbytes,
                buffer_bytes=len(self.memory),
            )
        lib.rp_stage(prepared.struct, cache.pointer, layer, self._pointer)
        self._layout = layout

    @property
    def layout(self) -> StagingLayout:
        """Of the operands now in the buffer.

        Raises:
            WrongState: nothing was filled in.
        """
        if self._layout is None:
            raise WrongState(f"staging buffer {self.index} holds nothing: fill it first", buffer=self.index)
        return self._layout

    @property
    def keys(self) -> NDArray[np.float16]:
        """Fp16 `layout.keys_shape`: a view, as the following are."""
        return self._view(self.layout.keys_offset, self.layout.keys_shape)

    @property
    def values(self) -> NDArray[np.float16]:
        """Fp16 `layout.values_shape`."""
        return self._view(self.layout.values_offset, self.layout.values_shape)

    @property
    def query(self) -> NDArray[np.float16]:
        """Fp16 `layout.query_shape`; the host writes it while FILLING."""
        return self._view(self.layout.query_offset, self.layout.query_shape)

    @property
    def mask(self) -> NDArray[np.float16]:
        """Fp16 `layout.mask_shape`, empty if K carries the mask; the host writes it while FILLING."""
        return self._view(self.layout.mask_offset, self.layout.mask_shape)

    @property
    def out(self) -> NDArray[np.float16]:
        """Fp16 `layout.out_shape`; the device writes it, the host reads it after `sync_from_device`."""
        return self._view(self.layout.out_offset, self.layout.out_shape)

    def sync_to_device(self) -> None:
        """FILLING -> READY: the device sees the bytes as they are now."""
        self.require(BufferState.FILLING)
        self._device.sync_to_device(self._offset, self.layout.nbytes)
        self.state = BufferState.READY

    def launch(self) -> None:
        """READY -> IN_FLIGHT: the bytes belong to the device until its job has ended."""
        self.require(BufferState.READY)
        self.state = BufferState.IN_FLIGHT

    def sync_from_device(self) -> None:
        """Make the result visible in `out`, once the job has ended."""
        self.require(BufferState.IN_FLIGHT)
        self._device.sync_from_device(self._offset + self.layout.out_offset, self.layout.out_bytes)

    def release(self) -> None:
        """Any state -> FREE. The caller knows that no job is using the buffer any more.

        Raises:
            WrongState: the buffer is free: it would be handed out twice.
        """
        if self.state is BufferState.FREE:
            raise WrongState(f"staging buffer {self.index} was released twice", buffer=self.index)
        self.state = BufferState.FREE
        self._layout = None

    def close(self) -> None:
        """Let go of the memory; for who made the buffer."""
        self.memory = np.empty(0, np.uint8)
        ffi.release(self._pointer)

    def _view(self, offset: int, shape: tuple[int, ...]) -> NDArray[np.float16]:
        nbytes = prod(shape) * FP16_BYTES
        return self.memory[offset : offset + nbytes].view(np.float16).reshape(shape)


def _check_plan(cache: PagedKVCache, plan: GatherPlan) -> None:
    if plan.geometry != cache.geometry or plan.units > cache.units or plan.unit_bytes != cache.unit_bytes:
        raise UsageError(
            f"the plan is for {plan.units} blocks of {plan.geometry}, the cache holds {cache.units} of "
            f"{cache.geometry}",
            plan=plan.geometry,
            cache=cache.geometry,
        )
