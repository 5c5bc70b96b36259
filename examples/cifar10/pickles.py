"""CIFAR-10's Python files, read without letting a pickle call anything.

A pickle is a program, and NumPy rebuilds what it says: an array of objects is one of raw pointers, so a made-up one ends the
process, or worse. Here nothing of NumPy is called. What a pickle asks for is noted by stand-ins, and taken if it is what
CIFAR-10 has: an array of uint8 and a list of ints.
"""
import io
import pickle
import reprlib

import numpy as np

__all__ = ["parse"]

# What CIFAR-10's files, and copies of them by Python 3, are made of: nothing of the text protocol, whose ints may have
# millions of digits, and nothing that makes sets or objects.
_OPCODES = b"".join([
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.BINPUT,
    pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST,
    pickle.APPEND, pickle.APPENDS, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.NONE,
    pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.SHORT_BINSTRING, pickle.BINSTRING, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES,
    pickle.SHORT_BINBYTES])
_MOST_READS = 10 ** 6  # CIFAR-10's files take a tenth; a list for each byte would take gigabytes


def parse(content, count, size, classes):
    """Returns what a pickle of CIFAR-10 holds.

    Args:
      content: bytes, of protocol 2 to 4, by Python 2 or 3.
      count: int, how many images there should be.
      size: int, the bytes of an image.
      classes: int, the number of labels.

    Returns:
      uint8 [count, size] and int64 [count].

    Raises:
      ValueError: saying what it is instead, in half a sentence.
    """
    try:
        record = _Reader(_File(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from error
    except EOFError as error:
        raise ValueError("it ends too early") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError("it is no pickle of CIFAR-10") from error
    data, labels = (record.get(name) if isinstance(record, _Record) else None for name in (b"data", b"labels"))
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise ValueError("it holds no dict with an array as b'data' and a list as b'labels'")
    pixels = data.content()
    if data.shape != (count, size) or len(pixels) != count * size or len(labels) != count:
        raise ValueError("it holds %d bytes as uint8 %s and %d labels where uint8 (%d, %d) and %d were expected"
                         % (len(pixels), reprlib.repr(data.shape), len(labels), count, size, count))
    for i, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < classes:
            raise ValueError("it has the label %s in record %d; labels are whole numbers from 0 to %d"
                             % (reprlib.repr(label), i, classes - 1))
    return np.frombuffer(pixels, np.uint8).reshape((count, size), order="F" if data.fortran else "C"), np.array(labels)


class _Record(dict):
    """A dict by strings. Others are refused: Python's hash of tuples within tuples overflows the stack."""
    __slots__ = ()

    def __setitem__(self, key, value):
        key = _bytes(key)
        if key is None:
            raise pickle.UnpicklingError("it has a dict by something else than strings")
        super().__setitem__(key, value)


class _StandIn:
    """What a pickle may call. Where there is a `__setstate__`, it can't set attributes, those of the class included."""

    def __setstate__(self, state):
        pass


class _Dtype(_StandIn):
    """Stands for `numpy.dtype`. Its state would be the byte order, which bytes have none of."""

    def __init__(self, code, align, copy):
        self.code = code


class _Encoded(_StandIn):
    """Stands for `_codecs.encode`, by which Python 3 writes bytes in protocol 2; encoding waits until all is read."""

    def __init__(self, text, encoding):
        self.text = text


class _Array(_StandIn):
    """Stands for `numpy.core.multiarray._reconstruct`: notes the state that the array would be given."""
    shape = dtype = fortran = pixels = None

    def __init__(self, kind, shape, code):
        pass

    def __setstate__(self, state):
        _, self.shape, self.dtype, self.fortran, self.pixels = state

    def content(self):
        """Returns its bytes if it is one of uint8."""
        code = self.dtype.code if isinstance(self.dtype, _Dtype) else None
        if code not in ("u1", b"u1"):
            raise ValueError("its array is of dtype %s where uint8 was expected" % reprlib.repr(code))
        content = _bytes(self.pixels)
        if content is None:
            raise ValueError("its array is not made of bytes")
        return content


def _bytes(value):
    """Returns the bytes that a string is, or None if it is none."""
    value = value.text if isinstance(value, _Encoded) else value
    value = value.encode("latin-1") if isinstance(value, str) else value
    return value if isinstance(value, bytes) else None


_STAND_INS = {("numpy", "dtype"): _Dtype, ("numpy", "ndarray"): None, ("_codecs", "encode"): _Encoded,
              ("numpy.core.multiarray", "_reconstruct"): _Array, ("numpy._core.multiarray", "_reconstruct"): _Array}


class _Reader(pickle._Unpickler):  # the one in C has no table of opcodes, and makes room for any number of the memo
    dispatch = {code: read for code, read in pickle._Unpickler.dispatch.items() if code in _OPCODES}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Record())
    dispatch[pickle.FRAME[0]] = lambda self: self.read(8)  # what is in a frame is read as if there were none

    def find_class(self, module, name):
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError("it refers to %r" % ("%s.%s" % (module, name))[:80])
        return _STAND_INS[module, name]


class _File(io.BytesIO):
    """A file that may be read only so often."""
    _reads = 0

    def read(self, size=-1):
        self._reads += 1
        if self._reads > _MOST_READS:
            raise pickle.UnpicklingError("it has more parts than a pickle of CIFAR-10")
        return super().read(size)
