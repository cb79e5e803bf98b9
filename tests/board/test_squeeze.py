"""A process whose cgroup is being filled by a neighbour, on this machine's kernel: half a minute."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.board.memory_cgroup import NoMemoryCgroup, memory_cgroup
from tests.board.squeezed import REQUESTS, TOKENS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
POOL_BYTES = 128 * MIB
EATEN_BYTES = 100 * MIB
"""More than is free beside the pool and two Pythons, which take 40 MiB each."""

KILLED = -9


def squeeze(respond: bool) -> tuple[int, str, int]:
    """Status, what was written, and how many the kernel killed."""
    command = [sys.executable, "-m", "tests.board.squeezed", str(POOL_BYTES), str(EATEN_BYTES), "8", str(int(respond))]
    try:
        with memory_cgroup(LIMIT_BYTES) as cgroup:
            done = cgroup.run(command, cwd=ROOT)
            return done.returncode, done.stdout or done.stderr, cgroup.oom_kills
    except NoMemoryCgroup as reason:
        pytest.skip(str(reason))


def test_who_is_squeezed_sheds_in_order_and_lives() -> None:
    status, out, kills = squeeze(respond=True)
    assert (status, kills) == (0, 0), out
    report: dict[str, Any] = json.loads(out)
    assert report["owner"].startswith("cgroup /")
    assert report["happened"] == ["give back", "pause", "shed", "refuse"]
    assert report["damaged"] == 0  # no block in use lost its content
    assert 1 <= report["fewest_running"] < REQUESTS
    assert POOL_BYTES // 4 < report["most_given_bytes"] <= POOL_BYTES * 7 // 8
    # The neighbour had all it wanted, and when it was gone everybody finished and all came back.
    assert report["eater"] == 0
    assert report["reasons"] == ["length"] * REQUESTS
    assert report["lengths"] == [TOKENS] * REQUESTS
    assert report["withheld"] == 0


def test_whoever_does_nothing_is_killed() -> None:
    status, out, kills = squeeze(respond=False)
    assert status == KILLED, out
    assert kills >= 1
