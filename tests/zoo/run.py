"""Runs every case of the zoo, and its corrected twin, and says what the comparison finds.

    python tests/zoo/run.py [name ...] [--verbose]

A case rebuilds a publicly reported bug of data-parallel training in Keras. It is trained under
`MirroredStrategy` on logical CPU devices and compared with one device; the search does not know
what is to be found. Exits with 1 if a bug is not found at its stage with its cause, if anything
else is found, or if a twin is not clean.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
FOLDER = pathlib.Path(__file__).resolve().parent
for _folder in (FOLDER, FOLDER.parents[1]):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import data_and_layers
import keras
import losses_and_updates
import tensorflow as tf
from small import Case, Program

import lockstep
from app.verification.case_training import compare_evaluation
from lockstep.record_keras import Recorder
from lockstep.trace_file import from_parts
from lockstep.verdict import Finding

CASES = losses_and_updates.CASES | data_and_layers.CASES
MAX_STEPS, MAX_REPLICAS = 6, 3


def search(program: Program, num_replicas: int) -> Sequence[Finding]:
    """Trains a program under a strategy, and returns what is not as on one device."""
    keras.utils.set_random_seed(1)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        # Collectives keep the group of devices of the first strategy of a process.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    assert strategy.num_replicas_in_sync == num_replicas
    with strategy.scope():
        model = program.model()
    batches = list(program.data().as_numpy_iterator())
    given = program.distribute(strategy) if program.distribute else program.data()
    with Recorder(model, steps=MAX_STEPS) as record:
        model.fit(given, verbose=0)
    one_device, trace = program.model(), from_parts(record.about, record.arrays)
    found = lockstep.compare(trace, model=one_device, batches=batches).findings
    if program.evaluation_data:
        dataset, distribute = program.evaluation_data(), program.distribute_evaluation
        given = distribute(strategy) if distribute else dataset
        logs = model.evaluate(given, verbose=0, return_dict=True)
        last = len(trace.steps) - 1
        states = [trace.arrays(last, "after", replica) or [] for replica in trace.copies]
        found = *found, *compare_evaluation(logs, one_device, states, dataset)
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found in a case and in its twin, and why the case fails, if it does."""

    name: str
    found: Sequence[Finding]
    twin: Sequence[Finding]
    problems: list[str]


def examine(name: str) -> Row:
    """Searches a case and its twin; where that raises, the row says so."""
    case = CASES[name]
    try:
        found, twin = (search(p, case.num_replicas) for p in (case.wrong, case.right))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Row(name, [], [], [f"{text} ({pathlib.Path(where.filename).name}:{where.lineno})"])
    return Row(name, found, twin, [*problems(case, found), *(f"twin: {_short(f)}" for f in twin)])


def problems(case: Case, found: Sequence[Finding]) -> list[str]:
    """Returns what differs from what the case says is to be found."""
    named = [f for f in found if _where(f) == (case.stage, case.cause, case.status)]
    also = [f for f in found if f not in named and _where(f) not in case.also]
    wrong = [] if named else [f"not found: {case.stage}/{case.cause}"]
    wrong += [f"also: {_short(finding)}" for finding in also]
    for finding in named:
        if case.steps not in (None, finding.steps):
            wrong.append(f"steps {finding.steps}, not {case.steps}")
        if case.items not in (None, finding.items):
            wrong.append(f"{finding.items}, not {case.items}")
        if not all(case.tensors in tensor for tensor in finding.tensors or [""]):
            wrong.append(f"tensors {finding.tensors}, not those of {case.tensors}")
    return wrong


def _where(finding: Finding) -> tuple[str, str, str]:
    return finding.stage, finding.cause, finding.status


def _short(finding: Finding) -> str:
    return f"{finding.stage}/{finding.cause} ({finding.status})"


def _print_row(row: Row, verbose: bool) -> None:
    case = CASES[row.name]
    found = ", ".join(_short(finding) for finding in row.found) or "nothing"
    twin = ", ".join(_short(finding) for finding in row.twin) or "clean"
    print(f"{'FAILED' if row.problems else 'ok':<7}{case.bug:<32} {found}; twin: {twin}")
    print(f"       {row.name:<32} {case.link}")
    for problem in row.problems:
        print(f"       {problem}")
    if verbose:
        for finding in [*row.found, *row.twin]:
            print(f"       {finding.text}")
    sys.stdout.flush()


def main() -> int:
    """Prints a line for each case; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; all of them by default")
    parser.add_argument("--verbose", action="store_true", help="print findings in full")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(CASES)):
        parser.error(f"no case is named {', '.join(unknown)}; take some of {', '.join(CASES)}")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * MAX_REPLICAS,
    )
    tf.get_logger().setLevel("ERROR")  # Each case traces another step, on purpose.
    warnings.filterwarnings("ignore", category=UserWarning, module="keras")
    rows = []
    for name in arguments.names or CASES:
        rows.append(examine(name))
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
