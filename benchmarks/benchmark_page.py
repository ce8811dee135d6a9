"""Renders the results of `run.py` as Markdown: a summary, and a table per part."""

from collections.abc import Iterator
from typing import Any

from app.performance import interval
from programs import FOLDER

FIGURE = "benchmarks.png"


def render(results: dict[str, Any]) -> str:
    """Returns the results as Markdown.

    Args:
        results: "date", "processor", "cores", "versions"; "parts", name → measurements.
    """
    parts = results["parts"]
    lines = [
        (FOLDER / "preamble.md").read_text(encoding="utf-8"),
        f"{results['date']}, {results['processor']}, {results['cores']} cores, no GPU;"
        f" {', '.join(f'{name} {version}' for name, version in results['versions'].items())}.",
        "",
    ]
    lines += [f"![images per second of each program]({FIGURE})", ""]
    lines += ["## Summary", "", *summary(results), ""]
    for part in parts.values():
        lines += [f"## {part['title']}", "", *_render_part(part), ""]
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> list[str]:
    """Returns a table of this project against each peer's best, and the other ratios."""
    lines = [
        "| model | time of an image of | over that of | ratio | 95 % interval |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part in results["parts"].values():
        for name, base in [*_against_best(part), *part["ratios"]]:
            a, b = (part["programs"][each]["secs"] for each in (name, base))
            found = interval.ratio(a, b)
            lines.append(
                f"| {part['model']} | {name} | {base} | {found.value:.3f} |"
                f" {found.low:.3f}–{found.high:.3f} |"
            )
    return lines


def _against_best(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields `manual` in a precision and the fastest program of each peer.

    For bfloat16, the peer's fastest program in any precision is used: bfloat16 may be slower there.
    """
    programs = part["programs"]
    for name, result in programs.items():
        if not name.startswith("manual × 2"):
            continue
        for peer in dict.fromkeys(r["peer"] for r in programs.values() if r["peer"]):
            precisions = {"float32", result["precision"]}
            candidates = [
                other
                for other, r in programs.items()
                if r["peer"] == peer and r["precision"] in precisions
            ]
            yield name, min(candidates, key=lambda n: interval.median(programs[n]["secs"]).value)


def _render_part(part: dict[str, Any]) -> list[str]:
    programs = part["programs"]
    tested = any("accuracy" in result for result in programs.values())
    lines = [
        "| program | images/s | 95 % interval |" + (" sec/epoch | accuracy |" if tested else ""),
        "| --- | --- | --- |" + (" --- | --- |" if tested else ""),
    ]
    for name, result in programs.items():
        rate = interval.combine(lambda sec: 1 / sec, result["secs"])
        line = f"| {name} | {rate.value:,.1f} | {rate.low:,.1f}–{rate.high:,.1f} |"
        if tested:
            epoch_sec = interval.median(result["secs"]).value * result["images"][0]
            line += f" {epoch_sec:.2f} | {result['accuracy']:.4f} |"
        lines.append(line)
    return lines
