"""Code of a page or a notebook, run as a reader sees it."""

import ast
from typing import Any


def run_code(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """Run it, and return the value of its last line if that is an expression: what a notebook shows."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)
