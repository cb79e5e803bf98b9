"""Types of the compiled module; `_gather.h` says what each function does."""

from hostcache._cffi import FFI, CData

class _Lib:
    def rp_stage(self, plan: CData, pool: CData, layer: int, buffer: CData) -> None: ...

ffi: FFI
lib: _Lib
