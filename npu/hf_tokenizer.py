"""The tokenizer of a Hugging Face folder: tokenizer.json and the files around it, in the house's own terms.

The library that wrote tokenizer.json could run it as it is. It is translated instead, for three reasons: whether
control tokens are parsed is up to the call, regular expressions of unknown cost are not taken from a file, and a step
that rockpage does not know is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hostcache.errors import BadModelFile, UnsupportedModel

from .bpe import build_bpe
from .folder_files import read_object
from .generation_config import GenerationConfig, eos_ids_of
from .hf_steps import Steps, first_tokens, read_steps
from .spm import build_pieces
from .vocabulary import Spelling, TokenKind, Vocabulary, is_byte_token

if TYPE_CHECKING:
    import tokenizers

__all__ = ["FolderTokenizer", "special_texts_of_folder"]

_MOST_TOKENS = 1 << 20
"""Ids; the largest vocabularies in use have 262,144."""

_MOST_UNUSED = 1 << 16
"""Ids without a token; models have some hundreds, to round their rows up. Each takes 170 bytes."""

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Special tokens by the names that chat templates use: `SPECIAL_TOKENS_ATTRIBUTES` of Hugging Face transformers."""


@dataclass(frozen=True)
class FolderTokenizer:
    """The parts of a tokenizer.

    Attributes:
        vocabulary: tokens, kinds, merges and ends; with unused tokens up to `vocab_size` of config.json, since a model
            may have more rows than its tokenizer has tokens.
        steps: what is done to plain text.
        add_bos: whether text starts with bos.
    """

    vocabulary: Vocabulary
    steps: Steps
    add_bos: bool

    @classmethod
    def read(cls, folder: Path) -> FolderTokenizer:
        """Read a folder.

        Raises:
            UnsupportedModel: there is no tokenizer.json, or it asks for a step that rockpage does not know.
            BadModelFile: a file is damaged, or the files contradict each other.
        """
        source = read_object(folder / "tokenizer.json")
        if source is None:
            raise UnsupportedModel(
                f"{folder} has no tokenizer.json; write one with transformers:"
                " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                folder=str(folder),
            )
        model = _part(source, "model", dict)
        config = read_object(folder / "tokenizer_config.json") or {}
        named = special_texts_of_folder(folder)
        ids = _collect_ids(_part(model, "vocab", dict).items())
        added = _added_tokens(source, config)
        ids |= _collect_ids([*ids.items(), *((text, token.id) for text, token in added.items())])
        control = {text for text, token in added.items() if token.special} | set(named.values())
        steps = read_steps(source)
        sizes = read_object(folder / "config.json") or {}
        tokens = _by_id(ids, sizes.get("vocab_size"))
        byte_tokens = steps.spelling is Spelling.SENTENCEPIECE
        unknown = model.get("unk_token") if byte_tokens else None  # byte-level BPE leaves out what it has no token for

        def kind(text: str) -> TokenKind:
            if text not in ids:
                return TokenKind.UNUSED
            if text == unknown:
                return TokenKind.UNKNOWN
            if text in control:
                return TokenKind.CONTROL
            if text in added:
                return TokenKind.USER_DEFINED
            return TokenKind.BYTE if byte_tokens and is_byte_token(text) else TokenKind.NORMAL

        vocabulary = Vocabulary(
            tokens=tokens,
            kinds=[kind(text) for text in tokens],
            merges=[_merge(merge) for merge in _part(model, "merges", list)],
            bos_id=ids.get(named.get("bos_token", "")),
            eos_ids=_ends(folder, sizes, ids.get(named.get("eos_token", "")), len(tokens)),
            spelling=steps.spelling,
        )
        return cls(vocabulary, steps, _adds_bos(source, config, named.get("bos_token")))

    def build(self) -> tokenizers.Tokenizer:
        """Build the part that turns plain text into ids.

        Raises:
            UnsupportedModel: not every text could be encoded.
            MissingExtra: the `tokenizers` library is not installed.
        """
        if self.steps.spelling is Spelling.SENTENCEPIECE:
            return build_pieces(self.vocabulary, self.vocabulary.merges)
        return build_bpe(self.vocabulary.mergeable(), self.vocabulary.merges, self.steps.words)


def special_texts_of_folder(folder: Path) -> dict[str, str]:
    """The texts of the special tokens a folder names, by the names that chat templates use (`bos_token`, ...).

    tokenizer_config.json goes before the older special_tokens_map.json.

    Raises:
        BadModelFile: a file is damaged, or a token is neither a text nor an object with `content`.
    """
    texts: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_object(folder / name) or {}
        for key in _NAMED:
            token = config.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[key] = text
            elif token is not None:
                _fail(f"'{key}' of {name} is {token!r:.80}")
    return texts


@dataclass(frozen=True)
class _Added:
    """A token that is matched as a whole."""

    id: int
    special: bool


def _added_tokens(source: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, _Added]:
    """Tokens matched as a whole, by text; tokenizer_config.json may add some, or call some special.

    Their `normalized` is not looked at: they are matched in the text as it is given, as llama.cpp does.
    """
    listed = _part(source, "added_tokens", list, default=[])
    more = _part(config, "added_tokens_decoder", dict, default={})
    added: dict[str, _Added] = {}
    for entry in [*listed, *({"id": key, **_object(entry)} for key, entry in more.items())]:
        token, text = _object(entry).get("id"), entry.get("content")
        token = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 8 else token
        if type(token) is not int or not isinstance(text, str) or not text:
            _fail(f"the added token {entry!r:.120} has no id or no content")
        for flag in ("lstrip", "rstrip", "single_word"):
            if entry.get(flag):
                raise UnsupportedModel(
                    f"the added token {text!r:.60} takes the text around it into account ({flag}), which rockpage does"
                    " not run; use another model",
                    token=text,
                    flag=flag,
                )
        known = added.get(text)
        if known is not None and known.id != token:
            _fail(f"the added token {text!r:.60} has the ids {known.id} and {token}")
        added[text] = _Added(token, bool(entry.get("special")) or (known is not None and known.special))
    return added


def _collect_ids(pairs: Iterable[tuple[str, object]]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for text, token in pairs:
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            _fail(f"token {text!r:.60} has the id {token!r:.60}")
        if ids.setdefault(text, token) != token:
            _fail(f"token {text!r:.60} has the ids {ids[text]} and {token}")
    return ids


def _by_id(ids: Mapping[str, int], vocab_size: object) -> list[str]:
    """Texts in the order of their ids; what has none, up to the model's number of rows, is named as unused."""
    texts = {token: text for text, token in ids.items()}
    if len(texts) < len(ids):
        first, second = next((text, texts[token]) for text, token in ids.items() if texts[token] != text)
        _fail(f"tokens {first!r:.60} and {second!r:.60} have one id")
    rows = vocab_size if vocab_size is not None else 0
    if type(rows) is not int or not 0 <= rows <= _MOST_TOKENS:
        _fail(f"'vocab_size' of config.json is {vocab_size!r:.60}")
    total = max(rows, max(texts, default=-1) + 1)
    if total - len(texts) > _MOST_UNUSED:
        _fail(f"{total - len(texts)} of {total} ids have no token")
    return [texts.get(token, f"[UNUSED {token}]") for token in range(total)]


def _merge(merge: object) -> tuple[str, str]:
    """Two tokens, in a list or, as older files have it, in a text with a space between."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        _fail(f"the merge {merge!r:.60} is not two tokens")
    return parts[0], parts[1]


def _ends(folder: Path, sizes: Mapping[str, Any], eos_id: int | None, vocab_size: int) -> frozenset[int]:
    """What `Tokenizer.eos_ids` documents for folders."""
    named = GenerationConfig.from_folder(folder).eos_ids or eos_ids_of(sizes, folder / "config.json")
    ends = frozenset(named) | ({eos_id} if eos_id is not None else frozenset())
    if ends and max(ends) >= vocab_size:
        _fail(f"'eos_token_id' is {max(ends)}, not one of {vocab_size} tokens")
    return ends


def _adds_bos(source: Mapping[str, Any], config: Mapping[str, Any], bos: str | None) -> bool:
    """`add_bos_token` of tokenizer_config.json or, where it is silent, what the post-processor does."""
    first = first_tokens(source.get("post_processor"))
    if first not in ([], [bos]):
        _fail(f"the post-processor puts {first!r:.80} before a text, but bos is {bos!r:.60}")
    wanted = config.get("add_bos_token")
    if wanted is None or bos is None:
        return bool(first)
    if not isinstance(wanted, bool):
        _fail(f"'add_bos_token' of tokenizer_config.json is {wanted!r:.60}")
    return wanted


def _part(source: Mapping[str, Any], key: str, kind: type[Any], default: object = None) -> Any:  # noqa: ANN401 - `kind`
    value = source.get(key, default)
    value = default if value is None else value
    if not isinstance(value, kind):
        _fail(f"'{key}' is {value!r:.60}, not a {kind.__name__}")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(f"{value!r:.60} stands for a token")
    return value


def _fail(problem: str) -> NoReturn:
    raise BadModelFile(f"the folder's tokenizer files are bad: {problem}; fetch them again", problem=problem)
