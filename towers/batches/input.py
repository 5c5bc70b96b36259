"""Batches from `tf.data`: a data set or an iterator in place of the tensors that it hands out.

A batch is taken once for all towers. Of a data set it is divided in the pipeline, and prefetched, while the step before runs; of
an iterator, which others may have made or may turn to other data, it is divided in the step. All of that stands on the host: what
TensorFlow has to put batches on devices ahead of time (`prefetch_to_device`) serves one device a data set, and each tower would
run the pipeline anew.
"""
import warnings

import tensorflow.compat.v1 as tf

from towers.api.wording import TowersWarning
from towers.batches.batch import check_batch, is_dataset, split_batch
from towers.devices.placement import HOST
from towers.graph.private import control_flow_now
from towers.graph.walk import ancestors

__all__ = ["is_input", "next_batches"]

_KINDS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor, tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)
# Data sets that hand out single examples, and those that hand on what they get.
_UNBATCHED = ("TensorSliceDataset", "TextLineDataset", "TFRecordDataset", "ShuffleDataset", "ShuffleAndRepeatDataset",
              "RepeatDataset", "TakeDataset", "SkipDataset", "ShardDataset", "FilterDataset", "CacheDataset", "PrefetchDataset",
              "ZipDataset", "ConcatenateDataset", "OptionsDataset")
_AHEAD = 1  # batches that wait, divided, while a step runs


def is_input(batch):
    """Tells whether a batch is a data set or an iterator of either version of `tf.data`."""
    return is_dataset(batch) or hasattr(batch, "get_next")


def next_batches(source, num_towers):
    """Takes the next batch of a data set or iterator and divides it over towers along axis 0.

    A data set gets a one-shot iterator if it can, which needs no initializing. Where it holds lookup tables, variables or random
    tensors it gets one whose initializer is put into `tf.GraphKeys.TABLE_INITIALIZERS`, so `tf.tables_initializer()` runs it, and
    so do monitored sessions.

    Args:
      source: data set or iterator whose elements are batches: each tensor's axis 0 is the batch.
      num_towers: int.

    Returns:
      A list over towers of structures like an element.

    Raises:
      ValueError: for elements that hold a scalar or a tensor of unknown rank, for sizes that disagree or are too small; for a
        data set that reads a placeholder, or in a loop.
      TypeError: for elements that hold anything but tensors.

    Warns:
      TowersWarning: for a data set that hands out single examples.
    """
    with tf.device(HOST):
        if not is_dataset(source):
            with tf.name_scope("batch"):
                batch = source.get_next()
            _check_elements(batch, source)
            return split_batch(batch, num_towers)
        with tf.name_scope("dataset"):
            _check_elements(source.element_spec, source)
            _check_place(source)
            _warn_of_examples(source)
            divided = _divide(source, num_towers) if num_towers > 1 else source
            batch = _iterator(divided.prefetch(_AHEAD)).get_next()
            return list(batch) if num_towers > 1 else [batch]


def _check_elements(element, source):
    """Raises an error where an element is no structure of batches."""
    check_batch(element)
    for leaf in tf.nest.flatten(element):
        if not isinstance(leaf, _KINDS):
            raise TypeError("The elements of %r hold %r: towers can divide tensors, sparse and ragged too."
                            % (source, leaf))
        if isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.shape.rank == 0:
            raise ValueError("The elements of %r hold a scalar, %r, which has no axis 0 to be the batch: make batches by "
                             "dataset.batch(...). If the scalar is meant for every tower, hand in the tensors of "
                             "iterator.get_next()." % (source, leaf))


def _check_place(dataset):
    graph = tf.get_default_graph()
    if control_flow_now(graph) is not None or hasattr(graph, "outer_graph"):
        raise ValueError("Towers are built in a tf.while_loop, tf.cond or tf.function, where the data set %r would begin anew: "
                         "make an iterator outside, and hand that in as the batch." % (dataset,))


def _divide(dataset, num_towers):
    """Returns a data set of tuples over towers of what is an element of `dataset`."""
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert  # which would wrap what is raised
    def divide(*element):
        return tuple(split_batch(_named(element if is_tuple else element[0]), num_towers))

    return dataset.map(divide)


def _named(element):
    """Returns an element with its tensors named by their place in it, for errors to name them."""
    if isinstance(element, dict):
        places = list(element)
    elif isinstance(element, tuple):
        places = getattr(element, "_fields", range(len(element)))
    else:
        return element
    leaves = element.values() if isinstance(element, dict) else element
    leaves = [_name_leaf(leaf, place) for place, leaf in zip(places, leaves)]
    if isinstance(element, dict):
        return type(element)(zip(places, leaves))
    return type(element)(*leaves) if hasattr(element, "_fields") else tuple(leaves)


def _name_leaf(leaf, place):
    return tf.identity(leaf, name="tensor_%s" % place) if isinstance(leaf, tf.Tensor) else leaf


def _iterator(dataset):
    try:
        return tf.data.make_one_shot_iterator(dataset)
    except ValueError:  # a table, a variable, or anything else that it would have to capture
        iterator = tf.data.make_initializable_iterator(dataset)
    fed = [op.name for op in ancestors([iterator.initializer]) if op.type == "Placeholder"]
    if fed:
        raise ValueError("The data set reads the placeholder %r, which has to be fed when an iterator is initialized: make one "
                         "by tf.compat.v1.data.make_initializable_iterator(dataset), hand that in as the batch, and run its "
                         "initializer with what is to be fed." % fed[0])
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator


def _warn_of_examples(dataset):
    """Warns where axis 0 of what a data set hands out is surely none of a batch's."""
    # The one public function of all versions that leads to what a data set is made of.
    made_of = {op.type for op in ancestors([tf.data.experimental.cardinality(dataset).op]) if "Dataset" in op.type
               and not op.type.endswith("DatasetCardinality")}
    if made_of and all(kind.startswith(_UNBATCHED) for kind in made_of):
        warnings.warn("The data set %r hands out single examples, and axis 0 of each is taken for the batch that is divided over "
                      "towers: make batches by dataset.batch(...)." % (dataset,), TowersWarning, stacklevel=5)
