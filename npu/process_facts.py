"""What the system grants this process, and what Python has installed for it."""

from __future__ import annotations

import grp
import os
import resource
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .account_names import group_name, user_name

__all__ = ["ProcessFacts"]


@dataclass(frozen=True)
class ProcessFacts:
    """A process's rights and limits.

    Attributes:
        architecture: of the processor, such as `aarch64`.
        release: of the kernel, such as `6.1.99-rockchip-rk3588`.
        user: its name, or its number where that has none.
        is_root: whether it is root's.
        groups: names of the groups it is in.
        future_groups: of the groups that its user is in, those that count after the next login only.
        open_files: how many files it may have open now, and how many it may ask for; -1 is as many as it likes.
        page_bytes: bytes of a page of memory.
        python: version, such as `(3, 11)`.
        lite: version of rknn-toolkit-lite2; None if it is not installed.
    """

    architecture: str
    release: str
    user: str
    is_root: bool
    groups: frozenset[str]
    future_groups: frozenset[str]
    open_files: tuple[int, int]
    page_bytes: int
    python: tuple[int, int]
    lite: str | None

    @classmethod
    def here(cls) -> ProcessFacts:
        """This process's."""
        system = os.uname()
        user = user_name(os.geteuid())
        groups = frozenset(map(group_name, {os.getegid(), *os.getgroups()}))
        return cls(
            architecture=system.machine,
            release=system.release,
            user=user,
            is_root=os.geteuid() == 0,
            groups=groups,
            future_groups=frozenset(group.gr_name for group in grp.getgrall() if user in group.gr_mem) - groups,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            page_bytes=resource.getpagesize(),
            python=sys.version_info[:2],
            lite=_version("rknn-toolkit-lite2"),
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
