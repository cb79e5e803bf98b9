"""Fixtures of several modules here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.npu.rknnrt_bed import RknnrtBed, compile_stub


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub of the vendor's library, for this machine."""
    return compile_stub(tmp_path_factory.mktemp("library") / "librknnrt.so")


@pytest.fixture
def rknnrt_bed(stub_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RknnrtBed]:
    """A board for the rknnrt runtime; nothing may be left in its library."""
    bed = RknnrtBed(stub_library, tmp_path, monkeypatch)
    yield bed
    bed.close()
