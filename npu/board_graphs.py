"""A folder of exported attention graphs, held against the model and the library that are to use them."""

from __future__ import annotations

from pathlib import Path

from hostcache.errors import UsageError

from .attention_export import launch_sizes
from .attention_manifest import AttentionFile, AttentionManifest
from .rknn_errors import require_version
from .rknn_manifest import graphs_digest, read_manifest

__all__ = ["BoardGraphs"]


class BoardGraphs:
    """What `rockpage export attention` wrote, for one model.

    Args:
        folder: where it lies.
        kv_heads: of the model; likewise the others.
        heads: query heads.
        head_dim: elements per head.

    Attributes:
        manifest: as read; all files were found as they were exported.
        buckets: tokens that the graphs were exported for.
        batches: sequences of a decode launch that the graphs were exported for.
        digest: of all graphs, short.

    Raises:
        UsageError: the folder has no graphs of attention, or not all, or they are not for this model.
        BadModelFile: the folder is damaged, or of another version of rockpage.
    """

    def __init__(self, folder: Path, kv_heads: int, heads: int, head_dim: int) -> None:
        self._folder = folder
        self.manifest = read_manifest(AttentionManifest, folder)
        self._check_geometry(kv_heads, heads, head_dim)
        self.buckets, self.batches = self._sizes()
        self.digest = graphs_digest(self.manifest)

    def path(self, file: AttentionFile) -> Path:
        """Of a graph's file."""
        return self._folder / file.rknn.file

    def check_version(self, version: str) -> None:
        """Do nothing if a library is of the compiler's version.

        Raises:
            DeviceError: it is of another.
        """
        require_version(version, self.manifest.toolkit, "graphs")

    def _check_geometry(self, kv_heads: int, heads: int, head_dim: int) -> None:
        manifest = self.manifest
        exported = (manifest.kv_heads, manifest.kv_heads * manifest.group, manifest.head_dim)
        if exported != (kv_heads, heads, head_dim):
            raise UsageError(
                f"the graphs in {self._folder} are for {exported[0]} KV heads and {exported[1]} heads of "
                f"{exported[2]}, the model has {kv_heads} and {heads} of {head_dim}: rockpage export attention MODEL "
                "--out another folder",
                exported=exported,
                model=(kv_heads, heads, head_dim),
            )

    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Buckets and batches."""
        launches = {
            self.manifest.graph(file.tile): {(launch.batch, launch.tokens) for launch in file.launches}
            for file in self.manifest.files
        }
        every = set().union(*launches.values())
        buckets, batches = (tuple(sorted({size[axis] for size in every})) for axis in (1, 0))
        for graph, sizes in launch_sizes(tuple(launches), buckets, batches).items():
            if missing := set(sizes) - launches[graph]:
                raise UsageError(
                    f"the graph {graph.kind} in {self._folder} lacks launches of sequences x tokens {sorted(missing)}: "
                    "export it again with this version of rockpage",
                    missing=sorted(missing),
                )
        return buckets, batches
