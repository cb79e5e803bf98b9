"""`rockpage plan`: its JSON and its text, against values computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hostcache.memory_budget import MemoryBudget
from tools.main import main

MIB = 1 << 20
MACHINE = MemoryBudget(None, limit=4096 * MIB, available=2048 * MIB)


def test_plan_answers_in_json_and_by_status(capsys: pytest.CaptureFixture[str]) -> None:
    reference = ["plan", "--json", "--geometry", "layers=24,kv_heads=2,head_dim=128,heads=12", "--weights", "1.1GB"]
    assert main([*reference, "--ram", "4GiB"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert answer["weights_bytes"] == 1_100_000_000
    assert answer["pool_bytes"] == 192 * 2**20
    assert answer["bytes_per_token"] == 24 * 2**10
    assert answer["block_bytes"] == 384 * 2**10
    # Six buffers. K and V of 4096 tokens of one layer: 2 * 2 * 4096 * 128 * 2 bytes. 64 tokens of 6 query heads for
    # each KV head, and a canary, padded to a multiple of 4, are 388 rows: q and the result take 2 * 2 * 388 * 128 * 2
    # bytes, and the mask 4096 * 388 * 2.
    assert answer["staging_bytes"] == 6 * (4_194_304 + 397_312 + 3_178_496)
    # 512 blocks over 8, 32 and 128 blocks a session; 192 MiB over 48 MiB.
    assert answer["sessions"] == {
        "128": {"paged": 64, "preallocated": 4},
        "512": {"paged": 16, "preallocated": 4},
        "2048": {"paged": 4, "preallocated": 4},
    }
    assert main([*reference, "--ram", "1GiB"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False
    assert answer["obstacles"] == [
        f"{answer['needed_bytes'] / 2**30:.2f} GiB are needed and 1.00 GiB are there: no pool would fit"
    ]


@pytest.mark.parametrize(
    ("runtime", "staging", "device"),
    # Six buffers of 7,770,112 bytes, as above; the emulated NPU keeps all of them a second time.
    [("auto", 46_620_672, 0), ("cpu", 0, 0), ("emulated", 46_620_672, 46_620_672)],
)
def test_each_runtime_takes_what_it_needs(
    capsys: pytest.CaptureFixture[str], runtime: str, staging: int, device: int
) -> None:
    arguments = ["plan", "--geometry", "layers=24,kv_heads=2,head_dim=128,heads=12", "--weights", "1GB"]
    assert main([*arguments, "--ram", "4GiB", "--runtime", runtime, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["staging_bytes"], answer["device_bytes"]) == (staging, device)
    assert answer["process_bytes"] == (
        answer["weights_bytes"] + answer["runtime_bytes"] + staging + device + answer["pool_bytes"]
    )
    assert main([*arguments, "--ram", "4GiB", "--runtime", runtime]) == 0
    assert ("the emulated NPU's copy" in capsys.readouterr().out) == (device > 0)


def test_what_stays_staged_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--geometry", "layers=24,kv_heads=2,head_dim=128,heads=12", "--weights", "1GB"]
    arguments += ["--ram", "4GiB", "--resident", "100MiB", "--json"]
    for runtime, copies in (("auto", 0), ("emulated", 1)):
        assert main([*arguments, "--runtime", runtime]) == 0
        answer = json.loads(capsys.readouterr().out)
        staging = 46_620_672 + (100 << 20)
        assert (answer["staging_bytes"], answer["device_bytes"]) == (staging, copies * staging)
    assert main([*arguments, "--runtime", "cpu"]) == 2
    assert "the cpu runtime stages nothing" in capsys.readouterr().err


def test_plan_in_text_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--geometry", "layers=24,kv_heads=2,head_dim=128", "--weights", "1GiB", "--ram", "4GiB"]
    assert main([*arguments, "--context", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "24 layers, 2 KV heads of 128, fp16: 24.0 KiB a token, 384.0 KiB a block"
    assert "KV pool, 512 blocks            192.0 MiB" in lines
    assert "of 128 tokens                 64               4" in lines
    assert lines[-1] == "it fits"
    assert max(map(len, lines)) < 80
    assert main([*arguments, "--context", "8193", "--kv", "fp16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "it does not fit"
    assert lines[-1].startswith("- a context of 8193 tokens takes 513 blocks and the pool has 512")


REFERENCE = ("plan", "--geometry", "layers=24,kv_heads=2,head_dim=128,heads=12", "--weights", "1GB", "--ram", "4GiB")


@pytest.mark.parametrize(
    ("sessions", "codec", "blocks", "fits"),
    # Of 128 blocks. 192 MiB are 512 blocks of fp16. A row of 16 tokens is 4096 bytes; in int8 2048 and 32 for scales,
    # so that two are 4160 bytes and 504 extents are there; in int4 1024 and 128, four of them 4608 bytes, 455 extents.
    [
        (4, "fp16", 512, True),
        (5, "int8", 2 * 504, True),
        (7, "int8", 2 * 504, True),
        (8, "int4", 4 * 455, True),
        (14, "int4", 4 * 455, True),
        (15, "int4", 4 * 455, False),
    ],
)
def test_the_richest_codec_with_which_the_sessions_fit_is_chosen(
    capsys: pytest.CaptureFixture[str], sessions: int, codec: str, blocks: int, fits: bool
) -> None:
    arguments = [*REFERENCE, "--context", "2048", "--sessions", str(sessions)]
    assert main([*arguments, "--json"]) == (0 if fits else 1)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kv"], answer["pool_blocks"], answer["fits"]) == (codec, blocks, fits)
    assert answer["sessions"]["2048"]["paged"] == blocks // 128
    assert answer["block_bytes"] == {"fp16": 384 << 10, "int8": 96 * 2080, "int4": 96 * 1152}[codec]

    assert main(arguments) == (0 if fits else 1)
    lines = capsys.readouterr().out.splitlines()
    if fits:
        assert lines[1] == f"{codec} is the richest KV in which {sessions} sessions of 2048 tokens fit: --kv {codec}"
    else:
        assert lines[1] == "there is no KV in which 15 sessions of 2048 tokens fit; in int4:"
        # 15 * 128 blocks are 480 extents of 96 rows of 4608 bytes.
        assert lines[-1] == (
            "- 15 sessions of 2048 tokens take 1920 blocks in int4 and the pool has 1820: ask for 202.5 MiB"
        )
    assert max(map(len, lines[:-1])) < 80


def test_a_codec_that_is_named_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REFERENCE, "--kv", "int8", "--sessions", "1", "--context", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"] == "int8"


def test_sessions_of_no_length_are_not_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REFERENCE, "--sessions", "5"]) == 2
    assert "--sessions needs --context, the tokens that each must be able to hold" in capsys.readouterr().err


@pytest.mark.parametrize(
    "geometry",
    [
        "",
        "layers=24",
        "layers=24,kv_heads=2",
        "layers=24,kv_heads=2,head_dim=0",
        "layers=24,kv_heads=2,head_dim=x",
        "layers=-1,kv_heads=2,head_dim=8",
        "layers=1,layers=1,kv_heads=2,head_dim=8",
        "layers=1,kv_heads=2,head_dim=8,depth=3",
        "layers=1,kv_heads=2,head_dim=8,heads=2,heads=2",
        "layers=1,kv_heads=2,head_dim=8,heads=0",
    ],
)
def test_a_geometry_is_read_strictly(capsys: pytest.CaptureFixture[str], geometry: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--geometry", geometry, "--weights", "1GB"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("rockpage: error: argument --geometry: '")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--geometry", "layers=1,kv_heads=1,head_dim=1"],
        ["--weights", "1GB"],
        ["model.gguf", "--weights", "1GB"],
        ["model.gguf", "--geometry", "layers=1,kv_heads=1,head_dim=1"],
        ["model.gguf", "--geometry", "layers=1,kv_heads=1,head_dim=1", "--weights", "1GB"],
    ],
)
def test_plan_wants_a_model_or_a_geometry_with_weights(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert (
        capsys.readouterr().err == "rockpage: error: plan takes either a MODEL, or --geometry together with --weights\n"
    )


@pytest.mark.parametrize("runtime", ["auto", "cpu", "emulated"])
@pytest.mark.parametrize(
    ("geometry", "refusal"),
    [
        ("head_dim=8", ""),
        ("head_dim=256", ""),
        ("head_dim=1", "head_dim 1 is not a multiple of 8 up to 256"),
        ("head_dim=12", "head_dim 12 is not a multiple of 8 up to 256"),
        ("head_dim=264", "head_dim 264 is not a multiple of 8 up to 256"),
        ("head_dim=64,heads=3", "3 query heads are not a multiple of 2 KV heads"),
    ],
)
def test_plan_refuses_what_no_runtime_computes(
    capsys: pytest.CaptureFixture[str], geometry: str, refusal: str, runtime: str
) -> None:
    arguments = ["plan", "--geometry", f"layers=1,kv_heads=2,{geometry}", "--weights", "1MB", "--ram", "64GiB"]
    assert main([*arguments, "--runtime", runtime]) == (2 if refusal else 0)
    errors = capsys.readouterr().err.splitlines()
    assert [error.startswith(f"rockpage: error: {refusal}") for error in errors] == [True] * bool(refusal)


def test_plan_reads_a_real_model(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(demo_model), "--ram", "4GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert main(["plan", str(demo_model), "--ram", "4GiB", "--context", "8193", "--pool", "1GiB"]) == 1
    assert "beyond the 8192 of the model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("budgets", "reserve", "expected"),
    [
        ([MACHINE], [], (4096, 512)),
        ([MACHINE], ["--reserve", "1GiB"], (4096, 1024)),
        # A cgroup's limit is its own: nothing of it is left to the kernel.
        ([MACHINE, MemoryBudget("/a", 1800 * MIB, MIB)], [], (1800, 0)),
        ([MACHINE, MemoryBudget("/a", 1800 * MIB, MIB)], ["--reserve", "100MiB"], (1800, 100)),
        # 4096 less 512 is less than the cgroup may have.
        ([MACHINE, MemoryBudget("/a", 3585 * MIB, MIB), MemoryBudget("/", 3900 * MIB, MIB)], [], (4096, 512)),
        ([MACHINE, MemoryBudget("/a", 3583 * MIB, MIB), MemoryBudget("/", 3900 * MIB, MIB)], [], (3583, 0)),
    ],
)
def test_without_ram_it_plans_for_where_it_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    budgets: list[MemoryBudget],
    reserve: list[str],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr("hostcache.memory_budget.memory_budgets", lambda: budgets)
    arguments = ["plan", "--geometry", "layers=24,kv_heads=2,head_dim=128", "--weights", "1GiB", "--json"]
    main([*arguments, *reserve])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ram_bytes"], answer["reserve_bytes"]) == (expected[0] * MIB, expected[1] * MIB)


def test_a_kernel_that_does_not_say_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hostcache.memory_budget.memory_budgets", list)
    assert main(["plan", "--geometry", "layers=1,kv_heads=1,head_dim=8", "--weights", "1B"]) == 2
    assert capsys.readouterr().err == (
        "rockpage: error: the kernel does not say how much memory there is: give --ram\n"
    )


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF"])
def test_plan_of_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert main(["plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rockpage: error: ")
    assert "x.gguf" in err
    assert err.count("\n") == 1
