"""Encodes a conversation by a template, watched."""

from __future__ import annotations

import html  # noqa: F401 - MarkupSafe imports it when a text is stripped of its tags for the first time
import re

from npu.chat import ChatTemplate, encode_chat
from tests.fuzz.guard import Broken, refusals
from tests.fuzz.sandbox_watch import watched
from tests.npu.toy_tokenizer import toy

__all__ = ["render"]

_TOY = toy()
_MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "a <|end|> b"},
    {"role": "assistant", "content": "</think> c"},
]
_TOOLS = [{"type": "function", "function": {"name": "f"}}]
_DOCUMENTS = [{"title": "t", "text": "u"}]
_OUTSIDE = re.compile(r"<(module|frame|code|traceback) ")  # how Python prints what a template has no way to


def render(source: str) -> None:
    """Encode a conversation by a template.

    Raises:
        Broken: the template did something beyond computing, or wrote what is none of its business.
    """
    template = ChatTemplate(source, {"bos_token": "<|begin|>"})
    with refusals():
        _ = template._template  # compiled before it is watched, for that sets off events of Python's
        with watched(), template.one_budget():
            encode_chat(_TOY, template, _MESSAGES, tools=_TOOLS, documents=_DOCUMENTS)
            text = template.render(_MESSAGES)
        if found := _OUTSIDE.search(text):
            raise Broken(f"the template has written {text[found.start() :]!r:.200}")
