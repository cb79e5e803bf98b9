"""Messages of a conversation, checked and brought into the form that chat templates are written for."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from hostcache.errors import UsageError

__all__ = ["ROLES", "Message", "check_beside", "check_messages", "join_parts", "template_form"]

Message: TypeAlias = Mapping[str, object]
"""`role` and `content`, as in OpenAI's chat format: a text or a list of text parts. An assistant's may have
`tool_calls` instead of content; a tool's may have `name` and `tool_call_id`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles a message may have. Templates build control tokens from them, so the list is closed."""

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what is no conversation.

    Raises:
        UsageError: they are no list, or a message is malformed; it is named by its place.
    """
    if not isinstance(messages, list | tuple):
        raise UsageError(f"messages are {reprlib.repr(messages)}; a conversation is a list of them", messages=messages)
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
        if not isinstance(content, str) and not _are_text_parts(content) and not calls_instead:
            raise UsageError(
                f"message {index} ({role}) has content {reprlib.repr(content)}; it must be a string, or a list of"
                " {'type': 'text', 'text': ...}",
                index=index,
                role=role,
                content=content,
            )


def check_beside(
    tools: Sequence[Mapping[str, object]] | None,
    documents: Sequence[Mapping[str, object]] | None,
    variables: Mapping[str, object] | None,
) -> None:
    """Refuse what a template could not take beside messages.

    Raises:
        UsageError: tools or documents are no lists of mappings, or variables are no mapping of names.
    """
    for name, entries in (("tools", tools), ("documents", documents)):
        fits = isinstance(entries, list | tuple) and all(isinstance(entry, Mapping) for entry in entries)
        if entries is not None and not fits:
            raise UsageError(f"{name} are {reprlib.repr(entries)}; pass a list of mappings, or None", name=name)
    if variables is not None and not (isinstance(variables, Mapping) and all(isinstance(k, str) for k in variables)):
        raise UsageError(f"variables are {reprlib.repr(variables)}; pass a mapping from names, or None")


def template_form(message: Message) -> dict[str, object]:
    """A message as Hugging Face transformers hands it to a template.

    Without the keys whose value is None, which templates would print; and with an assistant's reasoning under the two
    names that templates read, whichever of three it came under.
    """
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def join_parts(message: Message) -> dict[str, object]:
    """A message whose text parts are one text, with a space between them, as transformers' own server joins them."""
    content = message.get("content")
    if not _are_text_parts(content):
        return dict(message)
    assert isinstance(content, list | tuple)
    return {**message, "content": " ".join(part["text"] for part in content)}


def _are_text_parts(content: object) -> bool:
    return isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
