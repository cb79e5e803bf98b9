"""SentencePiece vocabularies: worked out by hand, and refused where they leave something open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import BadModelFile, UnsupportedModel, UsageError
from npu.tokenizer import Tokenizer
from npu.vocabulary import Metadata

UNK, BOS, EOS, BYTE_0, A = 0, 1, 2, 3, 259


def metadata(pieces: Sequence[tuple[str, float]] = (), user_defined: Sequence[str] = (), **overrides: Any) -> Metadata:
    """Unknown, bos, eos, 256 bytes, the given pieces from `A` on, user-defined tokens."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    ggml: dict[str, Any] = {
        "model": "llama",
        "tokens": [*special, *bytes_, *(piece for piece, _ in pieces), *user_defined],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(user_defined)],
        "scores": [0.0] * 259 + [score for _, score in pieces] + [0.0] * len(user_defined),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **overrides,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}


def toy(pieces: Sequence[tuple[str, float]] = (), user_defined: Sequence[str] = (), **overrides: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(pieces, user_defined, **overrides))


LETTERS = (("\u2581", -10.0), ("a", -11.0), ("b", -12.0), ("c", -13.0))
SPACE, LETTER_A, LETTER_B, LETTER_C, FIRST = range(A, A + 5)


def test_the_highest_score_is_joined_first_wherever_it_stands() -> None:
    # "bc" scores above "ab", so abc is a bc, though ab stands to the left.
    tokenizer = toy([*LETTERS, ("ab", -2.0), ("bc", -1.0)])
    assert tokenizer.encode("abc", bos=False).tolist() == [SPACE, LETTER_A, FIRST + 1]


def test_pieces_reach_across_words() -> None:
    tokenizer = toy([*LETTERS, ("a\u2581", -1.0), ("a\u2581b", -2.0)])
    assert tokenizer.encode("a b", bos=False).tolist() == [SPACE, FIRST + 1]


def test_what_no_piece_holds_becomes_bytes() -> None:
    ids = toy(LETTERS).encode("aé\n", bos=False).tolist()
    assert ids == [SPACE, LETTER_A, BYTE_0 + 0xC3, BYTE_0 + 0xA9, BYTE_0 + 0x0A]


def test_without_bytes_what_is_unknown_becomes_one_token() -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a"]
    tokenizer = toy(tokens=tokens, token_type=[2, 3, 3, 1, 1], scores=[0.0, 0.0, 0.0, -1.0, -2.0])
    assert tokenizer.encode("aéxa", bos=False).tolist() == [3, 4, UNK, 4]


def test_a_control_token_is_followed_by_a_prefix_and_a_user_defined_one_is_not() -> None:
    tokenizer = toy(LETTERS, user_defined=["<t>", "\u2581\u2581"])
    tool, two = FIRST, FIRST + 1
    assert tokenizer.encode("a</s>b", bos=True, special=True).tolist() == [BOS, SPACE, LETTER_A, EOS, SPACE, LETTER_B]
    assert tokenizer.encode("a<t>b", bos=False).tolist() == [SPACE, LETTER_A, tool, LETTER_B]
    assert tokenizer.encode("<t>b", bos=False).tolist() == [SPACE, tool, LETTER_B]
    # The prefix counts as text: with the space of the text it makes the user-defined pair.
    assert tokenizer.encode(" a", bos=False).tolist() == [two, LETTER_A]
    assert tokenizer.decode([two, LETTER_A]) == " a"


def test_a_file_may_do_without_the_prefix() -> None:
    assert toy(LETTERS, add_space_prefix=False).encode("a b", bos=False).tolist() == [LETTER_A, SPACE, LETTER_B]


def test_bos_comes_first_unless_the_file_says_no() -> None:
    assert toy(LETTERS).encode("a").tolist() == [BOS, SPACE, LETTER_A]
    assert toy(LETTERS, add_bos_token=False).encode("a").tolist() == [SPACE, LETTER_A]
    assert toy(LETTERS).encode("").tolist() == [BOS]


def test_decoding_takes_away_the_prefix_and_no_other_space() -> None:
    tokenizer = toy(LETTERS)
    assert tokenizer.decode([BOS, SPACE, LETTER_A, SPACE, LETTER_B]) == "a b"
    assert tokenizer.decode([SPACE, LETTER_A, EOS, SPACE, LETTER_B], special=True) == "a</s>b"
    assert tokenizer.decode([LETTER_A, UNK, SPACE, LETTER_B]) == "a b"
    # A token by itself is what it is in the midst of a text: a stream of an answer joins its prompt.
    assert tokenizer.token_bytes(SPACE) == b" "


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")), st.booleans())
def test_any_text_survives_the_round_trip(text: str, prefix: bool) -> None:
    tokenizer = toy(
        [*LETTERS, ("\u2581a", -1.0), ("ab", -2.0), ("\u2581\u2581", -3.0)], ["<t>"], add_space_prefix=prefix
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(f"{text}</s>{text}<t>", special=True)) == f"{text}{text}<t>"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"scores": None}, "'tokenizer.ggml.scores'.*missing"),
        ({"scores": [1] * 263}, "'tokenizer.ggml.scores'.*list of float"),
        ({"scores": [1.0]}, "1 for 263 tokens"),
        ({"scores": [float("nan")] * 263}, "not all numbers"),
        ({"add_space_prefix": 2}, "add_space_prefix' is 2"),
    ],
)
def test_files_that_contradict_themselves_are_refused(overrides: dict[str, Any], names: str) -> None:
    with pytest.raises(BadModelFile, match=names):
        toy(LETTERS, **overrides)


def test_pieces_longer_than_any_are_refused() -> None:
    with pytest.raises(BadModelFile, match="129 characters"):
        toy([*LETTERS, ("a" * 129, -1.0)])


@pytest.mark.parametrize("others", [("ab", "bc"), ("aa", "bb"), ("aa", "aaaa")])
def test_equal_scores_are_refused_with_both_pieces(others: tuple[str, str]) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{others[0]}' and '{others[1]}' have the same score"):
        toy([*LETTERS, *((piece, -1.0) for piece in others), ("aaa", -2.0)])


def test_runs_of_spaces_may_share_a_score_as_llama_2s_do() -> None:
    # Of equal scores the left pair is joined first, so the left run grows to the longest there is before the next.
    tokenizer = toy([*LETTERS, *(("\u2581" * n, -1e9) for n in (3, 2, 4)), ("\u2581a", -1.0)], add_space_prefix=False)
    three, two, four, space_a = range(FIRST, FIRST + 4)
    expected = {5: [four, SPACE], 6: [four, two], 7: [four, three], 9: [four, four, SPACE]}
    for spaces, ids in expected.items():
        assert tokenizer.encode(" " * spaces, bos=False).tolist() == ids
        assert tokenizer.encode(" " * spaces + "b  b", bos=False).tolist() == [*ids, LETTER_B, two, LETTER_B]
    # The word takes its space first.
    assert tokenizer.encode("   a", bos=False).tolist() == [two, space_a]


@pytest.mark.parametrize("key", ["precompiled_charsmap", "remove_extra_whitespaces"])
def test_rewriting_the_text_first_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        Tokenizer.from_metadata({**metadata(LETTERS), f"tokenizer.ggml.{key}": True})


def test_a_vocabulary_that_cannot_hold_every_text_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="0 of 256 byte tokens"):
        toy(tokens=["<s>", "a"], token_type=[3, 1], scores=[0.0, -1.0], bos_token_id=0, eos_token_id=None)


def test_ids_outside_are_refused() -> None:
    with pytest.raises(UsageError, match="999"):
        toy(LETTERS).decode([999])
