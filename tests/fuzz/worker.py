"""Runs targets in a process of its own, whose memory is limited and which no case can hang.

    python -m tests.fuzz.worker gguf --seconds 30 --seed 7
    python -m tests.fuzz.worker gguf folders --cases 20

Prints a line of JSON for each target. The first failure ends it, and goes to stderr with the case.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as draw_from

from tests.fuzz.corpus import CORPUS
from tests.fuzz.guard import MIB, Spent, bounded, stray_errors
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

__all__ = ["main"]

_ROUND = 200  # cases that are drawn from one seed
_PATIENCE = 60  # seconds; a case that keeps within its processor time has ended by then even on a busy machine
_SPARE_BYTES = 1 << 30  # of address space: a claim beyond it fails even where the memory would never be touched


def main() -> None:
    """Run the targets that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=list(TARGETS), metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=0, help="of each target, at least")
    parser.add_argument("--cases", type=int, default=0, help="of each target, at least, beside those of the corpus")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same cases")
    parser.add_argument(
        "--last", type=Path, default=Path("/dev/null"), help="file for the case being run, should it crash"
    )
    options = parser.parse_args()
    for name in options.targets:
        with tempfile.TemporaryDirectory(prefix=f"rockpage-fuzz-{name}-") as folder:
            run = _Run(TARGETS[name](Path(folder)), options.last)
            with warnings.catch_warnings(), _limited_memory():
                warnings.simplefilter("error")
                for case in CORPUS.get(name, ()):
                    run.check(case)
                run.draw(options.seconds, options.cases, options.seed)
        report = {"target": name, "cases": run.cases, "seconds": run.most.seconds, "mib": run.most.nbytes / MIB}
        print(json.dumps(report), flush=True)  # noqa: T201 - for whoever started it


class _Run:
    """One target's cases, counted and measured."""

    def __init__(self, target: Target, last: Path) -> None:
        self._target = target
        self._last = last
        self.cases = 0
        self.most = Spent()

    def check(self, case: Any) -> None:
        """Run a case.

        Raises:
            Exception: whatever came out of it, if that is no refusal of ours.
            Broken: it took too much time or memory, or raised where nobody could catch it.
        """
        target = self._target
        self._last.write_text(repr(case), errors="backslashreplace")
        prepared = target.prepare(case)
        faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        try:
            with (
                stray_errors(),
                bounded(target.seconds, target.nbytes + target.times * target.size(prepared), self.most),
            ):
                target.run(prepared)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.cases += 1

    def draw(self, seconds: float, cases: int, seed: int) -> None:
        """Check cases for so many seconds, and at least so many; a failing one is made smaller before it is shown."""
        end, enough = time.monotonic() + seconds, self.cases + cases

        def check(case: Any) -> None:
            if self.cases < enough or time.monotonic() < end:
                self.check(case)

        while self.cases < enough or time.monotonic() < end:
            some = settings(
                max_examples=min(_ROUND, cases or _ROUND),
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
            )
            draw_from(seed)(some(given(case=self._target.cases)(check)))()
            seed += 1


@contextmanager
def _limited_memory() -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status").read_text()
    taken = int(status.partition("VmSize:")[2].split(maxsplit=1)[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (taken + _SPARE_BYTES, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


if __name__ == "__main__":
    faulthandler.enable()
    main()
