"""Updates by the reference's rule with something changed, and averages of weights: evidence."""

from collections.abc import Iterator

import numpy as np

from lockstep.data.trace import STATE, WEIGHT
from lockstep.engine.averages import FITS
from lockstep.engine.look import Finding, Look
from lockstep.engine.pair import OF_MIXED
from lockstep.engine.solve import CLOSE, solve
from lockstep.numeric.arrays import Named, dense, norm, same_bits
from lockstep.numeric.sampling import without_sums


def changed_rules(finding: Finding, look: Look) -> dict[str, str]:
    """Returns name → reason of what makes the rule's update that of the training."""
    return {name: text for name, text, new in _candidates(look) if _fits(finding, look, new)}


def _candidates(look: Look) -> Iterator[tuple[str, str, Named]]:
    """Yields name, reason and the variables after an update, by the names of the reference."""
    pair, oracle = look.pair, look.pair.oracle
    if oracle is None:
        return
    before, used = pair.reference.starts[0], pair.reference.applied(0)
    once = oracle.update(before, used)
    if pair.follows_rule is False:
        return
    yield "updated_twice", "the update is made twice", oracle.update(once, used)
    stateless = {n: a for n, a in before.items() if pair.reference.trace.kinds[n] != STATE}
    yield "state_lost", "the update starts from no state", oracle.update(stateless, used)
    if any(rule.mixes_elements for rule in oracle.rules.values()):
        num = pair.num_ranks
        for axis in (0, 1):
            text = f"the update is computed from {num} parts, each as a matrix of its own"
            yield "updated_from_a_part", text, oracle.update(before, used, parts=num, axis=axis)


def _fits(finding: Finding, look: Look, new: Named) -> bool:
    """Returns whether the wrong weights have a predicted value, and it is not the right one."""
    num = 0
    for change in finding.seen.get("changes", ()):
        variable, (first, copies) = change.variable, look.pair.states(change.variable)
        own = copies[change.copy]
        if variable.kind != WEIGHT or first is None or own is None or variable.first not in new:
            continue
        # Of samples, the rule computes the elements alone.
        num_sums = look.pair.reference.trace.num_sums(np.shape(first.new))
        got, wanted = (
            without_sums(x, num_sums)
            for x in (variable.as_first(own.new), dense(new[variable.first]))
        )
        far = norm(got - wanted) if got.shape == wanted.shape else np.inf
        rule = look.pair.rule(variable.weight)
        loose = OF_MIXED if rule is not None and rule.mixes_elements else CLOSE
        if far > loose * norm(got - without_sums(dense(first.new), num_sums)):
            return False
        num += 1
    return num > 0


def other_average(finding: Finding, look: Look) -> str:
    """Says how averages of weights differ: X' = k·X + (1 − k)·W' in the reference."""
    text = ""
    for change in finding.seen.get("changes", ()):
        variable, (first, copies) = change.variable, look.pair.states(change.variable)
        own, average = copies[change.copy], look.averages.of(variable.first)
        if first is None or own is None or average is None:
            return ""
        kept = average.kept.get(look.pair.number)
        source = look.pair.state(average.source)
        if kept is None or source is None or not np.any(dense(own.old)):
            continue
        old, new = variable.as_first(own.old), variable.as_first(own.new)
        starts_there = norm(old - dense(source.old)) <= FITS * norm(old)
        if same_bits(*own):
            if not starts_there:
                return ""
            text = "it takes the weights before the update, which it has"
            continue
        terms = [{"": old}, {"": dense(source.new)}]
        terms += [] if starts_there else [{"": dense(source.old)}]
        factors, known = solve({"": new}, terms, [""])
        value = sum(f * t[""] for f, t in zip(factors, terms, strict=True))
        if not known.all() or norm(new - value) > FITS * norm(new):
            return ""
        shown = [f"{f:.4g}·{x}" for f, x in zip(factors, ("X", "W'", "W"), strict=False)]
        text = f"X' = {' + '.join(shown)}, in the reference {kept:.4g}·X + {1 - kept:.4g}·W'"
    return text
