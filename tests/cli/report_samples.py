"""Records for tests of reports, without training, and what a page has."""

import dataclasses
import re
from xml.etree import ElementTree

from app.options import Config
from app.records.files import write_json
from app.records.history import summarize, write_history
from app.records.run_directory import HEADER
from tests.training.test_checkpoint import RUN_METADATA, make_history

GPUS = ["/device:GPU:0", "/device:GPU:1"]


class Page:
    """What a page has; raises where a tag is not closed as it was opened."""

    def __init__(self, path):
        closed = re.sub("<((?:meta|link|img) [^>]*)>", r"<\1/>", path.read_text("utf-8"))
        self.root = ElementTree.fromstring(closed)
        self.text = [*self.root.itertext()]
        self.tags = [element.tag for element in self.root.iter()]
        self.rows = [["".join(cell.itertext()) for cell in row] for row in self.root.iter("tr")]

    def row(self, name):
        return next(row for row in self.rows if row[0] == name)

    def paragraphs(self, name=""):
        found = [each for each in self.root.iter("p") if name in f" {each.get('class')}".split(" ")]
        return ["".join(each.itertext()) for each in found]


def write_config(path, command="train", **more):
    path.mkdir(parents=True, exist_ok=True)
    config = Config.of(command).result_fields()
    write_json(path / "config.json", {**HEADER, **config, "command": command, **more})


def write_training(path, *, num_epochs=4, config=None, **changes):
    """Writes the files of `train`; returns its summary."""
    config = {**RUN_METADATA.config, "strategy": "manual", **(config or {})}
    honest = {"dataset": "fashion_mnist", "simulated_devices": False, "devices": GPUS}
    metadata = dataclasses.replace(RUN_METADATA, **{**honest, "config": config, **changes})
    epochs = make_history(num_epochs)
    write_config(path, strategy=config["strategy"])
    write_history(path, metadata, epochs, lambda runs, out_dir: None)
    return summarize(metadata, epochs)
