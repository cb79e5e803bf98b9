"""Types of the compiled module; `_kv.h` says what each function does."""

from ._cffi import FFI, CData

class _Lib:
    def rp_kv_write(
        self,
        pool: CData,
        unit_bytes: int,
        row_bytes: CData,
        layer: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        slots: CData,
        codecs: CData,
        rows: int,
        k: CData,
        k_stride: int,
        v: CData,
        v_stride: int,
        feedback: CData,
    ) -> None: ...
    def rp_kv_misfit(
        self, slots: CData, codecs: CData, rows: int, block_tokens: int, spans: CData, units: int
    ) -> int: ...
    def rp_kv_read(
        self,
        pool: CData,
        unit_bytes: int,
        row_bytes: int,
        codec: int,
        layer: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        blocks: CData,
        tokens: int,
        k: CData,
        v: CData,
    ) -> None: ...
    def rp_kv_combine(
        self,
        codecs: CData,
        codec: int,
        rows: int,
        heads: int,
        head_dim: int,
        share: int,
        offsets: CData,
        matrices: CData,
        x: CData,
        y: CData,
    ) -> None: ...
    def rp_kv_note(self, slots: CData, rows: int, block_tokens: int, written: CData, rewrites: CData) -> None: ...
    def rp_kv_copy_block(
        self,
        pool: CData,
        unit_bytes: int,
        row_bytes: int,
        runs: int,
        codec: int,
        block_tokens: int,
        head_dim: int,
        src: int,
        dst: int,
        tokens: int,
    ) -> None: ...
    def rp_kv_use_isa(self, isa: bytes) -> int: ...

ffi: FFI
lib: _Lib
