"""The models by name; a new one is a file here and a line in `MODELS`."""

MODELS = {"lenet": "models.lenet:build_lenet", "resnet18": "models.resnet:build_resnet18"}
