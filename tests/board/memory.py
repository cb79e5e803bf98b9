"""What a 4 GB board must hold, measured: 1.1 billion weights and sixteen sessions in a memory cgroup of 1.8 GB.

`python -m tests.board.memory` prints the table that the README quotes; `--json` gives all that was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npu.memory_plan import PREALLOCATED_TOKENS
from tests.board.memory_cgroup import memory_cgroup
from tests.board.mixed_sessions import ALL, AT_ONCE
from tests.board.random_model import REFERENCE, write_random_model
from tools.demo_model import demo_model_path

__all__ = ["LIMIT_BYTES", "POOL_BYTES", "PREALLOCATED_BYTES", "TOO_LITTLE_BYTES", "Run", "measure"]

ROOT = Path(__file__).parents[2]

LIMIT_BYTES = 1_800_000_000
"""What a board with 4 GB has free for one process beside a system, a desktop and the NPU's driver."""

TOO_LITTLE_BYTES = 1_000_000_000
"""Less than the weights."""

POOL_BYTES = 128 << 20
"""Twice what the sessions need, for prefixes that are kept."""

PREALLOCATED_BYTES = AT_ONCE * PREALLOCATED_TOKENS * REFERENCE.geometry.bytes_per_token

ROCKPAGE = ("-c", "import sys; from tools.main import main; sys.exit(main(sys.argv[1:]))")


@dataclass(frozen=True)
class Run:
    """A process that has ended in a cgroup of its own.

    Attributes:
        status: its exit status; -9 if it was killed.
        out: what it wrote.
        err: what it wrote to stderr.
        peak_bytes: the most that was charged to the cgroup, pages of files that the kernel may drop included.
        oom_kills: whether it was the kernel that killed it.
    """

    status: int
    out: str
    err: str
    peak_bytes: int
    oom_kills: int

    @classmethod
    def of(cls, limit_bytes: int, folder: Path, *arguments: object) -> Run:
        """Run Python with these arguments. What lies in `folder` is read from the disk, at the cgroup's cost."""
        for path in folder.rglob("*"):
            if path.is_file():
                _forget_pages(path)
        with memory_cgroup(limit_bytes) as cgroup:
            done = cgroup.run([sys.executable, *map(str, arguments)], cwd=ROOT)
            return cls(done.returncode, done.stdout, done.stderr, cgroup.peak_bytes, cgroup.oom_kills)


def measure(folder: Path, model: Path) -> dict[str, Run]:
    """Run everything, by what it is.

    Args:
        folder: on a disk, with 3 GB to spare: what lies in memory would be charged to the cgroup that writes it.
        model: the reference model's file.
    """
    cache = folder / "cache"
    paged, contiguous = "tests.board.mixed_sessions", "tests.board.contiguous"
    plan = (*ROCKPAGE, "plan", model, "--runtime", "cpu", "--json")
    run = (*ROCKPAGE, "run", model, "--prompt", "Hello", "--max-tokens", "1")
    return {
        "plan": Run.of(LIMIT_BYTES, folder, *plan, "--pool", POOL_BYTES),
        "plan_preallocated": Run.of(LIMIT_BYTES, folder, *plan, "--pool", PREALLOCATED_BYTES),
        "cold": Run.of(LIMIT_BYTES, folder, "-m", paged, model, cache, POOL_BYTES, 1),
        "paged": Run.of(LIMIT_BYTES, folder, "-m", paged, model, cache, POOL_BYTES, ALL),
        "contiguous": Run.of(LIMIT_BYTES, folder, "-m", contiguous, model, cache, AT_ONCE),
        "refused": Run.of(LIMIT_BYTES, folder, *run, "--pool", PREALLOCATED_BYTES),
        "too_little": Run.of(TOO_LITTLE_BYTES, folder, *run),
    }


@contextmanager
def reference_model() -> Iterator[tuple[Path, Path]]:
    """A folder on a disk, and the reference model in it; both are gone when the context ends."""
    # /tmp may be memory; /var/tmp is kept over a restart (Filesystem Hierarchy Standard 3.0, 5.15).
    with tempfile.TemporaryDirectory(prefix="rockpage-", dir="/var/tmp") as folder:
        model = Path(folder) / "reference.gguf"
        write_random_model(model, demo_model_path(progress=False))
        yield Path(folder), model


def table(runs: dict[str, Run]) -> str:
    """Both ways side by side."""
    served: dict[str, Any] = json.loads(runs["paged"].out)
    plan, preallocated = (json.loads(runs[name].out) for name in ("plan", "plan_preallocated"))
    fitting = len(runs["contiguous"].out.splitlines())
    rows = [
        ("", "paged", f"contiguous, {PREALLOCATED_TOKENS} tokens a session"),
        ("KV set aside", _mib(POOL_BYTES), _mib(PREALLOCATED_BYTES)),
        ("KV in use at most", _mib(served["kv_bytes_used"]), ""),
        (
            "sessions",
            f"{len(served['tokens'])}, {served['most_at_once']} at once",
            f"{fitting} of {AT_ONCE}, then killed",
        ),
        ("process at most", _mib(served["footprint"]["peak"]), ""),
        ("rockpage plan says", *(f"{_mib(p['process_bytes'])}: {_verdict(p)}" for p in (plan, preallocated))),
    ]
    return "\n".join(f"{name:<22}{paged:<24}{contiguous}".rstrip() for name, paged, contiguous in rows)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _verdict(plan: dict[str, Any]) -> str:
    return "it fits" if plan["fits"] else "it does not fit"


def _forget_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # only what is on the disk can be forgotten
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all that was measured")
    arguments = parser.parse_args()
    with reference_model() as (folder, model):
        runs = measure(folder, model)
    shown = json.dumps({name: asdict(run) for name, run in runs.items()}) if arguments.json else table(runs)
    sys.stdout.write(f"{shown}\n")


if __name__ == "__main__":
    main()
