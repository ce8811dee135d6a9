"""Reads the heads of the programs: what each trains, its other right forms and its mistakes."""

import ast
import json
import pathlib
import random
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parent
FRAMEWORKS, MODES = ("torch", "jax", "keras", "keras-jax"), ("pair", "resume", "port")
RIGHT = "right"  # Name of the right program as it stands.


class Case(NamedTuple):
    """A program with its head, as `schema.json` says.

    Attributes:
        id: kind and name, as in "losses/batch_dice"; also the path of its file.
        title: the first sentence of its docstring.
        head: the table, with `framework`, `processes`, `steps` and `mode`.
        right: name → table of each right form; the program as it stands is `RIGHT`.
        wrong: name → table of each mistake.
    """

    id: str
    title: str
    head: Mapping[str, Any]
    right: Mapping[str, Mapping[str, Any]]
    wrong: Mapping[str, Mapping[str, Any]]

    @property
    def kind(self) -> str:
        """The folder of the program."""
        return self.id.partition("/")[0]

    @property
    def path(self) -> pathlib.Path:
        """The file of the program."""
        return FOLDER / f"{self.id}.py"

    @property
    def variants(self) -> dict[str, Mapping[str, Any]]:
        """Name → table of each form of the program, right ones first."""
        return {**self.right, **self.wrong}

    def source(self, name: str) -> str:
        """Returns the text of a form of the program.

        Raises:
            ValueError: a text that its patch replaces does not occur exactly once.
        """
        text = self.path.read_text("utf-8")
        end = text.index('"""', text.index('"""') + 3)  # The docstring may have the head.
        head, body = text[:end], text[end:]
        for old, new in self.variants[name].get("patch", ()):
            if (number := body.count(old)) != 1:
                raise ValueError(
                    f"{self.id}.{name}: {number} times in the program, not once: {old}"
                )
            body = body.replace(old, new)
        return head + body


def read_case(path: pathlib.Path) -> Case | None:
    """Returns the case of a file; None if it has no head, such as a module that cases share.

    A head is the second part of the docstring, or, where it is long, a TOML file beside it.

    Raises:
        ValueError: a head is wrong, or is not that of its file.
    """
    try:
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    title, _, text = docstring.partition("\n\n")
    if path.with_suffix(".toml").exists():
        text = path.with_suffix(".toml").read_text("utf-8")
    if "\nframework = " not in text and "\nid = " not in f"\n{text}":
        return None
    try:
        head = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: its head is no TOML: {error}") from None
    right, wrong = head.pop("right", {}), head.pop("wrong", {})
    if missing := {"id", "framework", "processes", "steps", "mode"} - head.keys():
        raise ValueError(f"{path}: its head has no {sorted(missing)[0]}")
    if head["id"] != f"{path.parent.name}/{path.stem}":
        raise ValueError(f"{path}: its head has the id {head['id']}")
    for key, known in (("framework", FRAMEWORKS), ("mode", MODES)):
        if head[key] not in known:
            raise ValueError(f"{path}: {key} is {head[key]!r}, and none of {', '.join(known)}")
    if without := [name for name, form in wrong.items() if "place" not in form]:
        raise ValueError(f"{path}: [wrong.{without[0]}] has no place")
    return Case(head["id"], title.replace("\n", " "), head, {RIGHT: {}, **right}, wrong)


def read_cases() -> list[Case]:
    """Returns all cases, by their names."""
    found = (read_case(path) for path in sorted(FOLDER.glob("*/*.py")))
    return [case for case in found if case]


def choose(
    cases: Sequence[Case], words: Sequence[str], *, framework: str = "", every: int = 1,
    number: int | None = None, seed: int = 0,
) -> list[tuple[Case, list[str]]]:  # fmt: skip
    """Returns the cases that are asked for, each with the names of its forms.

    Args:
        cases: all cases.
        words: kinds, as "losses", ids, or ids with a form, as "losses/batch_dice.right"; none for
            all.
        framework: only cases of this one.
        every: about one case of n, always the same ones.
        number: so many of them, drawn at random.
        seed: of the draw.

    Raises:
        ValueError: a word is none of these.
    """
    known = {case.id for case in cases} | {case.kind for case in cases}
    known |= {f"{case.id}.{name}" for case in cases for name in case.variants}
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"{unknown[0]}: no kind, case or form of a case; kinds are"
                         f" {', '.join(sorted({case.kind for case in cases}))}")  # fmt: skip
    chosen = []
    for case in cases:
        whole = not words or case.id in words or case.kind in words
        names = [name for name in case.variants if whole or f"{case.id}.{name}" in words]
        is_in_part = zlib.crc32(case.id.encode()) % every == 0
        if names and is_in_part and case.head["framework"].startswith(framework):
            chosen.append((case, names))
    if number is not None and number < len(chosen):
        drawn = random.Random(seed).sample(range(len(chosen)), number)
        chosen = [chosen[index] for index in sorted(drawn)]
    return chosen


def read_lines(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the lines of a JSONL file by their `variant`; none if there is no file."""
    if not path.exists():
        return {}
    found = {}
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            found[line["variant"]] = line
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}:{number}: no line of results: {text[:60]}") from None
    return found


def write_lines(path: pathlib.Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a JSONL file in the order of `variant`; it is whole, or as it was."""
    text = "".join(f"{json.dumps(lines[key])}\n" for key in sorted(lines))
    part = path.with_suffix(".part")
    part.write_text(text, "utf-8")
    part.replace(path)
