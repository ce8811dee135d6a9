"""Writes verdicts as a page: one HTML file that needs no other file and runs no code.

`document` and the functions that it is filled with are those of every page of the project.
"""

import contextlib
import html
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lockstep
from lockstep.answer.json import record_of_node
from lockstep.answer.text import facts_of, nodes_of, notes_of, one_line, sentence_of
from lockstep.engine.verdict import BY_DESIGN, CLEAN, NODES, NOT_COMPARED, Verdict

_HEAD_BYTES = 4096  # `_GENERATOR` is within them.
_LONGEST, _LONGEST_SUMMARY = 500, 60  # Letters of a fact, and of what is shown of a longer one.
_GENERATOR = '<meta name="generator" content="Lockstep">'
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'"
)
_ABOUT_NODES = (
    "For each node, in the order of the data, the largest difference from the reference over what"
    " rounding allows: at most 1 is right. “–” was not measured apart: the state"
    " after each step covers it, or it was not recorded."
)
GOOD, BAD = "good", "bad"  # Kinds of verdicts; `BY_DESIGN` is the third.
_STYLE = """
:root { color-scheme: light dark; --good: light-dark(#0a6b4d, #5fd0aa); --bad: light-dark(#a83a00, #ff9a62); --warn: light-dark(#8f4700, #e69f00); --quiet: light-dark(#57606a, #a3acb6); --rule: light-dark(#d5dae0, #363d46); }
body { margin: 0 auto; max-width: 76rem; padding: 1rem clamp(1rem, 3vw, 2.5rem) 4rem; background: light-dark(#fff, #14171b); color: light-dark(#1b1f24, #e6e9ed); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin-bottom: 0.3rem; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
p { margin: 0.25rem 0; }
.quiet, dt { color: var(--quiet); }
.verdict { margin: 0.5rem 0; padding: 0.5rem 1rem; border-left: 0.35rem solid; font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
.design, .caveat, .differs { color: var(--warn); }
.verdict.good::before { content: "✓ "; }
.verdict.bad::before { content: "✗ "; }
.verdict.design::before { content: "≠ "; }
.caveat { margin: 0.5rem 0; padding: 0.5rem 1rem; border: 1px solid; border-radius: 0.25rem; font-weight: 600; }
.scroll { overflow-x: auto; margin: 0.4rem 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.title { margin-top: 1.25rem; }
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
.text { text-align: left; }
thead .text { white-space: normal; overflow-wrap: break-word; min-width: 3.5rem; max-width: 14rem; vertical-align: bottom; }
th:first-child { text-align: left; padding-left: 0; white-space: normal; overflow-wrap: break-word; }
details td { text-align: left; white-space: normal; vertical-align: top; min-width: 8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; margin: 0.5rem 0 1rem; }
dt { max-width: 14rem; }
dd { margin: 0; white-space: pre-line; }
.line { display: block; padding-left: 0.5rem; white-space: pre-wrap; border-left: 0.2rem solid var(--rule); }
dt:empty { margin: 0; }
img { display: block; max-width: 100%; background: #fff; border-radius: 0.4rem; }
summary { cursor: pointer; color: var(--quiet); margin-top: 1rem; }
dd summary { margin: 0; }
@media (max-width: 45rem) { table { font-size: 0.8rem; } th, td { padding: 0.25rem 0.3rem; } img { max-width: none; } }
@media (max-width: 30rem) { dl { display: block; } dt { font-size: 0.8rem; margin-top: 0.5rem; } h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; } }
@media print { details { display: none; } section, img, tr { break-inside: avoid; } }
"""  # noqa: E501


def write_page(verdicts: Sequence[Verdict], path: str | os.PathLike[str]) -> None:
    """Writes the page of some verdicts, as a whole or not at all.

    Args:
        verdicts: the verdicts, of different names.
        path: the file; an earlier page is replaced.

    Raises:
        OSError: the page cannot be written, or the path is another file.
    """
    require_writable(path)
    file = pathlib.Path(path)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(page_of(verdicts).encode("utf-8", "replace"))
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raises OSError if a page cannot be written to a path; a recording is not replaced."""
    file = pathlib.Path(path)
    problem = ""
    if file.is_dir():
        problem = "is a folder; give the name of a file"
    elif os.path.lexists(file) and not is_page(file):
        problem = "exists and is no page of this program; give another name"
    elif not file.absolute().parent.is_dir():
        problem = "the folder does not exist"
    elif not os.access(file.absolute().parent, os.W_OK):
        problem = "the folder cannot be written"
    if problem:
        raise OSError(None, problem, str(path))


def is_page(path: pathlib.Path) -> bool:
    """Returns whether a file, and no link, was written as a page of this project."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with open(path, "rb") as file:
            return _GENERATOR.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def page_of(verdicts: Sequence[Verdict]) -> str:
    """Returns the page of some verdicts: sentences, then each place with its facts, then nodes."""
    names = ", ".join(one_line(verdict.training) for verdict in verdicts)
    body = [f'<p class="quiet">{text_of(names)}; lockstep {lockstep.__version__}</p>']
    body += [verdict_line(kind_of(each.status), sentence_of(each)) for each in verdicts]
    for verdict in verdicts:
        facts = facts_of(verdict, details=True)
        facts |= {NOT_COMPARED: "\n".join(notes_of(verdict))}
        facts |= {"note": "\n".join(map(one_line, verdict.remarks))}
        if shown := {name: text for name, text in facts.items() if text}:
            body.append(facts_list(one_line(verdict.training), shown))
    body.append("<h2>Largest differences</h2>")
    body.append(nodes_table({v.training: _nodes_of(v) for v in verdicts}))
    body.append(f"<details><summary>What each node is</summary>{facts_list('', NODES)}</details>")
    bounds = {one_line(v.training): one_line(v.tolerance) for v in verdicts if v.tolerance}
    if bounds:
        body.append(facts_list("What rounding allows", bounds))
    return document(f"Lockstep: {names}", "Lockstep", body)


def _nodes_of(verdict: Verdict) -> dict[str, Any]:
    return {node: record_of_node(each) for node, each in nodes_of(verdict).items()}


def frame_of(verdicts: Sequence[Verdict], height: int = 480) -> str:
    """Returns the page of some verdicts as an element of another page, whose style it ignores.

    Args:
        verdicts: the verdicts.
        height: in pixels; a longer page scrolls.
    """
    page = html.escape(page_of(verdicts), quote=True)
    style = f"width: 100%; height: {height}px"
    return f'<iframe srcdoc="{page}" title="Lockstep" style="{style}"></iframe>'


def nodes_table(trainings: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table: how far each node of some trainings is from the reference's.

    Args:
        trainings: name of a training → node → its record, as in the JSON.
    """
    rows = [[node, *(cell_of(each[node]) for each in trainings.values())] for node in NODES]
    if all(cell == "–" for _, *cells in rows for cell in cells):
        return paragraph("No step without a fault was measured.", "quiet")
    of_nodes = table("", ["node", *map(one_line, trainings)], rows, [False] * (len(trainings) + 1))
    return f"{paragraph(_ABOUT_NODES, 'quiet')}\n{of_nodes}"


def cell_of(node: Mapping[str, Any] | str) -> str:
    """Returns the record of a node as a cell of a table."""
    if isinstance(node, str):
        return "–"
    share = node["share"]
    if share == 0 and node["equal"] == node["arrays"]:
        return "bitwise equal"
    if share is None:
        return "✗ differs"
    return f"{share:.2g}" if share <= 1 else f"✗ {share:.3g}"


def document(title: str, heading: str, body: Iterable[str]) -> str:
    """Returns a page.

    Args:
        title: its title, as text.
        heading: its heading, as text.
        body: its elements, as HTML.
    """
    lines = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{_GENERATOR}
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{text_of(title if len(title) <= 100 else title[:99] + "…")}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{text_of(heading)}</h1>
{lines}
</body>
</html>
"""


def kind_of(status: str) -> str:
    """Returns the kind of a verdict with a status: `GOOD`, `BY_DESIGN` or `BAD`."""
    return {CLEAN: GOOD, BY_DESIGN: BY_DESIGN}.get(status, BAD)


def verdict_line(kind: str, sentence: str) -> str:
    """Returns a verdict as HTML, in the colour of its kind."""
    css_class = {GOOD: "good", BAD: "bad"}.get(kind, "design")
    return paragraph(sentence, f"verdict {css_class}")


def paragraph(text: str, css_class: str = "") -> str:
    """Returns a paragraph as HTML; what stands between backticks is code."""
    of_class = f' class="{css_class}"' if css_class else ""
    return f"<p{of_class}>{_with_code(text)}</p>"


def facts_list(title: str, facts: Mapping[str, str]) -> str:
    """Returns a title, which may be empty, and named facts as HTML.

    The facts "-" and "+" are lines of code: one to remove, and the one to write instead.
    """
    lines = [f"<h3>{text_of(title)}</h3>"] if title else []
    lines.append("<dl>")
    for name, text in facts.items():
        shown = f"<dd>{_with_code(text)}</dd>"
        if len(text) > _LONGEST:  # As the names of all variables: on request.
            begin = text_of(text[:_LONGEST_SUMMARY])
            shown = f"<dd><details><summary>{begin}…</summary>{_with_code(text)}</details></dd>"
        if name in ("-", "+"):
            shown = f'<dd><code class="line">{name} {text_of(text)}</code></dd>'
            name = "code" if name == "-" or "-" not in facts else ""
        lines.append(f"<dt>{text_of(name)}</dt>{shown}")
    return "\n".join([*lines, "</dl>"])


def table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool]
) -> str:
    """Returns a table as HTML; the first column names the rows.

    Args:
        title: a title, which may be empty.
        header: name of each column.
        rows: the cells, as text.
        numeric: whether each column holds numbers, which are aligned right.
    """
    text_class = ["" if is_number else "text" for is_number in numeric]
    head = "".join(
        f'<th scope="col" class="{css}">{text_of(name)}</th>'
        for css, name in zip(text_class, header, strict=True)
    )
    lines = [paragraph(title, "quiet title")] if title else []
    lines += ['<div class="scroll" tabindex="0">', f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for first, *cells in rows:
        differs = ' class="differs"' if first.startswith("≠") else ""
        line = f'<tr><th scope="row"{differs}>{text_of(first)}</th>'
        for css, cell in zip(text_class[1:], cells, strict=True):
            line += f'<td class="{css} {_class_of_cell(cell)}">{text_of(cell)}</td>'
        lines.append(f"{line}</tr>")
    return "\n".join([*lines, "</tbody></table>", "</div>"])


def _class_of_cell(cell: str) -> str:
    if cell.startswith("✗"):
        return "bad"
    return "good" if cell in ("bitwise equal", "bit-identical") else ""


def text_of(text: str) -> str:
    """Returns text as HTML."""
    return html.escape(text)


def _with_code(text: str) -> str:
    """Returns text as HTML; what stands between backticks is code."""
    return "".join(
        f"<code>{text_of(piece)}</code>" if number % 2 else text_of(piece)
        for number, piece in enumerate(text.split("`"))
    )
