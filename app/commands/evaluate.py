"""`evaluate`: computes the test accuracy of a run, on any strategy and number of devices."""

from app.config import EvaluateConfig
from app.devices import device_setup
from app.records.caveats import DATASET_CAVEATS
from app.runtime import console
from app.training.run_reader import SavedRun


def run(config: EvaluateConfig) -> float:
    """Prints loss and accuracy over the whole test set and returns the accuracy, a fraction."""
    saved = SavedRun.open(config)
    prepared = device_setup.set_up(saved.config)
    dataset = saved.load_dataset()
    strategy = saved.rebuild(prepared)
    from app.training.evaluation import evaluate

    totals = evaluate(strategy, dataset)
    step = saved.checkpoint.progress.step
    console.say(
        f"{saved.config.model} of {config.run}, step {step}, on {dataset.name}:"
        f" {totals.correct:,} of {totals.examples:,} right, test loss {totals.loss:.4f}"
    )
    if dataset.name in DATASET_CAVEATS:
        console.warn(DATASET_CAVEATS[dataset.name])
    console.say(f"test acc: {totals.accuracy:.4f} with {strategy.name} on {strategy.devices}")
    return totals.accuracy
