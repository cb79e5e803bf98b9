"""A folder of exported dense segments, held against the model, and the decoder that runs them on a board."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hostcache.errors import UsageError

from .dense_decoder import SegmentedDecoder
from .dense_manifest import DOMAIN_BYTES, DenseManifest
from .machine_identity import machine_identity
from .model import ModelConfig
from .rknn_manifest import read_manifest
from .rknnlite_segments import RknnLiteSegments
from .sizes import format_size
from .source import ModelSource
from .weights_cache import default_cache_dir, model_digest

__all__ = ["DenseFolder"]


class DenseFolder:
    """What `rockpage export dense` wrote, for one model.

    Args:
        folder: where it lies.
        source: the open model.
        cache_dir: where the model's digest is kept; None: the user's cache folder.

    Attributes:
        manifest: as read; all files were found as they were exported.

    Raises:
        UsageError: the folder has no dense segments, they are of another model, or more than the NPU can address.
        BadModelFile: the folder is damaged, or of another version of rockpage.
    """

    def __init__(
        self, folder: str | os.PathLike[str], source: ModelSource, *, cache_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._folder = Path(folder)
        self._source = source
        self._fingerprint = model_digest(source, default_cache_dir() if cache_dir is None else Path(cache_dir))
        self.manifest = read_manifest(DenseManifest, self._folder)
        if self.manifest.model_sha256 != self._fingerprint:
            raise UsageError(
                f"the segments in {folder} are of another model than {source.path}: rockpage export dense "
                f"{source.path} --out another folder",
                exported=self.manifest.model_sha256,
                model=self._fingerprint,
            )
        if self.manifest.npu_bytes > DOMAIN_BYTES:
            raise UsageError(
                f"the segments in {folder} take {format_size(self.manifest.npu_bytes)} of the NPU's memory, and it "
                f"addresses {format_size(DOMAIN_BYTES)}: export them with --precision w8a8, or use a smaller model",
                npu_bytes=self.manifest.npu_bytes,
            )

    def load(self, max_rows: int) -> SegmentedDecoder:
        """Put the segments onto the NPU; the caller closes the decoder.

        Args:
            max_rows: most tokens of one step.

        Raises:
            UsageError: the segments take too few rows.
            MissingExtra: rknn-toolkit-lite2 is not installed.
            DeviceError: the NPU cannot be used, or does not compute; see `npu.rknnlite_segments`.
        """
        config = ModelConfig.from_gguf(self._source)
        runner = RknnLiteSegments(self._folder, self.manifest)
        try:
            # Embedding and rotation are computed here, by numpy.
            host = (f"numpy-{np.__version__}", machine_identity(), config.positions_identity)
            return SegmentedDecoder(
                self._source,
                config,
                runner,
                fingerprint=self._fingerprint,
                numerics="/".join((runner.numerics, *host)),
                max_rows=max_rows,
            )
        except BaseException:
            runner.close()
            raise
