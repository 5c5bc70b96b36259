"""The loop of a training: on all workers alike, interrupted between steps, gone on with from its folder."""
import signal
import sys

import tensorflow.compat.v1 as tf

import towers
from examples.training.folder import (
    UsageError, changed_settings, check_checkpoint, check_settings, make_saver, restore, saved_checkpoints)
from examples.training.graph import Training, tower_devices
from examples.training.record import NoRecord, Record

__all__ = ["train"]


class _Interruption:
    """Notes the first SIGINT or SIGTERM instead of dying of it; a second one has its usual effect."""

    def __enter__(self):
        self.signal = None
        self._usual = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, _):
        self.signal = number
        signal.signal(number, self._usual[number])

    def came(self, training, session):
        """Tells whether a signal came to any worker. All ask between the same steps, and stop together."""
        if not training.sum_over_workers(session, int(self.signal is not None)):
            return False
        self.signal = self.signal or signal.SIGTERM
        return True

    def __exit__(self, *_):
        for number, handler in self._usual.items():
            signal.signal(number, handler)


def train(settings, task_of):
    """Trains as the settings say, and returns the exit status: 0, or 128 + signal when interrupted.

    Args:
      settings: of the command line, with what `graph.Training` and `record.Record` need, evaluate_every, num_towers, save_every
        and sync_bn.
      task_of: function of the settings that returns a `graph.Task`; called under the training's graph.

    Raises:
      UsageError, WriteError: for what can't be done.
    """
    workers = _connect(settings)
    with tf.Graph().as_default():
        task = task_of(settings)
        if workers.is_chief:
            check_settings(settings.train_dir, task.identity)
        training = Training(settings, task, workers)
        with workers.session() as session, _Interruption() as interruption:
            if workers.is_chief:
                return _run(settings, training, session, interruption, _begin(settings, training, session))
            session.run(tf.global_variables_initializer())
            return _run(settings, training, session, interruption, NoRecord())


def _connect(settings):
    """Returns the `towers.workers.Workers` that this process is one of, alone where no others are named."""
    try:
        workers = towers.workers.connect(devices=tower_devices(settings.num_towers))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:  # others did not come, or a port is taken: another time it may work
        sys.exit("error: %s" % error)
    if workers.is_evaluator:
        raise UsageError("TF_CONFIG says that this process evaluates: the command that evaluates does, once for all.")
    if settings.batch_size < settings.num_towers * workers.size:
        raise UsageError("A batch of %d is too small for %d towers: each needs an image."
                         % (settings.batch_size, settings.num_towers * workers.size))
    if workers.size > 1:
        settings.num_workers = workers.size
    return workers


def _begin(settings, training, session):
    """Restores or initializes the variables, and returns the `Record` of this training."""
    print("Training a %s on %s: %s, update ops '%s'." % (
        training.task.model_name, training.task.data_name, training.who, settings.update_ops))
    saver, checkpoints, changes = make_saver(), saved_checkpoints(settings.train_dir), changed_settings(settings)
    if checkpoints:
        check_checkpoint(checkpoints[-1], tf.global_variables(), training.task.model_name)
        restore(saver, session, checkpoints[-1])
        saver.recover_last_checkpoints(checkpoints)
        print("Going on from step %d, %s." % (session.run(training.global_step), checkpoints[-1]))
        if changes:
            print("From here on with other settings: %s." % ", ".join("%s %s, not %s" % change for change in changes))
    else:
        session.run(tf.global_variables_initializer())
    return Record(settings, training, saver, session, int(session.run(training.global_step)))


def _run(settings, training, session, interruption, record):
    session.graph.finalize()  # an op that a step made would grow the graph for hours
    session.run(training.broadcast)
    step, last = int(session.run(training.global_step)), training.num_steps
    if step >= last:
        record.say("The %d steps asked for are done." % last)
    try:
        steps = () if interruption.came(training, session) else training.steps(
            session, step, last, lambda done: [training.summary] if record.wants_summary(done) else [])
        for step, loss, accuracy, summaries in steps:
            for summary in summaries:
                record.add_summary(summary, step - 1)
            record.step(step, loss, accuracy)
            ends_epoch = step % training.steps_an_epoch == 0
            if step == last or step % (training.steps_an_epoch * settings.evaluate_every) == 0:
                record.evaluated(step, training.evaluate(session))
            if step == last or ends_epoch or step % settings.save_every == 0:
                record.save(step)
            if ends_epoch:
                record.restart_clock()  # evaluating and saving are no training
            if step < last and interruption.came(training, session):
                break
        record.save(step)
    except UsageError as error:
        raise UsageError("%s The checkpoints in %s are those of earlier steps." % (error, settings.train_dir)) from error
    finally:
        record.close()
    if step < last:
        record.interrupted(step)
        return 128 + interruption.signal
    record.finish(step)
    return 0
