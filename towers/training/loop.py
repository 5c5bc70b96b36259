"""Many training steps in one `session.run`, input pipeline included.

A call of `session.run` may take longer, in Python and on its way to the devices, than the step of a small model. So the steps run
in a `tf.while_loop`. The step is built outside of it, as ever, so that variables, slots, seeds and names are those of a training
without the loop, and the loop's body is a copy of what it computes.
"""
import warnings
from typing import Any, List, NamedTuple, Tuple, Union

import tensorflow.compat.v1 as tf

from towers.api.annotations import StepFn, Tensor
from towers.api.arguments import as_tensor
from towers.api.wording import TowersWarning
from towers.context import current_tower
from towers.devices.placement import HOST
from towers.graph.inner_training import applies_gradients
from towers.graph.private import control_flow_now
from towers.graph.walk import is_ref
from towers.training.shared_draws import copies_of_steps

__all__ = ["repeat"]

_MOST = 2 ** 31 - 1


def repeat(step_fn: Union[StepFn, List[StepFn], Tuple[StepFn, ...]], num_steps: Union[int, Tensor]) -> Any:
    """Builds a loop that runs a step many times in one `session.run`, and returns its results of all steps.

        one session.run(repeat(step_fn, n))     =  n times session.run(step_fn()),    to the bit
        one session.run(repeat([f, f, g], n))   =  n times session.run(f()), session.run(f()), session.run(g())

    `step_fn` is called once, and builds the step as it would without the loop: variables, slots of optimizers, seeds and names of
    checkpoints are the same. What its results depend on then runs in each step, whether `step_fn` made it or not: the next batch
    of an iterator, a learning rate of the global step, reads and updates of variables, random numbers. As in `session.run`,
    what they do not depend on does not run, so the results have to wait for the train op, or it has to be among them. A step
    begins when the one before has finished.

    What is fed is the same in all steps, and has to be fed to a placeholder. What `tf.control_dependencies` around the call name
    runs once, before the first step. Gradients do not pass. Random ops with seeds draw in each step what they would draw in the
    next `session.run`; each loop draws from a beginning of its own.

    A list of functions are steps that are run in turn, as those of a GAN. A function that stands in it several times is called
    once. Random ops that the steps share, such as noise, go on from step to step.

    If a step fails, as at the end of the data (`tf.errors.OutOfRangeError`), the call of `session.run` does, without results. The
    steps before it stay done: the variables are trained by them.

    Args:
      step_fn: function without arguments that returns a nested structure of tensors, variables and operations, or a list of such
        functions. A tensor has the same shape in every step; where it has not, `tf.errors.InvalidArgumentError` is raised when
        it runs.
      num_steps: int, or scalar integer tensor, of 1 or more; of a list of functions, how often each of its places has its turn.

    Returns:
      The structure of `step_fn`, in which tensors are `[num_steps, ...]`, one row a step, and operations one that runs all steps;
      for a list of functions the list of these structures.

    Raises:
      TypeError: if `step_fn` is no function, `num_steps` no integer, or what `step_fn` returns holds anything but tensors,
        variables and operations.
      ValueError: if `num_steps` is less than 1; within a tf.cond, tf.while_loop, tf.function or model function; for results of
        another graph or out of a tf.cond or loop; for ref variables under control flow v2; for a
        `tf.placeholder_with_default` whose default changes from step to step; for a random op that steps share in a tf.cond or
        loop, or that some of three steps share. A tensor `num_steps` less than 1 is an InvalidArgumentError when it runs.
      RuntimeError: under eager execution.

    Warns:
      TowersWarning: if `step_fn` makes an optimizer's op that its results do not wait for, so that it would never run.

    Example:

        def step():
            replicas = builder.build(model_fn, iterator.get_next())
            return replicas.loss, towers.minimize(replicas, optimizer, global_step=global_step)

        losses, train_op = towers.repeat(step, 100)
        losses_of_100_steps, _ = session.run([losses, train_op])
        d_losses, g_losses = session.run(towers.repeat([lambda: (d_loss, d_op), lambda: (g_loss, g_op)], 100))
    """
    in_turn = list(step_fn) if isinstance(step_fn, (list, tuple)) else [step_fn]
    _check_call(in_turn)
    graph, num_steps = tf.get_default_graph(), _checked_number(num_steps, len(in_turn))
    step_fns = [fn for i, fn in enumerate(in_turn) if all(fn is not earlier for earlier in in_turn[:i])]
    order = [next(i for i, fn in enumerate(step_fns) if fn is each) for each in in_turn]
    first_op = len(graph.get_operations())
    with tf.control_dependencies(None):
        structures = [fn() for fn in step_fns]
        ends = [_checked_ends(structure, graph) for structure in structures]
    copies = copies_of_steps(ends)
    _warn_of_left_out(graph.get_operations()[first_op:], copies)
    with tf.name_scope("repeat"):
        results = [tf.nest.pack_sequence_as(structures[i], of_step)
                   for i, of_step in zip(order, _loop(copies, ends, order, num_steps))]
    return results if isinstance(step_fn, (list, tuple)) else results[0]


class _Results(NamedTuple):
    """What the tensors of a step came to: lists over them of the shape in its last turn, a string, and of a TensorArray."""
    shapes: list
    arrays: list


def _loop(copies, ends, order, num_steps):
    """Builds the loop.

    Returns, for each place in `order`, which holds numbers of steps, for each end of the step its values of all its turns, or an
    operation that waits for the last step.
    """
    with tf.device(HOST):
        count = _positive(num_steps, len(order)) if tf.is_tensor(num_steps) else tf.constant(num_steps, name="num_steps")
        tensors = [[end for end in of_step if isinstance(end, tf.Tensor)] for of_step in ends]
        results = [_Results([""] * len(of_step), [_array(tensor, _times(count, order.count(i))) for tensor in of_step])
                   for i, of_step in enumerate(tensors)]
        num_turns = _times(count, len(order))

        def body(turn, results):
            given, made = copies.make_shared()
            with tf.control_dependencies(made):
                place = turn % len(order) if len(order) > 1 else None
            return _one_of([lambda i=i: run(i, turn, place, results, given) for i in range(len(ends))], order, place)

        def run(i, turn, place, results, given):
            made, number = copies.of_steps[i].make("step", given), _turn_of_step(i, turn, place, order)
            values = [value for value in made if isinstance(value, tf.Tensor)]
            shapes = [_checked_shape(*each, number) for each in zip(tensors[i], values, results[i].shapes)]
            with tf.control_dependencies(made + shapes):  # the next step begins when all of this one is done
                if any(is_ref(tensor) for op in copies.of_steps[i].ops for tensor in op.inputs):
                    values = [_in_memory_of_its_own(value) for value in values]
                arrays = [array.write(number, value) for array, value in zip(results[i].arrays, values)]
                return turn + 1, results[:i] + [_Results(shapes, arrays)] + results[i + 1:]

        # One iteration at a time on each device too: Grappler lets a cast of a ref variable run when its iteration begins,
        # whatever the read waited for.
        done, results = tf.while_loop(lambda turn, _: turn < num_turns, body, (tf.constant(0), results),
                                      parallel_iterations=1, back_prop=False, return_same_structure=True)
        finished = tf.group(done, name="finished")
        stacked = [[array.stack() for array in of_step.arrays] for of_step in results]
        found = []
        for place, i in enumerate(order):
            turns = slice(order[:place].count(i), None, order.count(i)) if order.count(i) > 1 else None
            values = iter(stacked[i] if turns is None else [value[turns] for value in stacked[i]])
            found.append([_result(next(values), end, num_steps) if isinstance(end, tf.Tensor) else finished for end in ends[i]])
        return found


def _in_memory_of_its_own(value):
    """Returns a copy of what may be a ref variable's own memory, which the next step writes."""
    if value.dtype.base_dtype == tf.string:
        return tf.strings.join([value])
    return tf.raw_ops.DeepCopy(x=value)


def _times(count, number):
    return count if number == 1 else count * number


def _array(tensor, size):
    name = tensor.op.name.split("/")[-1]
    return tf.TensorArray(tensor.dtype.base_dtype, size, element_shape=tensor.shape, tensor_array_name=name)


def _one_of(branches, order, place):
    """Builds the branch, of those of all steps, that has its turn."""
    if len(branches) == 1:
        return branches[0]()
    step = tf.gather(tf.constant(order), place)

    def from_number(i):
        if i == len(branches) - 1:
            return branches[i]()
        return tf.cond(tf.equal(step, i), branches[i], lambda: from_number(i + 1))
    return from_number(0)


def _turn_of_step(i, turn, place, order):
    """Returns how many turns a step has had before, a tensor."""
    if place is None:
        return turn
    before = tf.gather(tf.constant([order[:j].count(i) for j in range(len(order))]), place)
    return turn // len(order) * order.count(i) + before


def _checked_shape(tensor, value, shape, step):
    """Returns the shape of a step's result as a string; it fails when it is run if that is not `shape`, the last step's."""
    if tensor.shape.is_fully_defined():
        return shape
    now = tf.strings.join(["[", tf.strings.reduce_join(tf.as_string(tf.shape(value)), separator=", "), "]"])
    check = tf.raw_ops.Assert(condition=tf.logical_or(tf.equal(step, 0), tf.equal(now, shape)), data=[
        "The result %s of towers.repeat has to have the same shape in every step. The shape, that of the step before, and the "
        "number of the step are" % tensor.name, now, shape, step])
    with tf.control_dependencies([check]):
        return tf.identity(now)


def _result(stacked, end, num_steps):
    result = tf.identity(stacked, name=end.op.name.split("/")[-1])
    result.set_shape(tf.TensorShape([None if tf.is_tensor(num_steps) else num_steps]).concatenate(end.shape))
    return result


def _check_call(step_fns):
    if not step_fns:
        raise TypeError("step_fn is an empty list: it has to hold a function for each step that is run in turn.")
    for step_fn in step_fns:
        if not callable(step_fn):
            raise TypeError("step_fn has to be a function without arguments that builds a step, or a list of such functions, not "
                            "%r: for what is built already `lambda: (loss, train_op)`." % (step_fn,))
    if tf.executing_eagerly():
        raise RuntimeError("towers.repeat builds a loop in a TensorFlow 1 graph, and eager execution is on: call "
                           "tf.compat.v1.disable_eager_execution() when the program starts.")
    graph = tf.get_default_graph()
    if current_tower() is not None or control_flow_now(graph) is not None or hasattr(graph, "outer_graph"):
        raise ValueError("towers.repeat was called inside a model function, tf.cond, tf.while_loop or tf.function: call it "
                         "outside, and let step_fn build all that is to be repeated.")


def _checked_number(num_steps, num_places):
    """Returns a number of steps as int where it is known now, else as scalar int32 or int64 tensor."""
    given, known = num_steps, num_steps
    if not hasattr(num_steps, "__index__") or tf.is_tensor(num_steps):
        num_steps = as_tensor(num_steps, "num_steps")
        known = tf.get_static_value(num_steps)
        if not num_steps.dtype.is_integer or num_steps.shape.rank not in (0, None):
            raise TypeError("num_steps has to be an int or a scalar integer tensor; %r is %s of shape %s."
                            % (given, num_steps.dtype.name, num_steps.shape))
    if known is None:
        return num_steps
    if isinstance(given, bool):
        raise TypeError("num_steps has to be an int or a scalar integer tensor, not %r." % given)
    if not 1 <= int(known) <= _MOST // num_places:
        raise ValueError("num_steps has to be 1 or more and less than 2^31%s, not %d." % (_over(num_places), known))
    return int(known)


def _over(num_places):
    return " / %d" % num_places if num_places > 1 else ""


def _positive(num_steps, num_places):
    """Returns a number of steps as int32; it fails when it is run if the number is none of 1, 2, 3 ..."""
    with tf.name_scope("num_steps"):
        fine = tf.logical_and(num_steps >= 1, num_steps <= _MOST // num_places)
        check = tf.raw_ops.Assert(condition=tf.reduce_all(fine), data=[
            "num_steps of towers.repeat has to be 1 or more and less than 2^31%s. It is" % _over(num_places), num_steps])
        with tf.control_dependencies([check]):
            return tf.reshape(tf.cast(num_steps, tf.int32), [])


def _checked_ends(structure, graph):
    """Returns the leaves of what a step function returned, checked, a list."""
    ends = [_checked_end(leaf, structure, graph) for leaf in tf.nest.flatten(structure, expand_composites=False)]
    if not ends:
        raise TypeError("step_fn returned %r, which holds nothing to run: return the loss, say." % (structure,))
    return ends


def _checked_end(leaf, structure, graph):
    """Returns a tensor or operation of what `step_fn` returned, a variable's value for a variable."""
    if not isinstance(leaf, (tf.Tensor, tf.Operation)) and not (hasattr(leaf, "initializer") and hasattr(leaf, "assign")):
        raise TypeError("step_fn has to return a structure of tensors, variables and operations; %r in %r is none of them."
                        % (leaf, structure))
    end = leaf if isinstance(leaf, tf.Operation) else tf.convert_to_tensor(leaf)
    if end.graph is not graph:
        raise ValueError("step_fn returned %r of another graph than the default one: call towers.repeat in the graph of the step."
                         % end.name)
    if not graph.is_fetchable(end):
        raise ValueError("step_fn returned %r, which stands inside a tf.cond or tf.while_loop: return what the tf.cond or "
                         "tf.while_loop itself returns." % end.name)
    if isinstance(end, tf.Tensor) and end.dtype in (tf.resource, tf.variant):
        raise TypeError("step_fn returned %r of %s, which can't be joined over the steps." % (end.name, end.dtype.name))
    return end


def _warn_of_left_out(made, copies):
    copied = {op for copy in copies.of_steps + [copies.shared] if copy is not None for op in copy.ops}
    left_out = [op for op in made if applies_gradients(op) and op not in copied]
    if left_out:
        warnings.warn("step_fn makes %r, which trains, and what it returns does not wait for that, so it never runs. Return the "
                      "train op too." % left_out[0].name, TowersWarning, stacklevel=3)
