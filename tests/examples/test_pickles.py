"""Pickles of CIFAR-10: those of any Python are read as NumPy reads them, and made-up ones do nothing."""
import copyreg
import os
import pickle
import pickletools
import re
import resource
import struct

import numpy as np
import pytest

from examples.cifar10 import pickles

IMAGES = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
LABELS = [3, 0, 9]


def parse(content):
    return pickles.parse(content, 3, 4, 10)


def refusal(content):
    """What is said of a pickle."""
    with pytest.raises(ValueError) as raised:
        parse(content)
    message = str(raised.value)
    assert type(raised.value) is ValueError and "\n" not in message and len(message) < 200, message
    return message


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("images", [IMAGES, np.asfortranarray(IMAGES), IMAGES[::-1]])
def test_what_numpy_wrote_is_read_in_protocol_2_to_4(protocol, images):
    found, labels = parse(pickle.dumps({b"labels": LABELS, b"data": images, b"filenames": [b"a.png"] * 3}, protocol))
    assert found.dtype == np.uint8 and labels.tolist() == LABELS
    np.testing.assert_array_equal(found, images)


# By Python 2, opcode by opcode, as the official files are made.
def string(text):
    return b"U" + struct.pack("<B", len(text)) + text


def array(dtype=b"cnumpy\ndtype\nq\x04" + string(b"u1") + b"K\x00K\x01\x87q\x05Rq\x06(K\x03" + string(b"|")
          + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x07b", shape=b"K\x03K\x04\x86", fortran=b"\x89",
          content=b"T\x0c\x00\x00\x00" + IMAGES.tobytes(), kind=b"cnumpy\nndarray\n", module=b"numpy.core.multiarray",
          function=b"_reconstruct"):
    return (b"c" + module + b"\n" + function + b"\nq\x02" + kind + b"K\x00\x85" + string(b"b") + b"\x87Rq\x03(K\x01" + shape
            + dtype + fortran + content + b"tb")


def python_2(data=None, labels=b"](K\x03K\x00K\x09e"):
    return (b"\x80\x02}q\x01(" + string(b"data") + b"r\x00\x01\x00\x00" + (array() if data is None else data)
            + string(b"labels") + labels + string(b"batch_label") + string(b"testing batch 1 of 1") + b"u.")


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_what_python_2_wrote_is_read(module):
    found, labels = parse(python_2(array(module=module)))
    np.testing.assert_array_equal(found, IMAGES)
    assert labels.tolist() == LABELS


def dtype(code, state):
    """A dtype whose state says what it likes, of the objects in it too."""
    return b"cnumpy\ndtype\n" + string(code) + b"K\x00K\x01\x87R" + state + b"b"


POINTERS = dtype(b"O8", b"(K\x03" + string(b"|") + b"NNNK\x08K\x08K\x00t")  # flags of 0: not as a list, but as it is in memory


@pytest.mark.parametrize("data,message", [
    (array(dtype=POINTERS, shape=b"K\x01\x85", content=string(b"\x01" * 8)), "its array is of dtype b'O8' where uint8 was"),
    (array(dtype=string(b"u1")), "its array is of dtype None where uint8 was"),
    (array(dtype=array()), "its array is of dtype None where"),
    (array(shape=b"K\x03K\x05\x86"), r"it holds 12 bytes as uint8 \(3, 5\) and 3 labels where uint8 \(3, 4\) and 3 were"),
    (array(content=string(b"short")), r"it holds 5 bytes as uint8 \(3, 4\) and 3 labels"),
    (array(shape=b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\x04\x86"), r"it holds 12 bytes as uint8 \(9223372036854775807, 4\)"),
    (array(shape=b"J\xfd\xff\xff\xffJ\xfc\xff\xff\xff\x86"), r"it holds 12 bytes as uint8 \(-3, -4\)"),
    (array(shape=b"]"), r"it holds 12 bytes as uint8 \[\]"),
    (array(content=b"](NNNe"), "its array is not made of bytes"),
    (array(content=b"N"), "its array is not made of bytes"),
    (array() + b"K\x05b", "it is no pickle of CIFAR-10"),
    (array(kind=b"cnumpy\nmatrix\n"), "it refers to 'numpy.matrix'"),
    (array(kind=b"cnumpy.ma.core\nMaskedArray\n"), "it refers to 'numpy.ma.core.MaskedArray'"),
    (array(function=b"scalar"), "it refers to 'numpy.core.multiarray.scalar'"),
    (array(module=b"numpy.core.numeric", function=b"_frombuffer"), "it refers to 'numpy.core.numeric._frombuffer'"),
    (array(module=b"numpy.f2py.capi_maps", function=b"eval"), "it refers to 'numpy.f2py.capi_maps.eval'"),
    (array(function=b"_reconstruct.__globals__"), "it refers to "),
    (b"cos\nmkdir\n(U\x04harmtR", "it refers to 'os.mkdir'"),
    (b"(U\x04harmios\nmkdir\n", "it is no pickle of CIFAR-10"),
    (b"K\x05", "it holds no dict with an array as b'data'"),
    (b"](](K\x01K\x02ee", "it holds no dict with an array as b'data'"),
    (b"cnumpy\ndtype\n", "it holds no dict with an array as b'data'"),
])
def test_arrays_that_cifar10_has_not_are_never_made(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    assert re.match(message, refusal(python_2(data)))
    assert not os.listdir(str(tmp_path))


@pytest.mark.parametrize("label,message", [
    (b"G" + struct.pack(">d", 2.5), "the label 2.5 in record 1; labels are whole numbers from 0 to 9"),
    (b"G" + struct.pack(">d", float("nan")), "the label nan in record 1"),
    (b"\x88", "the label True in record 1"), (b"N", "the label None in record 1"),
    (string(b"cat"), "the label b'cat' in record 1"), (b"]", r"the label \[\] in record 1"), (b"K\x0a", "the label 10 in"),
    (b"J\xff\xff\xff\xff", "the label -1 in"), (b"\x8a\xff" + b"\x7f" * 255, "the label 9.*99.* in"),
])
def test_labels_that_are_no_whole_numbers_are_named(label, message):
    found = refusal(python_2(labels=b"](K\x03" + label + b"K\x09e"))
    if b"\x8a" in label:
        assert found.startswith("it has the label ") and len(found) < 120
    else:
        assert re.match("it has " + message, found)


@pytest.mark.parametrize("labels", [b"N", string(b"\x03\x00\x09"), b"K\x03", array(), b"}", b"(K\x03K\x00K\x09t"])
def test_labels_that_are_no_list_are_refused(labels):
    assert refusal(python_2(labels=labels)).startswith("it holds no dict with an array as b'data' and a list as b'labels'")


def test_labels_of_another_number_are_refused():
    assert "and 2 labels where" in refusal(python_2(labels=b"](K\x03K\x00e"))


@pytest.mark.parametrize("content,message", [
    (b"", "it ends too early"), (b"\x80\x02}", "it ends too early"), (python_2()[:80], ""), (b"no pickle", "it is no pickle of"),
    (b"}" + b")" + b"\x85" * 10 ** 5 + b"Ns.", "it has a dict by something else than strings"),  # whose hash overflows the stack
    (b"}r\xff\xff\xff\x7f.", "it holds no dict"),  # would take 32 GiB of memo
    (b"I" + b"9" * 10 ** 6 + b"\n.", "it is no pickle of CIFAR-10"),  # would take quadratic time
    (b"](" + b"]" * (10 ** 6 + 1) + b"e.", "it has more parts than a pickle of CIFAR-10"),
    (b"\x80\x04\x8c\x02a\n\x8c\x01b\x93.", r"it refers to 'a\\n.b'"),
    (b"P7\n.", "it is no pickle of CIFAR-10"), (b"\x82\x01.", "it is no pickle of CIFAR-10"),
    (b"cnumpy\ndtype\n)\x81.", "it is no pickle of CIFAR-10"),
])
def test_what_no_writer_makes_is_refused(content, message):
    assert re.match(message, refusal(content))


def test_every_other_opcode_is_refused():
    """Persistent ids, extensions, objects by class, sets, byte arrays, buffers, the text protocol: whatever Python knows."""
    known = pickles._OPCODES + pickle.EMPTY_DICT + pickle.FRAME
    others = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes if opcode.code.encode("latin-1") not in known]
    assert len(others) > 20
    for code in others:
        assert refusal(b"\x80\x02(]q\x00" + code + b"\x01" * 16 + b"\n.") == "it is no pickle of CIFAR-10", code


@pytest.mark.parametrize("opcode", [b"T", b"X", b"B"])
def test_lengths_that_a_file_has_not_take_no_memory(opcode):
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 29),
                                            before[1]))
    try:
        refusal(b"\x80\x02" + opcode + b"\xff\xff\xff\x7fshort")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", ["_Array", "_Dtype", "_Encoded", "_StandIn", "_Record"])
def test_no_pickle_changes_the_reader(name):
    """BUILD sets attributes of whatever has no `__setstate__`, of classes too."""
    before = dict(vars(getattr(pickles, name)))
    attributes = b"N}X\x03\x00\x00\x00getNs\x86b."
    for given in (b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n", b"cnumpy\nndarray\n",
                  b"}"):
        refusal(given + attributes)
    assert dict(vars(getattr(pickles, name))) == before


def test_registered_extensions_are_not_looked_up():
    copyreg.add_extension("os", "getcwd", 200)
    try:
        assert pickle.loads(b"\x82\xc8)R.") == os.getcwd()  # from now on Python knows it without asking find_class
        assert refusal(b"\x82\xc8)R.") == "it is no pickle of CIFAR-10"
    finally:
        copyreg.remove_extension("os", "getcwd", 200)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize("seed", range(5))
def test_damaged_bytes_are_read_or_refused(seed):
    rng, whole = np.random.RandomState(seed), python_2()
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randint(len(damaged))] = rng.randint(256)
        try:
            parse(bytes(damaged))
        except ValueError as error:
            assert type(error) in (ValueError, UnicodeEncodeError) and "\n" not in str(error)
