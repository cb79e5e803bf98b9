"""What the watch over templates hears, each in a process of its own: it cannot be taken off again."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def watch(block: str) -> subprocess.CompletedProcess[str]:
    """Run a block under the watch; `environment` is a sandbox of Jinja2's."""
    script = "\n".join(
        [
            "import json, sys",
            "from jinja2.sandbox import SandboxedEnvironment",
            "from tests.fuzz.sandbox_watch import watched",
            "environment = SandboxedEnvironment()",
            "with watched():",
            textwrap.indent(block, "    "),
        ]
    )
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("block", "heard"),
    [
        ("open('/dev/null').close()", "open ("),
        ("import wave", "import ('wave'"),
        ("exec('1')", "exec (<code object"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import socket; socket.socket()", "socket.__new__"),
        # A way out that the sandbox would have left open.
        ("environment.is_safe_attribute = lambda *_: True; environment.getattr('', '__class__')", "'__class__' of str"),
        ("environment.is_safe_attribute = lambda *_: True; environment.getattr(json, 'codecs')", "'codecs' of module"),
    ],
)
def test_what_leads_out_is_heard(block: str, heard: str) -> None:
    ended = watch(block)
    assert ended.returncode == 1
    assert "tests.fuzz.guard.Broken: the template has reached" in ended.stderr
    assert heard in ended.stderr


@pytest.mark.parametrize(
    "block",
    [
        "sum(range(99)); json.dumps({'a': [1]}); 'x'.join('ab')",
        "environment.getattr('', '__class__'); environment.getitem({'_': 1}, '_')",  # undefined, and an item
        "environment.from_string",
    ],
)
def test_what_stays_inside_is_not(block: str) -> None:
    ended = watch(block)
    assert (ended.returncode, ended.stderr) == (0, "")
