"""The README's Python works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_library_example_runs(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "model.gguf" in code
    exec(code.replace("model.gguf", str(demo_model)), {})
    *answers, summary = capsys.readouterr().out.splitlines()
    assert {line.split("?")[0] for line in answers} == {"What is a spindle", "What is coolant for"}
    used, kept, free = map(int, re.findall(r"\d+", summary))
    # A block of the demo's model is 30 layers * 2 * 3 heads * 16 tokens * 64 * 2 bytes; the pool is 64 MiB of them.
    assert used == 0
    assert kept > 0
    assert kept + free == (64 << 20) // 368_640
