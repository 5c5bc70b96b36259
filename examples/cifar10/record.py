"""What a training leaves behind: lines on the terminal, checkpoints, summaries, the epochs' history and the results."""
import os
import time

import tensorflow.compat.v1 as tf

from examples.cifar10.checkpoint import check_folder, read_history, read_sums, save
from examples.cifar10.report import EventWriter, Progress, draw_curve, read_json, write_json

__all__ = ["NoRecord", "Record"]


class Record:
    """What one training leaves on the terminal and in its folder.

    Args:
      settings: of the command line.
      training: `train.Training`.
      saver: `tf.train.Saver`.
      session: `tf.Session`.
      step: int, the step that the training begins at.

    Raises:
      UsageError: for a folder that can't be written, and for damaged files in it, before anything is written.
      WriteError: where a file can't be written; so do all methods.
    """

    def __init__(self, settings, training, saver, session, step):
        self._settings, self._training, self._saver, self._session = settings, training, saver, session
        self._first_step, self._saved, self._num_steps = step, step if step else None, training.num_steps
        self._steps_an_epoch = training.pipeline.steps_an_epoch
        folder = self._folder = settings.train_dir
        self._history = read_history(folder, step)
        self._sums = read_sums(folder, step, step % self._steps_an_epoch)  # of loss, accuracy and steps of the epoch
        check_folder(folder)
        write_json(os.path.join(folder, "settings.json"), dict(vars(settings), data=training.data_name))
        self._progress = Progress(step, self._num_steps, settings.batch_size)
        self._writer = EventWriter(folder, session.graph if step == 0 else None)
        self._started = time.time()

    def say(self, line):
        """Prints a line."""
        print(line)

    def restart_clock(self, step):
        """Leaves what was done since the last line, an evaluation say, out of the images/s."""
        self._progress.restart_clock(step)

    def wants_summary(self, step):
        """Tells whether a step's summary is to be added."""
        return step % 20 == 0

    def add_summary(self, summary, step):
        """Writes a `tf.Summary`, serialized or not."""
        self._writer.add(summary, step)

    def step(self, step, loss, accuracy):
        """Notes a finished step."""
        self._sums += loss, accuracy, 1
        self._progress.step(step, loss, accuracy)

    def end_epoch(self, step, test_accuracy):
        """Notes an evaluation, at the end of an epoch or of the training."""
        loss, accuracy = self._sums[:2] / self._sums[2]
        epoch = round(step / self._steps_an_epoch, 3)
        self._history.append({"step": step, "epoch": epoch, "train_loss": float(loss), "train_accuracy": float(accuracy),
                              "test_accuracy": test_accuracy})
        self._progress.say("epoch %g: training loss %.3f, accuracy %.1f %%; test accuracy %.1f %%" % (
            epoch, loss, 100 * accuracy, 100 * test_accuracy))
        self.add_summary(tf.Summary(value=[tf.Summary.Value(tag="test_accuracy", simple_value=test_accuracy)]), step)
        write_json(os.path.join(self._folder, "history.json"), self._history)
        self._sums = self._sums * (step % self._steps_an_epoch > 0)  # of an epoch that goes on later they are kept

    def save(self, step):
        """Saves a checkpoint, where there is none of this step."""
        if step not in (self._saved, 0):
            save(self._saver, self._session, self._folder, step, self._sums)
            self._saved = step

    def close(self):
        """Leaves the terminal and the files as they are; to be called whatever happened."""
        self._progress.close()
        self._writer.close()

    def interrupted(self, step):
        """Says where an interrupted training goes on."""
        if step:
            print("Interrupted; step %d is saved in %s. Run the same command again to go on from there." % (step, self._folder))
        else:
            print("Interrupted before the first step.")

    def finish(self, step):
        """Writes the results and draws the curve."""
        seconds, images = time.time() - self._started, (step - self._first_step) * self._settings.batch_size
        results_path, curve_path = (os.path.join(self._folder, name) for name in ("results.json", "curve.png"))
        history, data_name = self._history, self._training.data_name
        if images or _step_of(results_path) != step:
            write_json(results_path, {
                "settings": vars(self._settings), "data": data_name, "tensorflow": tf.__version__, "step": step,
                "test_accuracy": history[-1]["test_accuracy"] if history else None,
                "images_per_second_of_last_run": images / seconds if images else None, "history": history})
        if history:
            draw_curve(history, "ResNet-%d, %s, %s" % (self._settings.depth, self._training.who, data_name), curve_path)
            print("Test accuracy %.2f %% on %s after %d steps." % (100 * history[-1]["test_accuracy"], data_name, step))
            print("Results: %s, curve: %s" % (results_path, curve_path))


class NoRecord:
    """Has the methods of a `Record` and leaves nothing: for the workers beside the chief, which does the same steps."""

    def __getattr__(self, _):
        return lambda *_: None


def _step_of(results_path):
    try:
        return read_json(results_path, {}).get("step")
    except (AttributeError, ValueError):  # it is damaged, and written anew
        return None
