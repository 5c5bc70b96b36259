"""Command lines: what those of all examples have in common."""
import argparse

import tensorflow.compat.v1 as tf

from examples.training.folder import UsageError
from examples.training.report import exit_status

__all__ = ["add_train_dir", "add_training_arguments", "positive_int", "run"]


def run(command, *mistakes):
    """Calls a function without arguments under graph mode; returns its exit status, 2 after one sentence for what can't be done.

    Args:
      command: the function, which returns an exit status, None being 0.
      *mistakes: exceptions whose message is such a sentence, beside those of this package.
    """
    tf.disable_eager_execution()
    tf.logging.set_verbosity(tf.logging.ERROR)
    return exit_status(lambda: command() or 0, UsageError, *mistakes)


def positive_int(text):
    """Returns an int of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("%s is not 1 or more" % text)
    return value


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
    parser.add_argument("--learning-rate", type=float, help="at its peak, " + recipe("learning_rate"))
    parser.add_argument("--warmup-steps", type=int,
                        help="in which the rate rises to its peak, at most a tenth of all steps; " + recipe("warmup_steps"))
    parser.add_argument("--weight-decay", type=float, help=recipe("weight_decay"))
    parser.add_argument("--save-every", type=positive_int, default=200, metavar="STEPS", help="default 200")
    parser.add_argument("--evaluate-every", type=positive_int, default=1, metavar="EPOCHS", help="default 1")
    parser.add_argument("--seed", type=int, default=0)
