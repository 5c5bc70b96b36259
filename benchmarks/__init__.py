"""Benchmarks of `tf_syncbn.sync_batch_norm` against its peers: `python -m benchmarks --out DIR`.

    command.py      what the benchmarks' command lines share
    interleave.py   the timing protocol: variants in turn, in one process, and the ratios of each round's times
    record.py       the machine, the lane and the figures, as JSON
    networks.py     ResNets, written once over a few layers, so that every variant runs the very same network
    unsynced.py     batch norm of each tower alone, as tf.layers computes it
    lists.py        the peer that passes lists of tensors through every layer
    mirrored.py     the peer that is tf.distribute.MirroredStrategy with Keras
    variants.py     the ways to train the ResNet, built and ready to step
    saved.py        what a graph keeps of the forward pass for the backward pass
    layer.py  train_step.py  conversion.py  graph.py  memory.py  repeat.py  pipeline.py  workers.py      the benchmarks
    report.py  pictures.py                                           JSON in, tables and pictures out

None of them is a test, and no test depends on a time.
"""
