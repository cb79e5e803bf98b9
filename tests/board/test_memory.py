"""The size rockpage exists for, in the memory that a 4 GB board has left: minutes, and 3 GB of disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.board.memory import POOL_BYTES, PREALLOCATED_BYTES, Run, measure, reference_model, table
from tests.board.memory_cgroup import NoMemoryCgroup
from tests.board.mixed_sessions import ALL, AT_ONCE, answer_tokens

pytestmark = pytest.mark.long

KILLED = -9


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    try:
        with reference_model() as (folder, model):
            return measure(folder, model)
    except NoMemoryCgroup as reason:
        pytest.skip(str(reason))


def report(run: Run) -> dict[str, Any]:
    assert (run.status, run.oom_kills) == (0, 0), run.err
    answer: dict[str, Any] = json.loads(run.out)
    return answer


def test_sixteen_sessions_live_in_what_a_board_has_left(runs: dict[str, Run]) -> None:
    served = report(runs["paged"])
    assert served["most_at_once"] == AT_ONCE
    assert [len(tokens) for tokens in served["tokens"]] == [answer_tokens(number) for number in range(ALL)]
    assert served["blocks_shared"] == 256 // 16  # the system prompt, once for all who begin with it
    assert served["kv_bytes_used"] < POOL_BYTES < PREALLOCATED_BYTES == 768 << 20


def test_a_session_gets_the_tokens_it_gets_alone(runs: dict[str, Run]) -> None:
    served = report(runs["paged"])
    assert len(served["alone"]) == 3
    for number, tokens in served["alone"].items():
        assert tokens == served["tokens"][int(number)]


def test_the_first_load_repacks_the_weights_in_the_same_memory(runs: dict[str, Run]) -> None:
    cold, warm = report(runs["cold"]), report(runs["paged"])
    assert cold["tokens"] == warm["tokens"][:1]
    assert cold["footprint"]["peak"] <= warm["footprint"]["peak"]


def test_plan_is_within_a_tenth_of_the_peak(runs: dict[str, Run]) -> None:
    plan = json.loads(runs["plan"].out)
    assert plan["fits"]
    assert plan["process_bytes"] == pytest.approx(report(runs["paged"])["footprint"]["peak"], rel=0.1)


def test_setting_2048_tokens_aside_for_each_ends_in_a_kill(runs: dict[str, Run]) -> None:
    contiguous = runs["contiguous"]
    assert (contiguous.status, contiguous.oom_kills) == (KILLED, 1), contiguous.err
    # What is free beside the process is 48 MiB for each of so many; plan counts code in full, which others have loaded.
    plan = json.loads(runs["plan"].out)
    planned = plan["pool_limit_bytes"] // (48 << 20)
    assert planned <= len(contiguous.out.splitlines()) <= planned + 2 < AT_ONCE


def test_what_does_not_fit_is_refused_and_nobody_is_killed(runs: dict[str, Run]) -> None:
    plan = json.loads(runs["plan_preallocated"].out)
    assert (runs["plan_preallocated"].status, plan["fits"]) == (1, False)
    for name in ("refused", "too_little"):
        run = runs[name]
        assert (run.status, run.out, run.oom_kills) == (2, "", 0)
        assert "does not fit into the memory of cgroup /" in run.err
        assert run.err.count("\n") == 1
    assert "no pool would fit" in runs["too_little"].err


def test_the_readme_shows_this_table(runs: dict[str, Run]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("$ .venv/bin/python -m tests.board.memory\n")[2].partition("```")[0].splitlines()
    printed = table(runs).splitlines()
    assert [line[:22] for line in shown] == [line[:22] for line in printed]
    assert shown[:2] == printed[:2]  # what is set aside is no measure
    assert shown[3][22:46] == printed[3][22:46]  # nor is who is served


def test_the_table_has_both(runs: dict[str, Run]) -> None:
    lines = table(runs).splitlines()
    assert [line[:22].strip() for line in lines] == [
        "",
        "KV set aside",
        "KV in use at most",
        "sessions",
        "process at most",
        "rockpage plan says",
    ]
    assert lines[1].split("  ")[-1].strip() == "768 MiB"
    assert lines[-1].endswith(": it does not fit")
