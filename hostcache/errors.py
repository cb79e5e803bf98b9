"""Every error rockpage raises on purpose.

    RockpageError
    ├── UsageError              a value the caller gave cannot be used (also a ValueError)
    │   └── RequestRefused      a request that can never fit, refused at submit
    ├── MissingExtra            an optional dependency is not installed
    ├── RegionError             memory that must be there at start is not
    ├── PoolError
    │   ├── OutOfBlocks         not enough free or evictable blocks right now
    │   ├── BlockStateError     a block was used against its state: a bug, never load
    │   └── SwapError           swapped blocks cannot be read back: recompute them
    ├── RequestFailed           an accepted request could not be finished
    ├── BadStateFile            a file of saved KV is damaged; it was set aside
    ├── StagingError            the staging contract was broken
    │   ├── NotSynced           device memory is older than host memory
    │   ├── WrongState          a buffer was used in the wrong state of its life
    │   ├── NotContiguous       rows do not follow each other without gaps
    │   ├── Misaligned          an address or size breaks the device's alignment
    │   ├── OutsideArena        memory that the arena does not own
    │   ├── DimensionTooLarge   beyond what a 13-bit NPU register field holds
    │   ├── DirtyTail           bytes behind the valid tokens are not zero
    │   └── NoBucket            a context longer than the largest staging bucket
    ├── DeviceError             a device or vendor call failed
    └── ModelError
        ├── BadModelFile        the file is damaged or contradicts itself
        └── UnsupportedModel    a sound file of a kind rockpage does not run

Messages name the failing value and the way out; the same values are attributes, so that a caller
need not parse text.

Example:
    >>> from hostcache import BlockPool
    >>> from hostcache.errors import OutOfBlocks
    >>> try:
    ...     blocks = BlockPool(total=2, block_tokens=16).allocate(3)
    ... except OutOfBlocks as error:
    ...     print(error.values)
    {'asked': 3, 'available': 2, 'total': 2}
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BadModelFile",
    "BadStateFile",
    "BlockStateError",
    "DeviceError",
    "DimensionTooLarge",
    "DirtyTail",
    "Misaligned",
    "MissingExtra",
    "ModelError",
    "NoBucket",
    "NotContiguous",
    "NotSynced",
    "OutOfBlocks",
    "OutsideArena",
    "PoolError",
    "RegionError",
    "RequestFailed",
    "RequestRefused",
    "RockpageError",
    "StagingError",
    "SwapError",
    "UnsupportedModel",
    "UsageError",
    "WrongState",
]


class RockpageError(Exception):
    """Root of the tree.

    Args:
        message: one sentence for a person: the failing value and the way out.
        values: the failing values, by name; readable as `error.values["name"]`.
    """

    def __init__(self, message: str, **values: Any) -> None:  # noqa: ANN401 - values of any type are carried
        super().__init__(message)
        self.values = values


class UsageError(RockpageError, ValueError):
    """A value the caller gave cannot be used."""


class RequestRefused(UsageError):
    """A request that can never fit: refused at submit, nothing was allocated."""


class MissingExtra(RockpageError):
    """An optional dependency is missing; the message names the extra that brings it."""


class RegionError(RockpageError):
    """Memory that must be there at start is not: needed, available, and what to change."""


class PoolError(RockpageError):
    """The block pool cannot do what was asked."""


class OutOfBlocks(PoolError):
    """Fewer blocks are free or evictable than were asked for; nothing was taken."""


class BlockStateError(PoolError):
    """A block was freed twice, written while shared, or used while free: a bug in the caller."""


class SwapError(PoolError):
    """Blocks that were swapped out cannot be read back. Their sequence is to be recomputed; nothing else is lost."""


class RequestFailed(RockpageError):
    """An accepted request cannot be finished; every other request goes on."""


class BadStateFile(RockpageError):
    """A file of saved KV is damaged, cut short or no such file: nothing of it was used, and it was set aside."""


class StagingError(RockpageError):
    """The staging contract was broken; on a board this would be a wrong answer or a trap."""


class NotSynced(StagingError):
    """The device would read bytes older than those the host wrote."""


class WrongState(StagingError):
    """A staging buffer was used in the wrong state of `FREE -> FILLING -> READY -> IN_FLIGHT`."""


class NotContiguous(StagingError):
    """Rows handed to the device do not follow each other without gaps."""


class Misaligned(StagingError):
    """An address or a size breaks the device's alignment."""


class OutsideArena(StagingError):
    """Memory was handed to the device that the staging arena does not own."""


class DimensionTooLarge(StagingError):
    """A dimension above 8191: the NPU's registers hold 13 bits."""


class DirtyTail(StagingError):
    """Bytes behind the valid tokens are not zero; one NaN there poisons a whole row."""


class NoBucket(StagingError):
    """A context is longer than the largest staging bucket: it must take another way."""


class DeviceError(RockpageError):
    """A device or vendor call failed; the message names the call, its return value and the likely cause."""


class ModelError(RockpageError):
    """A model cannot be loaded."""


class BadModelFile(ModelError):
    """The file is damaged, cut short, or contradicts itself."""


class UnsupportedModel(ModelError):
    """A sound file whose architecture, tensor type or tokenizer rockpage does not run."""
