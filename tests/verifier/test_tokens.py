"""Log-probabilities of tokens in two programs.

A model is a matrix here: the logits behind a token are its row, and the head's product with it.
"""

import numpy as np
import pytest

from lockstep.comparison import compare_traces
from lockstep.data.trace import WEIGHT, About, Trace, Variable
from tests.verifier import shown

ROWS_OF_BATCH, LENGTH, WORDS, WIDTH = 3, 10, 12, 8
DROPOUT = {"name": "drop", "class": "Dropout", "rate": 0.1, "weights": ()}


def program(
    name, *, seed=0, temperature=1.0, shift=0, noise=0.0, computed_in="", modes=(),
    order=None, padding=0, changed=0.0, first_word=0,
):  # fmt: skip
    """Returns a recording; `changed` is added to the output of the second module."""
    random = np.random.default_rng(seed)
    table, head = random.normal(size=(WORDS, WIDTH)), random.normal(size=(WIDTH, WORDS))
    tokens = np.random.default_rng(9).integers(WORDS, size=(ROWS_OF_BATCH, LENGTH)) + first_word
    tokens = tokens % WORDS if order is None else tokens[order]
    first = table[tokens]
    second = first + changed
    logits = (second @ head + noise * np.random.default_rng(8).normal(size=(WORDS,))) / temperature
    shifted = logits - logits.max(-1, keepdims=True)
    all_of_them = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    found = np.zeros(tokens.shape)
    found[:, 1:] = np.take_along_axis(all_of_them[:, :-1], tokens[:, 1:, None], 2)[..., 0]
    found = np.roll(found, shift, 1)
    counted = np.zeros(tokens.shape, bool)
    counted[:, 3:] = True
    arrays = {"tokens": tokens, "counted": counted, "log_probs": found}
    if padding:
        pads = ((0, 0), (padding, 0))
        arrays = {kind: np.pad(array, pads) for kind, array in arrays.items()}
    else:
        arrays["logits"] = np.abs(logits[:, :-1][counted[:, 1:]]).max()
    arrays = {f"1/{kind}/0/0": array for kind, array in arrays.items()}
    arrays |= {"1/before/0/0": table.astype(np.float32), "1/before/0/1": head.astype(np.float32)}
    arrays |= {"1/module_out/0/0": first, "1/module_out/0/1": second}
    about = About(
        framework="torch", num_replicas=1, steps=(0,), computed_in=computed_in,
        variables=(Variable("table", WEIGHT), Variable("head", WEIGHT)), modules=("a", "b"),
        in_evaluation=(modes,), layers=(DROPOUT,),
    )  # fmt: skip
    return Trace(about, arrays, name)


PROGRAMS = {  # What is wrong → changes of the reference, of the other program, the place and name.
    "the same": ({}, {}, ""),
    "another order of rows": ({}, {"order": [2, 0, 1]}, ""),
    "padded on the left": ({}, {"padding": 4}, ""),
    "old weights": ({}, {"seed": 1}, "start: other_start"),
    "a temperature": ({}, {"temperature": 0.8, "padding": 1}, "outputs: other_outputs"),
    "one token beside": ({}, {"shift": 1}, "outputs: other_outputs"),
    "a mode": ({"modes": ("drop",)}, {"noise": 0.1}, "outputs: inference_mode"),
    "fewer digits": ({}, {"noise": 0.01, "computed_in": "bfloat16"}, "outputs: reduced_precision"),
    "rounding in 16 bits": ({"computed_in": "bfloat16"},
        {"noise": 0.01, "computed_in": "bfloat16"}, ""),
    "another module": ({}, {"changed": 0.1}, "outputs: other_outputs"),
}  # fmt: skip


def compared(first, second):
    traces = [program("one.npz", **first), program("two.npz", **second)]
    return compare_traces(traces, {})["two.npz"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_log_probabilities_are_the_outputs_of_a_program(name):
    first, second, found = PROGRAMS[name]
    verdict = compared(first, second)
    assert shown(verdict) == (f"fault: {found}" if found else "clean") and not verdict.error
    assert name != "another module" or verdict.place.module == "b, forward"
    assert verdict.remarks[0].startswith("batch 0: 0 of 21 tokens differ") == (not found)


def test_other_tokens_are_not_verified():
    verdict = compared({}, {"first_word": 1})
    assert shown(verdict) == "not verified"
    assert verdict.missing == ("no batch has the same tokens in both",)
