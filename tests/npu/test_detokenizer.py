"""Streams of text: characters over several tokens, invalid bytes, and stop strings over several pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import UsageError
from npu.detokenizer import Detokenizer, StopChecker
from tests.npu.toy_tokenizer import byte_ids, toy

TOKENIZER = toy(merges=[("a", "b")])


def test_a_character_comes_out_with_the_token_that_completes_it() -> None:
    stream = Detokenizer(TOKENIZER)
    assert [stream.push(token) for token in byte_ids("a🙂é")] == ["a", "", "", "", "🙂", "", "é"]
    assert stream.flush() == ""


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    stream = Detokenizer(TOKENIZER)
    assert [stream.push(token) for token in byte_ids("🙂".encode()[:3])] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.push(byte_ids("a")[0]) == "a"  # a new stream, nothing left over


def test_a_character_broken_off_is_replaced_as_soon_as_that_is_certain() -> None:
    stream = Detokenizer(TOKENIZER)
    assert [stream.push(token) for token in byte_ids(b"\xf0\x9fa")] == ["", "", "\ufffda"]


def test_a_genuine_replacement_character_passes() -> None:
    stream = Detokenizer(TOKENIZER)
    assert "".join(map(stream.push, byte_ids("\ufffd"))) == "\ufffd"


def test_control_tokens_give_no_text_unless_asked_for() -> None:
    assert Detokenizer(TOKENIZER).push(1) == ""
    assert Detokenizer(TOKENIZER, special=True).push(1) == "<|end|>"


def test_an_id_outside_the_vocabulary_leaves_the_stream_as_it_was() -> None:
    stream = Detokenizer(TOKENIZER)
    first, *rest = byte_ids("é")
    assert stream.push(first) == ""
    with pytest.raises(UsageError):
        stream.push(TOKENIZER.vocab_size)
    assert "".join(map(stream.push, rest)) == "é"


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans())
def test_any_ids_stream_to_what_they_decode_to(ids: list[int], special: bool) -> None:
    stream = Detokenizer(TOKENIZER, special=special)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == TOKENIZER.decode(ids, special=special)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_valid_text_streams_without_a_remainder(text: str) -> None:
    stream = Detokenizer(TOKENIZER)
    assert "".join(map(stream.push, TOKENIZER.encode(text))) == text
    assert stream.flush() == ""


def stopped_text(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a stream gives out and why it ended, one character at a time: the definition of StopChecker."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_stop_string_over_three_pieces_never_comes_out() -> None:
    checker = StopChecker(["###"])
    assert [checker.push(piece) for piece in ("one #", "#", "# two", "three")] == ["one ", "", "", ""]
    assert checker.stopped == "###"
    assert checker.flush() == ""


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    checker = StopChecker(["</end>"])
    assert [checker.push(piece) for piece in ("a</e", "m>", "</en")] == ["a", "</em>", ""]
    assert checker.stopped is None
    assert checker.flush() == "</en"
    assert checker.flush() == ""


def test_the_stop_string_that_is_complete_first_wins() -> None:
    for pieces in (["xabcd"], ["xab", "cd"], list("xabcd")):
        checker = StopChecker(["abcd", "bc", "d"])
        assert "".join(map(checker.push, pieces)) == "xa"
        assert checker.stopped == "bc"


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    checker = StopChecker(["User:", "\nUser:"])
    assert checker.push("Fine.\nUser: and") == "Fine."
    assert checker.stopped == "\nUser:"


def test_without_stop_strings_everything_passes_at_once() -> None:
    checker = StopChecker([])
    assert checker.push("abc") == "abc"
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopChecker(["a", ""])


@given(
    st.lists(st.text("ab", max_size=6), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_any_cut_of_any_text_stops_at_the_same_place(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    out = ""
    for position, piece in enumerate(pieces, start=1):
        out += checker.push(piece)
        seen = "".join(pieces[:position])
        if checker.stopped is None:  # nothing is held back but what may become a stop string
            assert seen.startswith(out)
            held = seen[len(out) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    out += checker.flush()
    assert (out, checker.stopped) == stopped_text("".join(pieces), stops)
