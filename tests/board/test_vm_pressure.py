"""Memory pressure as Linux 6.1 tells of it: stall triggers, and cgroup v2 with its events. Run by `make test-vm`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hostcache import PressureWatch
from tests.board.memory_cgroup import memory_cgroup
from tests.board.squeezed import REQUESTS, TOKENS

pytestmark = pytest.mark.vm

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
POOL_BYTES = 64 * MIB

THROTTLED = """
import time
from hostcache import PressureWatch
from hostcache.memory_budget import memory_cgroups
watch = PressureWatch()
folder = next(memory_cgroups())[1]
(folder / "memory.high").write_text(str(int((folder / "memory.current").read_text()) + (2 << 20)))
held, end, heard = [], time.monotonic() + 30, ""
while time.monotonic() < end and not heard:
    held.append(bytearray(b"x") * (1 << 20))  # beyond memory.high: the kernel makes us wait
    reading = watch.read(time.monotonic())
    heard = reading.stalled if reading else ""
print(heard)
print(reading.headroom)
"""

BEREAVED = """
import subprocess, sys, time
from hostcache import PressureWatch
watch = PressureWatch()
child = subprocess.run([sys.executable, "-S", "-c", "held = b'x' * (200 << 20)"])
end, heard = time.monotonic() + 10, ""
while time.monotonic() < end and "ran out" not in heard:
    reading = watch.read(time.monotonic())
    heard = reading.stalled if reading else ""
    time.sleep(0.05)
print(child.returncode, heard)
"""


def test_this_kernel_offers_all_there_is_to_hear() -> None:
    assert Path("/proc/pressure/memory").exists()
    with memory_cgroup(64 * MIB) as cgroup:
        script = "from hostcache import PressureWatch; print(PressureWatch().describe())"
        done = cgroup.run([sys.executable, "-c", script], cwd=ROOT)
        own = f"/{cgroup.folder.name}"
    sources = f"stalls of cgroup {own}, stalls of this machine, events of the cgroup"
    assert done.stdout == f"{sources}; what is left is looked at every 0.25 s\n", done.stderr
    watch = PressureWatch()
    assert watch.read(0.0) is not None
    assert watch.read(0.1) is None  # all is quiet
    watch.close()


def test_tasks_that_are_made_to_wait_are_heard() -> None:
    with memory_cgroup(256 * MIB) as cgroup:
        done = cgroup.run([sys.executable, "-c", THROTTLED], cwd=ROOT)
        own = f"/{cgroup.folder.name}"
    heard, headroom = done.stdout.splitlines()
    assert f"tasks of cgroup {own} waited for memory" in heard, done.stderr
    assert int(headroom) < 2 * MIB  # memory.high is a limit, too


def test_a_death_in_the_cgroup_is_heard() -> None:
    with memory_cgroup(96 * MIB) as cgroup:
        done = cgroup.run([sys.executable, "-c", BEREAVED], cwd=ROOT)
        assert cgroup.oom_kills == 1
    assert done.stdout.startswith("-9 "), done.stderr
    assert "the cgroup ran out of memory" in done.stdout


def test_who_is_squeezed_sheds_in_order_and_lives() -> None:
    command = [sys.executable, "-m", "tests.board.squeezed", str(POOL_BYTES), str(48 * MIB), "12", "1"]
    with memory_cgroup(176 * MIB) as cgroup:
        done = cgroup.run(command, cwd=ROOT)
        kills = cgroup.oom_kills
        own = f"cgroup /{cgroup.folder.name}"
    assert (done.returncode, kills) == (0, 0), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(report)  # noqa: T201 - shown by pytest -rP
    assert (report["owner"], report["sources"][0]) == (own, f"stalls of {own}")
    assert report["happened"] == ["give back", "pause", "shed", "refuse"]
    assert report["damaged"] == 0
    assert 1 <= report["fewest_running"] < REQUESTS
    assert report["most_given_bytes"] > POOL_BYTES // 4
    assert report["eater"] == 0
    assert report["reasons"] == ["length"] * REQUESTS
    assert report["lengths"] == [TOKENS] * REQUESTS
    assert report["withheld"] == 0
