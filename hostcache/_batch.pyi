"""Types of the compiled module; `_batch.h` says what each function does."""

from ._cffi import FFI, CData

class _Lib:
    def rp_batch_advance(self, batch: CData, places: CData, n: int) -> int: ...
    def rp_batch_width_to_grow(self, batch: CData, places: CData, n: int) -> int: ...
    def rp_batch_grow(self, batch: CData, places: CData, n: int) -> None: ...

ffi: FFI
lib: _Lib
