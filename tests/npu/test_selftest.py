"""The self-test on a board, over a stand-in for the vendor's wheel: what it proves, and how it says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hostcache.errors import DeviceError, UsageError
from npu import selftest as module
from npu.board_device import NPU
from npu.device import AttentionJob
from npu.device_lock import DeviceLock
from npu.discovery import discover
from npu.logprobs import TokenLogprobs
from npu.process_facts import ProcessFacts
from npu.rknnlite import LiteContext
from npu.rknnlite_device import RknnLiteDevice
from npu.selftest import Subject, selftest
from npu.selftest_report import Report, Step, anonymous
from npu.selftest_tokens import NEAR_TIE, _Answer, _compared
from tests.npu.beds import BEDS
from tests.npu.doctor_cases import HEALTHY, PROCESS
from tests.npu.fake_machine import Bed, TreeMachine
from tests.npu.rknnlite_stand_in import Board
from tests.npu.stub_graphs import export_stub_graphs
from tests.npu.tiny import TINY, write_tiny_llama

LAUNCHING = ["graphs", "launches", "cores at once", "old results", "faults", "priority"]
IN_PLACE = ["graphs in place", "launches in place", "cores at once in place", "priority in place"]
EMULATED_NAMES = ["doctor", "heaps", *LAUNCHING, "residency", "tokens"]
NAMES = ["doctor", "heaps", *LAUNCHING, *IN_PLACE, "residency", "tokens"]


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selftest")
    return export_stub_graphs(folder, TINY.kv_heads, TINY.heads, TINY.head_dim)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("selftest") / "tiny.gguf")


@pytest.fixture
def subject(graphs: Path, model: Path) -> Subject:
    return Subject(lambda: model, board=True, graphs=graphs)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Board]:
    """A healthy board; its locks and its cache are this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("npu.device_lock.lock_folders", lambda: [tmp_path])
    monkeypatch.setattr(ProcessFacts, "here", lambda: PROCESS)
    board = Board()
    board.install(monkeypatch)
    yield board
    assert board.alive == []
    DeviceLock(NPU).release()  # nobody holds it any more


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TreeMachine:
    return _pretend(HEALTHY, tmp_path, monkeypatch)


def _pretend(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TreeMachine:
    machine = bed.write(tmp_path / "machine")
    monkeypatch.setattr("npu.runtimes.discover", lambda: discover(machine))
    return machine


def steps_of(report: Report) -> dict[str, Step]:
    return {step.name: step for step in report.steps}


def figures_of(report: Report, name: str) -> dict[str, object]:
    return dict(steps_of(report)[name].figures)


# --- all is well ------------------------------------------------------------------------------------------------------


def test_a_sound_board_is_proved(board: Board, machine: TreeMachine, subject: Subject) -> None:
    told: list[Step] = []
    report = selftest(subject, report=told.append, machine=machine)
    assert [step.name for step in report.steps] == NAMES
    assert told == list(report.steps)
    statuses = {step.name: step.status for step in report.steps}
    # The machine's heaps are plain files, faults cannot be injected, and the library is no library.
    missing = ["heaps", "faults", *IN_PLACE, "residency"]
    assert [name for name, status in statuses.items() if status == "not run"] == missing
    assert [name for name, status in statuses.items() if status == "failed"] == []
    assert (report.verdict, report.exit_status, report.emulated) == ("proved", 0, False)
    assert report.chip == {"model": "Radxa ROCK 5B", "soc": "RK3588", "cores": 3}
    versions = ("driver", "librknnrt", "graphs")
    assert [report.versions[name] for name in versions] == ["0.9.8", "2.5.0", "2.5.0"]


def test_every_exported_launch_ran_on_every_core(board: Board, machine: TreeMachine, subject: Subject) -> None:
    report = selftest(subject, machine=machine)
    launches = figures_of(report, "launches")["launches"]
    assert isinstance(launches, list)
    sizes = {(one["shape"]["kind"], one["shape"]["batch"], one["shape"]["tokens"]) for one in launches}
    # A staging buffer is as large as a tile of 64 in the largest bucket: there is room for 4 sequences in any of these.
    decode = {("decode", batch, tokens) for batch in (1, 2, 4) for tokens in (64, 128, 256)}
    tiles = {(kind, 1, tokens) for kind in ("prefill16", "prefill64") for tokens in (64, 128, 256)}
    assert decode - sizes <= {("decode", 4, 256)}
    assert tiles <= sizes <= decode | tiles
    assert {one["failures"] for one in launches} == {0}
    assert all(one["milliseconds"] > 0 and one["estimate"] > 0.1 for one in launches)  # 0.4 ms a launch, by three cores
    assert {core for core, _ in board.runs} == {0, 1, 2}


def test_the_tokens_are_those_of_the_cpu(board: Board, machine: TreeMachine, subject: Subject) -> None:
    figures = figures_of(selftest(subject, machine=machine), "tokens")
    assert (figures["tokens"], figures["same"]) == (16, 16)
    # Two layers; a prompt of less than 64 tokens is one tile, and each of 15 further tokens a row.
    assert figures["launches"] == 2 * (1 + 15)


@pytest.mark.usefixtures("board", "rknnrt_bed")
def test_a_library_that_reads_in_place_is_tried_too(
    subject: Subject, stub_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu.selftest_ways.LIBRARY", stub_library)
    machine = HEALTHY.without("dma_heap").write(tmp_path / "machine")  # its heaps are the bed's
    report = selftest(subject, machine=machine)
    steps = steps_of(report)
    assert {steps[name].status for name in [*IN_PLACE, "residency"]} == {"proved"}
    assert steps["graphs in place"].found.startswith("loaded by rknnrt for each of 3 cores")
    assert [line.split()[:4] for line in steps["launches in place"].details[1:]] == [
        line.split()[:4] for line in steps["launches"].details[1:]
    ]


def test_two_cores_are_two(board: Board, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _pretend(
        replace(HEALTHY, devices=BEDS["fused"].devices, files={**HEALTHY.files, **BEDS["fused"].files}),
        tmp_path,
        monkeypatch,
    )
    report = selftest(subject, machine=machine)
    assert figures_of(report, "cores at once")["cores"] == 2
    assert {core for core, _ in board.runs} == {0, 1}


# --- what is wrong is said --------------------------------------------------------------------------------------------


def wrong_on(monkeypatch: pytest.MonkeyPatch, core: int, rows: int | None = None, by: float = 0.01) -> None:
    """Let a core's first row be off, in all launches or in those of one graph; its canary is right."""
    right = RknnLiteDevice._run

    def run(device: RknnLiteDevice, context: LiteContext, job: AttentionJob, its_core: int) -> None:
        right(device, context, job, its_core)
        if its_core == core and rows in (None, job.out.shape[1]):
            job.out[:, 0] += np.float16(by)

    monkeypatch.setattr(RknnLiteDevice, "_run", run)


def test_wrong_numbers_of_one_core_fail_by_name(
    board: Board, machine: TreeMachine, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has its few launches on core 0, and the canary sees nothing: this is what the oracle is for."""
    wrong_on(monkeypatch, core=2)
    report = selftest(subject, machine=machine)
    steps = steps_of(report)
    assert (report.verdict, report.exit_status) == ("failed", 1)
    assert [step.name for step in report.steps if step.status == "failed"] == ["launches", "cores at once"]
    failed = [line for line in steps["launches"].details if "FAILED" in line]
    assert len(failed) == len(steps["launches"].details) - 1  # the first is the heading
    assert all(
        "core 2: " in line and "core 0" not in line and " numbers are wrong; the worst" in line for line in failed
    )
    assert " launches of prefill64 1 x 256; the first: " in steps["cores at once"].found


def test_wrong_numbers_of_one_graph_fail_its_launches_alone(
    board: Board, machine: TreeMachine, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 tokens of two heads a group, and the canary, padded to four."""
    wrong_on(monkeypatch, core=0, rows=36)
    details = steps_of(selftest(subject, machine=machine))["launches"].details
    assert {line.split()[0] for line in details if "FAILED" in line} == {"prefill16"}


def test_what_is_no_number_is_wrong(
    board: Board, machine: TreeMachine, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_on(monkeypatch, core=1, by=np.nan)
    report = selftest(subject, machine=machine)
    assert [step.name for step in report.steps if step.status == "failed"] == ["launches", "cores at once"]
    assert "is nan in place of" in steps_of(report)["cores at once"].found
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("deed", "words"),
    [("stale", "2 of 2 heads do not answer this launch"), ("garbage", "do not answer"), (-1, "run returned -1")],
)
def test_a_run_that_does_nothing_or_fails_is_no_proof(
    board: Board, machine: TreeMachine, subject: Subject, deed: str | int, words: str
) -> None:
    board.faults["run", 3] = deed
    report = selftest(subject, machine=machine)
    assert report.exit_status == 1
    (failed,) = (line for line in steps_of(report)["launches"].details if "FAILED" in line)
    assert failed.startswith("decode 1 x 64")  # the third of five runs of the first shape
    assert words in failed


def test_a_check_that_an_old_operand_passes_is_no_proof(
    board: Board, machine: TreeMachine, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another nonce changes a channel by 2, another shift from -1.75 to 1.75 by 2 * tanh(0.875) = 1.41 at most."""
    monkeypatch.setattr("npu.canary._TOLERANCE", 1.5)
    step = steps_of(selftest(subject, machine=machine))["old results"]
    assert step == Step("old results", "failed", "a result of another launch's query passed, of decode 1 x 64")


def test_attention_that_the_host_had_to_compute_is_no_proof(
    board: Board, machine: TreeMachine, subject: Subject
) -> None:
    board.faults["run", 0] = -1
    report = selftest(subject, machine=machine)
    steps = steps_of(report)
    failed = [step.name for step in report.steps if step.status == "failed"]
    assert failed == ["launches", "cores at once", "old results", "tokens"]
    assert "left to the CPU" in steps["tokens"].found
    assert figures_of(report, "launches")["largest_error"] is None


def test_graphs_that_do_not_load_are_said_and_the_rest_is_named(
    board: Board, machine: TreeMachine, subject: Subject
) -> None:
    board.faults["init_runtime", 0] = -1
    report = selftest(subject, machine=machine)
    assert [step.name for step in report.steps] == NAMES
    steps = steps_of(report)
    assert "on core 0: init_runtime returned -1" in steps["graphs"].found
    assert {steps[name].status for name in ("graphs", "tokens")} == {"failed"}
    assert {steps[name].status for name in ("launches", "cores at once", "old results", "faults")} == {"not run"}
    assert report.exit_status == 1


def test_a_library_that_takes_priority_in_a_run_is_noticed(
    board: Board, machine: TreeMachine, subject: Subject
) -> None:
    board.faults["run", 7] = lambda: setattr(board, "niceness", -19)
    step = steps_of(selftest(subject, machine=machine))["priority"]
    assert step.status == "failed"
    assert "niceness -19, it was 0 before" in step.found


def test_what_the_doctor_finds_unusable_fails_and_does_not_stop_the_rest(
    board: Board, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: text for name, text in HEALTHY.files.items() if name != "/usr/lib/librknnrt.so"}
    machine = _pretend(replace(HEALTHY, files=files), tmp_path, monkeypatch)
    report = selftest(subject, machine=machine)
    assert steps_of(report)["doctor"].status == "failed"
    assert steps_of(report)["doctor"].found == "unusable: librknnrt"
    assert steps_of(report)["launches"].status == "proved"
    assert report.versions["librknnrt"] is None


def test_without_graphs_the_report_is_incomplete(board: Board, machine: TreeMachine, subject: Subject) -> None:
    report = selftest(replace(subject, graphs=None), machine=machine)
    assert [step.name for step in report.steps] == NAMES
    assert {step.status for step in report.steps[2:]} == {"not run"}
    assert "rockpage export attention" in steps_of(report)["graphs"].found
    assert (report.verdict, report.exit_status) == ("incomplete", 1)
    assert board.calls.total() == 0


@pytest.mark.parametrize(("bed", "words"), [("pc", "no board with an NPU"), ("rocket", "driver rocket")])
def test_no_board_is_refused(
    bed: str, words: str, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessFacts, "here", lambda: PROCESS)
    machine = _pretend(BEDS[bed], tmp_path, monkeypatch)
    with pytest.raises(DeviceError, match=f"no NPU to test .*{words}.*without --board"):
        selftest(subject, machine=machine)
    with pytest.raises(UsageError, match="add --board"):
        selftest(replace(subject, board=False), machine=machine)


# --- a model's tokens -------------------------------------------------------------------------------------------------


def answer(*tokens: int, launches: int = 10, trouble: str = "") -> _Answer:
    """Each token has log-probability -0.5; 7 comes 0.05 behind it, and 8 far behind."""
    tops = tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (7, -0.55), (8, -2.5))) for token in tokens)
    return _Answer(tops, launches, trouble)


def test_tokens_may_part_where_two_are_as_likely() -> None:
    assert 0.05 < NEAR_TIE < 0.2  # what the entries below are made for
    same = _compared(answer(1, 2, 3), answer(1, 2, 3), "rknnlite")
    tie = _compared(answer(1, 2, 3), answer(1, 7, 5), "rknnlite")
    far = _compared(answer(1, 2, 3), answer(1, 8, 3), "rknnlite")
    unheard_of = _compared(answer(1, 2, 3), answer(9, 2, 3), "rknnlite")
    assert [step.status for step in (same, tie, far, unheard_of)] == ["proved", "proved", "failed", "failed"]
    assert (same.figures["same"], tie.figures["same"], far.figures["same"]) == (3, 1, 1)
    assert tie.figures["gap"] == pytest.approx(0.05)
    assert far.figures["gap"] == pytest.approx(2.0)
    assert unheard_of.figures["gap"] == pytest.approx(2.0)  # at least: behind all that were named
    assert "up to token 1, where the CPU has rknnlite's choice 2.000 or more behind its own" in far.found


def test_tokens_that_no_npu_computed_prove_nothing() -> None:
    assert _compared(answer(1), answer(1, launches=0), "rknnlite").status == "failed"
    assert _compared(answer(1), answer(1, trouble="3 failed"), "rknnlite") == Step("tokens", "failed", "3 failed")


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_tells_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu.selftest_report.user_name", lambda _: "ada")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    monkeypatch.setattr("os.uname", lambda: type("Names", (), {"nodename": "workshop-7"}))
    text = "no /home/ada/npu/m.rknn, /home/adam, ada:ada on workshop-7; adaptive, workshop-70, root:render"
    told = "no ~/npu/m.rknn, /home/adam, USER:USER on HOST; adaptive, workshop-70, root:render"
    assert anonymous(text) == told
    assert Step("graphs", "failed", text, details=(text,)).without_names() == Step(
        "graphs", "failed", told, details=(told,)
    )


def test_root_and_numbers_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("Names", (), {"nodename": "localhost"}))
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    for user in ("root", "1000"):
        monkeypatch.setattr("npu.selftest_report.user_name", lambda _, user=user: user)
        assert anonymous("/dev/x root:root 1000 of 1000 on localhost") == "/dev/x root:root 1000 of 1000 on localhost"


def test_the_worst_step_decides() -> None:
    proved, failed = Step("a", "proved", ""), Step("b", "failed", "")
    missing, spared = Step("c", "not run", ""), Step("d", "not run", "", needed=False)

    def verdict(*steps: Step) -> tuple[str, int]:
        report = Report(True, {}, {}, steps)
        return report.verdict, report.exit_status

    assert verdict(proved, spared) == ("proved", 0)
    assert verdict(proved, missing, spared) == ("incomplete", 1)
    assert verdict(missing, failed) == ("failed", 1)


def test_a_step_that_ends_with_an_error_is_a_failed_step() -> None:
    def refuse() -> Step:
        raise UsageError("the graphs are for another model")

    assert module._guarded("tokens", refuse) == Step("tokens", "failed", "the graphs are for another model")
