"""Command lines: what those of all examples have in common."""
import argparse
import math

import tensorflow.compat.v1 as tf

from examples.training.folder import UsageError
from examples.training.report import exit_status

__all__ = ["add_train_dir", "add_training_arguments", "number", "positive_int", "run", "seed"]


def run(command, *mistakes):
    """Calls a function without arguments under graph mode; returns its exit status, 2 after one sentence for what can't be done.

    Args:
      command: the function, which returns an exit status, None being 0.
      *mistakes: exceptions whose message is such a sentence, beside those of this package.
    """
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return exit_status(lambda: command() or 0, UsageError, *mistakes)


def number(kind, low, high=math.inf):
    """Returns a function that makes a number of an argument's text, for argparse.

    Args:
      kind: int or float.
      low, high: numbers, the least and the greatest that it may be.
    """
    what = "%g or more" % low if high == math.inf else "from %g to %g" % (low, high)

    def made(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError("%s is no %s" % (text, "whole number" if kind is int else "number")) from None
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError("%s is not %s" % (text, what))
        return value
    return made


positive_int = number(int, 1)
seed = number(int, 0, 2 ** 31 - 1)


def add_train_dir(parser, default):
    """Adds what training and evaluation share beside the data."""
    parser.add_argument("--train-dir", default=default, help="default %s" % default)
    parser.add_argument("--num-towers", type=positive_int, default=2, help="of each worker (default 2)")


def add_training_arguments(parser, batch_size, recipe):
    """Adds what a training needs. How long, at which rate and with which weight decay are left None where the user is silent.

    Args:
      parser: `argparse.ArgumentParser`.
      batch_size: int, the default.
      recipe: function of the name of a setting that recipes have, which returns the help on its default.
    """
    parser.add_argument("--batch-size", type=positive_int, default=batch_size,
                        help="of all towers of all workers together (default %d)" % batch_size)
    parser.add_argument("--sync-bn", dest="sync_bn", action="store_true", default=True,
                        help="batch norm over all towers (the default)")
    parser.add_argument("--no-sync-bn", dest="sync_bn", action="store_false", help="batch norm of each tower alone")
    parser.add_argument("--update-ops", choices=["first", "all", "last", "none"], default="first",
                        help="whose moving averages are updated (default first)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive_int, help=recipe("epochs"))
    length.add_argument("--steps", type=positive_int, help="instead of --epochs")
    parser.add_argument("--learning-rate", type=number(float, 0), help="at its peak, " + recipe("learning_rate"))
    parser.add_argument("--warmup-steps", type=number(int, 0),
                        help="in which the rate rises to its peak, at most a tenth of all steps; " + recipe("warmup_steps"))
    parser.add_argument("--weight-decay", type=number(float, 0), help=recipe("weight_decay"))
    parser.add_argument("--save-every", type=positive_int, default=200, metavar="STEPS", help="default 200")
    parser.add_argument("--evaluate-every", type=positive_int, default=1, metavar="EPOCHS", help="default %(default)s")
    parser.add_argument("--seed", type=seed, default=0, help="0 or more (default 0)")
