"""Which steps of numbers are refused before a minute and gigabytes are spent on them."""

from __future__ import annotations

import pytest

from hostcache.errors import UsageError
from npu.json_multiples import excessive_multiple
from npu.structured import Structure, StructureCompiler
from tests.npu.toy_tokenizer import toy


@pytest.mark.parametrize(
    "schema",
    [
        '{"multipleOf": 5}',
        '{"multipleOf": 0.01}',
        '{"multipleOf": 1000000}',  # a digit and zeros
        '{"multipleOf": 9973}',
        # 1 and 500 hundredths: together 500, 5 without zeros.
        '{"properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 5}}}',
        '{"properties": {"multipleOf": {"type": "string"}}}',  # a member of that name
        '{"multipleOf": "5"}',
        '{"multipleOf": 0}',
        "no JSON",
        "[" * 100_000,
    ],
)
def test_steps_that_cost_little_pass(schema: str) -> None:
    assert excessive_multiple(schema) is None


@pytest.mark.parametrize(
    ("schema", "step"),
    [
        ('{"multipleOf": 1048575}', "1048575"),
        ('{"multipleOf": -1048575}', "-1048575"),
        ('{"multipleOf": 10.0001}', "10.0001"),  # 100001 ten thousandths
        ('{"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}', "101"),  # together 10403; the last is looked at first
        ('{"items": [{"multipleOf": 1e999999}]}', "1E+999999"),
        ('{"items": [{"multipleOf": 1e-999999}]}', "1E-999999"),
        ('{"multipleOf": ' + "7" * 4000 + "}", "7" * 4000),
    ],
)
def test_steps_that_cost_too_much_are_named(schema: str, step: str) -> None:
    assert excessive_multiple(schema) == step


def test_a_schema_with_such_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match="a multipleOf of 9999991 takes too many states; round it"):
        StructureCompiler(toy()).constraint(Structure.json_schema({"multipleOf": 9999991}))
