"""Names of users and groups, which a container may not know."""

from __future__ import annotations

import grp
import pwd

__all__ = ["group_name", "user_name"]


def user_name(uid: int) -> str:
    """The user's name, or the number itself where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """The group's name, or the number itself where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
