"""A conversation that goes on from one `rockpage run --session FILE` to the next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hostcache.errors import BadStateFile
    from npu.engine import Engine
    from npu.sessions import Session

__all__ = ["Conversation"]


class Conversation:
    """What was said so far: the messages of a chat, or the tokens of a text.

    Args:
        engine: the open engine.
        file: where it is kept, or None: it is not.
        chat: whether the next prompt is a message of a chat; a file of a chat goes on as one in any case.
        system: what to tell the model first, in a new chat.

    Attributes:
        chat: whether it is a chat.
        known: tokens of earlier runs whose KV came with the file.
        lost: why the file was set aside, and the conversation begins anew; None: it was not.

    Raises:
        UsageError: the file is of another model, other options or another kind of conversation, or its folder is not
            there, or it has begun without this system message.
        BadStateFile: it is no state file.
        OSError: it cannot be read.
    """

    def __init__(self, engine: Engine, file: str | None, *, chat: bool, system: str | None) -> None:
        from hostcache.errors import UsageError

        self._engine = engine
        self._path = None if file is None else Path(file)
        self._messages: list[dict[str, str]] = []
        self._tokens: Sequence[int] | NDArray[np.int32] = ()
        self.known = 0
        self.lost: BadStateFile | None = None
        if self._path is not None and not self._path.parent.is_dir():
            raise UsageError(f"there is no folder {self._path.parent} for the session: make it", path=file)
        session = None if self._path is None else self._load(self._path)
        if session is not None and self._path is not None:
            self._messages = _messages_in(session.note, self._path)
            self._tokens, self.known = session.tokens, session.restored
            if chat and not self._messages:
                raise UsageError(f"{file} continues a text: leave --chat and --system out, or give another name")
            if system is not None:
                raise UsageError(f"{file} has begun already: --system is for a new session; leave it out")
        elif system is not None:
            self._messages = [{"role": "system", "content": system}]
        self.chat = chat or bool(self._messages)

    def _load(self, path: Path) -> Session | None:
        """What the file holds; None if there is none, or none any more."""
        from hostcache.errors import BadStateFile

        if not path.exists():
            return None
        try:
            return self._engine.sessions.load(path)
        except BadStateFile as error:
            if path.exists():  # no state file: it may be anybody's
                raise
            self.lost = error
            return None

    def ask(self, text: str) -> NDArray[np.int32]:
        """The whole prompt as ids. In a chat, only the template's own text can become control tokens.

        Raises:
            UsageError: the text or the template cannot be used.
        """
        import numpy as np

        if self.chat:
            self._messages.append({"role": "user", "content": text})
            return self._engine.encode_chat(self._messages)
        if len(self._tokens):
            return np.concatenate([self._tokens, self._engine.tokenizer.encode(text, bos=False)])
        return self._engine.tokenizer.encode(text)

    def beginning(self, prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        """What other prompts begin with, too: all of a text; of a chat, what stands before its last message.

        Args:
            prompt: as `ask` returned it.
        """
        from hostcache.prefix_node import common_beginning

        if not self.chat:
            return prompt
        other = self._engine.encode_chat([*self._messages[:-1], {"role": "user", "content": "?"}])
        return prompt[: common_beginning(prompt, other)]

    def keep(self, prompt: NDArray[np.int32], answer: Sequence[int], text: str) -> None:
        """Save the conversation, if it has a file.

        Args:
            prompt: as `ask` returned it.
            answer: the ids that came.
            text: the text that came.

        Raises:
            UsageError: the file cannot be written; one that was there is there still.
        """
        import numpy as np

        from hostcache.errors import UsageError

        if self._path is None:
            return
        note = b""
        if self.chat:
            note = json.dumps({"messages": [*self._messages, {"role": "assistant", "content": text}]}).encode()
        elif answer and answer[-1] in self._engine.tokenizer.eos_ids:
            answer = answer[:-1]  # what comes next goes on with the text, not behind its end
        try:
            self._engine.sessions.save(self._path, np.append(prompt, np.array(answer, np.int32)), note=note)
        except OSError as error:
            raise UsageError(
                f"the session cannot be saved to {self._path}: {error.strerror}; what was there is there still",
                path=str(self._path),
            ) from error


def _messages_in(note: bytes, path: Path) -> list[dict[str, str]]:
    """The messages that `Conversation.keep` noted; none of a text.

    Raises:
        UsageError: another program's note.
    """
    from hostcache.errors import UsageError

    if not note:
        return []
    try:
        messages = json.loads(note)["messages"]
        if messages and all(message.keys() == {"role", "content"} for message in messages):
            return [{name: str(value) for name, value in message.items()} for message in messages]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path} was not saved by rockpage run: give another name", path=str(path))
