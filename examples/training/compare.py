"""What synchronizing buys: the same total batch as one tower, as synced towers and as unsynced ones, from the same start.

All trainings of a seed begin with the same values of the variables and see the same images in the same order, augmented alike.
"""
import contextlib
import os
import time
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from examples.training.command import number, positive_int
from examples.training.comparison import FIRST_STEPS, draw, read, table
from examples.training.folder import UsageError
from examples.training.graph import Training, alone, tower_devices
from examples.training.report import Progress, WriteError, write_json

__all__ = ["KINDS", "Kind", "add_arguments", "compare"]

POINTS = 60  # of a curve


class Kind(NamedTuple):
    """One side of the comparison: whether it has towers of few images, its batch norm, and whose moving averages it keeps."""
    is_divided: bool
    sync_bn: bool
    update_ops: str


KINDS = {
    "one": Kind(False, False, "first"),  # TensorFlow's own batch norm, which knows nothing of towers, is the authority
    "synced": Kind(True, True, "first"),
    "unsynced": Kind(True, False, "first"),
    "unsynced-all": Kind(True, False, "all"),
}


def add_arguments(parser, batch_size, steps, rate_of_an_image, out):
    """Adds the arguments of a comparison; the numbers are the defaults, the learning rate's for each image of a batch."""
    parser.add_argument("--batch-size", type=positive_int, default=batch_size,
                        help="of all towers together (default %d)" % batch_size)
    parser.add_argument("--images-a-tower", type=positive_int, default=2, help="of the synced and unsynced towers (default 2)")
    parser.add_argument("--seeds", type=positive_int, default=3, help="how many, from 0 on (default 3)")
    parser.add_argument("--steps", type=positive_int, default=steps, help="of each training (default %d)" % steps)
    parser.add_argument("--learning-rate", type=number(float, 0),
                        help="at its peak (default %.3g times the batch size)" % rate_of_an_image)
    parser.add_argument("--out", default=out, help="folder of compare.json and compare.png (default %s)" % out)


def compare(settings, described, settings_of, task_of):
    """Runs what has not been run yet, prints the table, draws the picture, and returns the exit status: 0, 130 when interrupted.

    Args:
      settings: what `add_arguments` added: batch_size, images_a_tower, learning_rate, out, seeds, steps.
      described: dict of what else is the same in all trainings; a file of others is refused. "model" and "data" are what to call
        these.
      settings_of: function of nothing that returns what a `graph.Training` needs; what kinds differ in is set here.
      task_of: function of such settings and of a dtype, None for the model's own, that returns a `graph.Task`.

    Raises:
      UsageError, WriteError: for what can't be done.
    """
    if settings.batch_size % settings.images_a_tower or settings.batch_size == settings.images_a_tower:
        raise UsageError("A batch of %d does not make two or more towers of %d images each."
                         % (settings.batch_size, settings.images_a_tower))
    trainings = Trainings(settings, settings_of, task_of)
    json_path, png_path = (os.path.join(settings.out, "compare." + ending) for ending in ("json", "png"))
    same = {name: getattr(settings, name) for name in ("batch_size", "images_a_tower", "steps", "learning_rate")}
    measure = trainings.measures[0]
    comparison = read(json_path, dict(described, **same, tensorflow=tf.__version__), measure)
    try:
        os.makedirs(settings.out, exist_ok=True)
    except OSError as error:
        raise WriteError("The folder %s can't be made: %s." % (settings.out, error.strerror)) from error
    write_json(json_path, comparison)  # before hours of training
    try:
        for seed in range(settings.seeds):
            done = [run["kind"] for run in comparison["runs"] if run["seed"] == seed]
            missing = [kind for kind in KINDS if kind not in done]
            start = trainings.initial_values(seed) if missing else None
            for kind in missing:
                comparison["runs"].append(trainings.train_one(kind, seed, start))
                write_json(json_path, comparison)
    except KeyboardInterrupt:
        print("\nInterrupted; run the same command again to go on after %d of %d trainings."
              % (len(comparison["runs"]), settings.seeds * len(KINDS)))
        return 130
    print(table(comparison, measure))
    draw(comparison, measure, png_path)
    print("Results: %s, picture: %s" % (json_path, png_path))
    return 0


class Trainings:
    """The trainings of a comparison; arguments as for `compare`.

    Attributes:
      measures: tuple of `graph.Measure`, of what is trained.
    """

    def __init__(self, settings, settings_of, task_of):
        self._settings, self._settings_of, self._task_of = settings, settings_of, task_of
        with tf.Graph().as_default():
            self.measures = task_of(self.settings_of("one", 0), None).measures

    def settings_of(self, kind, seed):
        """Returns what a `graph.Training` of a kind needs."""
        settings, result = self._settings, self._settings_of()
        result.batch_size, result.learning_rate = settings.batch_size, settings.learning_rate
        result.steps, result.seed = settings.steps, seed
        result.num_towers = settings.batch_size // settings.images_a_tower if KINDS[kind].is_divided else 1
        result.sync_bn, result.update_ops = KINDS[kind].sync_bn, KINDS[kind].update_ops
        return result

    def initial_values(self, seed):
        """Returns the values that the variables of the one tower begin with, a dict by name.

        Other kinds would draw others from the same seed on TensorFlow 1, where a draw follows the number of ops made before it.
        """
        with self.built("one", seed) as (_, session):
            return session.run({v.op.name: v.read_value() for v in tf.global_variables()})

    @contextlib.contextmanager
    def built(self, kind, seed, start=None, dtype=None):
        """Gives a `graph.Training`, and a session in which its variables have the values of a dict by name, if there is one."""
        settings = self.settings_of(kind, seed)
        with tf.Graph().as_default():
            training = Training(settings, self._task_of(settings, dtype), alone(tower_devices(settings.num_towers)))
            with training.workers.session() as session:
                # All in one run: a large graph takes long to prepare for each.
                values = {v.initializer.inputs[1]: start[v.op.name] for v in tf.global_variables()} if start else None
                session.run(tf.global_variables_initializer(), values)
                yield training, session

    def train_one(self, kind, seed, start):
        """Trains one kind with one seed.

        Args:
          kind: str, of `KINDS`.
          seed: int.
          start: dict from the names of all variables to the arrays that they begin with.

        Returns:
          A dict of "kind", "seed", the measures by their names, "milliseconds_a_step" without the first ten steps, "first_losses"
          of `FIRST_STEPS` steps, "first_losses_in_float64", the same steps done in float64, where rounding tells nothing, and
          "curve", a list of [step, mean loss of the steps since the point before].
        """
        print("%s, seed %d:" % (kind, seed), flush=True)
        num_steps, moments, losses = self._settings.steps, [time.time()], []
        progress = Progress(0, num_steps, self._settings.batch_size)
        try:
            with self.built(kind, seed, start) as (training, session):
                for step, loss, accuracy, _ in training.steps(session, 0, num_steps):
                    losses.append(loss)
                    moments.append(time.time())
                    progress.step(step, loss, accuracy)
                measures = training.evaluate(session)
        finally:
            progress.close()
        with self.built(kind, seed, start, tf.float64) as (training, session):
            in_float64 = [loss for _, loss, _, _ in training.steps(session, 0, min(FIRST_STEPS, num_steps))]
        first = min(10, num_steps - 1)
        milliseconds = 1e3 * (moments[-1] - moments[first]) / (num_steps - first)
        words = ", ".join("%s %.2f %%" % (measure.words, 100 * measures[measure.name]) for measure in self.measures)
        print("%s, seed %d: %s, %.0f ms a step" % (kind, seed, words, milliseconds), flush=True)
        return dict({"kind": kind, "seed": seed}, **measures, milliseconds_a_step=round(milliseconds, 2),
                    first_losses=losses[:FIRST_STEPS], first_losses_in_float64=in_float64, curve=curve(losses))


def curve(losses):
    """Returns the means of up to `POINTS` stretches of losses, a list of [last step, mean]."""
    stretches = np.array_split(np.arange(len(losses)), min(POINTS, len(losses)))
    return [[int(steps[-1]) + 1, round(float(np.mean([losses[step] for step in steps])), 5)] for steps in stretches]
