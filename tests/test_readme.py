"""The README's Python works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def library_example(model: Path) -> str:
    """The README's program, with the path of the demo's model in place of `model.gguf`."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "model.gguf" in code
    return str(code).replace("model.gguf", str(model))


def check_answers(output: str) -> None:
    """What the example must print, whatever the model says."""
    *answers, summary = output.splitlines()
    assert {line.split("?")[0] for line in answers} == {"What is a spindle", "What is coolant for"}
    used, kept, free = map(int, re.findall(r"\d+", summary))
    # A block of the demo's model is 30 layers * 2 * 3 heads * 16 tokens * 64 * 2 bytes; the pool is 64 MiB of them.
    assert used == 0
    assert kept > 0
    assert kept + free == (64 << 20) // 368_640


def test_the_library_example_runs(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(library_example(demo_model), {})
    check_answers(capsys.readouterr().out)
