"""What a training leaves behind: lines on the terminal, checkpoints, summaries, the evaluations' history and the results."""
import os
import time

import tensorflow.compat.v1 as tf

from examples.training.folder import check_folder, read_history, read_sums, remove_leftovers, save
from examples.training.report import EventWriter, Progress, draw_curve, read_json, write_json

__all__ = ["NoRecord", "Record"]


class Record:
    """What one training leaves on the terminal and in its folder.

    Args:
      settings: of the command line.
      training: `graph.Training`.
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
        self._stretch = training.steps_an_epoch * settings.evaluate_every  # from one evaluation to the next
        folder = self._folder = settings.train_dir
        self._history = read_history(folder, step, training.task.measures)
        self._sums = read_sums(folder, step, step % self._stretch)  # of loss, accuracy and steps since the evaluation
        check_folder(folder)
        remove_leftovers(folder)
        write_json(os.path.join(folder, "settings.json"), dict(vars(settings), data=training.task.data_name))
        self._progress = Progress(step, self._num_steps, settings.batch_size)
        self._writer = EventWriter(folder, session.graph if step == 0 else None)
        self._started = time.time()

    def say(self, line):
        """Prints a line."""
        print(line)

    def restart_clock(self):
        """Leaves what was done since the last step, an evaluation say, out of the images/s."""
        self._progress.restart_clock()

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

    def evaluated(self, step, measures):
        """Notes an evaluation, a dict by the measures' names, after an epoch or at the end of the training."""
        loss, accuracy = self._sums[:2] / self._sums[2]
        epoch = round(step / self._training.steps_an_epoch, 3)
        self._history.append(dict(
            {"step": step, "epoch": epoch, "train_loss": float(loss), "train_accuracy": float(accuracy)}, **measures))
        self._progress.say("epoch %g: training loss %.3f, accuracy %.1f %%; %s" % (
            epoch, loss, 100 * accuracy, self._in_words("%s %.1f %%")))
        self.add_summary(tf.Summary(value=[
            tf.Summary.Value(tag=name, simple_value=value) for name, value in measures.items()]), step)
        write_json(os.path.join(self._folder, "history.json"), self._history)
        self._sums = self._sums * (step % self._stretch > 0)  # of a stretch that goes on later they are kept

    def _in_words(self, form):
        measures, last = self._training.task.measures, self._history[-1]
        return ", ".join(form % (measure.words, 100 * last[measure.name]) for measure in measures)

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
        history, task = self._history, self._training.task
        if images or _step_of(results_path) != step:
            write_json(results_path, dict(
                {"settings": vars(self._settings), "data": task.data_name, "tensorflow": tf.__version__, "step": step},
                **{measure.name: history[-1][measure.name] if history else None for measure in task.measures},
                images_per_second_of_last_run=images / seconds if images else None, history=history))
        if history:
            draw_curve(history, task.measures, "%s on %s: %s" % (task.model_name, task.data_name, self._training.who), curve_path)
            words = self._in_words("%s %.2f %%")
            print("%s on %s after %d steps." % (words[0].upper() + words[1:], task.data_name, step))
            print("Results: %s, curve: %s" % (results_path, curve_path))


class NoRecord:
    """Has the methods of a `Record` and leaves nothing: for the workers beside the chief, which does the same steps."""

    def __getattr__(self, _):
        return lambda *_: None


def _step_of(results_path):
    try:
        return read_json(results_path, {}).get("step")
    except (AttributeError, OSError, ValueError):  # it is damaged, and written anew
        return None
