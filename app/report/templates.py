"""Loads the templates of the pages."""

import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2


def create_environment() -> "jinja2.Environment":
    """Creates the environment that loads the templates of this package and escapes all values."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
