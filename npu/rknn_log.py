"""What the vendor's compiler says of a graph: tables of its operators and memory, and complaints between them.

rknn-toolkit2 2.5.0 has no other way to tell. One table of operators and one sum of memory belong to each set of input
shapes, the largest first::

    D RKNN: [..] ID   OpType          DataType Target InputShape                 OutputShape  Cycles(..) RW(KB) FullName
    D RKNN: [..] 3    exSDPAttention  FLOAT16  NPU    (3,72,1,4),(3,72,1,64),... (3,64,1,4)   0/0/0      52     exSDPA..
    D RKNN: [..] Total Internal Memory Size: 91.125KB
    D RKNN: [..] Total Weight Memory Size: 0KB
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hostcache.errors import DeviceError

__all__ = ["FUSED_ATTENTION", "Layer", "LayerTable", "complaints", "last_words", "layer_tables"]

FUSED_ATTENTION = "exSDPAttention"
"""The operator that the compiler makes of products, mask and softmax together: scores never leave the NPU."""

_INPUT, _OUTPUT = "InputOperator", "OutputOperator"  # their target is always the CPU, which converts layouts there

_ROW = re.compile(r"(\d+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +\d+/\d+/(\d+) +(\d+) *(\S*)")
_MEMORY = re.compile(r"Total (Internal|Weight) Memory Size: ([0-9.]+)KB")
_LINE = re.compile(r"[A-Z] RKNN: \[[0-9:.]+\] (.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"E RKNN: \[[0-9:.]+\] (.*)")
_COMPLAINT = re.compile(r"[WE] RKNN: \[[0-9:.]+\] (.*)")

_HARMLESS = re.compile(
    "|".join(
        (
            r"subgraphs in rknn greater than 1",  # a set of shapes is a subgraph
            r"Warning: Tensor \S+ need parameter qtype, type is set to float16 by default!",  # which is wanted
            r"tensor name: \S+ is already in IndependentMap",  # shapes share the weight, which is wanted
        )
    )
)


@dataclass(frozen=True)
class Layer:
    """One operator, as compiled.

    Attributes:
        op: what it does; a fused one has a name of its own, such as `ConvAdd`.
        dtype: such as `FLOAT16`.
        target: `NPU` or `CPU`.
        inputs: shapes, such as `(3,72,1,4),(3,72,1,64),...`; the compiler shortens long lists.
        output: shape.
        cycles: of the NPU's clock, the larger of memory's and arithmetic's; 0 where the compiler has no estimate.
        traffic_kib: read and written.
        name: the compiler's, from the graph's node; empty if it made the operator up.
    """

    op: str
    dtype: str
    target: str
    inputs: str
    output: str
    cycles: int
    traffic_kib: int
    name: str


@dataclass(frozen=True)
class LayerTable:
    """What one set of input shapes was compiled to.

    Attributes:
        shapes: of the graph's inputs, in its order.
        layers: in the order they run, without the rows for the graph's inputs and outputs.
        internal_bytes: for inputs, outputs and what lies between operators.
        weight_bytes: for constants.
    """

    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[Layer, ...]
    internal_bytes: int
    weight_bytes: int

    @property
    def on_cpu(self) -> tuple[Layer, ...]:
        """Operators that do not run on the NPU."""
        return tuple(layer for layer in self.layers if layer.target != "NPU")


def layer_tables(log: str) -> list[LayerTable]:
    """The tables of one compilation, in the order printed.

    Raises:
        DeviceError: no table is there, or one is without its memory: this compiler prints something else.
    """
    tables = list(_tables(log))
    if not tables:
        raise DeviceError("the compiler printed no table of layers: rockpage reads that of rknn-toolkit2 2.5.0")
    return tables


def _tables(log: str) -> Iterator[LayerTable]:
    rows: list[Layer] = []
    memory: dict[str, int] = {}
    for line in _lines(log, _LINE):
        if row := _ROW.fullmatch(line):
            number, op, dtype, target, inputs, output, cycles, traffic, name = row.groups()
            if int(number) != len(rows):
                raise DeviceError(f"a row of the compiler's table cannot be read: {len(rows)} comes before {number}")
            rows.append(Layer(op, dtype, target, inputs, output, int(cycles), int(traffic), name))
        elif total := _MEMORY.match(line):
            memory[total[1]] = round(float(total[2]) * 1024)
            if len(memory) == 2:
                shapes = tuple(_numbers(row.output) for row in rows if row.op == _INPUT)
                layers = tuple(row for row in rows if row.op not in (_INPUT, _OUTPUT))
                yield LayerTable(shapes, layers, memory["Internal"], memory["Weight"])
                rows, memory = [], {}
    if rows or memory:
        raise DeviceError(f"the compiler's table of {len(rows)} layers breaks off before its memory", layers=len(rows))


def _numbers(shape: str) -> tuple[int, ...]:
    return tuple(int(size) for size in shape.strip("()").split(","))


def complaints(log: str) -> list[str]:
    """Warnings and errors, each once, but for those known to mean nothing."""
    found = (line for line in _lines(log, _COMPLAINT) if not _HARMLESS.fullmatch(line))
    return list(dict.fromkeys(found))


def last_words(log: str) -> str:
    """What a compiler said before it failed: its last error, else its last line."""
    plain = _COLOUR.sub("", log)
    lines = _lines(plain, _ERROR) or [line for line in map(str.strip, plain.splitlines()) if line]
    return lines[-1] if lines else "nothing"


def _lines(log: str, pattern: re.Pattern[str]) -> Sequence[str]:
    return [match[1].strip() for line in log.splitlines() if (match := pattern.fullmatch(line.strip()))]
