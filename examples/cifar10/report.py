"""What a training run says: progress on the terminal, a learning curve, and a results file."""
import json
import os
import sys
import time

import tqdm

__all__ = ["Progress", "draw_curve", "read_json", "write_json"]


class Progress:
    """A progress bar with loss, accuracy and images/s; a plain line every ten seconds where there is no terminal."""

    def __init__(self, first_step, last_step, batch_size, seconds_between_lines=10):
        self._last_step, self._batch_size, self._between = last_step, batch_size, seconds_between_lines
        self._interactive = sys.stderr.isatty()
        self._bar = tqdm.tqdm(total=last_step, initial=first_step, unit="step", disable=not self._interactive)
        self._said, self._said_step = time.time(), first_step
        self._recent = []

    def step(self, step, loss, accuracy):
        """Notes a finished step."""
        self._recent = self._recent[-49:] + [(loss, accuracy)]
        self._bar.update(1)
        elapsed = time.time() - self._said
        if elapsed >= (0.5 if self._interactive else self._between) or step == self._last_step:
            loss, accuracy = (sum(column) / len(self._recent) for column in zip(*self._recent))
            rate = (step - self._said_step) * self._batch_size / max(elapsed, 1e-9)
            if self._interactive:
                self._bar.set_postfix_str("loss %.3f, accuracy %.1f %%, %.0f images/s" % (loss, 100 * accuracy, rate))
            else:
                self.say("step %d of %d, loss %.3f, accuracy %.1f %%, %.0f images/s"
                         % (step, self._last_step, loss, 100 * accuracy, rate))
            self._said, self._said_step = time.time(), step

    def restart_clock(self, step):
        """Leaves what was done since the last line, an evaluation say, out of the next line's images/s."""
        self._said, self._said_step = time.time(), step

    def say(self, line):
        """Prints a line above the bar."""
        tqdm.tqdm.write(line)
        sys.stdout.flush()

    def close(self):
        """Leaves the bar as it stands."""
        self._bar.close()


def draw_curve(history, title, path):
    """Writes a PNG of loss and accuracy over epochs.

    Args:
      history: list of dicts with "epoch", "train_loss", "train_accuracy", "test_accuracy".
      title: str.
      path: str.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator
    epochs = [record["epoch"] for record in history]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    left.plot(epochs, [record["train_loss"] for record in history], "o-", label="training")
    left.set_ylabel("loss")
    right.plot(epochs, [100 * record["train_accuracy"] for record in history], "o-", label="training")
    right.plot(epochs, [100 * record["test_accuracy"] for record in history], "o-", label="test")
    right.set_ylabel("accuracy in %")
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.tight_layout()
    _replace(path, lambda scratch: figure.savefig(scratch, dpi=120, format="png"))
    pyplot.close(figure)


def write_json(path, content):
    """Writes a JSON file that is never seen half written."""
    def write(scratch):
        with open(scratch, "w") as f:
            json.dump(content, f, indent=2)
            f.write("\n")
    _replace(path, write)


def read_json(path, default):
    """Reads a JSON file; `default` where there is none."""
    if not os.path.exists(path):
        return default
    with open(path) as f:
        return json.load(f)


def _replace(path, write):
    scratch = "%s.%d.tmp" % (path, os.getpid())
    try:
        write(scratch)
        os.replace(scratch, path)
    finally:
        if os.path.exists(scratch):
            os.remove(scratch)
