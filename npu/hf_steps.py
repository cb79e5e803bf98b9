"""The steps around BPE that a tokenizer.json lists, recognised one by one; any other is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hostcache.errors import UnsupportedModel

from .bpe import PRE_TOKENIZERS, PreTokenizer
from .spm import NO_PREFIX, Before, SpacePrefix
from .vocabulary import SPACE_MARK, Spelling

__all__ = ["Steps", "first_tokens", "read_steps"]

_EVERYWHERE = frozenset(Before)
_SPLITS = frozenset(pre.split for pre in PRE_TOKENIZERS.values())


@dataclass(frozen=True)
class Steps:
    """What is done to plain text.

    Attributes:
        spelling: how tokens are written.
        words: how byte-level BPE cuts text into words; unused by SentencePiece, which does not.
        prefix: the space that plain text gets.
    """

    spelling: Spelling
    words: PreTokenizer = PRE_TOKENIZERS["gpt-2"]
    prefix: SpacePrefix = NO_PREFIX


def read_steps(source: Mapping[str, Any]) -> Steps:
    """Recognise normalizer, pre-tokenizer and the model's options.

    Args:
        source: the whole tokenizer.json; `model` is an object.

    Raises:
        UnsupportedModel: a step is of another kind, or has an option that rockpage does not run.
    """
    model = source["model"]
    if model.get("type", "BPE") != "BPE":  # files of before 2020 name no type
        _refuse("model", model)
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            _refuse("model", {"type": "BPE", option: model[option]})
    before = list(_flat("normalizer", source.get("normalizer"), "normalizers"))
    cutting = list(_flat("pre_tokenizer", source.get("pre_tokenizer"), "pretokenizers"))
    if any(step["type"] == "ByteLevel" for step in cutting):
        return _byte_level(before, cutting, whole_words=bool(model.get("ignore_merges")))
    if model.get("ignore_merges"):
        _refuse("model", {"type": "BPE", "ignore_merges": True, "pre_tokenizer": None})
    return Steps(Spelling.SENTENCEPIECE, prefix=_sentencepiece_prefix(before, cutting))


def first_tokens(post_processor: object) -> list[str]:
    """The tokens that a post-processor puts before a text; behind it, rockpage takes none.

    Raises:
        UnsupportedModel: it is of another kind, or puts tokens behind the text.
    """
    first: list[str] = []
    for step in _flat("post_processor", post_processor, "processors"):
        if step["type"] == "ByteLevel":  # shifts offsets, which nobody asks for
            continue
        single = step.get("single") if step["type"] == "TemplateProcessing" else None
        parts_are_objects = isinstance(single, list) and all(isinstance(part, dict) for part in single)
        if not single or not parts_are_objects or "Sequence" not in single[-1]:
            _refuse("post_processor", step)
        for part in single[:-1]:
            special = part.get("SpecialToken")
            if not isinstance(special, Mapping):
                _refuse("post_processor", step)
            first.append(str(special.get("id")))
    return first


def _byte_level(before: list[dict[str, Any]], cutting: list[dict[str, Any]], *, whole_words: bool) -> Steps:
    words = PreTokenizer(whole_words=whole_words)
    for step in before:
        if step["type"] != "NFC":
            _refuse("normalizer", step)
        words = replace(words, nfc=True)
    *earlier, last = cutting
    for step in earlier:
        if step == {"type": "Digits", "individual_digits": True} and words.split is None:
            words = replace(words, single_digits=True)
        elif step["type"] == "Split" and words.split is None:
            words = replace(words, split=_known_split(step))
        else:
            _refuse("pre_tokenizer", step)
    prefixed = last.get("add_prefix_space", True)
    # With other steps before it, ByteLevel would prefix every word they made.
    if (
        last["type"] != "ByteLevel"
        or last.get("use_regex", True) is not (words.split is None)
        or (prefixed and earlier)
    ):
        _refuse("pre_tokenizer", last)
    prefix = SpacePrefix(_EVERYWHERE, unless_space=True) if prefixed else NO_PREFIX
    return Steps(Spelling.BYTE_LEVEL, words, prefix)


def _known_split(step: Mapping[str, Any]) -> str:
    pattern = step.get("pattern")
    split = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    known = isinstance(split, str) and split in _SPLITS
    if not known or step.get("behavior") != "Isolated" or step.get("invert"):
        _refuse("pre_tokenizer", step)
    return str(split)


def _sentencepiece_prefix(before: list[dict[str, Any]], cutting: list[dict[str, Any]]) -> SpacePrefix:
    """The two forms in use: normalizers that prepend and replace, or the pre-tokenizer Metaspace that does both."""
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    if cutting:
        if before or len(cutting) > 1 or cutting[0]["type"] != "Metaspace":
            _refuse("pre_tokenizer", (before or cutting[1:] or cutting)[0])
        return _metaspace(cutting[0])
    if before == [mark]:
        return NO_PREFIX
    if before == [prepend, mark]:
        return SpacePrefix(_EVERYWHERE)
    unknown = [step for step in before if step not in (prepend, mark)]
    return _refuse("normalizer", (unknown or before or [{"type": None}])[0])


def _metaspace(step: Mapping[str, Any]) -> SpacePrefix:
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    behind = {"always": _EVERYWHERE, "first": frozenset({Before.NOTHING}), "never": frozenset[Before]()}
    known = isinstance(scheme, str) and scheme in behind
    if not known or step.get("replacement") != SPACE_MARK or step.get("split", True):
        _refuse("pre_tokenizer", step)
    return SpacePrefix(behind[scheme], unless_space=True)


def _flat(part: str, step: object, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a part, with those of a `Sequence` in its place."""
    if step is None:
        return
    if not isinstance(step, dict) or not isinstance(step.get("type"), str):
        _refuse(part, {"type": step})
    if step["type"] != "Sequence":
        yield step
        return
    steps = step.get(inner)
    if not isinstance(steps, list) or any(isinstance(item, dict) and item.get("type") == "Sequence" for item in steps):
        _refuse(part, step)
    for item in steps:
        yield from _flat(part, item, inner)


def _refuse(part: str, step: Mapping[str, Any]) -> NoReturn:
    options = ", ".join(f"{key}={value!r:.60}" for key, value in step.items() if key not in ("type", "vocab", "merges"))
    raise UnsupportedModel(
        f"tokenizer.json has the {part} {step.get('type')!r:.60} ({options:.300}), which rockpage does not run;"
        " use a model of a family that `rockpage models` lists",
        part=part,
        type=step.get("type"),
    )
