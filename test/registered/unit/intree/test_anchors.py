"""Finding, refusing and changing code, on small sources."""

import sys

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

pytest.importorskip("libcst", reason="the extra `apply` is not installed")

from sglang_aiter_moe.intree.anchors import (
    ChangedCode,
    Source,
    code_of,
    digest,
    signature,
    with_decorator,
    with_first,
    with_last,
    with_only,
)

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

TEXT = '''\
"""Doc."""
import os   # spaces   stay
from sglang.a import b
from sglang.m import (  # a comment
    n,
)


class C:
    """Doc of C."""

    def method(self, x , y = 1, *, key=None, **rest):
        """Doc."""
        # about the first line
        return  x+y

    # above the static one
    @staticmethod
    def other(): pass
'''


def source(text=TEXT):
    return Source("file.py", text.encode())


def test_a_source_that_is_not_edited_comes_back_byte_for_byte():
    for text in (TEXT, TEXT.replace("\n", "\r\n"), TEXT.replace("    ", "\t"), TEXT.rstrip("\n")):
        assert source(text).module.bytes == text.encode()


def test_signature_names_defaults_and_kinds():
    node = source().find("C.method")
    assert signature(node.params) == ["self", "x", "y=", "*", "key=", "**rest"]


@pytest.mark.parametrize(
    "parameters, named",
    [
        (["self", "x", "z=", "*", "key=", "**rest"], "`y=` for `z=`"),
        (["self", "x", "y=", "*", "key="], "another number"),
        (["self", "x", "y", "*", "key=", "**rest"], "`y=` for `y`"),
    ],
)
def test_another_signature_is_refused_with_place_and_name(parameters, named):
    with pytest.raises(ChangedCode) as error:
        source().function("C.method", parameters)
    assert "file.py:12" in error.value.what and named in error.value.what
    assert source().function("C.method", ["self", "x"], exact=False) is not None


def test_a_missing_function_is_refused():
    with pytest.raises(ChangedCode, match=r"file.py: there is no function C.nothing"):
        source().function("C.nothing", [])


@pytest.mark.parametrize(
    "code, same",
    [
        ("def f(a):\n    return a + 1", True),
        ('def f(a):  # words\n    """Doc."""\n\n    return (a\n        + 1)', True),
        ("def f(b):\n    return b + 1", False),
        ("def f(a):\n    return a + 2", False),
        ("def f(a):\n    return a - 1", False),
        ("def f(a=0):\n    return a + 1", False),
        ("def f(a):\n    a\n    return a + 1", False),
    ],
)
def test_the_digest_sees_meaning_and_nothing_else(code, same):
    assert (digest(code) == digest("def f(a):\n    return a + 1")) is same


def test_the_digest_of_a_method_is_that_of_the_code_at_any_depth():
    assert digest(code_of(source().find("C.other"))) == digest("@staticmethod\ndef other(): pass")


def test_unknown_code_is_refused():
    found = source()
    node = found.find("C.method")
    found.known(node, "C.method", {digest(code_of(node))})
    with pytest.raises(ChangedCode, match=r"C\.method is not the code"):
        found.known(node, "C.method", {"0" * 16})


def test_edits_touch_nothing_but_their_lines():
    found = source()
    new = found.statements("if self.ours:\n    return 1")
    found.replace("C.method", lambda node: with_first(node, new))
    found.replace("C.other", lambda node: with_decorator(node, found, "around(f)"))
    found.add_import("sglang.b", "c", "d")
    assert found.module.code == TEXT.replace(
        "from sglang.m", "from sglang.b import c as d\nfrom sglang.m"
    ).replace(
        "        # about", "        if self.ours:\n            return 1\n        # about"
    ).replace("    @staticmethod\n", "    @staticmethod\n    @around(f)\n")


def test_a_body_is_replaced_or_extended_and_the_docstring_stays():
    found = source()
    found.replace("C.method", lambda node: with_only(node, found.statements("return 2")))
    assert '"""Doc."""\n        return 2\n' in found.module.code
    found = source()
    found.replace("C.method", lambda node: with_last(node, found.statements("# why\ndone()")))
    assert "return  x+y\n        # why\n        done()\n" in found.module.code


def test_line_ends_and_indentation_are_the_files():
    found = source(TEXT.replace("    ", "\t").replace("\n", "\r\n"))
    new = found.statements("if a:\n    b()")
    found.replace("C.method", lambda node: with_first(node, new))
    assert "\r\n\t\tif a:\r\n\t\t\tb()\r\n" in found.module.code


@pytest.mark.parametrize(
    "module, before", [("sglang.a.z", "from sglang.m"), ("sglang.z", "\n\nclass C")]
)
def test_imports_go_where_sorting_puts_them(module, before):
    found = source()
    found.add_import(module, "x", "y")
    head, _, tail = found.module.code.partition(f"from {module} import x as y\n")
    assert head and tail.startswith(before)


def test_what_does_not_parse_is_refused():
    with pytest.raises(ChangedCode, match="does not parse"):
        Source("file.py", b"def f(:\n")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
