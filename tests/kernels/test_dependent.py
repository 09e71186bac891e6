"""Kernels that begin early keep the rules of `kernels.dependent`, as their source shows.

A GPU would show a broken rule only now and then, and Triton's interpreter never. What the kernels compute is tested
with each kernel.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("triton")

from verl_server import kernels
from verl_server.kernels import dependent

BEFORE = {
    "_silu_mul_block": set[str](),
    "_norm_row": {"weight"},
    "_add_norm_row": {"weight"},
    "_gemv": {"weight"},
    "_skinny": set[str](),
    "_norm_rotate_store": {"cos", "sin", "positions", "slots"},
    "decode_kernel": {"meta", "kv_lens", "rows", "starts", "page_table"},
    "extend_kernel": {"q_starts"},
    "shared_kernel": {"items"},
}
"""Kernel -> the pointers that it may read before it waits: to weights, tables and indices of the step."""
WRITES = ("store", "atomic_")


def functions() -> Iterator[tuple[str, ast.FunctionDef, dict[str, Any]]]:
    """Yield (name, syntax tree, globals) of every kernel with the parameter DEPENDENT."""
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"verl_server.kernels.{info.name}")
        for value in vars(module).values():
            fn = getattr(value, "fn", None)
            if not isinstance(fn, FunctionType) or not fn.__module__ == module.__name__ != dependent.__name__:
                continue
            if "DEPENDENT" in inspect.signature(fn).parameters:
                yield fn.__name__, tree_of(fn), fn.__globals__


def tree_of(fn: FunctionType) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(fn))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def name_of(call: ast.Call) -> str:
    """Return the last part of the name of a called function: "store" for `tl.store(...)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_wait(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node) == "dependent.wait(DEPENDENT)"


def writes(node: ast.AST, names: dict[str, Any]) -> bool:
    """Return True if the code, or a function of this package that it calls, writes memory."""
    for call in calls(node):
        fn = getattr(names.get(name_of(call)), "fn", None)
        if name_of(call).startswith(WRITES) or (isinstance(fn, FunctionType) and writes(tree_of(fn), fn.__globals__)):
            return True
    return False


def sources(before: list[ast.stmt], names: dict[str, Any]) -> set[str]:
    """Return the pointers that statements read from, each by the name of its argument.

    A pointer is the leftmost name of an address, as in `weight + column`. A helper gets it as its first argument.
    """
    origins: dict[str, str] = {}

    def base(node: ast.expr) -> str:
        while isinstance(node, ast.BinOp):
            node = node.left
        return origins.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    read = set()
    for statement in before:
        for call in calls(statement):
            helper = getattr(names.get(name_of(call)), "fn", None)
            loads = isinstance(helper, FunctionType) and any(name_of(each) == "load" for each in calls(tree_of(helper)))
            if loads or name_of(call) == "load":
                read.add(base(call.args[0]))
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            origins[statement.targets[0].id] = base(statement.value)
    return read


def broken_rule(tree: ast.FunctionDef, names: dict[str, Any], may_read: set[str]) -> str | None:
    """Return the rule that a kernel breaks, None if it keeps all of them."""
    waits = [i for i, statement in enumerate(tree.body) if is_wait(statement)]
    if len(waits) != 1:
        return "one unconditional wait"
    before = tree.body[: waits[0]]
    if any(writes(statement, names) for statement in before):
        return "no write before the wait"
    for statement in before:
        for block in (each for each in ast.walk(statement) if isinstance(each, ast.If)):
            returns = [i for i, each in enumerate(block.body) if isinstance(each, ast.Return)]
            if returns and not any(is_wait(each) for each in block.body[: returns[0]]):
                return "no return before a wait"
    if more := sources(before, names) - may_read:
        return f"no read of {', '.join(sorted(more))} before the wait"
    if not any(ast.unparse(each) == "dependent.let_next_begin(DEPENDENT)" for each in before):
        return "the next kernel may begin"
    return None


FOUND = list(functions())


def test_every_kernel_is_listed() -> None:
    assert {name for name, _, _ in FOUND} == set(BEFORE)


@pytest.mark.parametrize(("name", "tree", "names"), FOUND, ids=[name for name, _, _ in FOUND])
def test_a_kernel_keeps_the_rules(name: str, tree: ast.FunctionDef, names: dict[str, Any]) -> None:
    """A program that ends without the wait lets the kernel after the next one read unfinished results."""
    assert broken_rule(tree, names, BEFORE[name]) is None


@pytest.mark.parametrize(
    ("name", "old", "new", "rule"),
    [
        ("decode_kernel", "\n    dependent.wait(DEPENDENT)", "\n    pass", "one unconditional wait"),
        ("decode_kernel", "\n        dependent.wait(DEPENDENT)", "\n        pass", "no return before a wait"),
        ("_norm_row", "dependent.wait(DEPENDENT)\n    values =", "values =", "one unconditional wait"),
        ("_norm_row", "weight + column", "x + column", "no read of x before the wait"),
        ("_add_norm_row", "inside = column", "tl.store(out, 0)\n    inside = column", "no write before the wait"),
        ("_gemv", "start = weight", "start = x", "no read of x before the wait"),
        ("_silu_mul_block", "dependent.let_next_begin(DEPENDENT)", "pass", "the next kernel may begin"),
    ],
)
def test_a_broken_rule_is_noticed(name: str, old: str, new: str, rule: str) -> None:
    tree, names = next((tree, names) for found, tree, names in FOUND if found == name)
    source = ast.unparse(tree)
    assert old in source
    (broken,) = ast.parse(source.replace(old, new, 1)).body
    assert isinstance(broken, ast.FunctionDef)
    assert broken_rule(broken, names, BEFORE[name]) == rule
