"""The models by name; a new one is a file here and a line in `MODELS`."""

from models.lenet import build_lenet
from models.resnet import build_resnet18

MODELS = {"lenet": build_lenet, "resnet18": build_resnet18}
