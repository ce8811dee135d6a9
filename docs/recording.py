"""Writes `docs/recording.svg`, the animated terminal recording of the README: `make recording`.

Each command is run, and the lines that it prints are shown as they are, in less time: the time that
the command took is written below them.
"""

import argparse
import dataclasses
import html
import pathlib
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "recording.svg"
_COLUMNS, _ROWS = 116, 19
_CHARACTER_WIDTH, _LINE_HEIGHT, _MARGIN = 7.85, 18, 16
_TYPING_SEC, _SEC_BETWEEN_LINES, _PAUSE_SEC = 1.2, 0.18, 4.5
_PROGRAM = ".venv/bin/python main.py"
_SCENES = (
    "--recipe=fast --epochs=1",
    "verify --strategies=manual,mirrored --steps=5",
    "verify --strategies=manual --steps=5 --inject=drop_gradient:replica=1",
)
_STYLE = """
  svg {
    --ground: #f6f8fa; --text: #1b1f24; --strong: #000; --quiet: #57606a;
    --good: #0a6b4d; --bad: #a83a00;
  }
  @media (prefers-color-scheme: dark) {
    svg {
      --ground: #14171b; --text: #d7dde4; --strong: #fff; --quiet: #8b98a5;
      --good: #5fd0aa; --bad: #ff9a62;
    }
  }
  rect { fill: var(--ground); stroke: var(--quiet); }
  text { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
  text { white-space: pre; }
  .line { fill: var(--text); opacity: 0; animation: TOTALs linear START infinite; }
  .command { fill: var(--strong); font-weight: bold; } .quiet { fill: var(--quiet); }
  .good { fill: var(--good); } .bad { fill: var(--bad); }
  @media (prefers-reduced-motion: reduce) {
    .line { animation: none !important; } .last { opacity: 1; }
  }
"""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the terminal.

    Attributes:
        text: at most as long as the terminal is wide.
        kind: "command", "good", "bad", "quiet" or "".
    """

    text: str
    kind: str = ""


def record(words: str, out: pathlib.Path) -> list[Line]:
    """Runs a command of the program; returns its lines, cut to what the terminal can show.

    Raises:
        subprocess.CalledProcessError: the command failed other than by a mismatch it should find.
    """
    command = [sys.executable, str(ROOT / "main.py"), *shlex.split(words), f"--out={out}"]
    start = time.monotonic()
    result = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    sec = time.monotonic() - start
    expected = 9 if "--inject" in words else 0
    if result.returncode != expected:
        raise subprocess.CalledProcessError(result.returncode, command, result.stdout)
    if "GENERATED images" in result.stdout:
        sys.exit("error: Fashion-MNIST was not found; set FASHION_MNIST_DIR")
    printed = result.stdout.replace(str(out), "runs/…")
    lines = [
        Line(part, _kind(line))
        for line in printed.splitlines()
        for part in textwrap.wrap(line, _COLUMNS, subsequent_indent="  ", drop_whitespace=False)
        or [""]
    ]
    ending = f"# exit code {result.returncode} after {sec:.0f} s on two shared CPU cores"
    return [*_shortened(lines, _ROWS - 3), Line(""), Line(ending, "quiet")]


def _kind(line: str) -> str:
    if line.startswith("test acc") or "is the training on one device" in line:
        return "good"
    bad = ("WARNING", "error", "  where", "  why")
    return "bad" if line.startswith(bad) or "is not the training" in line else ""


def _shortened(lines: Sequence[Line], most: int) -> list[Line]:
    """Returns the first lines and the last two, with a mark where lines are left out."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 3], Line("…", "quiet"), *lines[-2:]]


def render(scenes: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """Returns the animated SVG: one scene after another, each on an empty screen.

    Args:
        scenes: the command of each scene, and the lines that it printed.
    """
    starts, total = [], 0.0
    for _, lines in scenes:
        starts.append(total)
        total += _TYPING_SEC + _SEC_BETWEEN_LINES * len(lines) + _PAUSE_SEC
    texts, frames = [], []
    for number, ((command, lines), start) in enumerate(zip(scenes, starts, strict=True)):
        end = starts[number + 1] if number + 1 < len(scenes) else total
        shown = [Line(f"$ {command}", "command"), *lines]
        for row, line in enumerate(shown):
            delay = 0.2 if row == 0 else _TYPING_SEC + _SEC_BETWEEN_LINES * row
            name = f"l{number}-{row}"
            first, last = 100 * (start + delay) / total, 100 * end / total
            frames.append(
                f"  @keyframes {name} {{ 0%, {first - 0.01:.2f}% {{ opacity: 0; }}"
                f" {first:.2f}%, {last - 0.02:.2f}% {{ opacity: 1; }}"
                f" {last - 0.01:.2f}%, 100% {{ opacity: 0; }} }}"
            )
            is_last = " last" if number == len(scenes) - 1 else ""
            y = _MARGIN + _LINE_HEIGHT * (row + 1)
            texts.append(
                f'<text class="line {line.kind}{is_last}" style="animation-name: {name}"'
                f' x="{_MARGIN}" y="{y}">{html.escape(line.text)}</text>'
            )
    width = round(_COLUMNS * _CHARACTER_WIDTH + 2 * _MARGIN)
    height = _LINE_HEIGHT * (_ROWS + 1) + 2 * _MARGIN
    # It starts near its end: the first picture is the last scene, not an empty terminal.
    style = _STYLE.replace("TOTAL", f"{total:.1f}").replace("START", f"{2 - total:.1f}s")
    style += "\n".join(frames)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">',
            "<title>A terminal with three commands</title>",
            "<desc>A training reaches an accuracy of 0.87. A verification of five steps passes."
            " Another one, with an injected fault, names a lost replica.</desc>",
            f"<style>{style}\n</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Records all scenes and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=FILE, help="file to write")
    arguments = parser.parse_args()
    scenes = []
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(_SCENES):
            print(f"running {words}", flush=True)
            lines = record(words, pathlib.Path(folder) / f"run-{number}")
            scenes.append((f"{_PROGRAM} {words}", lines))
    arguments.out.write_text(render(scenes), encoding="utf-8")


if __name__ == "__main__":
    main()
