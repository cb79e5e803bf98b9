"""Pages of mapped files, counted by the kernel."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from npu.decoder import Decoder
from npu.mapped_file import release_mappings
from npu.source import open_model
from tests.footprint import Footprint
from tests.npu.tiny import write_tiny_llama

NBYTES = 1 << 20
CONTENT = bytes(range(256)) * (NBYTES // 256)


def mapped(path: Path) -> mmap.mmap:
    """As a library may map a file: private, and writable though nobody writes."""
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    assert mapping[:] == CONTENT  # touches every page
    return mapping


@pytest.mark.parametrize("name", ["a folder", "line\nfeed", "form\x0cfeed", "a\u2028b", "M\udcfcller"])
def test_all_mappings_of_a_file_are_released_and_none_of_another(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    ours, other = folder / "weights.bin", tmp_path / "weights.bin"
    ours.write_bytes(CONTENT)
    other.write_bytes(CONTENT)
    mappings = [mapped(ours), mapped(ours), mapped(other)]
    assert Footprint.of_this_process().weights == 3 * NBYTES
    (tmp_path / "link").symlink_to(ours)
    release_mappings(tmp_path / "link")
    assert Footprint.of_this_process().weights == NBYTES
    assert mappings[0][-3:] == mappings[1][-3:] == b"\xfd\xfe\xff"  # read again where it is wanted
    for mapping in mappings:
        mapping.close()


@pytest.mark.parametrize("name", ["missing", "0"])  # "0" is what stands where anonymous memory has no file
def test_a_file_that_nobody_has_mapped(tmp_path: Path, name: str) -> None:
    kept = mmap.mmap(-1, NBYTES)
    kept[:4] = b"kept"
    release_mappings(tmp_path / name)
    assert kept[:4] == b"kept"
    kept.close()


def test_a_loaded_model_holds_no_page_of_its_weights_file(tmp_path: Path) -> None:
    before = Footprint.of_this_process().weights  # of models that other tests have not let go of
    with open_model(write_tiny_llama(tmp_path / "tiny.gguf")) as source:
        decoder = Decoder.load(source, cache_dir=tmp_path)
    assert Footprint.of_this_process().weights <= before
    tokens, rows = np.zeros(4, np.int32), np.arange(1)
    logits = decoder.forward(tokens, tokens, rows, lambda layer, q, k, v, out: np.copyto(out, q))
    assert np.isfinite(logits).all()
    assert Footprint.of_this_process().weights <= before  # nor does it read any
