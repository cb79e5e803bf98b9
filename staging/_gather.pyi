"""Types of the compiled module; `_gather.h` says what each function does."""

from hostcache._cffi import FFI, CData

class _Lib:
    def rp_gather(
        self, src: CData, src_shift: int, dst: CData, place: CData, runs: CData, n: int, mark: CData
    ) -> None: ...
    def rp_clear(self, dst: CData, place: CData, runs: CData, n: int, mark: CData) -> None: ...

ffi: FFI
lib: _Lib
