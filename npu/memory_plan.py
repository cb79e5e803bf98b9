"""What fits into a board's memory, computed before any of it is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostcache.block_layout import BlockLayout
from hostcache.codec import CODECS, FP16, Codec
from hostcache.codec_pools import unit_bytes
from hostcache.geometry import KVGeometry

from .sizes import format_size
from .weights import Activations, Form, PackedMatrix, WeightsPlan

__all__ = [
    "CODE_BYTES",
    "LIBRARIES_BYTES",
    "PREALLOCATED_TOKENS",
    "USUAL_VOCABULARY",
    "MemoryPlan",
    "blocks_in",
    "extent_bytes",
    "resident_weights",
    "richest_plan",
    "runtime_bytes",
    "step_bytes",
    "tiled_runtime_bytes",
    "tiled_step_bytes",
]

PREALLOCATED_TOKENS = 2048
"""Tokens a cache without paging sets aside for each session: what paging is compared with."""

USUAL_VOCABULARY = 49_152
"""Tokens assumed where only a geometry is known."""

# Measured with ONNX Runtime 1.32, numpy 2.4, tokenizers 0.23 and CPython 3.11 on x86-64: resident memory, so that code
# counts in full even where other processes map it too.

CODE_BYTES = 60 << 20
"""Resident code of the interpreter and of all libraries: 48 to 66 MiB, since the kernel maps more of a file around a
fault if it lies in the page cache."""

LIBRARIES_BYTES = CODE_BYTES + (36 << 20)
"""The interpreter and all libraries with what they have on the heap, before there is a model."""

_TOKEN_BYTES = 530  # of vocabulary and merges, in the tokenizer
_LAYER_BYTES = 340 << 10  # a session and its graph, without weights

_RESIDENT_BYTES: dict[Form, tuple[float, dict[Activations, int]]] = {
    # scales, block sums for int8, offsets
    Form.Q4: (0.5, {"int8": 4 + 4, "fp32": 4}),
    Form.Q4_OFFSET: (0.5, {"int8": 4 + 4 + 4, "fp32": 4 + 4}),
    Form.Q8: (1, {"int8": 4 + 4}),
    Form.Q8_OFFSET: (1, {"int8": 4 + 4 + 4}),
    Form.Q8_HALVES: (1, {"fp32": 2 * 4 + 4}),
    Form.DENSE: (4, {"int8": 0, "fp32": 0}),
}
"""Bytes per weight, and beside them per block, that stay in memory once the kernels have packed a matrix.

Source: measured with ONNX Runtime 1.32 on x86-64.
"""


@dataclass(frozen=True)
class MemoryPlan:
    """A pool, what it serves, and what stands beside it in memory.

    Attributes:
        geometry: shape of the model's KV cache.
        ram_bytes: memory of the board.
        reserve_bytes: left to the kernel and other programs.
        weights_bytes: weights as they lie in memory after load.
        runtime_bytes: interpreter, libraries, graphs, tokenizer, and what a full step computes in.
        staging_bytes: the staging arena, with the sequences that stay staged.
        device_bytes: memory of the emulated NPU's own; a board's NPU reads the arena itself.
        pool_asked: bytes asked for the pool; it takes whole blocks of them.
        context: tokens one session must be able to hold; None asks for nothing.
        context_limit: positions the model was trained for; None if unknown.
        codec: how sessions store their KV.
        sessions_asked: of `context` tokens each, or of 1, that must fit at once; None asks for nothing.

    Example:
        >>> from hostcache import KVGeometry
        >>> from npu.memory_plan import MemoryPlan
        >>> plan = MemoryPlan(
        ...     KVGeometry(layers=24, kv_heads=2, head_dim=128), ram_bytes=4 << 30, reserve_bytes=512 << 20,
        ...     weights_bytes=1100 << 20, runtime_bytes=130 << 20, staging_bytes=32 << 20, device_bytes=0,
        ...     pool_asked=192 << 20,
        ... )
        >>> plan.fits, plan.pool_blocks, plan.sessions(tokens=32), plan.preallocated_sessions(tokens=32)
        (True, 512, 256, 4)
    """

    geometry: KVGeometry
    ram_bytes: int
    reserve_bytes: int
    weights_bytes: int
    runtime_bytes: int
    staging_bytes: int
    device_bytes: int
    pool_asked: int
    context: int | None = None
    context_limit: int | None = None
    codec: Codec = FP16
    sessions_asked: int | None = None

    @property
    def extent_bytes(self) -> int:
        """Bytes of what the pool is cut into: a block of fp16, or as many of the codec as there are in its place."""
        return extent_bytes(self.geometry, self.codec)

    @property
    def pool_blocks(self) -> int:
        """Whole blocks of the codec in the pool."""
        return blocks_in(self.geometry, self.codec, self.pool_asked)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the codec, scales included."""
        return BlockLayout(self.geometry, self.codec).block_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes the pool takes."""
        return self.pool_asked // self.extent_bytes * self.extent_bytes

    @property
    def pool_limit_bytes(self) -> int:
        """Bytes of the largest pool that fits; 0 if not even one block does."""
        spare = self.ram_bytes - (self.needed_bytes - self.pool_bytes)
        return max(0, spare // self.extent_bytes) * self.extent_bytes

    @property
    def process_bytes(self) -> int:
        """Resident memory of the process once a step was full."""
        return self.weights_bytes + self.runtime_bytes + self.staging_bytes + self.device_bytes + self.pool_bytes

    @property
    def needed_bytes(self) -> int:
        """The process, and what is left to the system."""
        return self.process_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.obstacles()

    def obstacles(self) -> list[str]:
        """Why it does not fit, one sentence each with the way out; empty if it does."""
        found = []
        if self.needed_bytes > self.ram_bytes:
            found.append(
                f"{format_size(self.needed_bytes)} are needed and {format_size(self.ram_bytes)} are there: "
                + (
                    f"a pool of {format_size(self.pool_limit_bytes)} would fit"
                    if self.pool_limit_bytes
                    else "no pool would fit"
                )
            )
        if self.pool_blocks < 1:
            found.append(
                f"a pool of {format_size(self.pool_asked)} holds no block of {format_size(self.extent_bytes)}: "
                "ask for a larger one"
            )
        elif self.context is not None and self.geometry.blocks_for(self.context) > self.pool_blocks:
            needed = self.geometry.blocks_for(self.context)
            found.append(
                f"a context of {self.context} tokens takes {needed} blocks and the pool has {self.pool_blocks}: "
                f"ask for {format_size(self._bytes_for(needed))} or a shorter context"
            )
        elif self.sessions_asked is not None and self.sessions(self.context or 1) < self.sessions_asked:
            needed = self.sessions_asked * self.geometry.blocks_for(self.context or 1)
            found.append(
                f"{self.sessions_asked} sessions of {self.context or 1} tokens take {needed} blocks in "
                f"{self.codec.name} and the pool has {self.pool_blocks}: ask for {format_size(self._bytes_for(needed))}"
            )
        if self.context is not None and self.context_limit is not None and self.context > self.context_limit:
            found.append(f"a context of {self.context} tokens is beyond the {self.context_limit} of the model")
        return found

    def sessions(self, tokens: int) -> int:
        """Sessions of `tokens` tokens each that the pool holds at once, if they share nothing."""
        return self.pool_blocks // self.geometry.blocks_for(tokens)

    def _bytes_for(self, blocks: int) -> int:
        """Bytes of the smallest pool with so many blocks of the codec."""
        return -(-blocks // self.codec.blocks_per_extent) * self.extent_bytes

    def preallocated_sessions(self, tokens: int) -> int:
        """Sessions that the same bytes hold in fp16 if `max(tokens, PREALLOCATED_TOKENS)` are set aside for each."""
        return self.pool_bytes // (max(tokens, PREALLOCATED_TOKENS) * self.geometry.bytes_per_token)


def extent_bytes(geometry: KVGeometry, codec: Codec) -> int:
    """Bytes of what a pool is cut into that is opened for a codec."""
    return unit_bytes(geometry, codec) * codec.blocks_per_extent


def blocks_in(geometry: KVGeometry, codec: Codec, pool_bytes: int) -> int:
    """Whole blocks of a codec in a pool that is opened for it."""
    return pool_bytes // extent_bytes(geometry, codec) * codec.blocks_per_extent


def richest_plan(plan: MemoryPlan) -> MemoryPlan:
    """The plan with the richest codec with which the sessions that it asks for fit; if with none, the leanest one.

    Where it asks for no sessions it is for one of its context.
    """
    wanted, tokens = plan.sessions_asked or 1, plan.context or 1
    plans = [replace(plan, codec=codec) for codec in CODECS.values()]
    return next((each for each in plans if each.sessions(tokens) >= wanted), plans[-1])


def resident_weights(plan: WeightsPlan, activations: Activations) -> int:
    """Bytes the matrices of a model take after load.

    The token embedding is not counted: its rows are read from the mapped file, whose pages the kernel may drop. A tied
    head is a matrix like any other.

    Args:
        plan: of the model file, made for the same `activations`.
        activations: how the inputs of the products are held.
    """
    return sum(_resident_bytes(matrix, activations) for group in plan.groups.values() for matrix in group)


def _resident_bytes(matrix: PackedMatrix, activations: Activations) -> int:
    per_weight, per_block = _RESIDENT_BYTES[matrix.form]
    weights = matrix.rows * matrix.columns
    return int(weights * per_weight) + weights // matrix.block * per_block[activations]


def runtime_bytes(layers: int, vocab: int = USUAL_VOCABULARY) -> int:
    """Bytes a process takes to run a model, beside weights, pool, staging and steps.

    What few need is not counted: 25 MiB of llguidance if an answer follows a structure, 5 MiB of gguf if a tensor is of
    a rarer type.
    """
    return LIBRARIES_BYTES + layers * _LAYER_BYTES + vocab * _TOKEN_BYTES


def tiled_runtime_bytes(vocab: int) -> int:
    """The same where tiles are multiplied by: without ONNX Runtime and its sessions.

    The libraries are planned as if it were there, for whoever loads another model beside has it.
    """
    return LIBRARIES_BYTES + vocab * _TOKEN_BYTES


def step_bytes(hidden: int, ffn: int, rows: int) -> int:
    """Bytes of the buffers between graphs and of their temporaries, which stay with the process after a full step.

    Args:
        hidden: width of the residual stream.
        ffn: width of the gated MLP.
        rows: most tokens of a step.
    """
    return rows * 4 * (11 * hidden + 8 * ffn)


def tiled_step_bytes(hidden: int, q_width: int, kv_width: int, ffn: int, rows: int) -> int:
    """The same where tiles are multiplied by.

    Args:
        hidden: width of the residual stream.
        q_width: of the queries of all heads.
        kv_width: of the keys of all heads.
        ffn: width of the gated MLP.
        rows: most tokens of a step.
    """
    widest = max(hidden, q_width, ffn)
    between = hidden + 2 * q_width + 2 * kv_width  # the stream, q and what was attended, k and v
    quantised = 2 * widest + 3 * 4 * 2 * widest // 32  # of two parts: codes; steps, sums and totals of 32
    return rows * (4 * (between + widest + ffn) + quantised)
