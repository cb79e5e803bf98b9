"""Exported graphs that a stand-in for the vendor's runtime can run: text that says what would have been compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from npu.attention_export import export_attention, launch_sizes
from npu.attention_graph import attention_graphs
from npu.rknn_cache import CompileCache
from npu.rknn_toolkit import CompileJob
from tests.npu.rknn_stand_in import StandInCompiler

__all__ = ["StubGraph", "export_stub_graphs"]


@dataclass(frozen=True)
class StubGraph:
    """What a file says; `tests/board/stub_librknnrt.c` reads the same.

    Attributes:
        rows: query rows of each head.
        key_channels: of q and K.
        head_dim: of V.
        masked: whether there is a fourth input.
        launches: `(heads, tokens)` each.
    """

    rows: int
    key_channels: int
    head_dim: int
    masked: bool
    launches: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, text: str) -> StubGraph:
        """From a file's text.

        Raises:
            ValueError: it is none.
        """
        first, *lines = text.splitlines()
        kind, *numbers = first.split()
        if kind != "rockpage-stub":
            raise ValueError("no stub graph")
        rows, key_channels, head_dim, masked = map(int, numbers)
        launches = tuple((int(heads), int(tokens)) for heads, tokens in (line.split() for line in lines))
        return cls(rows, key_channels, head_dim, bool(masked), launches)

    def write(self) -> str:
        """The file's text."""
        first = f"rockpage-stub {self.rows} {self.key_channels} {self.head_dim} {self.masked:d}\n"
        return first + "".join(f"{heads} {tokens}\n" for heads, tokens in self.launches)

    def shapes(self, launch: int) -> list[tuple[int, ...]]:
        """Of the inputs in one launch, channels last."""
        heads, tokens = self.launches[launch]
        shapes: list[tuple[int, ...]] = [
            (heads, 1, self.rows, self.key_channels),
            (heads, 1, tokens, self.key_channels),
            (heads, 1, tokens, self.head_dim),
        ]
        return [*shapes, (1, 1, self.rows, tokens)] if self.masked else shapes


class _StubCompiler(StandInCompiler):
    def compile(self, job: CompileJob, out: Path) -> str:
        log = super().compile(job, out)
        (_, key_channels, _, rows), _, (_, head_dim, _, _), *mask = job.shapes[0]
        launches = tuple((shapes[1][0], shapes[1][3]) for shapes in job.shapes)
        out.write_text(StubGraph(rows, key_channels, head_dim, bool(mask), launches).write())
        return log


def export_stub_graphs(
    folder: Path,
    kv_heads: int,
    heads: int,
    head_dim: int,
    *,
    buckets: Sequence[int] = (64, 128, 256),
    batches: Sequence[int] = (1, 2, 4),
    version: str = "2.5.0",
) -> Path:
    """What `rockpage export attention` would write, into `folder / "graphs"`; that folder."""
    sizes = launch_sizes(attention_graphs(kv_heads, heads, head_dim), buckets, batches)
    cache = CompileCache(folder / "cache")
    export_attention(sizes, folder / "graphs", _StubCompiler(version), cache)
    return folder / "graphs"
