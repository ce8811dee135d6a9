"""Renders the results of `run.py` as `docs/BENCHMARKS.md`."""

from typing import Any

from app.performance import interval
from programs import FOLDER

LENET_STEPS = 235  # An epoch of 60,000 in batches of 256, the last one short.
RESNET_STEPS = 6
TITLES = {
    "lenet": f"LeNet, batch 256: blocks of an epoch ({LENET_STEPS} steps)",
    "lenet_split": (
        "LeNet, batch 256, recipe `fast`: ways to split a training in PyTorch (blocks of an epoch)"
    ),
    "lenet_keras": "LeNet, batch 256, and Keras `fit` under MirroredStrategy",
    "resnet18": f"ResNet-18, batch 64: blocks of {RESNET_STEPS} steps",
    "resnet18_keras": "ResNet-18, batch 64, and Keras `fit` under MirroredStrategy",
}
TARGET_ACCURACY = 0.84
LONG_STEPS = 10_000
PARTS = (*TITLES, "accuracy", "memory")


def render(results: dict[str, Any]) -> str:
    """Returns the results as Markdown tables."""
    lines = [
        (FOLDER / "preamble.md").read_text(encoding="utf-8"),
        f"{results['date']}, {results['processor']}, {results['cores']} cores, no GPU;"
        f" {', '.join(f'{name} {version}' for name, version in results['versions'].items())}.",
        "",
    ]
    for part, title in TITLES.items():
        if part in results:
            lines += [f"## {title}", "", *_render_part(results[part]), ""]
    if "accuracy" in results:
        lines += [f"## Time to a test accuracy of {TARGET_ACCURACY}, LeNet", ""]
        lines += ["| | seconds | epochs | reached |", "| --- | --- | --- | --- |"]
        for name, runs in results["accuracy"].items():
            secs = ", ".join(f"{run['sec']:.1f}" for run in runs)
            last = runs[-1]
            lines.append(f"| {name} | {secs} | {last['epochs']} | {last['accuracy']:.4f} |")
        lines.append("")
    if "memory" in results:
        grown = results["memory"]["after_bytes"] - results["memory"]["before_bytes"]
        lines += [
            "## Memory", "",
            f"{LONG_STEPS:,} steps of LeNet, manual × 2: resident memory grew by"
            f" {grown / 2**20:.1f} MiB, from {results['memory']['before_bytes'] / 2**20:,.0f} MiB.",
            "",
        ]  # fmt: skip
    return "\n".join(lines)


def is_complete(results: dict[str, Any]) -> bool:
    """Tells whether every part of the page has been measured."""
    return all(part in results for part in PARTS)


def _render_part(part: dict[str, Any]) -> list[str]:
    programs = part["programs"]
    tested = any("accuracy" in result for result in programs.values())
    lines = [
        "| program | images/s | 95 % interval | of the peak |" + " sec/epoch | accuracy |" * tested,
        "| --- | --- | --- | --- |" + " --- | --- |" * tested,
    ]
    for name, result in programs.items():
        if name.startswith("peak"):
            continue
        rate = interval.combine(lambda sec: 1 / sec, result["secs"])
        peak = "peak, bfloat16" if "bfloat16" in name else "peak, float32"
        share = "–"
        if peak in programs and "flops_per_example" in result:
            share = interval.combine(
                lambda ours, limit, flops=result["flops_per_example"]: flops * limit / ours,
                result["secs"],
                programs[peak]["secs"],
            )
            share = f"{share.value:.2f} ({share.low:.2f}–{share.high:.2f})"
        line = f"| {name} | {rate.value:,.1f} | {rate.low:,.1f}–{rate.high:,.1f} | {share} |"
        if tested:
            epoch_sec = interval.median(result["secs"]).value * result["images"][0]
            line += f" {epoch_sec:.2f} | {result['accuracy']:.4f} |"
        lines.append(line)
    lines += [
        "",
        "| time of an image | over | ratio | 95 % interval |",
        "| --- | --- | --- | --- |",
    ]
    for ratio in part["ratios"]:
        a, b = (programs[ratio[key]]["secs"] for key in ("program", "base"))
        found = interval.ratio(a, b)
        lines.append(
            f"| {ratio['program']} | {ratio['base']} | {found.value:.3f} |"
            f" {found.low:.3f}–{found.high:.3f} |"
        )
    for name, result in programs.items():
        if name.startswith("peak"):
            rate = 1 / interval.median(result["secs"]).value / 1e9
            lines += ["", f"{name.capitalize()}: matrix products at {rate:,.0f} GFLOP/s."]
    return lines
