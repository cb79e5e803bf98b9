"""Types of the compiled module; `_gather.h` says what each function does."""

from hostcache._cffi import FFI, CData

class _Lib:
    def rp_gather(self, src: CData, src_shift: int, dst: CData, rows: CData, n: int) -> None: ...
    def rp_zero(self, dst: CData, runs: CData, n: int) -> None: ...

ffi: FFI
lib: _Lib
