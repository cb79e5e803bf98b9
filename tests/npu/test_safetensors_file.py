"""The safetensors reader: views at the right bytes, and every way in which a file may be broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hostcache.errors import BadModelFile, RockpageError, UnsupportedModel, UsageError
from npu.ggml import GGMLType
from npu.safetensors_file import SafetensorsFile


def write(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(start: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "single": rng.standard_normal((7,)).astype(np.float32),
    }
    save_file(arrays, tmp_path / "some.safetensors", metadata={"format": "np"})
    file = SafetensorsFile(tmp_path / "some.safetensors")
    assert {name: (info.type, info.shape) for name, info in file.tensors.items()} == {
        "half": (GGMLType.F16, (3, 5)),
        "empty": (GGMLType.F32, (0, 4)),
        "single": (GGMLType.F32, (7,)),
    }
    for name, array in arrays.items():
        data = file.data(name)
        assert data.tobytes() == array.tobytes()
        assert not data.flags.writeable
    kept = file.data("single")
    file.file.close()
    assert kept.tobytes() == arrays["single"].tobytes()
    with pytest.raises(UsageError, match="was closed"):
        file.data("single")


GOOD = {"a": entry(0, 16, 2, 2), "b": entry(16, 20, 2, dtype="BF16")}
BROKEN: dict[str, tuple[object, int, int | None, str]] = {
    "cut short": (GOOD, 19, None, "not fully covered|incomplete"),
    "longer": (GOOD, 21, None, "not fully covered|incomplete"),
    "a gap": ({"a": entry(4, 20, 2, 2)}, 20, None, "invalid offset"),
    "an overlap": ({"a": entry(0, 16, 2, 2), "b": entry(12, 16, 1)}, 16, None, "invalid offset"),
    "shape and bytes differ": ({"a": entry(0, 16, 5)}, 16, None, "invalid shape"),
    "a shape that overflows": ({"a": entry(0, 16, 2**40, 2**40)}, 16, None, "overflow"),
    "not JSON": (b"{", 0, None, "header"),
    "not an object": ([], 0, None, "header"),
    "no header": (b"", 0, None, "header"),
    "header beyond the file": (GOOD, 20, 10**6, "header"),
    "header beyond the limit": (GOOD, 20, (8 << 20) + 1, "8388609 bytes; rockpage reads 8388608 at most"),
    "header of 2^64 - 1": (GOOD, 20, 2**64 - 1, "18446744073709551615 bytes"),
    "an unknown type": ({"a": entry(0, 16, 2, 2, dtype="X")}, 16, None, "unknown variant"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, case: str) -> None:
    header, nbytes, length, words = BROKEN[case]
    path = write(tmp_path / "broken.safetensors", header, bytes(nbytes), length)
    with pytest.raises(BadModelFile, match=words) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "f8.safetensors", {"a": entry(0, 4, 2, 2, dtype="F8_E4M3")}, bytes(4))
    with pytest.raises(UnsupportedModel, match="tensor 'a' is F8_E4M3; rockpage reads F32, F16, BF16"):
        SafetensorsFile(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.touch()
    with pytest.raises(BadModelFile, match="the file is empty"):
        SafetensorsFile(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 170), byte=st.integers(0, 255), cut=st.integers(0, 200))
def test_damage_anywhere_is_our_own_error_or_a_sound_file(tmp_path: Path, position: int, byte: int, cut: int) -> None:
    whole = bytearray(write(tmp_path / "fuzzed.safetensors", GOOD, bytes(20)).read_bytes())
    if position < len(whole):
        whole[position] = byte
    path = tmp_path / "fuzzed.safetensors"
    path.write_bytes(whole[: len(whole) - cut] if cut < len(whole) // 2 else whole)
    try:
        file = SafetensorsFile(path)
    except RockpageError:
        return
    for name, info in file.tensors.items():
        assert len(file.data(name)) == info.nbytes == int(np.prod(info.shape)) * info.type.block_bytes


def test_the_missing_library_is_named(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["safetensors"] = None  # import fails as if it were not installed
from pathlib import Path
from hostcache.errors import MissingExtra
from npu.safetensors_file import SafetensorsFile
try:
    SafetensorsFile(Path(sys.argv[1]))
except MissingExtra as error:
    print(error)
"""
    path = write(tmp_path / "some.safetensors", GOOD, bytes(20))
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "reading .safetensors needs safetensors: pip install 'rockpage[model]'"
