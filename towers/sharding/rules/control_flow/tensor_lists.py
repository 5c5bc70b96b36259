"""The lists of control flow 2, which are values: TensorLists, and what is or is not there."""
import tensorflow.compat.v1 as tf

from towers.sharding.nodes import Refused, ShapeOf, Unfit
from towers.sharding.placements import BATCH, Blocks, InTurn, Listed, Own, Replicate, RowNumbers, Shard, Size, Turn, moved
from towers.sharding.rules.arithmetic import is_of_size
from towers.sharding.rules.control_flow.lists import element_written
from towers.sharding.rules.loops.in_turn import is_stack_of_rows, refuse_rows
from towers.sharding.rules.loops.turns import are_numbers, is_list_of_rows, number_of_rows, row_read
from towers.sharding.rules.movement.axes import shape_wanted
from towers.sharding.rules.table import ANY, SUMS, rule

__all__ = []

ELEMENTS = (Shard, Blocks, Listed) + SUMS


def _of_any_size(node, k):
    """Returns wants by which the shape of a new list's elements leaves open what depends on sizes of the batch, a dict."""
    placement = node.inputs[k].placement
    if isinstance(placement, (Replicate, Own)):
        return {}
    elements = node.inputs[k].elements()
    if elements is None or elements.ndim != 1:
        return node.wanted([k])
    return {k: ShapeOf(unknown=tuple(i for i, element in enumerate(elements) if is_of_size(element)))}


def _shape_of_element(node, k, element):
    """Returns wants by which a shape is that of a list's elements, a dict."""
    if isinstance(node.inputs[k].placement, Own):
        return {}
    if isinstance(element, (Shard, Blocks)) and node.inputs[k].elements() is not None and node.inputs[k].elements().ndim == 1:
        return shape_wanted(node, k, element.axis)
    return node.wanted([k])


def _element(node):
    """Returns the placement of the elements of a list that is input 0."""
    placement = node.inputs[0].placement
    element = placement.element if isinstance(placement, Listed) else None
    return Replicate() if element is None else element


@rule("EmptyTensorList TensorListReserve", (Size, Own), always=True)
def new_list(node):
    if node.context.carries_turns and node.context.counts_rows(node.inputs[1].tensor):
        return node.decide(Listed(None, BATCH), _of_any_size(node, 0))
    return node.decide(Listed(None), {**_of_any_size(node, 0), **node.wanted([1])})


@rule("TensorListFromTensor", ELEMENTS + (Size, Own, RowNumbers), always=True)
def listed(node):
    placement = node.inputs[0].placement
    if are_numbers(node.context, placement):
        return node.decide(Listed(Turn(), BATCH))
    if isinstance(placement, RowNumbers):
        return _listed_whole(node)
    if is_list_of_rows(node.context, placement) and node.op not in node.context.whole_lists:
        return node.decide(Listed(InTurn(), BATCH), node.wanted([1]))
    if isinstance(placement, (Shard, Blocks)):
        if placement.axis == 0 or node.op in node.context.whole_lists:
            return _listed_whole(node)
        placement = moved(placement, placement.axis - 1)
    elif isinstance(placement, Listed):
        raise Unfit()
    elif isinstance(placement, Size) or isinstance(placement, SUMS) and node.op in node.context.whole_lists:
        return _listed_whole(node)
    return node.decide(Listed(placement), _shape_of_element(node, 1, placement))


def _listed_whole(node):
    return node.decide(Listed(Replicate()), node.wanted([0, 1]))


@rule("TensorListScatter TensorListScatterV2", ELEMENTS + (Size, Own), always=True)
def scattered(node):
    placement, others = node.inputs[0].placement, node.wanted(k for k in (1, 3) if k < len(node.inputs))
    if isinstance(placement, (Shard, Blocks)) and placement.axis and node.op not in node.context.whole_lists:
        placement = moved(placement, placement.axis - 1)
    elif not (isinstance(placement, SUMS) and node.op not in node.context.whole_lists):
        return node.decide(Listed(Replicate()), {**others, **node.wanted([0, 2])})
    return node.decide(Listed(placement), {**others, **_shape_of_element(node, 2, placement)})


@rule("TensorListScatterIntoExistingList", ELEMENTS, always=True)
def scattered_into(node):
    placement = node.inputs[1].placement
    if isinstance(placement, (Shard, Blocks)):
        if placement.axis == 0:
            return element_written(node, 0, 1, Replicate(), node.wanted([1]))
        placement = moved(placement, placement.axis - 1)
    return element_written(node, 0, 1, placement, {})


@rule("TensorListSplit", ELEMENTS + (Size, Own), always=True)
def split(node):
    placement = node.inputs[0].placement
    if isinstance(placement, (Shard, Blocks)) and placement.axis == 0 or not isinstance(placement, (Shard, Blocks) + SUMS):
        return node.decide(Listed(Replicate()), node.wanted([0, 1, 2]))
    return node.decide(Listed(placement), {**_shape_of_element(node, 1, placement), **node.wanted([2])})


@rule("TensorListSetItem", ELEMENTS + (Own,), always=True)
def set_item(node):
    if node.op in node.context.whole_lists:
        return element_written(node, 0, 2, Replicate(), node.wanted([2]))
    return element_written(node, 0, 2, node.inputs[2].placement, {})


@rule("TensorListPushBack", ELEMENTS + (Own,), always=True)
def push(node):
    if node.op in node.context.whole_lists:
        return element_written(node, 0, 1, Replicate(), node.wanted([1]))
    return element_written(node, 0, 1, node.inputs[1].placement, {})


@rule("TensorListGetItem", (Listed, Size, Own), always=True)
def item(node):
    element = _element(node)
    row_read(node, 0)
    return node.decide(element, {**_shape_of_element(node, 2, element), **node.wanted([1])})


@rule("TensorListPopBack", (Listed, Size, Own), always=True)
def pop(node):
    refuse_rows(node, 0)
    element = _element(node)
    return node.decide([_list(node), element], _shape_of_element(node, 1, element))


def _list(node):
    placement = node.inputs[0].placement
    return placement if isinstance(placement, Listed) else Listed(None)


@rule("TensorListStack TensorListGather", (Listed, Size, Own), always=True)
def stacked(node):
    element, last = _element(node), len(node.inputs) - 1
    if is_stack_of_rows(node, 0, numbers=1 if node.type == "TensorListGather" else None):
        return node.decide(Shard(0, BATCH, 1), node.wanted([last]))
    found = moved(element, element.axis + 1) if isinstance(element, (Shard, Blocks)) else element
    wants = {**_shape_of_element(node, last, element), **node.wanted(range(1, last))}
    if node.type == "TensorListStack" and node.attr("num_elements") != -1 and node.outputs[0].rank and node.outputs[0].varies(0):
        return node.decide(found, wants, instead=_stack_of_any_size)
    return node.decide(found, wants)


def _stack_of_any_size(conversions, op, inputs):
    found = tf.raw_ops.TensorListStack(input_handle=inputs[0], element_shape=inputs[1], element_dtype=op.outputs[0].dtype)
    dims = conversions.dims_of(op.outputs[0])
    if dims is not None:
        found.set_shape(dims)
    return [found]


@rule("TensorListConcat TensorListConcatV2", (Listed, Size, Own), always=True)
def joined_along_axis(node):
    refuse_rows(node, 0)
    element = _element(node)
    if isinstance(element, (Shard, Blocks)) and element.axis == 0:
        raise Refused("%r joins a list of the towers' own examples along their axis: stack it, and reshape"
                      % node.op.name)
    wants = _shape_of_element(node, 1, element) if len(node.inputs) > 1 else {}
    return node.decide([element, Replicate()], {**wants, **node.wanted(range(2, len(node.inputs)))})


@rule("TensorListLength", (Listed,), always=True)
def length(node):
    placement = node.inputs[0].placement
    return node.decide(number_of_rows(1) if isinstance(placement, Listed) and placement.by_row else Replicate())


@rule("TensorListElementShape", (Listed,), always=True)
def element_shape(node):
    refuse_rows(node, 0)
    return node.decide(Own() if isinstance(_element(node), (Shard, Blocks)) else Replicate())


@rule("TensorListResize", (Listed,), always=True)
def resized(node):
    refuse_rows(node, 0)
    return node.decide(_list(node), node.wanted([1]))


@rule("OptionalFromValue", ANY, always=True)
def there(node):
    if len(node.inputs) != 1 or isinstance(node.inputs[0].placement, Size):
        return node.decide(Listed(Replicate()), node.wanted(range(len(node.inputs))))
    return node.decide(Listed(node.inputs[0].placement))


@rule("OptionalNone", always=True)
def not_there(node):
    return node.decide(Listed(None))


@rule("OptionalGetValue", (Listed,), always=True)
def value_there(node):
    element, dims = _element(node), node.outputs[0].dims
    if isinstance(element, (Shard, Blocks)) or dims is None or not any(map(node.outputs[0].varies, range(len(dims)))):
        return node.decide(element)
    return node.decide(element, instead=_value_of_any_size)


def _value_of_any_size(conversions, op, inputs):
    return list(tf.raw_ops.OptionalGetValue(optional=inputs[0], output_types=[out.dtype for out in op.outputs], output_shapes=[
        tf.TensorShape(conversions.dims_of(out)) for out in op.outputs]))


@rule("OptionalHasValue", (Listed,), always=True)
def is_there(node):
    return node.decide(Replicate())
