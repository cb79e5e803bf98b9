"""Types of the compiled module; `_dense.h` says what each function does."""

from hostcache._cffi import FFI, CData

class _Lib:
    RP_LANES: int
    RP_BLOCK: int

    def rp_dense_open(self, model: CData, max_rows: int, threads: int, isa: bytes) -> CData: ...
    def rp_dense_isa(self, runtime: CData) -> CData: ...
    def rp_dense_before(
        self,
        runtime: CData,
        layer: CData,
        m: int,
        residual: CData,
        cosine: CData,
        sine: CData,
        q: CData,
        k: CData,
        v: CData,
    ) -> None: ...
    def rp_dense_after(self, runtime: CData, layer: CData, m: int, attended: CData, residual: CData) -> None: ...
    def rp_dense_head(self, runtime: CData, m: int, residual: CData, logits: CData) -> None: ...
    def rp_dense_close(self, runtime: CData) -> None: ...

ffi: FFI
lib: _Lib
