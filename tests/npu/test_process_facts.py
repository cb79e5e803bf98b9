"""What is known of this process, against what the system's own tools say of it."""

from __future__ import annotations

import grp
import os
import resource
import subprocess
from types import SimpleNamespace

import pytest

from npu import process_facts
from npu.account_names import group_name, user_name
from npu.process_facts import ProcessFacts


def say(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_this_process_is_known() -> None:
    facts = ProcessFacts.here()
    assert facts.architecture == say("uname", "-m")
    assert facts.release == say("uname", "-r")
    assert facts.user == say("id", "-un")
    assert facts.groups == frozenset(say("id", "-Gn").split())
    assert facts.is_root == (say("id", "-u") == "0")
    assert facts.page_bytes == int(say("getconf", "PAGESIZE"))
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)


def test_groups_that_count_after_the_next_login_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    user = user_name(os.geteuid())
    mine = group_name(os.getegid())
    groups = [(mine, [user]), ("render", [user, "eve"]), ("video", ["eve"])]
    monkeypatch.setattr(grp, "getgrall", lambda: [SimpleNamespace(gr_name=name, gr_mem=who) for name, who in groups])
    assert ProcessFacts.here().future_groups == {"render"}


def test_numbers_stand_for_those_without_a_name() -> None:
    assert (user_name(4_000_000_000), group_name(4_000_000_000)) == ("4000000000", "4000000000")


def test_a_wheel_that_is_not_installed_has_no_version() -> None:
    assert process_facts._version("no-such-package-anywhere") is None
    assert process_facts._version("numpy") is not None
