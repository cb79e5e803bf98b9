"""Types of the compiled module; `_limits.h` says what each function does."""

from hostcache._cffi import FFI, CData

class _Lib:
    def rp_limit_copy(self, src: CData, dst: CData, nbytes: int) -> None: ...
    def rp_limit_copy_runs(self, src: CData, dst: CData, runs: CData, n: int) -> None: ...
    def rp_limit_read(self, src: CData, nbytes: int) -> int: ...

ffi: FFI
lib: _Lib
