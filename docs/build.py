"""Builds the library's reference from its docstrings: `make docs`, or `python docs/build.py FOLDER`.

pdoc reads and renders them. Added here are a front page (api.md) and two things that keep the text true: a name that a
docstring mentions leads to its page, from whatever module it comes, and one that leads nowhere fails the build.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pdoc
from jinja2 import pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from pdoc import doc, extract, render, render_helpers

__all__ = ["DanglingNames", "Linker", "build", "main"]

DOCUMENTED = ("hostcache", "hostcache.errors", "staging", "npu", r"!.+\._")
"""The library, from the bottom up, without modules that begin with an underscore. Where a package lists its public
names, all are on its own page. `tools` is the command, which says itself what it does."""

HERE = Path(__file__).parent

MENTION = re.compile(r"(?<=<code>)[A-Za-z_][\w.]*(?:\(\))?(?=</code>)|(?<=<strong>)[A-Z]\w+(?=:</strong>)")
"""A name in a code span that pdoc found no place for, or in front of a line of `Raises`."""

DOT = r"(?:\.|</span><span class=\"o\">\.</span><span class=\"n\">)"
DEFINED_IN = re.compile(rf"\b(hostcache|staging)({DOT})(?!errors\b)\w+{DOT}(?=[A-Z])")
"""In an annotation, the module of a class that readers find on, and import from, the page of its package."""


class DanglingNames(Exception):
    """Docstrings mention names that are not there."""


class Linker:
    """Knows where each name is documented.

    Args:
        modules: the documented modules by name; of those that share a name, the first is linked to.

    Attributes:
        dangling: what was mentioned and is not there, as `module: name`.
    """

    def __init__(self, modules: Mapping[str, doc.Module]) -> None:
        self.dangling: list[str] = []
        self._modules = modules
        self._places: dict[str, doc.Doc[Any]] = {}
        for module in modules.values():
            for name in getattr(module.obj, "__all__", ()):
                # Words in lower case are too often just words.
                if name[0].isupper() and (found := module.get(name)) is not None:
                    self._places.setdefault(name, found)

    def link(self, page: str, html: str) -> str:
        """Link the names that are mentioned in a docstring's HTML.

        Args:
            page: the module on whose page it is.
            html: as pdoc made it, its own links included.
        """
        return MENTION.sub(lambda mention: self._link(page, mention[0]), html)

    def _link(self, page: str, text: str) -> str:
        name = text.removesuffix("()")
        place = self._place(name)
        if place is None:
            head = name.partition(".")[0]
            if head != name and (head in self._modules or head in self._places):  # one of ours, so it ought to be there
                self.dangling.append(f"{page}: {text}")
            return text
        anchor = f"#{place.qualname}" if place.qualname else ""
        return f'<a href="{render_helpers.relative_link(page, place.modulename)}{anchor}">{text}</a>'

    def _place(self, name: str) -> doc.Doc[Any] | None:
        """What a name means: a module, something in a module, a public name of any module, or a member of one."""
        if name in self._modules:
            return self._modules[name]
        parent, _, last = name.rpartition(".")
        if not parent:
            return self._places.get(name)
        place = self._place(parent)
        return place.get(last) if isinstance(place, doc.Namespace) else None


def build(output: Path, documented: Sequence[str] = DOCUMENTED, front: Path = HERE / "api.md") -> None:
    """Write the reference as HTML: a page for each module, an index, and the index of the search box.

    Args:
        output: folder to write to.
        documented: modules, in pdoc's notation.
        front: Markdown, the front page.

    Raises:
        DanglingNames: a name in a docstring or on the front page leads nowhere.
        Warning: pdoc complains, and warnings are errors.
    """
    linker = Linker({name: doc.Module.from_name(name) for name in extract.walk_specs(documented)})

    @pass_context
    def linkify(context: Context, code: str, namespace: str = "", shorten: bool = True) -> Markup:
        # As plain strings: a Markup would escape what is put into it.
        linked = render_helpers.linkify(context, DEFINED_IN.sub(r"\1\2", str(code)), namespace, shorten)
        is_docstring = not shorten  # signatures are shortened, texts are not
        return Markup(linker.link(context["module"].modulename, str(linked))) if is_docstring else linked  # noqa: S704 - ours

    render.configure(docformat="google", template_directory=HERE, show_source=False)
    render.env.filters["linkify"] = linkify
    text = render_helpers.to_html(front.read_text(encoding="utf-8"))
    render.env.globals["front"] = Markup(linker.link("index", text))  # noqa: S704 - ours
    pdoc.pdoc(*documented, output_directory=output)
    if linker.dangling:
        raise DanglingNames("names that lead nowhere:\n  " + "\n  ".join(sorted(set(linker.dangling))))


def main() -> None:
    """Build into the folder named on the command line."""
    warnings.simplefilter("error")
    # The constructor of a NamedTuple says it comes from a module that does not exist, where pdoc looks for types.
    warnings.filterwarnings("ignore", message=r"Error parsing type annotation .* for npu\.blocks\.Blocks\.__init__")
    (output,) = sys.argv[1:]
    try:
        build(Path(output))
    except DanglingNames as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
