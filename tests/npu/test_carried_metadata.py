"""What a converted file says of a folder."""

from __future__ import annotations

import os
from pathlib import Path

from npu.carried_metadata import carried_metadata
from npu.huggingface import HuggingFaceFolder
from tests.fuzz.hf_folders import FolderCase


def test_the_name_is_the_folders_whatever_its_bytes(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xc3\xa9-\xff"))  # GGUF's texts are UTF-8
    folder.mkdir()
    FolderCase("llama").write(folder)
    with HuggingFaceFolder.open(folder) as source:
        assert carried_metadata(source)["general.name"] == "café-\ufffd"
