"""What of a step goes to the device, in which launches, and what the host attends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hostcache.errors import NoBucket
from staging import Buckets, Residency, ResidentCopy

from .attention import AttentionBatch
from .host_share import Share
from .launch import Cut, Launch, LaunchPlanner, capacity
from .placement import Placed, Placement, PlacementLog

__all__ = ["PlannedLaunch", "PlannedStep", "StepPlanner"]


@dataclass(frozen=True, eq=False)
class PlannedLaunch:
    """A launch for the device.

    Attributes:
        launch: what it is.
        copy: where its K and V stay staged; None if they do not.
    """

    launch: Launch
    copy: ResidentCopy | None


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step, cut and placed; the same for every layer.

    Attributes:
        rows: query rows of the step.
        launches: the device's.
        host: the rest, perhaps without rows.
    """

    rows: int
    launches: list[PlannedLaunch]
    host: Share


class StepPlanner:
    """Cuts steps into launches and places each.

    Args:
        launches: cuts what fits its buckets.
        buckets: the same buckets.
        placement: says which launches the device gets.
        residency: keeps decode launches staged, as far as there is memory; None: none are kept.
        host: whether there is a host runtime that attends the rest.

    Attributes:
        log: what went where, and why.
        capacity: tokens of the longest context that a bucket holds.
    """

    def __init__(
        self,
        launches: LaunchPlanner,
        buckets: Buckets,
        placement: Placement,
        residency: Residency | None,
        *,
        host: bool,
    ) -> None:
        self.log = PlacementLog()
        self._launches = launches
        self.capacity = capacity(buckets.largest)
        self._placement = placement
        self._residency = residency
        self._host = host

    def begin_step(self) -> None:
        """What the step before kept staged is free to be taken over."""
        if self._residency is not None:
            self._residency.begin_step()

    def plan(self, batch: AttentionBatch) -> PlannedStep:
        """Plan a step, or what it is to the layers of one window.

        Args:
            batch: checked, and narrowed to the layers' window; nothing of it is kept.

        Raises:
            NoBucket: a sequence is longer than the largest bucket holds and there is no host.
        """
        staged = self._launches.staged_tokens(batch)
        fits = staged <= self.capacity
        beyond = np.flatnonzero(~fits)
        if len(beyond) and not self._host:
            longest = int(staged.argmax())
            window = 0 if batch.windows is None else int(batch.windows[longest])
            raise NoBucket(
                f"a context of {staged[longest]} tokens{f' behind a window of {window}' if window else ''} is longer "
                f"than the {self.capacity} that the largest bucket holds: add a bucket, or give a host runtime",
                tokens=int(staged[longest]),
                largest=self.capacity,
                window=window,
            )
        for _ in beyond:
            self.log.add(Placed("beyond", 0, device=False), f"longer than {self.capacity} tokens")
        cuts = [self._weighed(cut) for cut in self._launches.cut(batch, np.flatnonzero(fits))]
        on_device = self._placement.on_device(cuts)
        for cut, device in zip(cuts, on_device, strict=True):
            kind = "tile" if cut.layout.mask_rows else "decode"
            self.log.add(Placed(kind, cut.layout.tokens, device), self._placement.reason(cut, len(cuts)))
        launches = [self._planned(cut) for cut, device in zip(cuts, on_device, strict=True) if device]
        shares = [cut.share for cut, device in zip(cuts, on_device, strict=True) if not device]
        return PlannedStep(batch.rows, launches, Share.joined([Share.of(batch, beyond), *shares]))

    def _weighed(self, cut: Cut) -> Cut:
        """A cut with the work that it is in the long run: of what stays staged, a token at a time is put there."""
        layout = cut.layout
        if self._residency is None or layout.mask_rows or not self._residency.fits(layout):
            return cut
        token = layout.query_offset // layout.tokens  # K and V of one token of each sequence
        return replace(cut, work=replace(cut.work, gathered_bytes=token + layout.nbytes - layout.query_offset))

    def _planned(self, cut: Cut) -> PlannedLaunch:
        launch = self._launches.launch(cut)
        if self._residency is None or cut.layout.mask_rows:
            return PlannedLaunch(launch, None)
        return PlannedLaunch(launch, self._residency.lend(launch.plan, launch.lengths, launch.before))
