"""The example's training step on its own input pipeline, against the same step on one batch that never changes.

    python -m benchmarks.pipeline --rounds 10

The pipeline picks, pads, crops, flips and scales every image of a batch on the host, while the step before runs. Variants take
turns of many steps, of which a pipeline can have prepared no more than four while the other one ran.
"""
import numpy as np
import tensorflow.compat.v1 as tf

import towers
from benchmarks import record
from benchmarks.command import parse, positive_int
from benchmarks.interleave import paired_ratio, spread, take_turns
from examples.cifar10 import data
from examples.cifar10.model import resnet

__all__ = ["main", "make_step"]

PIPELINE, CONSTANT = "the example's pipeline", "one batch, constant"
_DEPTH = 20


def main(argv=None):
    """Runs the command line and returns the path of the JSON that it wrote."""
    settings = parse("Times training steps of ResNet-20 with and without their input pipeline.", argv, 10, _add_arguments)
    images, built = data.generate().train, {}
    for name in (PIPELINE, CONSTANT):
        built[name] = make_step(name, images, settings.towers, settings.batch_size, _DEPTH)

    def turn(name):
        for _ in range(settings.steps):
            built[name]()

    seconds = take_turns({name: lambda name=name: turn(name) for name in built}, settings.rounds, 1, "pipeline")
    ratio = paired_ratio(seconds, PIPELINE, CONSTANT)
    row = {"towers": settings.towers, "ratio": ratio,
           "milliseconds": {name: spread(1e3 * seconds[name] / settings.steps) for name in built}}
    described = {"network": "ResNet-%d" % _DEPTH, "batch": settings.batch_size, "rounds": settings.rounds,
                 "steps_of_a_turn": settings.steps}
    return record.write(settings.out, "pipeline", described, [row], [
        record.target("pipeline, step of %d towers / the same on constant data" % settings.towers, ratio["median"], 1.05,
                      ratio["lower_quartile"], ratio["upper_quartile"])])


def _add_arguments(parser):
    parser.add_argument("--towers", type=positive_int, default=4, help="number of towers")
    parser.add_argument("--batch-size", type=positive_int, default=128, help="images of all towers together")
    parser.add_argument("--steps", type=positive_int, default=24, help="training steps of a turn")


def make_step(name, images, num_towers, batch_size, depth):
    """Builds a training step in a graph of its own; returns a function that runs it and returns its loss."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(0)
        pipeline = data.Pipeline(images, batch_size, True)
        batch = pipeline.batch
        if name == CONSTANT:
            batch = (tf.constant((images.images[:batch_size] - 120) / np.float32(64)), tf.constant(images.labels[:batch_size]))
        devices = ["/cpu:%d" % i for i in range(num_towers)]
        replicas = towers.TowerBuilder(devices).build(resnet(depth, True), batch)
        train_op = towers.minimize(replicas, tf.train.MomentumOptimizer(0.1, 0.9))
        session = tf.Session(config=towers.session_config(devices), graph=graph)
        session.run(tf.global_variables_initializer())
    numbers = iter(range(2 ** 62))

    def step():
        number = next(numbers)
        if number % pipeline.steps_an_epoch == 0:
            pipeline.start(session, number // pipeline.steps_an_epoch)
        return session.run([replicas.loss, train_op])[0]

    return step


if __name__ == "__main__":
    main()
