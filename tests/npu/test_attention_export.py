"""Export of attention graphs: which launches, what is refused, what lies in the folder afterwards, and who reads it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hostcache.errors import BadModelFile, DeviceError, DimensionTooLarge, UsageError
from hostcache.geometry import KVGeometry
from npu.attention import AttentionBatch
from npu.attention_export import export_attention, launch_sizes
from npu.attention_graph import AttentionGraph, attention_graphs
from npu.attention_manifest import AttentionManifest
from npu.launch import BATCHES, LaunchPlanner
from npu.rknn_cache import CompileCache
from npu.rknn_manifest import MANIFEST_FILE, read_manifest
from staging import DEFAULT_BUCKETS, Buckets
from tests.npu.rknn_stand_in import StandInCompiler

GEOMETRIES = [(3, 9, 64), (2, 14, 64), (2, 12, 128), (1, 8, 32)]


def export(folder: Path, compiler: StandInCompiler | None = None, heads: int = 9) -> AttentionManifest:
    """Graphs with four launches of 64 and 128 tokens, and tiles."""
    sizes = launch_sizes(attention_graphs(3, heads, 64), buckets=(64, 128), batches=(1, 2))
    return export_attention(sizes, folder / "out", compiler or StandInCompiler(), CompileCache(folder / "cache"))


@pytest.mark.parametrize(("kv_heads", "heads", "head_dim"), GEOMETRIES)
def test_every_launch_that_is_planned_has_a_graph(kv_heads: int, heads: int, head_dim: int) -> None:
    sizes = launch_sizes(attention_graphs(kv_heads, heads, head_dim))
    graphs = {graph.tile: graph for graph in sizes}
    planner = LaunchPlanner(KVGeometry(1, kv_heads, head_dim), 4096, heads, Buckets(DEFAULT_BUCKETS))
    planned = set()
    for length in (2, 62, 63, 126, 200, 300, 600, 1500, 3000, 4094):
        for sequences in range(1, 18):
            lengths = np.full(sequences, length, np.int32)
            tables = np.zeros((sequences, 256), np.int32)
            decode = AttentionBatch(np.arange(sequences + 1, dtype=np.int32), lengths, tables)
            planned |= {(cut.layout, 1) for cut in planner.cut(decode, np.arange(sequences))}
        for tile in (2, 16, 17, 64):
            if tile <= length:
                chunk = AttentionBatch(np.array([0, tile], np.int32), lengths[:1], tables[:1])
                cuts = planner.cut(chunk, np.arange(1))
                planned |= {(cut.layout, 16 if tile <= 16 else 64) for cut in cuts}
    for layout, tile in planned:
        graph = graphs[tile]
        assert (layout.batch, layout.tokens) in sizes[graph], (layout, tile)
        assert layout == graph.layout(layout.batch, layout.tokens)
    assert {(layout.batch, layout.tokens) for layout, tile in planned if tile == 1} == set(sizes[graphs[1]])


def test_launches_of_the_demo_model_by_hand() -> None:
    """A tile of 64 over 4096 tokens takes 4.78 MB; a decoding sequence 816 bytes a token."""
    decode, *tiles = launch_sizes(attention_graphs(3, 9, 64)).values()
    assert [max(tokens for batch, tokens in decode if batch == wanted) for wanted in BATCHES] == [
        *(4096, 2048, 1024, 512, 256),
    ]
    assert len(decode) == 7 + 6 + 5 + 4 + 3
    assert tiles == [tuple((1, tokens) for tokens in DEFAULT_BUCKETS)] * 2


def test_buckets_and_batches_that_cannot_be() -> None:
    graphs = attention_graphs(3, 9, 64)
    with pytest.raises(UsageError, match="ascending"):
        launch_sizes(graphs, buckets=(128, 64))
    with pytest.raises(UsageError, match="0 sequences of 64 tokens"):
        launch_sizes(graphs, buckets=(64,), batches=(0,))
    with pytest.raises(DimensionTooLarge, match="8192"):
        launch_sizes(graphs, buckets=(64, 8192))


def test_a_folder_reads_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = export(tmp_path)
    assert read_manifest(AttentionManifest, tmp_path / "out") == manifest
    assert [(file.kind, file.tile, file.rows) for file in manifest.files] == [
        ("decode", 1, 4),
        ("prefill16", 16, 52),
        ("prefill64", 64, 196),
    ]
    decode, prefill16, _ = manifest.files
    assert [(launch.batch, launch.tokens) for launch in decode.launches] == [(1, 64), (1, 128), (2, 64), (2, 128)]
    assert decode.launches[2].table.shapes == ((6, 72, 1, 4), (6, 72, 1, 64), (6, 64, 1, 64))
    assert decode.internal_bytes == 6 * 1024  # the stand-in says one KiB a head
    assert prefill16.inputs == ("q", "k", "v", "mask")
    assert (tmp_path / "out" / decode.rknn.file).read_text() == "compiled decode"
    assert decode.rknn.nbytes == len("compiled decode")


def test_an_export_is_for_whoever_may_read_the_folder(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        export(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o644}


def test_what_the_manifest_says_to_other_readers(tmp_path: Path) -> None:
    export(tmp_path)
    content = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert {name: content[name] for name in ("format", "holds", "toolkit", "target", "dtype", "group")} == {
        "format": 1,
        "holds": "attention",
        "toolkit": "2.5.0",
        "target": "rk3588",
        "dtype": "float16",
        "group": 3,
    }
    assert content["marks"] == {
        "masked": -1e4,
        "mask_channel": 0,
        "canary_score": 64,
        "canary_channel": 1,
        "shift_channel": 2,
        "canary_tokens": 2,
    }
    assert content["files"][0]["launches"][0]["table"]["layers"][0]["op"] == "exSDPAttention"
    # Of each graph its text, and as the stand-in says one KiB a head of its largest launch: six heads, and three.
    texts = sum(len(f"compiled {kind}") for kind in ("decode", "prefill16", "prefill64"))
    assert content["npu"] == {"bytes": texts + (6 + 3 + 3) * 1024, "domain_bytes": 4 << 30}


def test_what_was_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    compiler = StandInCompiler()
    first = export(tmp_path, compiler)
    assert export(tmp_path, compiler) == first
    assert compiler.jobs == ["decode", "prefill16", "prefill64"]
    export(tmp_path, StandInCompiler(version="2.6.0", jobs=compiler.jobs))
    assert len(compiler.jobs) == 6


@pytest.mark.parametrize("damaged", ["graph.rknn", "note.json"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damaged: str) -> None:
    compiler = StandInCompiler()
    manifest = export(tmp_path, compiler)
    entries = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert {path.name for entry in entries for path in entry.iterdir()} == {"graph.rknn", "note.json"}
    for entry in entries:
        (entry / damaged).write_bytes(b"{}")
    assert export(tmp_path, compiler) == manifest
    assert compiler.jobs == ["decode", "prefill16", "prefill64"] * 2
    assert read_manifest(AttentionManifest, tmp_path / "out") == manifest


def test_a_new_export_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    export(tmp_path)
    (tmp_path / "out" / "of-an-older-export.rknn").touch()
    manifest = export(tmp_path, heads=12)
    assert read_manifest(AttentionManifest, tmp_path / "out").group == 4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        MANIFEST_FILE,
        *(file.rknn.file for file in manifest.files),
    }


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (StandInCompiler(operator=("exSDPAttention", "CPU")), r"decode with .* has exSDPAttention on the CPU"),
        (
            StandInCompiler(operator=("exMatMul", "NPU")),
            r"decode with \(\(3, 72, 1, 4\), .*became exMatMul in place of one exSDPAttention: ",
        ),
        (StandInCompiler(warning="W RKNN: [0:0] it will fallback to CPU\n"), "complains: it will fallback to CPU"),
        (StandInCompiler(warning="E RKNN: [0:0] align_surf overflow!\n"), "complains: align_surf overflow!"),
        (StandInCompiler(skip=1), r"left out the shapes \[\(\(3, 72, 1, 4\), \(3, 72, 1, 64\)"),
    ],
)
def test_anything_but_one_operator_on_the_npu_is_refused(
    tmp_path: Path, compiler: StandInCompiler, reason: str
) -> None:
    with pytest.raises(DeviceError, match=reason):
        export(tmp_path, compiler)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_failed_export_leaves_the_old_one(tmp_path: Path) -> None:
    manifest = export(tmp_path)
    with pytest.raises(DeviceError):
        export(tmp_path, StandInCompiler(operator=("exMatMul", "NPU")), heads=12)
    assert read_manifest(AttentionManifest, tmp_path / "out") == manifest


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"manifest\.json is not there: rockpage export attention writes it"):
        read_manifest(AttentionManifest, tmp_path)


def test_a_folder_of_other_graphs_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    export(tmp_path)
    path = tmp_path / "out" / MANIFEST_FILE
    path.write_text(path.read_text().replace('"attention"', '"dense"'))
    with pytest.raises(UsageError, match="is of 'dense' graphs, not attention"):
        read_manifest(AttentionManifest, tmp_path / "out")
    compiler = StandInCompiler()
    with pytest.raises(UsageError, match="holds 'dense' graphs already"):
        export(tmp_path, compiler)
    assert compiler.jobs == []


def change(folder: Path, *path: Any, value: Any) -> None:
    """Change one place of the manifest."""
    manifest = folder / "out" / MANIFEST_FILE
    content = place = json.loads(manifest.read_text())
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("format",), 2, "it has format 2, this version of rockpage reads 1"),
        (("toolkit",), None, "toolkit is None, not of type str"),
        (("kv_heads",), True, "kv_heads is True, not of type int"),
        (("kv_heads",), 4, r"takes \(\(3, 72, 1, 4\)"),
        (("head_dim",), 100, "a head of 100 channels"),
        (("files",), {}, "files is {}, not a list"),
        (("files",), [], "it has graphs of nothing, and not one of each kind"),
        (("files", 1), [], r"files\[1\] is \[\], not an object"),
        (("files", 0, "rows"), 8, "decode with 8 rows is not the graph decode with 4"),
        (("files", 0, "kind"), "prefill16", "prefill16 with 4 rows is not the graph decode with 4"),
        (("files", 0, "extra"), 1, r"files\[0\] lacks, or must not have, extra"),
        (("files", 0, "launches", 1, "tokens"), 256, "decode of 1 x 256 takes"),
        (("files", 0, "launches", 1, "tokens"), 8192, "dimension of 8192"),
        (("files", 0, "launches", 1, "batch"), 0, "0 sequences"),
        (("files", 0, "inputs"), ["q", "k"], "decode of 1 x 64 takes"),
        (("files", 0, "rknn", "file"), "../decode.rknn", "'../decode.rknn' is not the name of a file"),
        (("files", 0, "rknn", "file"), "a\0b", r"'a\\x00b' is not the name of a file"),
        (("files", 0, "rknn", "file"), "..", "it is no regular file"),
        (("files", 0, "rknn", "nbytes"), -1, "it has 15 bytes, the manifest says -1"),
        (("files", 0, "rknn", "file"), "gone.rknn", r"gone.rknn: it cannot be read \(No such file"),
        (("files", 0, "rknn", "sha256"), "0" * 64, "the manifest says 000"),
        (("marks", "masked"), -100, "not what rockpage stages"),
        (("marks", "masked"), 10**400, "masked is beyond what a float holds"),
        (("target",), "rk3566", "graphs for rk3566"),
        (("dtype",), "int8", "int8"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_us(
    tmp_path: Path, path: tuple[Any, ...], value: Any, reason: str
) -> None:
    export(tmp_path)
    change(tmp_path, *path, value=value)
    with pytest.raises(BadModelFile, match=f"{reason}.*; export it again"):
        read_manifest(AttentionManifest, tmp_path / "out")


def test_a_manifest_that_lacks_a_field(tmp_path: Path) -> None:
    export(tmp_path)
    manifest = tmp_path / "out" / MANIFEST_FILE
    content = json.loads(manifest.read_text())
    del content["marks"]["canary_tokens"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(BadModelFile, match="marks lacks, or must not have, canary_tokens"):
        read_manifest(AttentionManifest, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_manifest_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(BadModelFile, match=MANIFEST_FILE):
        read_manifest(AttentionManifest, tmp_path)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_manifest_without_one_kind_of_graph_or_with_two(tmp_path: Path, missing: int) -> None:
    export(tmp_path)
    files = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())["files"]
    for wrong in (files[:missing] + files[missing + 1 :], [*files, files[missing]]):
        change(tmp_path, "files", value=wrong)
        kinds = ", ".join(file["kind"] for file in wrong)
        with pytest.raises(BadModelFile, match=f"it has graphs of {kinds}, and not one of each kind; export it again"):
            read_manifest(AttentionManifest, tmp_path / "out")


def test_a_pipe_in_the_place_of_a_graph_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "out" / export(tmp_path).files[2].rknn.file
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadModelFile, match=f"{path.name}: it is no regular file; export it again"):
        read_manifest(AttentionManifest, tmp_path / "out")


def test_a_file_with_other_bytes(tmp_path: Path) -> None:
    file = export(tmp_path).files[2].rknn.file
    (tmp_path / "out" / file).write_bytes(b"torn")
    with pytest.raises(BadModelFile, match=f"{file}: its SHA-256 is "):
        read_manifest(AttentionManifest, tmp_path / "out")


def test_graphs_are_told_before_they_are_compiled(tmp_path: Path) -> None:
    told: list[str] = []
    sizes = launch_sizes([AttentionGraph(1, 4, 8, tile=1)], buckets=(64,), batches=(1,))
    compiler = StandInCompiler()
    export_attention(sizes, tmp_path / "out", compiler, CompileCache(tmp_path / "cache"), report=told.append)
    assert told == ["decode"]
