"""What a training run says: progress on the terminal, a learning curve, and a results file."""
import json
import os
import re
import socket
import sys
import time

import tensorflow.compat.v1 as tf
import tqdm

from examples.training.files import check_file

__all__ = ["EventWriter", "Progress", "WriteError", "draw_curve", "exit_status", "new_figure", "read_json", "reason",
           "save_figure", "write_json"]

_LARGEST_JSON = 1 << 26  # bytes; a thousand times what a training leaves
_MOST_TICKS = 8  # of a curve


class WriteError(Exception):
    """A file can't be written; the message is one sentence for the person at the terminal."""


def exit_status(command, *mistakes):
    """Calls `command` and returns its exit status, or 2 after its one sentence on stderr.

    Args:
      command: function without arguments.
      *mistakes: exceptions whose message is such a sentence, beside `WriteError`.
    """
    try:
        status = command()
        sys.stdout.flush()
        return status
    except mistakes + (WriteError,) as error:
        print("error: %s" % error, file=sys.stderr)
    except OSError as error:
        print("error: %s can't be written: %s." % (error.filename or "Standard output", error.strerror or error), file=sys.stderr)
        if not error.filename:  # Python would try once more as it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def reason(error):
    """Returns why TensorFlow failed, without where in the graph.

    Of several files' names and reasons it is the last reason, of several devices' errors the first one.
    """
    message = getattr(error, "message", str(error))
    # TensorFlow 2 puts a stack trace before the reason, TensorFlow 1 behind it.
    message = re.sub(r"(?s)^.*\nNode: [^\n]*\n", "", message)
    return re.sub(r"^\d+ root error\(s\) found\.\s*\(0\) [^:\n]*: ", "", message).split("\n")[0].split("; ")[-1].rstrip(".")


class Progress:
    """A progress bar with loss, accuracy and images/s; a plain line every ten seconds where there is no terminal."""

    def __init__(self, first_step, last_step, batch_size, seconds_between_lines=10):
        self._last_step, self._batch_size, self._between = last_step, batch_size, seconds_between_lines
        self._interactive = sys.stderr.isatty()
        self._bar = tqdm.tqdm(total=last_step, initial=first_step, unit="step", disable=not self._interactive)
        self._said, self._recent = time.time(), []
        self._last_end = None  # when the last step ended, or what came between; the first step waits for more than training
        self._seconds, self._steps = 0.0, 0  # of training, since the last line

    def step(self, step, loss, accuracy):
        """Notes a finished step."""
        self._recent = self._recent[-49:] + [(loss, accuracy)]
        self._bar.update(1)
        now = time.time()
        if self._last_end is not None:
            self._seconds, self._steps = self._seconds + now - self._last_end, self._steps + 1
        self._last_end = now
        if now - self._said >= (0.5 if self._interactive else self._between) or step == self._last_step:
            self._say_means(step)
            self._said, self._seconds, self._steps = now, 0.0, 0

    def _say_means(self, step):
        means = "loss %.3f, accuracy %.1f %%" % tuple(
            factor * sum(column) / len(self._recent) for factor, column in zip((1, 100), zip(*self._recent)))
        if self._steps:
            means += ", %.0f images/s" % (self._steps * self._batch_size / max(self._seconds, 1e-9))
        if self._interactive:
            self._bar.set_postfix_str(means)
        else:
            self.say("step %d of %d, %s" % (step, self._last_step, means))

    def restart_clock(self):
        """Leaves what was done since the last step, an evaluation say, out of images/s."""
        self._last_end = time.time()

    def say(self, line):
        """Prints a line above the bar."""
        tqdm.tqdm.write(line)
        sys.stdout.flush()

    def close(self):
        """Leaves the bar as it stands."""
        self._bar.close()


class EventWriter:
    """Writes what TensorBoard shows. A full disk ends `tf.summary.FileWriter`'s thread, with a traceback or in silence.

    Args:
      folder: str.
      graph: `tf.Graph`, or None.

    Raises:
      WriteError: where a file can't be written; so do all methods.
    """

    def __init__(self, folder, graph=None):
        # As TensorBoard knows them; the process's number keeps two of the same second apart.
        name = "events.out.tfevents.%010d.%s.%d" % (time.time(), socket.gethostname(), os.getpid())
        self._path, self._writer = os.path.join(folder, name), None
        self._write(file_version="brain.Event:2")
        if graph is not None:
            self._write(graph_def=graph.as_graph_def(add_shapes=True).SerializeToString())

    def add(self, summary, step):
        """Writes a `tf.Summary`, serialized or not."""
        self._write(step=step, summary=tf.Summary.FromString(summary) if isinstance(summary, bytes) else summary)

    def close(self):
        """Writes what is left."""
        self._checked(lambda: self._writer.close())

    def _write(self, **content):
        def write():
            self._writer = self._writer or tf.io.TFRecordWriter(self._path)
            self._writer.write(tf.Event(wall_time=time.time(), **content).SerializeToString())
            self._writer.flush()
        self._checked(write)

    def _checked(self, write):
        try:
            write()
        except tf.errors.OpError as error:
            raise WriteError("%s can't be written: %s." % (self._path, reason(error))) from error


def draw_curve(history, measures, title, path):
    """Writes a PNG of the training's loss, and of its accuracy and the measures of its evaluations, over epochs.

    Args:
      history: list of dicts with "epoch", "train_loss", "train_accuracy" and the names of the measures.
      measures: sequence of `graph.Measure`.
      title: str.
      path: str.

    Raises:
      WriteError: if it can't be written.
    """
    epochs = [record["epoch"] for record in history]
    figure, (left, right) = new_figure(1, 2, figsize=(9, 3.6))
    left.plot(epochs, [record["train_loss"] for record in history], "o-")
    left.set_ylabel("training loss")
    for number, (name, words) in enumerate((("train_accuracy", "training accuracy"),) + tuple(measures)):
        right.plot(epochs, [100 * record[name] for record in history], "o-", color="C%d" % (number + 1), label=words)
    right.set_ylabel("%")
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.set_xticks(epochs[::-(-len(epochs) // _MOST_TICKS)])  # where there is a point
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    handles, words = right.get_legend_handles_labels()
    figure.legend(handles, words, loc="lower center", ncol=len(words))  # where it hides nothing
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save_figure(figure, path)


def new_figure(*shape, **options):
    """Returns a figure and its axes, as `pyplot.subplots` does; it needs no display."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot.subplots(*shape, **options)


def save_figure(figure, path):
    """Writes a figure as a PNG that is never seen half written, and closes it.

    Raises:
      WriteError: if it can't be written.
    """
    from matplotlib import pyplot
    try:
        _replace(path, lambda scratch: figure.savefig(scratch, dpi=120, format="png"))
    finally:
        pyplot.close(figure)


def write_json(path, content):
    """Writes a JSON file that is never seen half written.

    Raises:
      WriteError: if it can't be written.
    """
    def write(scratch):
        with open(scratch, "w") as f:
            json.dump(content, f, indent=2)
            f.write("\n")
    _replace(path, write)


def read_json(path, default):
    """Reads a JSON file; `default` where there is none.

    Raises:
      OSError: if it can't be read, a link to nothing among others.
      ValueError: if it is no JSON.
    """
    if not os.path.lexists(path):
        return default
    check_file(path, _LARGEST_JSON)
    with open(path) as f:
        try:
            return json.load(f)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def _replace(path, write):
    scratch = path + ".tmp"  # one name: what a killed process left is written over by the next
    try:
        write(scratch)
        os.replace(scratch, path)
    except OSError as error:
        raise WriteError("%s can't be written: %s." % (path, error.strerror)) from error
    finally:
        if os.path.exists(scratch):
            os.remove(scratch)
