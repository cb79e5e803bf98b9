"""How far to go when memory is short: a ladder that is climbed while it lasts and descended when it is over."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .errors import UsageError

__all__ = ["PressureLadder", "PressureLevel", "PressureLimits", "PressureReading"]

MIB = 1 << 20


class PressureLevel(enum.IntEnum):
    """What is done about it; each level does what those below it do, too."""

    CALM = 0
    """Nothing: memory that was given back is taken again as far as there is room."""
    GIVE_BACK = 1
    """The memory of free and cached blocks goes back to the kernel."""
    PAUSE = 2
    """No waiting request starts beside those that run."""
    SHED = 3
    """Running requests are preempted, lowest priority first, all but one."""
    REFUSE = 4
    """New requests are refused."""


@dataclass(frozen=True)
class PressureReading:
    """What is known of memory at one moment.

    Attributes:
        headroom: bytes that can be had before somebody is killed.
        owner: whose headroom that is, for messages.
        stalled: what says that tasks waited for memory since the last reading, for messages; empty if nothing does.
    """

    headroom: int
    owner: str = "this machine"
    stalled: str = ""


@dataclass(frozen=True)
class PressureLimits:
    """When to climb and when to descend.

    Attributes:
        low_bytes: memory is short when less than this can be had.
        high_bytes: this is to be had again: so much is given back, and nothing is taken that leaves less.
        settle_seconds: what one level gets to show its effect before the next is climbed.
        calm_seconds: how long memory must not be short before a level is left.

    Raises:
        UsageError: they contradict each other.
    """

    low_bytes: int
    high_bytes: int
    settle_seconds: float = 0.5
    calm_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.low_bytes < self.high_bytes:
            raise UsageError(
                f"low_bytes {self.low_bytes} and high_bytes {self.high_bytes} must be positive, and the first the less",
                low_bytes=self.low_bytes,
                high_bytes=self.high_bytes,
            )
        if not (self.settle_seconds > 0 and self.calm_seconds > 0):
            raise UsageError(f"seconds must be positive, got {self.settle_seconds} and {self.calm_seconds}")

    @classmethod
    def of(cls, budget_bytes: int) -> PressureLimits:
        """Limits for a machine or cgroup of that size: short below a thirty-second, 16 to 128 MiB; well at twice that.

        Chosen, not measured: a 4 GB board is short below 128 MiB.
        """
        low = min(max(budget_bytes // 32, 16 * MIB), 128 * MIB)
        return cls(low, 2 * low)


class PressureLadder:
    """Turns readings into a level. It has no clock, no files and no memory: all comes with a reading.

    A first sign of pressure climbs to `GIVE_BACK` at once; while it goes on, one level more each time that the last one
    has had `settle_seconds`. When less than half of `low_bytes` can be had there is no time to wait, and every reading
    climbs. Each `calm_seconds` without pressure descend by one level.

    Between the two lies a band: at less than `high_bytes` nothing is short, and nothing is taken again either, so the
    same memory does not go back and forth.

    Args:
        limits: when to climb and when to descend.

    Attributes:
        limits: as given.
        level: where it stands.
        short: whether the last reading was one of pressure.
        reason: why it was climbed last, for messages.

    Example:
        >>> from hostcache.pressure import PressureLadder, PressureLimits, PressureReading
        >>> ladder = PressureLadder(PressureLimits(low_bytes=100, high_bytes=200, settle_seconds=1, calm_seconds=5))
        >>> short, well = PressureReading(headroom=70), PressureReading(headroom=130)
        >>> [ladder.update(now, short).name for now in (0.0, 0.5, 1.0)]
        ['GIVE_BACK', 'GIVE_BACK', 'PAUSE']
        >>> ladder.wanted(short)
        130
        >>> [ladder.update(now, well).name for now in (2.0, 7.0, 12.0)]
        ['PAUSE', 'GIVE_BACK', 'CALM']
        >>> ladder.takeable(well), ladder.takeable(PressureReading(headroom=250))
        (0, 50)
    """

    def __init__(self, limits: PressureLimits) -> None:
        self.limits = limits
        self.level = PressureLevel.CALM
        self.short = False
        self.reason = ""
        self._climbed = 0.0  # when a level was reached
        self._descends = 0.0  # when the next one is left, unless memory is short again

    def update(self, now: float, reading: PressureReading) -> PressureLevel:
        """Take a reading into account.

        Args:
            now: seconds, of a clock that does not go back.
            reading: what is known at that moment.

        Returns:
            The level that holds from now on.
        """
        reason = self._shortage(reading)
        self.short = bool(reason)
        if reason:
            self.reason = reason
            self._descends = now + self.limits.calm_seconds
            if self.level is PressureLevel.CALM or self._is_due(now, reading):
                self._climb(now)
        while self.level > PressureLevel.CALM and now >= self._descends:
            self.level = PressureLevel(self.level - 1)
            self._descends += self.limits.calm_seconds
        return self.level

    def wanted(self, reading: PressureReading) -> int:
        """Bytes to give back: until `high_bytes` can be had, or `low_bytes` more each time that tasks stall anyway."""
        if self.level is PressureLevel.CALM:
            return 0
        missing = self.limits.high_bytes - reading.headroom
        return missing if missing > 0 else self.limits.low_bytes * bool(reading.stalled)

    def takeable(self, reading: PressureReading) -> int:
        """Bytes that can be taken again and leave `high_bytes`; none before it is calm."""
        if self.level is not PressureLevel.CALM:
            return 0
        return max(0, reading.headroom - self.limits.high_bytes)

    def _shortage(self, reading: PressureReading) -> str:
        if reading.headroom < self.limits.low_bytes:
            left, low = reading.headroom / MIB, self.limits.low_bytes / MIB
            return f"{reading.owner} has {left:.1f} MiB left, and {low:.1f} MiB are to stay"
        return reading.stalled

    def _is_due(self, now: float, reading: PressureReading) -> bool:
        urgent = reading.headroom < self.limits.low_bytes // 2
        return urgent or now - self._climbed >= self.limits.settle_seconds

    def _climb(self, now: float) -> None:
        if self.level < PressureLevel.REFUSE:
            self.level = PressureLevel(self.level + 1)
            self._climbed = now
