"""Lists lines with words that the project does not use, and the words to use instead.

    .venv/bin/python tests/plain_language.py

One thing has one name: the term that TensorFlow, Keras and PyTorch use for it. Checked are all
documents, the notebook's own text, and the code with its comments and messages.
"""

import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
_DOCUMENTS = (
    *("*.md", "docs/*.md", "docs/*.ipynb", "Makefile", "deploy/*"),
    *("examples/skill/*.md", "examples/*.yml"),
)
_CODE = (
    "main.py",
    "app",
    "models",
    "strategies",
    "lockstep",
    "frameworks",
    "benchmarks",
)
_CODE_TOO = ("examples", "docs/recording.py", "tests")
_OWN_FILES = ("tests/plain_language.py",)

# What is not written, as a regular expression → what is written instead.
WORDS = {
    r"the book('s)?\b": '"Dive into Deep Learning" (d2l)',
    r"\bwhoever\b": "anyone, or the name of the role", r"\bin silence\b": "silently",
    r"\bnobody\b|\bsomebody\b": "the name of the process, user or part",
    r"\bwitness(es)?\b": "observer (hook)", r"\bspoil(s|ed|ing)?\b": "inject a fault",
    r"\bfault lab\b": "fault injection", r"\bonlooker|\blook(s)? on\b": "observer",
    r"\bmend(s|ed|ing)?\b": "fix", r"\b(is|are|was|were) cut off\b": "is interrupted, or truncated",
    r"\bstart(s|ed|ing)? anew\b|\bbeg(an|in|ins|un) anew\b": "start from scratch",
    r"\bmade? anew\b|\bmakes? \w+ anew\b": "write again",
    r"\bgoes on\b|\bgo on\b|\bwent on\b|\bgoing on\b": "resumes, continues, or is running",
    r"\bgoes back\b|\bgo back\b": "rolls back",
    r"\bheld against\b|\bheld up\b": "compared with, delayed", r"\bfalse step\b": "first mismatch",
    r"\bthe same bits\b": "bitwise identical", r"\banother rate\b": "a different learning rate",
    r"\bstraggler time\b": "straggler", r"\bset(s)? aside\b": "quarantine",
    r"\btold of\b": "reported, or known",
    r"\bwants an explanation\b": "should be bitwise identical",
    r"\b(gradients|weights|sums) (are|is) exchanged\b": "all-reduced",
    r"\bexchange dtype\b": "communication dtype",
    r"\bsum_on_one\b|\ball_to_all\b|\bbucket_mb\b": "reduce_to_one, direct, bucket_mib",
    r"— [^;.\n]*\b(is|are) required;": "what is wrong; what to do",
    r"\bhas to be\b|\bhave to be\b": "must be", r"\bgot into it\b": "contains",
}  # fmt: skip
# File → words that are part of what it shows: a name that a record or another program has.
ALLOWED: dict[str, tuple[str, ...]] = {
    "tests/cli/test_doctor.py": ("nobody",),  # No user of that name.
}

_RULES = [(re.compile(pattern, re.IGNORECASE), use) for pattern, use in WORDS.items()]


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields line number, the word found, and what to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, use in _RULES:
            if match := pattern.search(line):
                yield number, match.group(), use


def files(root: pathlib.Path = ROOT) -> Iterator[pathlib.Path]:
    """Yields all files that people read."""
    for pattern in _DOCUMENTS:
        yield from sorted(path for path in root.glob(pattern) if path.is_file())
    for name in (*_CODE, *_CODE_TOO):
        path = root / name
        found = [path] if path.is_file() else sorted(path.rglob("*.py"))
        yield from (each for each in found if each.relative_to(root).as_posix() not in _OWN_FILES)


def text_of(path: pathlib.Path) -> str:
    """Returns what a file says; of a notebook its cells, without their outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "".join("".join(cell["source"]) + "\n" for cell in json.loads(text)["cells"])
    return text


def check(paths: Iterable[pathlib.Path], root: pathlib.Path = ROOT) -> list[str]:
    """Returns a line for each finding: file, line, word, what to write instead."""
    lines = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        allowed = ALLOWED.get(name, ())
        lines += [
            f"{name}:{number}: {word!r}; write: {use}"
            for number, word, use in findings(text_of(path))
            if word not in allowed
        ]
    return lines


if __name__ == "__main__":
    found = check(files())
    print("\n".join(found) or "no findings")
    sys.exit(bool(found))
