"""The reference: a name in a docstring leads to its page, and one that leads nowhere fails the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.build import DanglingNames, build

BENCH = '''"""Tools that cut. See `bench_planes.Plane`."""
from bench_planes import Plane

__all__ = ["Saw"]


class Saw:
    """Cuts, where {mention} levels.

    Raises:
        Blunt: it is blunt.
    """

    def lend(self, plane: Plane) -> None:
        """Lend it."""
'''
PLANES = '''"""Planes."""

__all__ = ["Blunt", "Plane"]


class Blunt(Exception):
    """Sharpen it."""


class Plane:
    """Levels.

    Attributes:
        width: in millimetres.
    """

    def __init__(self) -> None:
        self.width = 40

    def level(self) -> None:
        """Level."""
'''


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Two modules, whose names no other test has; the first mentions what the test's parameter says."""
    number = sum(map(ord, request.node.name))
    names = [f"bench_saws_{number}", f"bench_planes_{number}"]
    for name, source in zip(names, (BENCH.replace("{mention}", request.param), PLANES), strict=True):
        (tmp_path / f"{name}.py").write_text(source.replace("bench_planes", names[1]))
    (tmp_path / "front.md").write_text(f"# Shop\n\nBegin with `{names[1]}.Plane.level`.\n")
    monkeypatch.syspath_prepend(tmp_path)
    return names


@pytest.mark.parametrize(
    ("shop", "link"),
    [
        ("`Plane.level()`", '.html#Plane.level">Plane.level()</a>'),
        ("`Plane`", '.html#Plane">Plane</a>'),
        ("`Plane.width`", '.html#Plane.width">Plane.width</a>'),
        ("`Chisel.level`", "<code>Chisel.level</code>"),
    ],
    indirect=["shop"],
    ids=["a method", "a class of another module", "an attribute", "not one of ours"],
)
def test_names_lead_to_their_pages(shop: list[str], link: str, tmp_path: Path) -> None:
    build(tmp_path / "out", shop, tmp_path / "front.md")
    saws, planes = ((tmp_path / "out" / f"{name}.html").read_text() for name in shop)
    target = f'href="{shop[1]}'
    assert link in saws
    assert f'{target}.html#Blunt">Blunt</a>:' in saws
    assert f'{target}.html#Plane">' in saws.partition('id="Saw.lend"')[2]  # in the annotation
    assert 'id="Plane.level"' in planes
    assert f'{target}.html#Plane.level">' in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize("shop", ["`Plane.polish`", "`bench_planes.Chisel`"], indirect=True)
def test_a_name_that_is_not_there_fails_the_build(shop: list[str], tmp_path: Path) -> None:
    with pytest.raises(DanglingNames, match=rf"{shop[0]}: (Plane\.polish|{shop[1]}\.Chisel)$"):
        build(tmp_path / "out", shop, tmp_path / "front.md")


def test_an_annotation_leads_to_the_package_that_its_class_is_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        '"""Counts."""\nfrom hostcache import PagedKVCache\n__all__ = ["count"]\n'
        'def count(cache: PagedKVCache) -> int:\n    """Count its blocks."""\n'
    )
    (tmp_path / "bench_counts.py").write_text(source)
    (tmp_path / "front.md").write_text("# Counts")
    monkeypatch.syspath_prepend(tmp_path)
    build(tmp_path / "out", ["hostcache", "bench_counts"], tmp_path / "front.md")
    page = (tmp_path / "out" / "bench_counts.html").read_text()
    assert '<a href="hostcache.html#PagedKVCache">hostcache.PagedKVCache</a>' in page
    assert "&lt;/span&gt;" not in page
