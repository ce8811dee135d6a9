"""Draws random bugs as entries for `mutations.toml`, independent of the tests.

    python tests/mutations/draw.py PLACE COUNT [--seed=17]

PLACE is a folder of the program, for example `app/records`. The same seed draws the same bugs from
the same files. One that changes nothing that a test could see (a message, a speed) is to be listed
under `[[equivalent]]`, with the reason.
"""

import argparse
import ast
import pathlib
import random
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
COMPARISONS = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"),
}  # fmt: skip
Change = tuple[int, int, str]  # Start and end in the text, and what stands there instead.


def main() -> None:
    """Prints the entries."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    candidates = [
        (path, change)
        for path in sorted((ROOT / arguments.place).glob("*.py"))
        for change in changes(path.read_text(encoding="utf-8"))
    ]
    drawn = random.Random(arguments.seed).sample(candidates, arguments.count)
    for number, (path, change) in enumerate(drawn, start=1):
        old, new = whole_lines(path.read_text(encoding="utf-8"), change)
        why = f"drawn: seed {arguments.seed}, number {number} of {arguments.place}"
        print(f"[[mutation]]\nfile = {str(path.relative_to(ROOT))!r}")
        print(f"old = '''{old}'''\nnew = '''{new}'''\nwhy = {why!r}\n")


def changes(text: str) -> Iterator[Change]:
    """Yields every change that an operator, a number or a call can be drawn for."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    content = text.encode()

    def at(line: int, column: int) -> int:
        return len(content[: starts[line - 1] + column].decode())

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int]:
        return (
            at(left.end_lineno or 0, left.end_col_offset or 0),
            at(right.lineno, right.col_offset),
        )

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _swap(
                text, *between(node.left, node.comparators[0]), COMPARISONS[type(node.ops[0])]
            )
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield from _swap(text, *between(node.left, node.right), ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _swap(text, *between(*node.values[:2]), words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = at(node.lineno, node.col_offset)
            yield start, start + len("not "), ""
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            start = at(node.lineno, node.col_offset)
            end = at(node.end_lineno or 0, node.end_col_offset or 0)
            yield start, end, str(node.value + 1)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            start = at(node.lineno, node.col_offset)
            yield start, at(node.end_lineno or 0, node.end_col_offset or 0), "pass"


def _swap(text: str, start: int, end: int, words: tuple[str, str]) -> Iterator[Change]:
    """Yields the change of an operator between two operands, if it stands there once."""
    old, new = words
    found = list(re.finditer(re.escape(old), text[start:end]))
    if len(found) == 1:
        yield start + found[0].start(), start + found[0].end(), new


def whole_lines(text: str, change: Change) -> tuple[str, str]:
    """Returns the lines of a change before and after it, as many as make them unique."""
    start, end, replacement = change
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    while text.count(text[first:last]) > 1:
        first = text.rfind("\n", 0, first - 1) + 1
    return text[first:last], text[first:start] + replacement + text[end:last]


if __name__ == "__main__":
    main()
