"""Saves states in a child that is killed at random moments, and looks at what is there: see `test_power_loss.py`.

Run as a program, since it forks: FOLDER ROUNDS unnamed|hidden. Prints what it saw as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import RockpageError
from hostcache.state_file import StateReader

from .saved import Home, prompt

SAVED, SAVING = b"s", b"b"


def conversation(version: int) -> NDArray[np.int32]:
    """Tokens that say which version they are; of different lengths, so that no version's bytes fit another's place."""
    tokens = prompt(20 + version * 7 % 60, seed=version)
    tokens[0] = version
    return tokens


def save_for_ever(path: Path, version: int, pipe: int) -> None:
    """In the child: save one version after the other, and say before and after each which it is."""
    home = Home(blocks=24)
    while True:
        tokens = conversation(version)
        home.compute(tokens)
        os.write(pipe, SAVING + version.to_bytes(4, "little"))
        home.save(path, tokens)
        os.write(pipe, SAVED + version.to_bytes(4, "little"))
        version += 1


def round_of(path: Path, first: int, seconds: float) -> tuple[int, bool]:
    """Let a child save versions from `first` on and kill it.

    Returns:
        The last version that it had saved, 0 if none, and whether it was saving another.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(path, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    said = b""
    while SAVING not in said[:1]:
        said += os.read(reading, 5)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(reading, 1 << 16):
        said += piece
    os.close(reading)
    words = [said[at : at + 5] for at in range(0, len(said), 5)]
    saved = [int.from_bytes(word[1:], "little") for word in words if word[:1] == SAVED]
    return max(saved, default=0), words[-1][:1] == SAVING


def main(folder: str, rounds: str, files: str) -> None:
    """Do all rounds and print the counts."""
    if files == "hidden":
        real = os.open

        def refuse_unnamed(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, mode, dir_fd=dir_fd)

        os.open = refuse_unnamed  # type: ignore[assignment] # it is called like that, and not otherwise
    path, chance, version = Path(folder) / "state", random.Random(1), 1
    seen: Counter[str] = Counter()
    reported = 0
    for _ in range(int(rounds)):
        saved, at_it = round_of(path, version, chance.uniform(0, 0.01))
        reported = max(reported, saved)
        seen["rounds"] += 1
        seen["killed while saving"] += at_it
        if path.exists():
            found = found_version(path)
            seen["found"] += 1
            seen["not whole"] += found is None
            seen["older than reported"] += found is not None and found < reported
        else:
            seen["older than reported"] += reported > 0
        version = max(version, reported) + 2
    seen["left behind"] = len(os.listdir(folder)) - path.exists()
    names = ("rounds", "killed while saving", "found", "not whole", "older than reported", "left behind")
    print(json.dumps({name: seen[name] for name in names}))  # noqa: T201 - it is a program


def found_version(path: Path) -> int | None:
    """The version in a file, every token's KV compared; None if it is not whole."""
    home = Home(blocks=24)
    try:
        home.restore(path)
    except RockpageError:
        return None
    version = int(ids_in(path)[0])
    tokens = conversation(version)
    return version if home.known(tokens) == len(tokens) else None


def ids_in(path: Path) -> NDArray[np.int32]:
    """The ids in a file."""
    with StateReader(path) as reader:
        return reader.tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
