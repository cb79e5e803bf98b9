"""The reader of the compiler's log, on lines that rknn-toolkit2 2.5.0 printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.errors import DeviceError
from npu.rknn_log import Layer, complaints, last_words, layer_tables

LOGS = Path(__file__).with_name("rknn_logs")


def read(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def test_one_table_for_each_set_of_shapes() -> None:
    tables = layer_tables(read("decode"))
    assert [table.shapes for table in tables] == [
        ((12, 72, 1, 4), (12, 72, 1, 256), (12, 64, 1, 256)),
        ((12, 72, 1, 4), (12, 72, 1, 64), (12, 64, 1, 64)),
        ((3, 72, 1, 4), (3, 72, 1, 256), (3, 64, 1, 256)),
        ((3, 72, 1, 4), (3, 72, 1, 64), (3, 64, 1, 64)),
    ]
    fused = Layer(
        "exSDPAttention",
        "FLOAT16",
        "NPU",
        "(3,72,1,4),(3,72,1,256),(3,64,1,256)",
        "(3,64,1,4)",
        cycles=0,
        traffic_kib=205,
        name="exSDPAttention:o_2sdpa",
    )
    assert tables[2].layers == (fused,)
    assert [len(table.layers) for table in tables] == [1, 1, 1, 1]
    assert [table.internal_bytes for table in tables] == [997057, 259777, 360576, 93312]  # 973.688 KB and so on
    assert [table.weight_bytes for table in tables] == [0, 0, 0, 0]
    assert not any(table.on_cpu for table in tables)
    assert complaints(read("decode")) == []


def test_an_operator_without_a_name_is_one_too() -> None:
    (table,) = layer_tables(read("unfused"))
    assert [layer.op for layer in table.layers] == [
        *("Conv", "Transpose", "Transpose", "exMatMul", "Transpose", "Transpose"),
        *("Add", "exSoftmax13", "Transpose", "exMatMul", "Transpose"),
    ]
    assert table.layers[0].name == ""
    assert table.layers[0].cycles == 4096
    assert table.weight_bytes == 2112


def test_a_fallback_shows_in_complaints_even_if_the_table_says_npu() -> None:
    assert complaints(read("unfused")) == [
        "Transpose will fallback to CPU, because input shape has exceeded the max limit, height(256) * width(64) = "
        "16384, required product no larger than 8192!",
        "BroadcastLayoutConnFactory: op(Add:sm) has undefined broadcast type, please check this op.",
    ]
    assert layer_tables(read("unfused"))[0].on_cpu == ()


def test_an_operator_on_the_cpu_shows() -> None:
    tables = layer_tables(read("mask_of_three_axes"))
    assert [[layer.op for layer in table.on_cpu] for table in tables] == [["Reshape"], ["Reshape"]]
    assert complaints(read("mask_of_three_axes")) == ["Unkown op target: 0"]  # sic; said twice


def test_dense_layers_with_cycles_and_shared_weights() -> None:
    large, small = layer_tables(read("dense"))
    assert (large.shapes, small.shapes) == (((16, 576),), ((1, 576),))
    assert small.layers[2] == Layer(
        "ConvExSwish",
        "FLOAT16",
        "NPU",
        "(1,576,1,1),(1536,576,1,1)",
        "(1,1536,1,1)",
        cycles=74986,
        traffic_kib=1729,
        name="Conv:gate#2",
    )
    assert complaints(read("dense")) == []


def test_last_words_are_the_last_error() -> None:
    assert last_words(read("abort")) == "buffer overflow!!!"
    assert last_words("\x1b[1;31mE\x1b[0m \x1b[1;31mno more\x1b[0m\n\n") == "E no more"
    assert last_words("") == "nothing"


def test_no_table() -> None:
    with pytest.raises(DeviceError, match=r"no table"):
        layer_tables(read("abort"))


def test_a_table_that_breaks_off() -> None:
    lines = read("decode").splitlines()
    end = next(index for index, line in enumerate(lines) if "Total Internal" in line)
    with pytest.raises(DeviceError, match="5 layers breaks off"):
        layer_tables("\n".join(lines[:end]))


def test_a_row_that_cannot_be_read_is_not_passed_over() -> None:
    log = read("decode").replace("3    exSDPAttention     FLOAT16  NPU", "3    exSDPAttention     FLOAT16 ", 1)
    with pytest.raises(DeviceError, match="3 comes before 4"):
        layer_tables(log)
