"""State files: what is written comes back, and nothing else is ever taken for it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from hostcache import KVGeometry, Namespace
from hostcache.codec import INT8
from hostcache.errors import BadStateFile, UsageError
from hostcache.state_file import StateReader, save_state, state_bytes
from hostcache.state_format import MAGIC, MOST_HEADER_BYTES, PREAMBLE, StateHeader, encode_header

from .saved import HOME, NOTE, SMALL, Home, prompt, saved_file


def refused(path: Path, content: bytes, home: Home) -> str:
    """Put bytes into a file and use it as state; returns why not. Nothing may have come of it."""
    path.write_bytes(content)
    with pytest.raises(BadStateFile) as refusal:
        home.restore(path)
    assert home.prefix.resident == 0
    home.check_idle()
    return str(refusal.value)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    tokens = saved_file(tmp_path / "state")
    with StateReader(tmp_path / "state") as reader:
        assert np.array_equal(reader.tokens, tokens)
        assert reader.tokens.dtype == np.int32
        assert reader.note == NOTE
        assert (reader.header.kind, reader.header.computed, reader.header.blocks) == ("session", 10, 3)
    home = Home()
    assert home.restore(tmp_path / "state") == 10
    assert home.known(tokens) == 10
    home.check_idle()


def test_the_bytes_are_those_of_the_document(tmp_path: Path) -> None:
    """The format once more, from its description alone: preamble, header, note, ids, and each block with its digest."""
    home, tokens = Home(), prompt(6)
    blocks = home.compute(tokens)
    home.save(tmp_path / "state", tokens)
    data = (tmp_path / "state").read_bytes()
    assert data[:8] == b"\x89RPKV\r\n\x1a"
    version, size = struct.unpack_from("<II", data, 8)
    assert version == 2
    text = data[48 : 48 + size]
    digest = hashlib.blake2b(data[:16] + text, digest_size=32, person=b"rockpage header").digest()
    assert data[16:48] == digest
    header = json.loads(text)
    space = hashlib.blake2b(HOME.key(), digest_size=32, person=b"rockpage space").hexdigest()
    contents = hashlib.blake2b(NOTE + tokens.tobytes(), digest_size=32, person=b"rockpage content").hexdigest()
    assert header == {
        "kind": "session",
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "block_tokens": 4,
        "itemsize": 2,
        "codec": "fp16",
        "layout": "[layer][k|v][kv_head][token][head_dim], little-endian",
        "numerics": "a model",
        "adapter": "",
        "prompt_version": "",
        "namespace": space,
        "tokens": 6,
        "computed": 6,
        "note_bytes": len(NOTE),
        "contents": contents,
    }
    at = 48 + size
    assert data[at : at + len(NOTE)] == NOTE
    at += len(NOTE)
    assert data[at : at + 24] == tokens.astype("<i4").tobytes()
    at += 24
    for index, block in enumerate(blocks):
        content = data[at : at + SMALL.block_bytes]
        kept = (4, 2)[index]
        rows = np.frombuffer(content, np.float16).reshape(4, 4, 4)  # (layer, K or V), token, element
        assert np.array_equal(rows[:, :kept], home.cache.view(block).view(np.float16).reshape(4, 4, 4)[:, :kept])
        assert not rows[:, kept:].any()
        at += SMALL.block_bytes
        salt = struct.pack("<QQ", index, 0)
        assert data[at : at + 32] == hashlib.blake2b(content, digest_size=32, key=digest, salt=salt).digest()
        at += 32
    assert at == len(data)
    assert at == state_bytes(StateHeader.of("session", SMALL, HOME, tokens, computed=6, note=NOTE))


def test_a_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        saved_file(tmp_path / "state")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["state"]


def test_neither_the_salt_nor_a_neighbours_kv_is_in_the_file(tmp_path: Path) -> None:
    """The pool held 0xAB everywhere; of a block that is half full, the other half must not be saved."""
    saved_file(tmp_path / "state")
    data = (tmp_path / "state").read_bytes()
    assert b"a secret" not in data
    assert b"\xab\xab" not in data[-3 * (SMALL.block_bytes + 32) :]


def test_a_file_without_kv_holds_its_ids(tmp_path: Path) -> None:
    """Everything was evicted before it was saved: the ids are kept, and nothing is known."""
    home, tokens = Home(), prompt(9)
    assert home.save(tmp_path / "state", tokens) == 0
    with StateReader(tmp_path / "state") as reader:
        assert np.array_equal(reader.tokens, tokens)
    assert home.restore(tmp_path / "state") == 0
    home.check_idle()


def test_a_part_of_the_kv_is_kept_if_a_part_is_known(tmp_path: Path) -> None:
    home, tokens = Home(), prompt(10)
    home.compute(tokens[:7])
    assert home.save(tmp_path / "state", tokens) == 7
    other = Home()
    assert other.restore(tmp_path / "state") == 7
    assert other.known(tokens) == 7


@pytest.mark.parametrize("every_bit", [False, pytest.param(True, marks=pytest.mark.long)])
def test_bit_flips_anywhere_are_refused(tmp_path: Path, every_bit: bool) -> None:
    """Every byte of a small file, one bit of it flipped; of the first hundred bytes, and in the long run, each bit."""
    path = tmp_path / "state"
    saved_file(path, length=5)
    data = path.read_bytes()
    home = Home(blocks=4)
    for position in range(len(data)):
        for bit in range(8) if every_bit or position < 100 else (position * 5 % 8,):
            broken = bytearray(data)
            broken[position] ^= 1 << bit
            why = refused(path, bytes(broken), home)
            aside = (tmp_path / "state.bad").exists()
            assert aside != path.exists()
            assert aside == (position >= len(MAGIC)), why  # what is not ours is not renamed
            (tmp_path / "state.bad").unlink(missing_ok=True)
    path.write_bytes(data)
    assert home.restore(path) == 5  # the file itself is good


def test_sampled_bits_of_a_larger_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    geometry = KVGeometry(layers=4, kv_heads=2, head_dim=64)
    home, tokens = Home(8, geometry), prompt(100)
    table = home.cache.table()
    table.append(100)
    for block in table.blocks:
        content = np.random.default_rng(block).integers(0, 256, geometry.block_bytes).astype(np.uint8)
        home.cache.overwrite(block, content, 16)
    header = StateHeader.of("prefix", geometry, HOME, tokens, computed=100)
    save_state(path, home.cache, table.blocks, header, tokens)
    table.release()
    data = path.read_bytes()
    assert len(data) > 7 * 32768
    for position in np.random.default_rng(1).integers(len(MAGIC), len(data), 300):
        broken = bytearray(data)
        broken[position] ^= 1 << int(position) % 8
        refused(path, bytes(broken), home)
    path.write_bytes(data)
    assert home.restore(path) == 100


def test_a_file_cut_short_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    saved_file(path, length=5)
    data = path.read_bytes()
    home = Home(blocks=4)
    for size in range(len(data)):
        why = refused(path, data[:size], home)
        assert "set aside" in why or size < len(MAGIC)
    assert "it has" in refused(path, data + b"\0", home)  # nor is one that goes on


@pytest.mark.parametrize("swapped", ["places", "files"])
def test_a_block_counts_only_in_its_file_and_place(tmp_path: Path, swapped: str) -> None:
    """Whole sectors that ended up elsewhere carry sound digests of their own."""
    path = tmp_path / "state"
    saved_file(path, length=8)
    data = path.read_bytes()
    section = SMALL.block_bytes + 32
    first, second = data[-2 * section : -section], data[-section:]
    if swapped == "places":
        broken = data[: -2 * section] + second + first
    else:
        other, tokens = Home(), prompt(8, seed=1)
        other.compute(tokens)
        other.save(path, tokens)
        broken = data[:-section] + path.read_bytes()[-section:]
    assert len(broken) == len(data)
    assert "is damaged" in refused(path, broken, Home())


HOSTILE: dict[str, Callable[[dict[str, object]], object]] = {
    "no object": lambda header: [1],
    "a field too many": lambda header: {**header, "more": 1},
    "a field too few": lambda header: {name: value for name, value in header.items() if name != "codec"},
    "a number as text": lambda header: {**header, "layers": "2"},
    "a flag as a number": lambda header: {**header, "kv_heads": True},
    "a fraction": lambda header: {**header, "tokens": 5.0},
    "no layers": lambda header: {**header, "layers": 0},
    "negative tokens": lambda header: {**header, "tokens": -5, "computed": -5},
    "more computed than there is": lambda header: {**header, "computed": 6},
    "a negative note": lambda header: {**header, "note_bytes": -1},
    "more tokens than memory": lambda header: {**header, "tokens": 1 << 60},
    "another kind": lambda header: {**header, "kind": "dream"},
    "other contents": lambda header: {**header, "contents": "00"},
    "nested beyond reason": lambda header: None,
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_header_that_makes_no_sense_is_refused_although_its_digest_fits(
    tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    """Somebody made it on purpose, or the writer was wrong: no traceback, no huge allocation."""
    path = tmp_path / "state"
    saved_file(path, length=5)
    data = path.read_bytes()
    size = struct.unpack_from("<I", data, 12)[0]
    made = change(json.loads(data[48 : 48 + size]))
    text = json.dumps(made).encode() if made is not None else b"[" * 100_000
    start = struct.pack("<8sII", MAGIC, 2, len(text))
    digest = hashlib.blake2b(start + text, digest_size=32, person=b"rockpage header").digest()
    assert "set aside" in refused(path, start + digest + text + data[48 + size :], Home())


def test_a_header_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    start = PREAMBLE.pack(MAGIC, 1, 1 << 30, bytes(32))
    assert "its header has 1073741824 bytes" in refused(path, start + bytes(100), Home())


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused_and_kept(tmp_path: Path, version: int) -> None:
    path = tmp_path / "state"
    text = b'{"of": "another one"}'
    start = struct.pack("<8sII", MAGIC, version, len(text))
    digest = hashlib.blake2b(start + text, digest_size=32, person=b"rockpage header").digest()
    path.write_bytes(start + digest + text + b"whatever it has")
    with pytest.raises(UsageError, match=rf"version {version}, this one reads version 2; use the rockpage"):
        Home().restore(path)
    assert os.listdir(tmp_path) == ["state"]


OTHERS = {
    "another model": (Namespace("another model", salt="a secret"), SMALL, "another model, or other options"),
    "another tenant": (Namespace("a model", salt="another"), SMALL, "another salt"),
    "no tenant": (Namespace("a model"), SMALL, "another salt"),
    "another adapter": (replace(HOME, adapter="lora"), SMALL, "adapter '', not 'lora'"),
    "another version": (replace(HOME, prompt_version="2"), SMALL, "prompt version '', not '2'"),
    "more layers": (HOME, replace(SMALL, layers=3), "layers 2, not 3"),
    "more heads": (HOME, replace(SMALL, kv_heads=2), "kv_heads 1, not 2"),
    "larger heads": (HOME, replace(SMALL, head_dim=8), "head_dim 4, not 8"),
    "larger blocks": (HOME, replace(SMALL, block_tokens=8), "block_tokens 4, not 8"),
}


@pytest.mark.parametrize(("namespace", "geometry", "why"), OTHERS.values(), ids=OTHERS.keys())
def test_a_file_of_another_model_option_or_tenant_is_refused_and_kept(
    tmp_path: Path, namespace: Namespace, geometry: KVGeometry, why: str
) -> None:
    tokens = saved_file(tmp_path / "state")
    home = Home(geometry=geometry)
    with pytest.raises(UsageError, match=f"was saved with .*{why}.*: use it as it was saved"):
        home.restore(tmp_path / "state", namespace)
    assert os.listdir(tmp_path) == ["state"]
    assert home.prefix.resident == 0
    home.check_idle()
    assert Home().restore(tmp_path / "state") == len(tokens)


@pytest.mark.parametrize("field", [field.name for field in fields(StateHeader)])
def test_every_field_of_the_header_counts(tmp_path: Path, field: str) -> None:
    """A file whose header says something else, with digests to match, is never used as if it said the same."""
    path = tmp_path / "state"
    home, tokens = Home(), prompt(5)
    home.compute(tokens)
    header = StateHeader.of("session", SMALL, HOME, tokens, computed=5, note=NOTE)
    value = getattr(header, field)
    changed = value + 1 if isinstance(value, int) else {"kind": "prefix"}.get(field, value + "x")
    other = StateHeader(**{**asdict(header), field: changed})
    hit = home.prefix.match(HOME, tokens, whole=True)
    data = encode_header(other) + NOTE + tokens.tobytes()
    for index, block in enumerate([*hit.blocks, hit.partial]):
        content = home.cache.view(block).copy()
        if index == 1:
            content.reshape(4, 4, 8)[:, 1:] = 0
        key = encode_header(other)[16:48]
        digest = hashlib.blake2b(content.data, digest_size=32, key=key, salt=struct.pack("<QQ", index, 0)).digest()
        data += content.tobytes() + digest
    path.write_bytes(data)
    if field == "kind":  # the one that decides nothing about the bytes
        assert Home().restore(path) == 5
        return
    with pytest.raises((BadStateFile, UsageError)):
        Home().restore(path)


def test_the_codec_and_the_layout_are_part_of_it() -> None:
    header = StateHeader.of("session", SMALL, HOME, prompt(5), computed=5)
    assert (header.codec, header.differences(HOME, SMALL)) == ("fp16", [])
    # Layout and numerics go with the codec, so that there is one thing to change, and one is named.
    space = replace(HOME, numerics="a model in int8")
    lean = StateHeader.of("session", SMALL, space, prompt(5), computed=5, codec=INT8)
    assert lean.differences(HOME, SMALL) == ["codec 'int8', not 'fp16'"]
    assert replace(header, layout="as it comes").differences(HOME, SMALL)[0].startswith("layout 'as it comes', not")
    assert set(asdict(SMALL)) <= set(asdict(header))


def test_what_is_no_state_file_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("Buy milk.")
    with pytest.raises(BadStateFile, match="does not begin as a state file does; it was left as it is"):
        StateReader(notes)
    assert notes.read_text() == "Buy milk."
    with pytest.raises(FileNotFoundError):
        StateReader(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="is no regular file"):
            StateReader(path)


def test_a_file_that_came_meanwhile_is_not_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "state"
    saved_file(path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with StateReader(path) as reader:
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").replace(path)
        with pytest.raises(BadStateFile, match="block 2 is damaged; another file has its name by now"):
            reader.read_block(2)
    assert Home().restore(path) == 10


def test_an_earlier_bad_file_gives_way(tmp_path: Path) -> None:
    path, home = tmp_path / "state", Home()
    saved_file(path)
    data = path.read_bytes()
    refused(path, data[:-1], home)
    refused(path, data[:-2], home)
    assert (tmp_path / "state.bad").read_bytes() == data[:-2]


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    home, tokens = Home(), prompt(5)
    header = StateHeader.of("session", SMALL, HOME, tokens, computed=5)
    with pytest.raises(UsageError, match="5 tokens have 2 blocks, got 1"):
        save_state(tmp_path / "state", home.cache, [0], header, tokens)
    long = Namespace("a model", prompt_version="x" * MOST_HEADER_BYTES)
    with pytest.raises(UsageError, match="is too long for a state file"):
        home.save(tmp_path / "state", tokens, long)
    assert os.listdir(tmp_path) == []
    home.check_idle()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    path, home = tmp_path / "state", Home()
    saved_file(path)
    data = path.read_bytes()
    home.restore(path)
    home.prefix.invalidate()
    refused(path, data[:-1], home)
    refused(path, data[:3], home)
    assert len(os.listdir("/proc/self/fd")) == len(before)
