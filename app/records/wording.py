"""The words for what a reader of a result must not miss, wherever it is shown."""

DATASET_TITLES = {
    "fashion_mnist": "Fashion-MNIST",
    "synthetic": "GENERATED garments",
    "unverified": "UNVERIFIED images",
}
DATASET_CAVEATS = {
    "synthetic": "GENERATED images in place of Fashion-MNIST: accuracies are not comparable",
    "unverified": "UNVERIFIED images: these are not the accuracies of Fashion-MNIST",
}
TIMING_CAVEAT = "simulated devices: timing is not scaling"


def dataset_title(name: str) -> str:
    """Returns what a data set is called in figures and pages."""
    return DATASET_TITLES.get(name, str(name))


def injected_fault_caveat(fault: str) -> str:
    """Returns what has to be said wherever a result of a spoiled training is shown."""
    return f"injected fault: {fault}. This training was spoiled on purpose"
