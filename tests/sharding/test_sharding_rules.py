"""The law of rules: for each op of the table, and placements of its inputs, what the op computes in towers, put together as its
rule claims, is what it computes of the whole batch, and so are its gradients, within the model and of its loss.
"""
import os

import pytest
import tensorflow.compat.v1 as tf

from tests.random_graphs import GRADIENTS_OF_NO_ROWS
from tests.sharding_cases import CHOSEN
from tests.sharding_inputs import combinations, differences, op_def
from tests.sharding_samples import SAMPLES
from towers.sharding.rules import RULES

CASES = int(os.environ.get("HYPOTHESIS_CASES", 2))  # combinations of placements for each op
ALL = 10 ** 6
A_GRAPH = 40  # of them in one graph
MANY = 8  # ops of one rule

# What is held elsewhere, by the modules of its rules: it has effects, belongs to control flow, or calls functions.
ELSEWHERE = frozenset(name for name, rule in RULES.items() if rule.function.__module__.rpartition(".")[2] in (
    "functions", "lists", "state", "tensor_lists"))
# Draws are each tower's own or tower 0's: no two graphs draw the same.
DRAWS = frozenset(name for name, rule in RULES.items() if rule.always) - ELSEWHERE
WITHOUT_SAMPLE = {
    "BatchMatrixBandPart": "TensorFlow has removed it",
    "CTCLossV2": "TensorFlow runs it on no CPU",
    "RefIdentity": "it hands a variable on",
    "ResourceGather": "it gathers of a variable, the same in every tower, by the rule of GatherV2",
    "ResourceGatherNd": "it gathers of a variable, the same in every tower, by the rule of GatherNd",
    "StatelessRandomUniformFullIntV2": "its rule is that of StatelessRandomUniformIntV2"}

# What the law finds a fault in: op -> which one.
NOT_HELD_YET = {}
if op_def("MatrixDiagPartV3") is None:  # TensorFlow 1.15
    NOT_HELD_YET["BroadcastGradientArgs"] = "refused: the gradient of [n, 1] times [1, m] has no rank before it is reshaped"

# Kernels that take nothing of no examples.
REFUSE_NO_EXAMPLES = frozenset(["ExtractImagePatches", "ExtractVolumePatches", "GatherNd", "MaxPool3DGradGrad", "MirrorPad"])
if op_def("MatrixDiagPartV3") is None:  # TensorFlow 1.15
    REFUSE_NO_EXAMPLES |= {"Einsum"}  # a division by zero ends the process
if not GRADIENTS_OF_NO_ROWS:
    REFUSE_NO_EXAMPLES |= {"GatherV2"}  # with batch_dims

# What TensorFlow vectorizes, and has no rule.
COMPUTED_OF_ALL = "it is deterministic, and computed of the whole batch's inputs in every tower"
REFUSED = "it keeps a state, which is refused by name"
WITHOUT_RULE = dict(dict.fromkeys("""DecodeCSV ParseExampleV2 ParseSingleExample StatelessParameterizedTruncatedNormal
StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomPoisson StringFormat XlaEinsum XlaSharding
_EagerConst""".split(), COMPUTED_OF_ALL),
                    **dict.fromkeys("StackPopV2 StackPushV2".split(), REFUSED))


def is_there(name):
    """Tells whether this TensorFlow has an op, and holds it."""
    if op_def(name) is None or op_def(name).deprecation.version or name in NOT_HELD_YET:
        return False  # it has it not yet, or no more
    return hasattr(tf.raw_ops, name) or all(sample.call is not None for sample in SAMPLES[name])  # tf.contrib has others


def _cases(name):
    """Returns triples of the op, a sample and a combination of placements, from all its samples in turn.

    By default, ops that share a rule with many others have one each, of another sample than the ops before and behind.
    """
    if not is_there(name):
        return []
    alike = sorted(each for each in SAMPLES if RULES[each].function is RULES[name].function)
    if "HYPOTHESIS_CASES" not in os.environ and len(alike) > MANY:
        turn = alike.index(name)
        sample = SAMPLES[name][turn % len(SAMPLES[name])]
        found = combinations(name, sample, ALL)
        several = [each for each in found if each.placed > 1]
        return [(name, sample, several[turn % len(several)] if turn % 2 and several else found[turn // 2 % len(found)])]
    each = [[(name, sample, found) for found in combinations(name, sample, CASES)] for sample in SAMPLES[name]]
    turns = [found[turn] for turn in range(max(map(len, each))) for found in each if turn < len(found)]
    return turns[:max(CASES, len(each))]


def _families():
    """Returns ops by the functions that are their rules, so many at a time that one graph holds what is tried of them."""
    by_rule, found = {}, {}
    for name in sorted(SAMPLES):
        function = RULES[name].function
        by_rule.setdefault("%s-%s" % (function.__module__.rpartition(".")[2], function.__name__), []).append(name)
    for family, names in by_rule.items():
        for first in range(0, len(names), 12):
            chosen = names[first:first + 12]
            found["%s-%s" % (family, chosen[0]) if len(names) > 12 else family] = chosen
    return found


FAMILIES = _families()


def _chosen():
    """Returns the cases that `tests.sharding_cases` names, of unknown sizes and of known ones; and one of each other rule."""
    found, there = {"unknown": [], "known": []}, {}
    for words, _, placements in (line.partition(": ") for line in CHOSEN):
        name, number, size = words.split()
        if is_there(name):
            sample = SAMPLES[name][int(number)]
            if (name, number) not in there:
                there[name, number] = {str(each): each for each in combinations(name, sample, ALL)}
            assert placements in there[name, number], "%s has no %s: run tools/choose_cases.py" % (words, placements)
            found[size].append((name, sample, there[name, number][placements]))
    held = {RULES[name].function for cases in found.values() for name, _, _ in cases}
    for name in sorted(SAMPLES):
        if RULES[name].function not in held and _cases(name):
            held.add(RULES[name].function)
            found["unknown"].append(_cases(name)[-1])
    return found


@pytest.mark.parametrize("size", ["unknown", "known"])
def test_chosen_cases_come_in_towers_to_the_ops_on_the_whole_batch(size):
    found, cases = [], _chosen()[size]
    for first in range(0, len(cases), A_GRAPH):
        found += differences(cases[first:first + A_GRAPH], (2, 3), size == "known")
    assert not found, "\n".join(found)


@pytest.mark.laws
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ops_in_towers_come_to_the_ops_on_the_whole_batch(family):
    cases = [case for name in FAMILIES[family] for case in _cases(name)]
    found = []
    for split, is_known, turn in (((2, 0, 3), False, 0), ((2, 3), True, 1)):
        chosen = cases[turn::2]
        if not is_known and REFUSE_NO_EXAMPLES.intersection(FAMILIES[family]):
            split = (2, 1, 3)
        for first in range(0, len(chosen), A_GRAPH):
            found += differences(chosen[first:first + A_GRAPH], split, is_known)
    assert not found, "\n".join(found)


@pytest.mark.skipif(not NOT_HELD_YET, reason="all are held")
def test_ops_not_held_yet():
    pytest.skip("; ".join("%s: %s" % each for each in sorted(NOT_HELD_YET.items())))


def test_every_rule_is_held_to_the_law():
    without = set(RULES) - set(SAMPLES) - ELSEWHERE - DRAWS
    assert without == set(WITHOUT_SAMPLE) & set(RULES), "give the rule a sample, or a reason in WITHOUT_SAMPLE"


def test_what_tensorflow_vectorizes_has_a_rule_or_a_reason_for_none():
    pfor = pytest.importorskip("tensorflow.python.ops.parallel_for.pfor")
    names = set(getattr(pfor, "_pfor_converter_registry"))
    assert names - set(RULES) <= set(WITHOUT_RULE)
    assert not set(WITHOUT_RULE) & set(RULES)
    for name in names & set(WITHOUT_RULE):
        assert op_def(name).is_stateful == (WITHOUT_RULE[name] == REFUSED), name
