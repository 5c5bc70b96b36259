"""Chooses few cases of the law of rules that reach all lines of the rules which many cases reach, for `make test` to hold.

    python tools/choose_cases.py  # half an hour; writes tests/sharding_cases.py, once rules, or samples, have changed

Of each rule, inputs of some ops are tried in several placements, with sizes that are known and that are not, and which lines of
`towers/sharding/rules` decide for an op is noted. Of all these cases that one is taken which reaches the most lines that are
left, until none is left.
"""
import collections
import re
import sys
from pathlib import Path

import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import tests.conftest  # noqa: E402,F401  (the behaviour of TensorFlow)
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from tests import sharding_inputs  # noqa: E402
from tests.sharding.test_sharding_rules import is_there  # noqa: E402
from tests.sharding_samples import SAMPLES  # noqa: E402
from tests.support import build  # noqa: E402
from towers.sharding.plan import propagation  # noqa: E402
from towers.sharding.rules import RULES  # noqa: E402

MOST = 6  # combinations of placements for each sample
ALIKE = 5  # ops of one rule
A_GRAPH = 40
SPLIT = (2, 3)
HEAD = '''\
"""Cases of the law of rules, few, that together reach all lines of rules which many reach: `tools/choose_cases.py` chose them."""
__all__ = ["CHOSEN"]

# The type of the op, the number of its sample, whether sizes are known, and the placements of inputs.
CHOSEN = """'''


class Watch:
    """Notes for each case which lines of rules decide for its ops."""

    def __init__(self):
        self.lines, self._decide = collections.defaultdict(set), propagation.decide
        self._keys, self._called, self._made = [], sharding_inputs._called, 0
        propagation.decide, sharding_inputs._called = self._watched, self._within_its_scope

    def build(self, keys, cases, is_known):
        """Builds towers of some cases in one graph; of halves, where they can't be built."""
        self._keys, self._made, total = keys, 0, sum(SPLIT)
        model = sharding_inputs._model(cases, total, [])

        def model_fn(*batch):
            self._made = 0
            return model(*batch)
        try:
            with tf.Graph().as_default():
                parts = [tuple(tf.placeholder(value.dtype, (size if is_known else None,) + value.shape[1:])
                               for value in sharding_inputs._values(total)) for size in SPLIT]
                build(towers.whole_batch(model_fn), towers.PerTower(parts), len(SPLIT))
        except Exception:  # what one of them is refused for, others are not
            half = len(cases) // 2
            if half:
                self.build(keys[:half], cases[:half], is_known)
                self.build(keys[half:], cases[half:], is_known)
            else:
                self.lines.pop(keys[0], None)

    def _within_its_scope(self, *args):
        self._made += 1
        with tf.name_scope("case_%d_" % (self._made - 1)):
            return self._called(*args)

    def _watched(self, node):
        numbers = re.findall(r"case_(\d+)_", node.op.name)
        if not numbers:
            return self._decide(node)
        lines = self.lines[self._keys[int(numbers[-1])]]

        def note(frame, event, _):
            path = frame.f_code.co_filename
            if "/sharding/rules/" not in path:
                return None
            if event == "line":
                lines.add((path, frame.f_lineno))
            return note

        before = sys.gettrace()  # the functions of control flow 2 are decided about within a rule
        sys.settrace(note)
        try:
            return self._decide(node)
        finally:
            sys.settrace(before)


def _cases():
    """Returns pairs of a key and a case of `tests.sharding_inputs.differences`."""
    found, of_rule = [], collections.Counter()
    for name in filter(is_there, sorted(SAMPLES)):
        of_rule[RULES[name].function] += 1
        if of_rule[RULES[name].function] <= ALIKE:
            found += [((name, number, str(combination)), (name, sample, combination))
                      for number, sample in enumerate(SAMPLES[name])
                      for combination in sharding_inputs.combinations(name, sample, MOST)]
    return found


def main():
    """Writes the file of the cases that are chosen."""
    watch, cases = Watch(), _cases()
    for first in tqdm.tqdm(range(0, len(cases), A_GRAPH), unit="graph"):
        keys, chosen = zip(*cases[first:first + A_GRAPH])
        for size in ("known", "unknown"):
            watch.build([key + (size,) for key in keys], list(chosen), size == "known")
    left, found = set().union(*watch.lines.values()), []
    while left:
        size = ("known", "unknown")[len(found) % 2]
        found.append(max(watch.lines, key=lambda key: (len(watch.lines[key] & left), key[3] == size, key)))
        left -= watch.lines[found[-1]]
    lines = ["%s %d %s: %s" % (name, number, size, combination)
             for name, number, combination, size in sorted(found, key=lambda key: (key[3] == "known",) + key[:3])]
    (ROOT / "tests" / "sharding_cases.py").write_text("\n".join([HEAD] + lines + ['""".strip().split("\\n")', ""]))


if __name__ == "__main__":
    main()
