"""Conversations as the model file's own chat template writes them, and as token ids no message can forge."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UnsupportedModel, UsageError

from .folder_files import read_object, read_text
from .hf_tokenizer import special_texts_of_folder
from .messages import ROLES, Message, check_beside, check_messages, join_parts, template_form
from .stand_ins import StandIns, map_texts
from .tokenizer import Tokenizer, refuse_surrogates
from .vocabulary import Metadata, special_texts

if TYPE_CHECKING:
    from .jinja_sandbox import SandboxedTemplate

__all__ = ["ROLES", "ChatTemplate", "Message", "encode_chat", "turn_ends"]

_SOURCE_LIMIT = 1 << 16  # characters; real templates are below 32 KiB, and compiling as many takes up to a second
_PROBE = "\U0010fffd"  # in place of a message's text; no template writes it


class ChatTemplate:
    """A model's chat template, compiled when it is first rendered: a broken one does not stop a plain completion.

    Args:
        source: the Jinja2 text.
        special_tokens: what the template may name, such as `bos_token`.
        tool_use: the text of a template of its own for conversations with tools, if the model has one.

    Example:
        >>> from npu.chat import ChatTemplate
        >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}", {})
        >>> template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
        '[system] Be brief. [user] Hello '
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_use: str | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._for_tools = ChatTemplate(tool_use, special_tokens) if tool_use is not None else self

    @property
    def sources(self) -> dict[str, str]:
        """The Jinja2 texts by name, as they were given: `default`, and `tool_use` if there is one of its own."""
        own = {"default": self._source}
        return own if self._for_tools is self else {**own, "tool_use": self._for_tools._source}

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> ChatTemplate:
        """Take the template from a GGUF file's metadata: `tokenizer.chat_template`, and `.tool_use` if it has that.

        Raises:
            UnsupportedModel: the file has none.
            BadModelFile: it is not a text, or one of more than 65536 characters.
        """
        key = "tokenizer.chat_template"
        return cls._from_texts(
            {"default": metadata.get(key), "tool_use": metadata.get(f"{key}.tool_use")}, key, special_texts(metadata)
        )

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> ChatTemplate:
        """Take the template from a Hugging Face model folder.

        It stands in chat_template.jinja, with others in additional_chat_templates; in older folders in
        tokenizer_config.json, as one text or as a list of named ones. Of the named ones, `default` and `tool_use`
        are used.

        Raises:
            UnsupportedModel: the folder has none.
            BadModelFile: it is not a text, or one of more than 65536 characters, or another file is damaged.
        """
        folder = Path(folder)
        texts: dict[str, object] = {
            "default": read_text(folder / "chat_template.jinja"),
            "tool_use": read_text(folder / "additional_chat_templates" / "tool_use.jinja"),
        }
        if texts["default"] is None:
            listed = (read_object(folder / "tokenizer_config.json") or {}).get("chat_template")
            if isinstance(listed, list):
                texts |= {str(one.get("name")): one.get("template") for one in listed if isinstance(one, dict)}
            else:
                texts["default"] = listed
        return cls._from_texts(texts, f"chat template of {folder}", special_texts_of_folder(folder))

    @classmethod
    def _from_texts(cls, texts: Mapping[str, object], where: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        source, tool_use = texts.get("default"), texts.get("tool_use")
        if source is None:
            raise UnsupportedModel(
                f"the model has no chat template ({where}); use --prompt without --chat, or a model tuned for chat"
            )
        for text in (source, tool_use):
            if text is not None and (not isinstance(text, str) or len(text) > _SOURCE_LIMIT):
                raise BadModelFile(
                    f"the model's '{where}' is not a text of at most {_SOURCE_LIMIT} characters; fetch it again",
                    key=where,
                )
        assert isinstance(source, str)
        assert isinstance(tool_use, str | None)
        return cls(source, special_tokens, tool_use=tool_use)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Write a conversation as text, the same as transformers' `apply_chat_template`.

        Message text that looks like a control token looks like one in the result too; encode with `encode_chat`.
        Contents in parts go to the template as they are if it takes such; otherwise they are joined by a space.

        Args:
            messages: the conversation, oldest first.
            add_generation_prompt: end with the words that make the model answer.
            tools: descriptions of the functions the model may call, as JSON schemas.
            documents: what the model may refer to, each with `title` and `text`.
            variables: more that a template of this family looks at, such as `enable_thinking`.

        Raises:
            UsageError: an argument is malformed, or the template refuses the conversation or fails on it.
            BadModelFile: the source is not a Jinja2 template.
            ModelError: the template reaches outside its sandbox.
            MissingExtra: `jinja2` is not installed.
        """
        check_messages(messages)
        check_beside(tools, documents, variables)
        if tools is not None and self._for_tools is not self:
            return self._for_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                variables=variables,
            )
        in_parts = any(not isinstance(message.get("content"), str | None) for message in messages)
        if in_parts and not self._takes_parts:
            messages = [join_parts(message) for message in messages]
        return self._template.render(
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": [template_form(message) for message in messages],
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def one_budget(self) -> AbstractContextManager[None]:
        """Let all renderings of a block share what otherwise each of them may use."""
        from .jinja_sandbox import one_budget  # noqa: PLC0415 - needs an optional extra

        return one_budget()

    @functools.cached_property
    def behind_answer(self) -> str:
        """What the template writes behind an assistant's words at the end of a conversation; empty if it refuses it."""
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, behind = self.render(conversation, add_generation_prompt=False).rpartition(_PROBE)
        except UsageError:
            return ""
        return behind if found else ""

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes the text of a part, rather than the part itself or nothing."""
        parts = [{"type": "text", "text": _PROBE}]
        values = {"messages": [{"role": "user", "content": parts}], "tools": None, "documents": None}
        try:
            written = self._template.render({**self._special_tokens, **values, "add_generation_prompt": True})
        except UsageError:
            return False
        return _PROBE in written and "'text'" not in written

    @functools.cached_property
    def _template(self) -> SandboxedTemplate:
        from .jinja_sandbox import SandboxedTemplate  # noqa: PLC0415 - needs an optional extra

        return SandboxedTemplate(self._source)


def turn_ends(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The control token that the template writes behind an assistant's words, as a set of one.

    It ends an answer as the tokens of `Tokenizer.eos_ids` do, which come from the model's files and may be those of
    the model before it was tuned for chat.

    Returns:
        An empty set if the template writes none there, or refuses a conversation of two words.

    Raises:
        BadModelFile: the source is not a Jinja2 template.
        ModelError: the template reaches outside its sandbox.
        MissingExtra: `jinja2` is not installed.
    """
    text, control = next(iter(tokenizer.split_control(template.behind_answer)))
    return frozenset() if text.strip() or control is None else frozenset({control})


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> NDArray[np.int32]:
    """Encode a conversation: the template's control tokens become their ids, whatever messages hold stays text.

    The template is run on messages, tools and documents whose characters are replaced by stand-ins (`StandIns`). Of
    its output only what is not a stand-in can form a control token, and that is the template's own text. The
    characters are then put back in the text between control tokens, which is encoded as a whole, so that without
    forged tokens the ids are those of `encode(render(messages), special=True)`.

    A template may look into the text, to cut an answer at `</think>` say, and then comes out differently with
    stand-ins. In that case only the control tokens in the messages are replaced by stand-ins: they remain text, while
    the template sees all else. It must then write the same control tokens as with stand-ins, so that none can come
    together out of what it leaves of a message.

    The arguments and errors are those of `ChatTemplate.render`; and

    Raises:
        UsageError: the control tokens depend on the messages' text, or a text is no valid Unicode.

    Returns:
        int32 `[tokens]`; begins with bos only if the template writes it.

    Example:
        >>> from npu.chat import ChatTemplate, encode_chat
        >>> from npu.source import open_model
        >>> from npu.text import tokenizer_of
        >>> with open_model("model.gguf") as source:
        ...     tokenizer = tokenizer_of(source)
        >>> template = ChatTemplate("{{ messages[0].content }}<|im_end|>", {})
        >>> ids = encode_chat(tokenizer, template, [{"role": "user", "content": "Hi <|im_end|>"}])
        >>> ids.tolist().count(2)  # <|im_end|>: the template's, not the message's
        1
    """
    check_messages(messages)
    check_beside(tools, documents, variables)
    texts: list[str] = []

    def collect(text: str) -> str:
        refuse_surrogates(text)
        texts.append(text)
        return text

    def render(mark: Callable[[str], str], mark_name: Callable[[str], str]) -> str:
        return template.render(
            [map_texts(message, mark, mark_name) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=map_texts(tools, mark, mark_name),
            documents=map_texts(documents, mark, mark_name),
            variables=variables,
        )

    def mark_control(text: str) -> str:
        return "".join(
            piece if token is None else piece + stand_ins.mark(tokenizer.decode([token], special=True))
            for piece, token in tokenizer.split_control(text)
        )

    def controls(text: str) -> list[int | None]:
        return [token for _, token in tokenizer.split_control(text)]

    with template.one_budget():
        plain = render(collect, collect)
        stand_ins = StandIns(texts, avoid=plain)
        try:
            marked: str | None = render(stand_ins.mark, mark_control)
        except UsageError:  # the template accepted the text itself: it looks into it
            marked = None
        if marked is None or stand_ins.unmark(marked) != plain:
            own, marked = marked, render(mark_control, mark_control)
            if own is not None and controls(own) != controls(marked):
                raise UsageError(
                    "the model's chat template writes other control tokens for other texts of the same messages, so"
                    " that its own cannot be told from forged ones; change the messages, or use --prompt without --chat"
                )
    pieces = ((stand_ins.unmark(text), control) for text, control in tokenizer.split_control(marked))
    return np.array(tokenizer.encode_pieces(pieces), dtype=np.int32)
