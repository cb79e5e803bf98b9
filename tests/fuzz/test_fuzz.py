"""Whatever comes in: our own errors, bounded time and memory, nothing reached beyond. A slice of it in every run.

The whole takes as long as it is given: `make fuzz`, `make fuzz FUZZ_SECONDS=30`. A failure shows the case, made as
small as it gets, and the seed; once it is mended, the case goes into `corpus.py`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.guard import Broken

ROOT = Path(__file__).parents[2]
SHARES = {"gguf": 4, "folders": 3, "templates": 6, "tokenizers": 1, "structures": 3, "requests": 2, "caches": 1}
"""Of the time, by target."""

SLICE = 25  # cases of each target in the ordinary suite


def run_worker(last: Path, *arguments: str) -> dict[str, int]:
    """Run targets; cases by target.

    Raises:
        Broken: one of them failed, or ended the process.
    """
    command = [sys.executable, "-m", "tests.fuzz.worker", "--last", str(last), *arguments]
    # Memory goes back to the system at once: what stays with the allocator would hide the next growth.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if ended.returncode:
        case = last.read_text(errors="replace") if last.exists() else "none"
        raise Broken(
            f"{' '.join(command)}\nended with {ended.returncode}\n{ended.stderr}\nthe last case was {case:.5000}"
        )
    reports = [json.loads(line) for line in ended.stdout.splitlines()]
    return {report["target"]: report["cases"] for report in reports}


def test_a_slice_of_every_target(tmp_path: Path) -> None:
    cases = run_worker(tmp_path / "case", *SHARES, "--cases", str(SLICE))
    assert set(cases) == set(SHARES)
    assert min(cases.values()) >= SLICE


@pytest.mark.fuzz
@pytest.mark.parametrize("target", SHARES)
def test_for_as_long_as_there_is_time(tmp_path: Path, target: str) -> None:
    seconds = float(os.environ.get("FUZZ_SECONDS", "600")) * SHARES[target] / sum(SHARES.values())
    seed = int(os.environ.get("FUZZ_SEED") or secrets.randbits(32))
    cases = run_worker(tmp_path / "case", target, "--seconds", str(seconds), "--seed", str(seed))
    print(f"{target}: {cases[target]} cases in {seconds:.0f} s from seed {seed}")  # noqa: T201 - pytest -s shows it
    assert cases[target] > 0
