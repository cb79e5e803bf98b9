"""What this process holds in memory, as the kernel counts it page by page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Footprint"]


@dataclass(frozen=True)
class Footprint:
    """One look at a process; all values are bytes.

    Attributes:
        resident: every page that is mapped and present, code included.
        anonymous: pages that belong to no file: heaps, stacks, anonymous mappings.
        models: present pages of mapped models and weights, whether or not other processes map them too.
        weights: of those, pages of repacked weights.
        peak: the most that `resident` ever was; the kernel counts it in batches, so it is right to some 100 KiB.
    """

    resident: int
    anonymous: int
    models: int
    weights: int
    peak: int

    @classmethod
    def of_this_process(cls) -> Footprint:
        """Walk the page tables now."""
        # VmRSS in `status` comes from per-CPU counters and lags behind; smaps counts.
        resident = anonymous = models = weights = 0
        of_a_model = of_weights = False
        for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
            name, *values = line.split()
            if not name.endswith(":"):  # a mapping's own line, with its file at the end
                file = line.removesuffix(" (deleted)")
                of_weights = file.endswith("/weights.bin")
                of_a_model = of_weights or file.endswith(".gguf")
            elif name == "Rss:":
                resident += _kib(values)
                models += of_a_model * _kib(values)
                weights += of_weights * _kib(values)
            elif name == "Anonymous:":
                anonymous += _kib(values)
        for line in Path("/proc/self/status").read_text().splitlines():
            name, *values = line.split()
            if name == "VmHWM:":
                return cls(resident, anonymous, models, weights, peak=_kib(values))
        raise OSError("the kernel does not report VmHWM in /proc/self/status")

    def as_dict(self) -> dict[str, int]:
        """The attributes by name."""
        return asdict(self)


def _kib(values: list[str]) -> int:
    amount, unit = values
    assert unit == "kB"
    return int(amount) * 1024
