"""The command line of `tf_syncbn.checkpoints`.

    python -m tf_syncbn.checkpoints list IN
    python -m tf_syncbn.checkpoints convert IN OUT --to slim --scope '/bn$=/BatchNorm'
"""
import argparse
import re
import sys
from typing import Optional, Sequence

import tensorflow.compat.v1 as tf

from tf_syncbn.checkpoints.files import convert, read
from tf_syncbn.checkpoints.variable_names import DIALECTS, lines, recognize

__all__ = ["main"]


def _print_list(in_path):
    checkpoint = read(in_path)
    recognized = recognize(checkpoint.shapes)
    rows = [("NAME", "SHAPE", "DTYPE", "RECOGNIZED AS")]
    for name, parts in recognized.items():
        spoken = " (%s)" % ", ".join(parts.dialects) if len(parts.dialects) < len(DIALECTS) else ""
        rows.append((name, str(checkpoint.shapes[name]), checkpoint.dtypes[name].name, (
            parts.kind + spoken if parts.kind else "unknown") + (", its " + parts.slot[1:] if parts.slot else "")))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print("%d names, %d of them unknown." % (len(recognized), sum(p.kind is None for p in recognized.values())))


def _print_conversion(in_path, out_path, to, scopes):
    new_names = convert(in_path, out_path, to, scopes)
    changed = ["%s -> %s" % (name, new) for name, new in new_names.items() if name != new]
    unknown = [name for name, parts in recognize(new_names).items() if parts.kind is None]
    print("Wrote %s: %d of %d names changed.%s" % (out_path, len(changed), len(new_names), lines(changed)))
    if unknown:
        print("Of no known kind, changed by --scope alone (%d):%s" % (len(unknown), lines(unknown)))


def _scope(text):
    # From the right: a pattern may hold "=", as in (?=...), and a TensorFlow scope can't.
    pattern, equals, replacement = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError("%r is not REGEX=REPLACEMENT" % text)
    return pattern, replacement


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tf_syncbn.checkpoints",
                                     description="Batch-norm variable names of tf.layers, slim and tensorpack, converted.")
    commands = parser.add_subparsers(dest="command", required=True)
    lister = commands.add_parser("list", help="print names, shapes, dtypes, and what each name is recognized as")
    converter = commands.add_parser("convert", help="write a checkpoint with the names of another dialect")
    for command in (lister, converter):
        command.add_argument("in_path", metavar="IN", help="a checkpoint's prefix, or a directory: its latest checkpoint")
    converter.add_argument("out_path", metavar="OUT", help="the new checkpoint's prefix, which must not exist")
    converter.add_argument("--to", required=True, choices=sorted(DIALECTS), help="the dialect of the new names")
    converter.add_argument("--scope", metavar="REGEX=REPLACEMENT", action="append", default=[], type=_scope,
                           help="change scopes (all before a name's last part) by re.sub; may be repeated, goes in order")
    given = parser.parse_args(argv)
    try:
        if given.command == "list":
            _print_list(given.in_path)
        else:
            _print_conversion(given.in_path, given.out_path, given.to, dict(given.scope))
    except ValueError as error:
        print("error: %s" % error, file=sys.stderr)
        return 2
    except tf.errors.OpError as error:  # TensorFlow 2 puts a stack trace before the reason, TensorFlow 1 behind it
        reason = re.sub(r"(?s)^.*\nNode: [^\n]*\n", "", error.message).split("\n")[0]
        print("error: TensorFlow could not convert %r: %s" % (given.in_path, reason), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
