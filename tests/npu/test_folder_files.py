"""The JSON and text files of a model folder: what is read, and what is refused without waiting or guessing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hostcache.errors import BadModelFile, UsageError
from npu.folder_files import read_object, read_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.json"


def test_a_missing_file_is_none(path: Path) -> None:
    assert read_text(path) is None
    assert read_object(path) is None
    path.write_text("a file")
    assert read_object(path / "below") is None


def test_text_is_utf8(path: Path) -> None:
    path.write_bytes("é\r\n".encode())
    assert read_text(path) == "é\r\n"
    path.write_bytes(b"ab\xff")
    with pytest.raises(BadModelFile, match=r"some\.json is not UTF-8 \(byte 2\)"):
        read_text(path)


def test_what_is_enormous_is_not_read(path: Path) -> None:
    path.touch()
    os.truncate(path, (64 << 20) + 1)
    with pytest.raises(BadModelFile, match="larger than 67108864 bytes"):
        read_text(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.mkdir, "is not a regular file"),
        (os.mkfifo, "is not a regular file"),  # opening it would wait for a writer
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
    ids=["folder", "pipe", "device", "loop"],
)
def test_what_is_no_file_is_refused_at_once(path: Path, make: Callable[[Path], None], words: str) -> None:
    make(path)
    with pytest.raises(UsageError, match=words) as caught:
        read_object(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [r'{"a": "\ud800"}', r'{"a": ["\udc00\ud800"]}', r'{"\uDBFF": 1}', r'{"a": "\ud83d \ude42"}'],
    ids=["high", "reversed", "key", "apart"],
)
def test_half_a_character_is_refused(path: Path, text: str) -> None:
    """No UTF-8 can hold it, and so no tokenizer, no GGUF file, and no terminal."""
    path.write_text(text)
    with pytest.raises(BadModelFile, match=r"some\.json is not JSON .*surrogates not allowed"):
        read_object(path)


def test_a_character_in_two_escapes_is_whole(path: Path) -> None:
    path.write_text(r'{"\ud83d\ude42": "\\ud800"}')
    assert read_object(path) == {"\U0001f642": r"\ud800"}


@pytest.mark.parametrize("depth", [900, 1000, 100_000])
def test_nesting_ends_in_a_value_or_a_refusal(path: Path, depth: int) -> None:
    path.write_text('{"a": ' + "[" * depth + r'"\ud83d\ude42"' + "]" * depth + "}")
    with contextlib.suppress(BadModelFile):  # which depth is too much is up to Python's version
        assert isinstance(read_object(path), dict)
