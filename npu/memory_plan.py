"""What fits into a board's memory, computed before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from hostcache.geometry import KVGeometry

from .ggml import GGMLType
from .gguf import TensorInfo

__all__ = [
    "PREALLOCATED_TOKENS",
    "RUNTIME_BYTES",
    "MemoryPlan",
    "resident_weights",
    "staging_bytes",
]

STAGING_BUFFERS = 6
LONGEST_BUCKET = 4096

PREALLOCATED_TOKENS = 2048
"""Tokens a cache without paging sets aside for each session: what paging is compared with."""

RUNTIME_BYTES = 90 << 20
"""Python, numpy, ONNX Runtime and tokenizers with a model's graphs, without its weights."""

_PACKED_BYTES = {
    GGMLType.Q4_0: 16 + 4 + 4,  # quants, and per block a float32 scale and sum
    GGMLType.Q4_1: 16 + 4 + 4 + 4,  # the same, and the float32 minimum of the exact split
    GGMLType.Q8_0: 32 + 4 + 4,
    GGMLType.F16: 32 * 4,  # computed in float32
    GGMLType.F32: 32 * 4,
}
"""Bytes per 32 weights as ONNX Runtime keeps them once packed for its kernels (measured with 1.32)."""


@dataclass(frozen=True)
class MemoryPlan:
    """A pool, what it serves, and what stands beside it in memory.

    Attributes:
        geometry: shape of the model's KV cache.
        ram_bytes: memory of the board.
        reserve_bytes: left to the kernel and other programs.
        weights_bytes: weights as they lie in memory after load.
        staging_bytes: the staging arena.
        pool_asked: bytes asked for the pool; it takes whole blocks of them.
        context: tokens one session must be able to hold; None asks for nothing.
        context_limit: positions the model was trained for; None if unknown.
        runtime_bytes: interpreter and libraries.
    """

    geometry: KVGeometry
    ram_bytes: int
    reserve_bytes: int
    weights_bytes: int
    staging_bytes: int
    pool_asked: int
    context: int | None = None
    context_limit: int | None = None
    runtime_bytes: int = RUNTIME_BYTES

    @property
    def pool_blocks(self) -> int:
        """Whole blocks in the pool."""
        return self.pool_asked // self.geometry.block_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes the pool takes."""
        return self.pool_blocks * self.geometry.block_bytes

    @property
    def pool_limit_bytes(self) -> int:
        """Bytes of the largest pool that fits; 0 if not even one block does."""
        spare = self.ram_bytes - self._beside_pool()
        return max(0, spare // self.geometry.block_bytes) * self.geometry.block_bytes

    @property
    def needed_bytes(self) -> int:
        """All of it together, the reserve included."""
        return self._beside_pool() + self.pool_bytes

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.obstacles()

    def obstacles(self) -> list[str]:
        """Why it does not fit, one sentence each with the way out; empty if it does."""
        found = []
        if self.needed_bytes > self.ram_bytes:
            found.append(
                f"{_mib(self.needed_bytes)} are needed and {_mib(self.ram_bytes)} are there: "
                + (
                    f"a pool of {_mib(self.pool_limit_bytes)} would fit"
                    if self.pool_limit_bytes
                    else "no pool would fit"
                )
            )
        if self.pool_blocks < 1:
            found.append(
                f"a pool of {_mib(self.pool_asked)} holds no block of {_mib(self.geometry.block_bytes)}: "
                "ask for a larger one"
            )
        elif self.context is not None and self.geometry.blocks_for(self.context) > self.pool_blocks:
            needed = self.geometry.blocks_for(self.context)
            found.append(
                f"a context of {self.context} tokens takes {needed} blocks and the pool has {self.pool_blocks}: "
                f"ask for {_mib(needed * self.geometry.block_bytes)} or a shorter context"
            )
        if self.context is not None and self.context_limit is not None and self.context > self.context_limit:
            found.append(f"a context of {self.context} tokens is beyond the {self.context_limit} of the model")
        return found

    def sessions(self, tokens: int) -> int:
        """Sessions of `tokens` tokens each that the pool holds at once, if they share nothing."""
        return self.pool_blocks // self.geometry.blocks_for(tokens)

    def preallocated_sessions(self, tokens: int) -> int:
        """Sessions that the same bytes hold if `max(tokens, PREALLOCATED_TOKENS)` are set aside for each."""
        return self.pool_bytes // (max(tokens, PREALLOCATED_TOKENS) * self.geometry.bytes_per_token)

    def _beside_pool(self) -> int:
        return self.weights_bytes + self.runtime_bytes + self.staging_bytes + self.reserve_bytes


def staging_bytes(geometry: KVGeometry) -> int:
    """Bytes of the staging arena: two buffers for each NPU core, each K and V of one layer of the longest bucket."""
    return STAGING_BUFFERS * LONGEST_BUCKET * geometry.bytes_per_token // geometry.layers


def resident_weights(tensors: Iterable[TensorInfo]) -> int:
    """Bytes that a GGUF file's weights take after load: each matrix as its kernel keeps it.

    Args:
        tensors: the file's directory. Types that rockpage does not run count with their size in the file.
    """
    total = 0
    for tensor in tensors:
        elements = prod(tensor.shape)
        packed = _PACKED_BYTES.get(tensor.type)
        total += tensor.nbytes if packed is None else elements // 32 * packed
    return total


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
