"""The signatures of the public API say what they take and return."""
import importlib
import inspect
import typing
from pathlib import Path

import pytest

from tests.support import PUBLIC_MODULES, public_functions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_function_and_method_is_annotated_in_full(module):
    found = dict(public_functions(module))
    for name, function in found.items():
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        names = list(signature.parameters)[1 if "." in name else 0:]  # without self
        assert all(signature.parameters[each].annotation is not inspect.Parameter.empty for each in names), name
        assert set(typing.get_type_hints(function)) == set(names) | {"return"}, name
    assert found


def test_every_field_of_a_public_tuple_is_of_a_type():
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for found in (getattr(module, name) for name in module.__all__):
            if inspect.isclass(found) and issubclass(found, tuple):
                assert list(typing.get_type_hints(found)) == list(found._fields), found


def test_packages_tell_checkers_that_they_have_types():
    settings = (ROOT / "setup.cfg").read_text()
    for package in ("towers", "tf_syncbn"):
        assert (ROOT / package / "py.typed").read_bytes() == b""
        assert "%s = py.typed" % package in settings
