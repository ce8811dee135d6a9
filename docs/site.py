"""What mkdocs adds to the pages of `docs/`: pages of the root, and files that pages name.

Pages link to files of the repository, as in `../strategies/manual.py`. In the site, such a link
leads to a page that shows the file, so that no link leaves the site unless it is a web address.
"""

import pathlib
import posixpath
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
OF_ROOT = ("BUILD.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(\]\(|(?:href|src)=\")(?!https?:|mailto:|#|data:)([^)\"#\s]+)((?:#[^)\"\s]*)?)")
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".md": "markdown"}
API = {
    "Record": [
        "record",
        "record_torch.record",
        "record_keras.record",
        "record_jax.record",
        "note",
    ],
    "Verify": ["compare", "assert_same_training"],
    "Verdict": ["Verdict", "Place", "Measured", "TraceError"],
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here."""
    texts = {"index.md": (ROOT / "README.md").read_text("utf-8")}
    texts |= {name: (ROOT / name).read_text("utf-8") for name in OF_ROOT}
    texts["api.md"] = "# API reference\n\n" + "\n\n".join(
        f"## {title}\n\n" + "\n\n".join(f"::: lockstep.{name}" for name in names)
        for title, names in API.items()
    )
    named = set[str]()
    for file in files.documentation_pages():
        named |= set(_files_named_in(file.content_string, "docs"))
    for name, text in texts.items():
        if name != "api.md":
            named |= set(_files_named_in(text, ""))
    texts |= {_source_page(name): _shown(name) for name in sorted(named)}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links to files of the repository lead to pages of the site."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    is_of_root = page.file.src_uri in (*OF_ROOT, "index.md")
    return LINK.sub(lambda found: _in_site(*found.groups(), "" if is_of_root else "docs"), markdown)


def _in_site(before: str, target: str, anchor: str, folder: str) -> str:
    """Returns a link of a page of a folder as that of a page at the root of the site."""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path == "README.md":
        path = "index.md"
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif path not in OF_ROOT:
        path = _source_page(path)
        path = path.removesuffix(".md") + ".html" if before != "](" else path
    return f"{before}{path}{anchor}"


def _files_named_in(text: str, folder: str) -> Iterator[str]:
    """Yields the files and folders of the repository that a page links to, but for pages."""
    for _, target, _ in LINK.findall(text):
        path = posixpath.normpath(posixpath.join(folder, target))
        if not path.startswith("docs/") and path not in (*OF_ROOT, "README.md"):
            yield path


def _source_page(path: str) -> str:
    return f"source/{path.removeprefix('.')}.md"


def _shown(path: str) -> str:
    """Returns a page that shows a file, or lists a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(
            each.name for each in place.iterdir() if not each.name.startswith(("_", "."))
        )
        text, language = "\n".join(names), ""
    else:
        text, language = place.read_text("utf-8"), LANGUAGES.get(place.suffix, "")
    return f"# {path}\n\n~~~~~~~~ {language}\n{text}\n~~~~~~~~\n"
