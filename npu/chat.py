"""Conversations as the model file's own chat template writes them, and as token ids no message can forge."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import BadModelFile, UnsupportedModel, UsageError

from .stand_ins import StandIns, map_texts
from .tokenizer import Tokenizer
from .vocabulary import Metadata, special_texts

if TYPE_CHECKING:
    from .jinja_sandbox import SandboxedTemplate

__all__ = ["ROLES", "ChatTemplate", "Message", "encode_chat"]

Message: TypeAlias = Mapping[str, object]
"""`role` and `content`, as in OpenAI's chat format; an assistant's may have `tool_calls` instead of content."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have. Templates build control tokens from them, so the list is closed."""

_SOURCE_LIMIT = 1 << 20  # characters; real templates are below 32 KiB


class ChatTemplate:
    """A model's chat template, compiled when it is first rendered: a broken one does not stop a plain completion.

    Args:
        source: the Jinja2 text.
        special_tokens: what the template may name, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> ChatTemplate:
        """Take the template from a GGUF file's metadata.

        Raises:
            UnsupportedModel: the file has none.
            BadModelFile: it is not a text, or one of more than a mebibyte.
        """
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            raise UnsupportedModel(
                "the model file has no chat template (tokenizer.chat_template); use --prompt without --chat,"
                " or a model tuned for chat"
            )
        if not isinstance(source, str) or len(source) > _SOURCE_LIMIT:
            raise BadModelFile(
                f"the model file's 'tokenizer.chat_template' is not a text of at most {_SOURCE_LIMIT} characters;"
                " fetch the file again",
                key="tokenizer.chat_template",
            )
        return cls(source, special_texts(metadata))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Write a conversation as text.

        Message text that looks like a control token looks like one in the result too; encode with `encode_chat`.

        Args:
            messages: the conversation, oldest first.
            add_generation_prompt: end with the words that make the model answer.
            tools: descriptions of the functions the model may call, as JSON schemas.

        Raises:
            UsageError: a message is malformed, or the template refuses the conversation or fails on it.
            BadModelFile: the source is not a Jinja2 template.
            ModelError: the template reaches outside its sandbox.
            MissingExtra: `jinja2` is not installed.
        """
        _check(messages)
        return self._template.render(
            {
                **self._special_tokens,
                "messages": list(messages),
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    @functools.cached_property
    def _template(self) -> SandboxedTemplate:
        from .jinja_sandbox import SandboxedTemplate  # noqa: PLC0415 - needs an optional extra

        return SandboxedTemplate(self._source)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> NDArray[np.int32]:
    """Encode a conversation: the template's control tokens become their ids, whatever messages hold stays text.

    The template is run on messages whose characters are replaced by stand-ins (`StandIns`). Of its output only what is
    not a stand-in can form a control token, and that is the template's own text. The characters are then put back in
    the text between control tokens, which is encoded as a whole, so that without forged tokens the ids are those of
    `encode(render(messages), special=True)`.

    A template may look into the text, to cut an answer at `</think>` say, and then comes out differently with
    stand-ins. In that case only the control tokens in the messages are replaced by stand-ins: they remain text, while
    the template sees all else. (A token that the template then joins from its own text and a message's is taken as its
    own; no template is known to leave part of a token next to a message.)

    The arguments and errors are those of `ChatTemplate.render`.

    Returns:
        int32 `[tokens]`; begins with bos only if the template writes it.
    """
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    def render(mark: Callable[[str], str], mark_name: Callable[[str], str]) -> str:
        return template.render(
            [map_texts(message, mark, mark_name) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=map_texts(tools, mark, mark_name),
        )

    plain = render(collect, collect)
    stand_ins = StandIns(texts, avoid=plain)

    def mark_control(text: str) -> str:
        return "".join(
            piece if token is None else piece + stand_ins.mark(tokenizer.decode([token], special=True))
            for piece, token in tokenizer.split_control(text)
        )

    try:
        marked = render(stand_ins.mark, mark_control)
    except UsageError:  # the template accepted the text itself: it looks into it
        marked = ""
    if stand_ins.unmark(marked) != plain:
        marked = render(mark_control, mark_control)
    ids: list[int] = []
    for text, control in tokenizer.split_control(marked):
        ids += tokenizer.encode(stand_ins.unmark(text), bos=False).tolist()
        if control is not None:
            ids.append(control)
    return np.array(ids, dtype=np.int32)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise UsageError("no messages; a conversation has at least one", messages=messages)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"message {index} is {reprlib.repr(message)}, not a mapping of role and content", index=index
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UsageError(
                f"message {index} has role {role!r}; use one of {', '.join(ROLES)}", index=index, role=role
            )
        calls_instead = content is None and role == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not calls_instead:
            raise UsageError(
                f"message {index} ({role}) has content {reprlib.repr(content)}; it must be one string",
                index=index,
                role=role,
                content=content,
            )
