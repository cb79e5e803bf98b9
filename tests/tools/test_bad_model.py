"""Model files that are damaged, lie, or are of another kind: refused in one line, in bounded time and memory."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest

from npu.gguf import GGUFFile
from tests.npu.tiny import TinyLlama, write_tiny_llama
from tests.tools.command_line import Outcome, assert_refused, run_apart, run_here
from tests.tools.damage import Damage, behind, cut, dimension, entry, put, renamed, u32, u64, value

TEXT = "the rain in the plain"
GENERATE = ["--prompt", TEXT, "--max-tokens", "2"]
WORKING = {
    "run": ["run", "MODEL", *GENERATE],
    "chat": ["run", "MODEL", *GENERATE, "--chat"],
    "emulated": ["run", "MODEL", *GENERATE, "--runtime", "emulated"],
    "score": ["score", "MODEL", "--ids-file", "IDS", "--json"],
    "tokenize": ["tokenize", "MODEL", "--text", TEXT, "--json"],
    "plan": ["plan", "MODEL", "--json"],
}
"""Command lines that a sound model serves."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the usual tiny model: two layers of width 64, 272 tokens, a context of 512."""
    return write_tiny_llama(tmp_path_factory.mktemp("sound") / "tiny.gguf").read_bytes()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def attempt(capsys: pytest.CaptureFixture[str], command: str, model: Path) -> Outcome:
    ids = model.with_name("ids.json")
    ids.write_text("[5, 6, 7]")
    places = {"MODEL": str(model), "IDS": str(ids)}
    started = time.monotonic()
    outcome = run_here(capsys, *(places.get(word, word) for word in WORKING[command]))
    assert time.monotonic() - started < 10  # milliseconds, but for a first import
    return outcome


def damaged(folder: Path, sound: bytes, damage: Damage) -> Path:
    model = folder / "model.gguf"
    model.write_bytes(damage(sound))
    return model


@pytest.mark.parametrize("command", WORKING)
def test_without_damage_the_model_is_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, command: str
) -> None:
    """So every refusal below is for the damage alone."""
    outcome = attempt(capsys, command, damaged(tmp_path, sound, lambda raw: raw))
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out


# Everything that opens the file reads its header: magic, version u32, counts u64, pairs, tensor directory.

HEADER: dict[str, tuple[Damage, str]] = {
    "empty": (lambda raw: b"", "the file is empty"),
    "another format": (put(0, b"PK\3\4"), "starts with b'PK\\x03\\x04'"),
    "cut in the magic": (lambda raw: raw[:3], "starts with b'GGU'"),
    "cut in the version": (lambda raw: raw[:6], "the version takes 4 bytes at byte 4, but the file has 6"),
    "cut in the counts": (lambda raw: raw[:20], "the metadata count takes 8 bytes at byte 16"),
    "cut in a key": (cut("llama.block"), "metadata key 1 takes 17 bytes"),
    "cut in a value": (cut("llama.block_count", 4 + 2), "'llama.block_count' takes 4 bytes"),
    "cut in a string": (cut("gp"), "'tokenizer.ggml.model' takes 4 bytes"),
    "cut in the vocabulary": (cut("<|im_e"), "'tokenizer.ggml.tokens', an array of 272 strings, takes 2176 bytes"),
    "cut in the merges": (cut("o r", -1), "'tokenizer.ggml.merges', element 11, takes 3 bytes"),
    "cut in the tensor directory": (cut("blk.1.attn_k.weight", 4 + 8 + 3), "'blk.1.attn_k.weight' takes 8 bytes"),
    "cut in front of the weights": (
        cut("output_norm.weight", 4 + 8 + 4 + 8),
        "'token_embd.weight' [272, 64] Q8_0 ends",
    ),
    "cut in the weights": (lambda raw: raw[:-64], "'output_norm.weight' [64] F32 ends at byte 64384"),
    "version 1": (put(4, u32(1)), "GGUF version 1"),
    "big endian": (put(4, struct.pack(">I", 3)), "big-endian version 3"),
    "2^60 tensors": (put(8, u64(2**60)), "the tensor count is 1152921504606846976"),
    "2^63 pairs": (put(16, u64(2**63)), "the metadata count is 9223372036854775808"),
    "a key of 2^64 - 1 bytes": (behind("llama.block_count", -25, u64(2**64 - 1)), "takes 18446744073709551615 bytes"),
    "2^61 tokens": (behind("tokenizer.ggml.tokens", 8, u64(2**61)), "an array of 2305843009213693952 strings"),
    "2^62 kinds": (behind("tokenizer.ggml.token_type", 8, u64(2**62)), "an array of 4611686018427387904 elements"),
    "2^32 - 1 dimensions": (behind("blk.0.ffn_up.weight", 0, u32(2**32 - 1)), "has 4294967295 dimensions"),
    "2^69 weights": (dimension("blk.0.ffn_up.weight", 1, 2**63), "[9223372036854775808, 64] Q4_1 ends at byte"),
    "an unknown tensor type": (entry("blk.0.ffn_up.weight", 99), "'blk.0.ffn_up.weight' has the unknown type 99"),
    "a name not in UTF-8": (behind("blk.0.ffn_up.weight", -1, b"\xff"), "is not valid UTF-8"),
}


@pytest.mark.parametrize("command", ["run", "score", "tokenize", "plan"])
@pytest.mark.parametrize("case", HEADER)
def test_a_damaged_header(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, case: str, command: str
) -> None:
    damage, words = HEADER[case]
    model = damaged(tmp_path, sound, damage)
    assert_refused(attempt(capsys, command, model), str(model), words)


# What runs a model or plans for it compares dimensions and tensors.

MOST = 2**31  # dimensions beyond it are refused by themselves
MODEL: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "another architecture": (renamed("llama", "bloom"), ("architecture 'bloom'", "rockpage runs llama")),
    "a name with an escape": (renamed("llama", "a\x1b[3m"), ("architecture 'a?[3m'",)),
    "no architecture": (
        renamed("general.architecture", "general.architect___"),
        ("'general.architecture' is missing",),
    ),
    "a missing key": (renamed("llama.block_count", "llama.block_kount"), ("'llama.block_count' is missing",)),
    "a missing tensor": (
        renamed("blk.1.ffn_up.weight", "blk.1.ffn_no.weight"),
        ("'blk.1.ffn_up.weight' is missing", "fetch the file again"),
    ),
    "a tensor too many": (value("llama.block_count", u32(1)), ("'blk.1.attn_norm.weight' is not part of",)),
    "2^32 - 1 layers": (value("llama.block_count", u32(2**32 - 1)), ("'llama.block_count' is 4294967295",)),
    "2^31 layers": (value("llama.block_count", u32(MOST)), ("'llama.block_count' is 2147483648", "4096 at most")),
    "no layers": (value("llama.block_count", u32(0)), ("'llama.block_count' is 0",)),
    "another width": (
        value("llama.embedding_length", u32(128)),
        ("'token_embd.weight' is [272, 64], the header calls for [272, 128]",),
    ),
    "a width of 2^31": (value("llama.embedding_length", u32(MOST)), ("calls for [272, 2147483648]",)),
    "a rank of 2^31": (value("llama.feed_forward_length", u32(MOST)), ("calls for [2147483648, 64]",)),
    "a vocabulary of 2^31": (value("llama.vocab_size", u32(MOST)), ("has 272 tokens but the model 2147483648",)),
    "2^31 + 1 heads": (
        value("llama.attention.head_count", u32(MOST + 1)),
        ("'llama.attention.head_count' is 2147483649",),
    ),
    "no heads": (value("llama.attention.head_count", u32(0)), ("'llama.attention.head_count' is 0",)),
    "an odd head": (value("llama.attention.key_length", u32(15)), ("attention.key_length' is 15",)),
    "epsilon NaN": (value("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", float("nan"))), ("is nan",)),
    "frequency 0": (value("llama.rope.freq_base", struct.pack("<f", 0)), ("'llama.rope.freq_base' is 0.0",)),
}


@pytest.mark.parametrize("command", ["run", "emulated", "score", "plan"])
@pytest.mark.parametrize("case", MODEL)
def test_a_model_that_contradicts_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, case: str, command: str
) -> None:
    damage, words = MODEL[case]
    model = damaged(tmp_path, sound, damage)
    assert_refused(attempt(capsys, command, model), str(model), *words)


# What turns text into tokens checks the vocabulary.

VOCABULARY: dict[str, tuple[Damage, str]] = {
    "another tokenizer": (renamed("gpt2", "bert"), "tokenizer is 'bert'"),
    "another pre-tokenizer": (renamed("smollm", "falcon"), "pre-tokenizer 'falcon'"),
    "a token twice": (lambda raw: raw.replace(u64(1) + b"A", u64(1) + b"B", 1), "are both 'B'"),
    "an unknown kind": (behind("tokenizer.ggml.token_type", 4 + 4 + 8, u32(9)), "9 is not a kind of token"),
    "an end outside": (value("tokenizer.ggml.eos_token_id", u32(272)), "272 is not one of 272 tokens"),
    "a merge of strangers": (lambda raw: raw.replace(u64(3) + b"h e", u64(3) + b"h {", 1), "'h{' is not a token"),
}


@pytest.mark.parametrize("command", ["run", "score", "tokenize"])
@pytest.mark.parametrize("case", VOCABULARY)
def test_a_vocabulary_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, case: str, command: str
) -> None:
    damage, words = VOCABULARY[case]
    assert_refused(attempt(capsys, command, damaged(tmp_path, sound, damage)), words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (renamed("tokenizer.chat_template", "tokenizer.chat_no_plate"), "no chat template"),
        (renamed("{% for message", "{% fox message"), "unknown tag 'fox'"),
        (renamed("message in messages", "message in mess.ages"[:19]), "does not take these messages"),
    ],
    ids=["missing", "not a template", "failing"],
)
def test_a_chat_needs_a_template_and_nothing_else_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, damage: Damage, words: str
) -> None:
    model = damaged(tmp_path, sound, damage)
    assert_refused(attempt(capsys, "chat", model), words)
    assert attempt(capsys, "run", model).status == 0


KINDS: dict[str, tuple[TinyLlama, str, str]] = {
    "an unsupported matrix type": (TinyLlama(matrix_type="MXFP4"), "run", "'blk.0.attn_q.weight' is MXFP4"),
    "an unsupported embedding": (TinyLlama(embedding_type="MXFP4"), "plan", "'token_embd.weight' is MXFP4"),
    "a head the kernel has no path for": (TinyLlama(heads=8, head_dim=20), "run", "head_dim 20"),
    "a plan for such a head": (TinyLlama(heads=8, head_dim=20), "plan", "head_dim 20"),
    "more rows than the NPU's registers hold": (
        TinyLlama(heads=128, kv_heads=1, head_dim=64, layers=1),
        "emulated",
        "the NPU's registers end at 8191",
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_a_sound_model_of_a_kind_that_is_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    kind, command, words = KINDS[case]
    assert_refused(attempt(capsys, command, write_tiny_llama(tmp_path / "model.gguf", kind)), words)


@pytest.mark.parametrize("command", ["run", "emulated", "score"])
def test_weights_that_are_not_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sound: bytes, command: str
) -> None:
    model = damaged(tmp_path, sound, lambda raw: raw)
    with GGUFFile.open(model) as opened:
        norm = opened.tensors["blk.0.attn_norm.weight"].offset
    damaged(tmp_path, sound, put(norm, struct.pack("<f", float("nan"))))
    assert_refused(attempt(capsys, command, model), "is nan", "the model's numbers are broken")


# Claims that would exhaust memory, each where only a little is to be had.

LITTLE = ("prlimit", f"--as={1 << 30}")
"""Address space in which `tokenize` and `plan` work on a sound model; running one takes 0.5 GiB more."""

MORE = ("prlimit", f"--as={3 << 30}")
"""The same for `run`, or for a file of 1 GiB, which is mapped as a whole."""


@pytest.mark.parametrize("case", ["2^60 tensors", "2^61 tokens", "2^69 weights"])
@pytest.mark.parametrize("command", ["tokenize", "plan"])
def test_claimed_counts_take_no_memory(tmp_path: Path, sound: bytes, case: str, command: str) -> None:
    damage, words = HEADER[case]
    model = damaged(tmp_path, sound, damage)
    options = {"tokenize": ["--text", TEXT], "plan": []}[command]
    assert_refused(run_apart(command, str(model), *options, prefix=LITTLE), words)


def test_an_array_that_fills_a_gigabyte_takes_no_memory(tmp_path: Path, sound: bytes) -> None:
    """The claim is true here: the file is as long as its header says, of zeros that no disk stores."""
    model = damaged(tmp_path, sound, behind("tokenizer.ggml.token_type", 4 + 4, u64(1 << 28)))
    os.truncate(model, (1 << 30) + (1 << 20))
    assert_refused(run_apart("plan", str(model), prefix=MORE), "'tokenizer.ggml.token_type'", "headers end by 33554")


def test_a_context_without_end_takes_no_memory(tmp_path: Path, sound: bytes) -> None:
    """A request's room is what the pool holds, whatever the model and the options claim."""
    model = damaged(tmp_path, sound, value("llama.context_length", u32(MOST)))
    options = [*GENERATE[:2], "--max-tokens", str(10**18), "--ignore-eos", "--pool", "12KiB", "--json"]
    outcome = run_apart("run", str(model), *options, prefix=MORE)
    assert_refused(outcome, "has grown to 49 tokens and the pool of 3 blocks of 16 has no room")
