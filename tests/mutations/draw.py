"""Draws random bugs as entries for `mutations.toml`, independent of the tests.

    python tests/mutations/draw.py PLACE COUNT [--seed=17]

PLACE is a folder of the program, with the folders in it: `app`. A bug deletes a statement, negates
a condition or moves a number by one. The same seed draws the same bugs from the same files. One
that changes nothing that a test could see (a message, a speed) is listed under `[[equivalent]]`,
with the reason.
"""

import argparse
import ast
import pathlib
import random
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
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
        for path in sorted((ROOT / arguments.place).rglob("*.py"))
        for change in changes(path.read_text(encoding="utf-8"))
    ]
    drawn = random.Random(arguments.seed).sample(candidates, arguments.count)
    for number, (path, change) in enumerate(drawn, start=1):
        old, new = whole_lines(path.read_text(encoding="utf-8"), change)
        why = f"drawn: seed {arguments.seed}, number {number} of {arguments.place}"
        print(f"[[mutation]]\nfile = {str(path.relative_to(ROOT))!r}")
        print(f"old = '''{old}'''\nnew = '''{new}'''\nwhy = {why!r}\n")


def changes(text: str) -> Iterator[Change]:
    """Yields every change that can be made in a module."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    content = text.encode()

    def at(line: int, column: int) -> int:
        return len(content[: starts[line - 1] + column].decode())

    def place(node: ast.stmt | ast.expr) -> tuple[int, int]:
        end = at(node.end_lineno or 0, node.end_col_offset or 0)
        return at(node.lineno, node.col_offset), end

    for node in ast.walk(ast.parse(text)):
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if is_call or isinstance(node, ast.AugAssign):
            yield *place(node), "pass"
        elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            start, end = place(node.test)
            yield start, end, f"not ({text[start:end]})"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield *place(node), str(node.value + 1)


def whole_lines(text: str, change: Change) -> tuple[str, str]:
    """Returns the lines of a change before and after it, as many as make them unique."""
    start, end, replacement = change
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    while text.count(text[first:last]) > 1:
        first = text.rfind("\n", 0, first - 1) + 1
    return text[first:last], text[first:start] + replacement + text[end:last]


if __name__ == "__main__":
    main()
