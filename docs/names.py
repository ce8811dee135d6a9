"""Writes what names mean, and what to do, into `docs/verdict.md`: `make docs`."""

import pathlib

from lockstep.answer.names import FROM, NAMES

FILE = pathlib.Path(__file__).parent / "verdict.md"
START = "<!-- `make docs` writes the rest, from lockstep/answer/names.py. -->\n"


def page() -> str:
    """Returns the page: what is written by hand, then all names and where to look without one."""
    by_hand, _, _ = FILE.read_text("utf-8").partition(START)
    lines = ["## Names", "In the order of the nodes."]
    for name, row in NAMES.items():
        also = f" It may also come from {row.also}." if row.also else ""
        lines.append(f"### {row.title[0].upper()}{row.title[1:]}")
        lines.append(f"{row.sentence}{also}\n\n**To do:** {row.remedy}. (`{name}`)")
    lines += ["## Unexplained", "Without a name, the verdict says where to look:"]
    lines.append("\n".join(f"- *{node}*: {advice}." for node, advice in FROM.items()))
    return by_hand + START + "\n" + "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(page(), "utf-8")
