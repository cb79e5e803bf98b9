from __future__ import annotations

import argparse

import pytest

from npu.sizes import format_size
from tools.units import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("7B", 7),
        ("2kB", 2_000),
        ("1.1GB", 1_100_000_000),
        ("192MiB", 201_326_592),
        ("4GiB", 4_294_967_296),
        ("4 GiB", 4_294_967_296),
        ("0.5KiB", 512),
        ("0.3MiB", 314_572),  # 314572.8: a fraction of a byte is dropped
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_are_read_exactly(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "4G",
        "4gib",
        "4 K",
        "1,5GB",
        ".5GB",
        "5.GB",
        "-1GB",
        "+1GB",
        "1e9",
        "0",
        "0.0GB",
        "0.4B",
        "0x10",
        "nan",
        "inf",
        " 1",
        "1 ",
        "1  GB",
        "1\n",
        "٣GB",
        "9223372036854775808",
        "9" * 5000,
    ],
)
def test_everything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a size|between") as caught:
        parse_size(text)
    assert str(caught.value).startswith(f"'{text}'")


def test_sizes_are_written_for_people() -> None:
    assert format_size(0) == "0.0 MiB"
    assert format_size(201_326_592) == "192.0 MiB"
    assert format_size(2**30 - 1) == "1024.0 MiB"
    assert format_size(2**30) == "1.00 GiB"
    assert format_size(2**32 + 2**30 // 4) == "4.25 GiB"
