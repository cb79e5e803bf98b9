"""Rewrites a template's syntax tree so that what Jinja2 compiles to plain Python takes steps and is weighed too."""

from __future__ import annotations

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

__all__ = ["CONCAT", "MADE", "STEP", "count_steps"]

# Names that no template can spell, so that none can call or replace these filters.
STEP = "step!"
"""Filter that counts one step of the budget."""
MADE = "made!"
"""Filter that weighs what was made."""
CONCAT = "concat!"
"""Filter that joins texts as `~` does, and weighs what comes of it."""


def count_steps(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Count in `tree`: each turn of a loop, each item a loop leaves out, comparisons, literals, and `~`."""
    counted = _Counter().visit(tree)
    counted.set_environment(environment)
    assert isinstance(counted, nodes.Template)
    return counted


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Counter(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the name says the node
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None, lineno=node.lineno), STEP), lineno=node.lineno))
        if isinstance(node.test, nodes.Expr):
            node.test = _filtered(node.test, STEP)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802 - the name says the node
        self.generic_visit(node)
        node.expr = _filtered(node.expr, STEP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - the name says the node
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802 - the name says the node
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in node.items) else _filtered(node, MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802 - the name says the node
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if constant or node.ctx != "load" else _filtered(node, MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802 - the name says the node
        self.generic_visit(node)
        return _filtered(node, MADE)
