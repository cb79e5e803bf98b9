"""A decoder on tiles gives its buffers back. Not for the sanitizers, which keep what was freed for a while."""

from __future__ import annotations

import os
from pathlib import Path

from npu.decoder_choice import load_decoder
from npu.gguf import GGUFFile
from npu.tiled_decoder import TiledDecoder
from tests.npu.tiny import write_tiny_llama


def test_buffers_of_tiles_are_given_back_at_close(tmp_path: Path) -> None:
    """The largest of 8,192 rows have 3 MiB. What malloc keeps for others comes to some 10 MiB, twenty leaks to 60."""
    path = write_tiny_llama(tmp_path / "tiny.gguf")

    def come_and_go() -> None:
        with GGUFFile.open(path) as source:
            decoder = load_decoder(source, max_rows=8192, cache_dir=tmp_path)
        assert isinstance(decoder, TiledDecoder)
        decoder.close()

    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGESIZE")

    come_and_go()
    before = mapped()
    for _ in range(20):
        come_and_go()
    assert mapped() - before < 30 << 20
