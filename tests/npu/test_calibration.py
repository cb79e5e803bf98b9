"""A cost model's file: kept, found again, and left out where it cannot be trusted."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu.calibration import CalibrationKey, describe_machine, load_cost_model, save_cost_model
from npu.cost_model import PUBLISHED
from npu.machine import Machine
from tests.npu.test_cost_model import ROUND

KEY = CalibrationKey(
    "Radxa ROCK 5A, aarch64, 4 x 0x41/0xd05, 4 x 0x41/0xd0b", "rknnlite-2.5.0-0123+cpu-neon", 4, 2, 12, 128
)


def test_a_model_is_found_again_by_its_key_and_by_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_cost_model(KEY, ROUND, tmp_path / "new" / "cache")
    cache = tmp_path / "new" / "cache"
    assert load_cost_model(KEY, cache, cores=1) == ROUND
    assert path.parent == cache / "calibration"
    assert path.stat().st_mode & 0o777 == 0o600
    others: dict[str, Any] = {"machine": "x", "runtime": "x", "threads": 2, "kv_heads": 3, "heads": 6, "head_dim": 64}
    for name, value in others.items():
        assert load_cost_model(replace(KEY, **{name: value}), cache, cores=3) == PUBLISHED
    save_cost_model(KEY, replace(ROUND, launch_seconds=0.5), cache)
    assert load_cost_model(KEY, cache, cores=1).launch_seconds == 0.5
    assert os.listdir(path.parent) == [path.name]
    assert caplog.records == []  # that none is there is no complaint


def test_the_published_model_is_told_the_cores_a_measured_one_knows_them(tmp_path: Path) -> None:
    assert load_cost_model(KEY, tmp_path, cores=2) == replace(PUBLISHED, cores=2)
    save_cost_model(KEY, ROUND, tmp_path)
    assert load_cost_model(KEY, tmp_path, cores=2).cores == ROUND.cores == 3


def changed(**fields: object) -> Callable[[bytes], bytes]:
    """The file with some fields of its model set."""

    def change(content: bytes) -> bytes:
        value = json.loads(content)
        value["model"].update(fields)
        return json.dumps(value).encode()

    return change


def without(name: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        value = json.loads(content)
        del value[name]
        return json.dumps(value).encode()

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda _: b"", "Expecting value"),
        (lambda content: content[:-20], "Expecting"),
        (lambda _: b"\xff\xfe\x00", "decode"),
        (lambda _: b"[" * 5000, "recursion"),
        (lambda _: b"[]", "not an object"),
        (lambda content: content + b" " * (1 << 16), None),
        (lambda content: content + b"x" * (1 << 16), "Extra data"),
        (without("key"), "lacks, or must not have, key"),
        (without("model"), "lacks, or must not have, model"),
        (lambda content: content.replace(b'"format": 1', b'"format": 2'), "it has format 2, not 1"),
        (lambda content: content.replace(b"ROCK 5A", b"ROCK 5B"), "it is for .*ROCK 5B.*, not for .*ROCK 5A"),
        (changed(launch_seconds=0), "launch_seconds is 0.0, it must be a positive number"),
        (changed(launch_seconds=-1.0), "launch_seconds is -1.0"),
        (changed(launch_seconds=float("nan")), "launch_seconds is nan"),
        (changed(gather_bytes_per_second=float("inf")), "gather_bytes_per_second is inf"),
        (changed(launch_seconds=10**400), "launch_seconds is beyond what a float holds"),
        (changed(launch_seconds="fast"), "launch_seconds is 'fast', not of type float"),
        (changed(cores=2.5), "cores is 2.5, not of type int"),
        (changed(cores=True), "cores is True, not of type int"),
        (changed(more=1), "lacks, or must not have, more"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], words: str | None
) -> None:
    path = save_cost_model(KEY, ROUND, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    if words is None:  # white space
        assert load_cost_model(KEY, tmp_path, cores=1) == ROUND
        return
    assert load_cost_model(KEY, tmp_path, cores=3) == PUBLISHED
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{path} cannot be used (")
    assert record.getMessage().endswith("): run rockpage calibrate again, or remove it")
    assert re.search(words, record.getMessage())


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_left_out_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    path = KEY.path(tmp_path)
    path.parent.mkdir()
    make(path)
    assert load_cost_model(KEY, tmp_path, cores=3) == PUBLISHED
    assert "it is no regular file" in caplog.text


def test_a_folder_that_cannot_be_read_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "calibration").write_text("a file where the folder should be")
    assert load_cost_model(KEY, tmp_path, cores=3) == PUBLISHED
    assert "Not a directory" in caplog.text


def test_a_machine_is_described_without_its_name(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "device-tree").mkdir(parents=True)
    (proc / "device-tree" / "model").write_bytes(b"Radxa ROCK 5A\0")
    core = "processor\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {}\nCPU revision\t: 0\n\n"
    cores = "".join(core.format(n, "0xd05" if n < 4 else "0xd0b") for n in range(8))
    (proc / "cpuinfo").write_text(cores + "Serial\t\t: 1234567890abcdef\n")
    description = describe_machine(Machine(tmp_path))
    assert description == f"Radxa ROCK 5A, {platform.machine()}, 4 x 0x41/0xd05, 4 x 0x41/0xd0b"


def test_other_machines_are_described_by_what_they_say(tmp_path: Path) -> None:
    assert describe_machine(Machine(tmp_path)) == platform.machine()
    (tmp_path / "proc").mkdir()
    cpu = "processor : {}\nvendor_id : AuthenticAMD\nmodel name : AMD EPYC\ncpu MHz : 2400.1\n\n"
    (tmp_path / "proc" / "cpuinfo").write_text(cpu.format(0) + cpu.format(1))
    assert describe_machine(Machine(tmp_path)) == f"{platform.machine()}, 2 x AMD EPYC"
    assert describe_machine() == describe_machine()
