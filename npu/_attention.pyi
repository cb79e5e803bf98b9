"""Types of the compiled module; `_attention.h` says what each function does."""

from hostcache._cffi import FFI, CData

class _Lib:
    RP_TILE_ROWS: int
    RP_MAX_HEAD_DIM: int

    def rp_attention_open(self, threads: int, isa: bytes) -> CData: ...
    def rp_attention_isa(self, runtime: CData) -> CData: ...
    def rp_attend(self, runtime: CData, step: CData, layer_offset: int, q: CData, out: CData) -> None: ...
    def rp_attention_close(self, runtime: CData) -> None: ...

ffi: FFI
lib: _Lib
