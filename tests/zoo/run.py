"""Runs every case of the zoo, and its corrected twin, and says what the comparison finds.

    python tests/zoo/run.py [name ...] [--verbose]

A case is a file beside this one that rebuilds a publicly reported bug of data-parallel training in
Keras. It is trained under `MirroredStrategy` on logical CPU devices and compared with one device;
the search does not know what the file says is to be found. Exits with 1 if a bug is not found at
its stage with its cause, if anything else is found, or if a twin is not clean.

A case has `model()`, `data(global_batch_size)` and, where the bug is in the input pipeline,
`distribute(strategy, global_batch_size)`, which returns what `fit` is given under the strategy in
place of the data. Where the bug is in the evaluation, it has `evaluation_data(global_batch_size)`
and `distribute_evaluation(strategy, global_batch_size)`. Of the twin, it has what differs, under
names that begin with `corrected_`. The constants `BUG`, `LINK`, `STAGE` and `CAUSE`, and where it
matters `STATUS`, `STEPS`, `REPLICAS`, `TENSORS` and `ALSO`, say what is to be found.
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import sys
import traceback
import types
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FOLDER = pathlib.Path(__file__).resolve().parent
for _folder in (FOLDER, FOLDER.parents[1] / "recorders"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import keras
import tensorflow as tf

from keras_comparison import FAULT, Finding
from lockstep_keras import Recorder, compare, compare_evaluation

NO_CASES = ("optimizers", "run", "small")
GLOBAL_BATCH_SIZE = 12
MAX_STEPS = 6
MAX_REPLICAS = 3


def case_names() -> list[str]:
    """Returns the names of the files that are cases."""
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    return [name for name in names if name not in NO_CASES]


def load_case(name: str) -> types.ModuleType:
    """Imports a case by the name of its file."""
    spec = importlib.util.spec_from_file_location(f"zoo_{name}", FOLDER / f"{name}.py")
    case = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case)
    return case


def search(case: types.ModuleType, *, corrected: bool) -> list[Finding]:
    """Trains a case under a strategy, and returns what is not as on one device.

    Args:
        case: of which only the functions and the number of replicas are used.
        corrected: take the twin's functions, where it has them.
    """

    def of_case(name: str) -> Any:
        own = getattr(case, name, None)
        return getattr(case, f"corrected_{name}", own) if corrected else own

    keras.utils.set_random_seed(1)
    num_replicas = getattr(case, "NUM_REPLICAS", 2)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        # Collectives keep the group of devices of the first strategy of a process.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    assert strategy.num_replicas_in_sync == num_replicas
    with strategy.scope():
        model = of_case("model")()
    data, distribute = of_case("data"), of_case("distribute")
    batches = list(data(GLOBAL_BATCH_SIZE).as_numpy_iterator())
    given = distribute(strategy, GLOBAL_BATCH_SIZE) if distribute else data(GLOBAL_BATCH_SIZE)
    with Recorder(model, steps=MAX_STEPS) as record:
        model.fit(given, verbose=0)
    one_device = of_case("model")()
    found = compare(record, one_device, batches=batches).findings
    if evaluation_data := of_case("evaluation_data"):
        dataset, distribute = evaluation_data(GLOBAL_BATCH_SIZE), of_case("distribute_evaluation")
        given = distribute(strategy, GLOBAL_BATCH_SIZE) if distribute else dataset
        logs = model.evaluate(given, verbose=0, return_dict=True)
        states = [record.steps[-1]["after", replica] for replica in range(num_replicas)]
        found = [*found, *compare_evaluation(logs, one_device, states, dataset)]
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """What came out for one case.

    Attributes:
        name: of the file.
        bug: the thread, and its link.
        found: what was found in the case.
        twin: what was found in its twin.
        problems: why the case fails, empty if it does not.
    """

    name: str
    bug: str
    link: str
    found: list[Finding]
    twin: list[Finding]
    problems: list[str]


def examine(name: str) -> Row:
    """Searches a case and its twin, then looks at what the case says is to be found."""
    case = load_case(name)
    found = search(case, corrected=False)
    twin = search(case, corrected=True)
    problems = [f"twin: {_short(finding)}" for finding in twin]
    named = [f for f in found if _where(f) == (case.STAGE, case.CAUSE, _status(case))]
    also = [f for f in found if f not in named and _where(f) not in getattr(case, "ALSO", ())]
    problems += [f"also: {_short(finding)}" for finding in also]
    if not named:
        problems.insert(0, f"not found: {case.STAGE}/{case.CAUSE}")
    for finding in named:
        problems += _wrong_details(case, finding)
    return Row(name, case.BUG, case.LINK, found, twin, problems)


def _examine_or_explain(name: str) -> Row:
    """Examines a case; where that raises, the row says so, and the others continue."""
    try:
        return examine(name)
    except Exception as error:
        case = load_case(name)
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        text += f" ({pathlib.Path(where.filename).name}:{where.lineno})"
        return Row(name, case.BUG, case.LINK, [], [], [text])


def _wrong_details(case: types.ModuleType, finding: Finding) -> list[str]:
    problems = []
    for constant, actual in (("STEPS", finding.steps), ("REPLICAS", finding.replicas)):
        if actual != getattr(case, constant, actual):
            problems.append(f"{constant.lower()} {actual}, not {getattr(case, constant)}")
    part = getattr(case, "TENSORS", "")
    if part and not (finding.tensors and all(part in path for path in finding.tensors)):
        problems.append(f"tensors {finding.tensors}, not those of {part}")
    return problems


def _status(case: types.ModuleType) -> str:
    return getattr(case, "STATUS", FAULT)


def _where(finding: Finding) -> tuple[str, str, str]:
    return finding.stage, finding.cause, finding.status


def _short(finding: Finding) -> str:
    return f"{finding.stage}/{finding.cause} ({finding.status})"


def _print_row(row: Row, verbose: bool) -> None:
    found = ", ".join(_short(finding) for finding in row.found) or "nothing"
    twin = ", ".join(_short(finding) for finding in row.twin) or "clean"
    print(f"{'FAILED' if row.problems else 'ok':<7}{row.bug:<32} {found}; twin: {twin}")
    print(f"       {row.name + '.py':<32} {row.link}")
    for problem in row.problems:
        print(f"       {problem}")
    if verbose:
        for finding in [*row.found, *row.twin]:
            print("       " + str(finding).replace("\n", "\n       "))
    sys.stdout.flush()


def main() -> int:
    """Prints a line for each case; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; all of them by default")
    parser.add_argument("--verbose", action="store_true", help="print findings in full")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(case_names())):
        parser.error(
            f"no case is named {', '.join(unknown)}; take some of {', '.join(case_names())}"
        )
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * MAX_REPLICAS,
    )
    tf.get_logger().setLevel("ERROR")  # Each case traces another step, on purpose.
    warnings.filterwarnings("ignore", category=UserWarning, module="keras")
    rows = []
    for name in arguments.names or case_names():
        rows.append(_examine_or_explain(name))
        _print_row(rows[-1], arguments.verbose)
    failed = [row.name for row in rows if row.problems]
    clean = sum(not row.twin for row in rows)
    print(
        f"{len(rows) - len(failed)} of {len(rows)} bugs found at their stage and named,"
        f" {clean} of {len(rows)} twins clean"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
