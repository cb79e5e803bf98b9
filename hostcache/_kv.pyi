"""Types of the compiled module; `_kv.h` says what each function does."""

from ._cffi import FFI, CData

class _Lib:
    def rp_kv_write(
        self,
        pool: CData,
        block_bytes: int,
        layer_offset: int,
        kv_bytes: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        slots: CData,
        rows: int,
        k: CData,
        k_stride: int,
        v: CData,
        v_stride: int,
    ) -> None: ...
    def rp_kv_note(self, slots: CData, rows: int, block_tokens: int, written: CData, rewrites: CData) -> None: ...
    def rp_kv_copy_block(
        self,
        pool: CData,
        block_bytes: int,
        row_bytes: int,
        runs: int,
        token_bytes: int,
        src: int,
        dst: int,
        tokens: int,
    ) -> None: ...
    def rp_kv_use_isa(self, isa: bytes) -> int: ...

ffi: FFI
lib: _Lib
