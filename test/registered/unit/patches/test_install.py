"""Every reference to a patched function is found, and what is lost later is noticed."""

import functools
import sys
import types

import pytest

from sglang_aiter_moe.patches.install import install, uninstall, verify
from sglang_aiter_moe.patches.model import How, Patch, State, Status
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def around(original, *args, **kwargs):
    """Stands for a function of ``srt``: marks the result of the original."""
    return ("patched", original(*args, **kwargs))


def replace(*args, **kwargs):
    return ("replaced", args)


def switched_on(original):
    return True


def subclass(original):
    class Wider(original):
        extra = 1

    return Wider


def broken(original):
    raise RuntimeError("cannot be made")


@pytest.fixture
def modules(monkeypatch):
    """A defining module with an alias, an importer, and registries, under SGLang's name."""
    definer = types.ModuleType("sglang.fake_definer")
    exec(
        "def rank(x):\n    return x\n"
        "alias = rank\n"
        "pool = {('standard', 'aiter'): rank, 'deep': {'x': rank}, 'list': [rank]}\n"
        "flag = False\n"
        "class Info:\n    pass\n"
        "class Method:\n"
        "    registry = {'apply': rank}\n"
        "    def apply(self, x):\n        return x\n"
        "    @staticmethod\n    def static(x):\n        return x\n",
        vars(definer),
    )
    for cls in (definer.Info, definer.Method):
        cls.__module__ = definer.__name__
    importer = types.ModuleType("sglang.fake_importer")
    importer.rank_here, importer.Info, importer.unrelated = definer.rank, definer.Info, False
    for module in (definer, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return definer, importer


def state_for(target, function="around", **fields):
    patch = Patch(
        name="test",
        target=f"sglang.fake_definer:{target}",
        function=f"{__name__}:{function}",
        why="because",
        **fields,
    )
    return State(patch)


@pytest.fixture(autouse=True)
def this_module_is_importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module():
    module = types.ModuleType(__name__)
    vars(module).update(globals())
    return module


def test_alias_importer_and_registries_get_the_patched_function(modules):
    definer, importer = modules
    state = state_for("rank")
    install(state)
    assert state.status is Status.IN_FORCE, state.reason
    for call in (
        definer.rank,
        definer.alias,
        importer.rank_here,
        definer.pool["standard", "aiter"],
        definer.pool["deep"]["x"],
        definer.pool["list"][0],
        definer.Method.registry["apply"],
    ):
        assert call(3) == ("patched", 3)
    assert verify(state) is None


def test_a_copy_that_appears_later_is_noticed(modules):
    _, importer = modules
    state = state_for("rank")
    install(state)
    importer.kept_from_before = state.original
    assert "sglang.fake_importer.kept_from_before" in verify(state)


def test_a_partial_cannot_be_patched_and_is_refused(modules):
    definer, importer = modules
    importer.bound = functools.partial(definer.rank, 1)
    state = state_for("rank")
    install(state)
    assert "functools.partial" in verify(state)


def test_a_default_argument_keeps_the_function_and_is_refused(modules):
    definer, importer = modules

    def route(x, by=definer.rank):
        return by(x)

    class Router:
        def route(self, x, *, by=definer.rank):
            return by(x)

    Router.__module__ = importer.__name__
    state = state_for("rank")
    install(state)
    assert verify(state) is None
    for name, holder in (("route", route), ("Router", Router)):
        setattr(importer, name, holder)
        assert f"sglang.fake_importer.{name}" in verify(state) and "default argument" in verify(
            state
        )
        delattr(importer, name)
    assert verify(state) is None


def test_methods_and_static_methods(modules):
    definer, _ = modules
    method, static = state_for("Method.apply"), state_for("Method.static")
    install(method)
    install(static)
    assert definer.Method().apply(2) == ("patched", 2)
    assert definer.Method.static(2) == ("patched", 2) == definer.Method().static(2)
    assert verify(method) is None


def test_a_subclass_that_overrides_is_refused(modules):
    definer, _ = modules
    state = state_for("Method.apply")
    install(state)

    class Other(definer.Method):
        def apply(self, x):
            return None

    assert "Other" in verify(state)


def test_a_constant_changes_in_one_module_only(modules):
    definer, importer = modules
    state = state_for("flag", "switched_on", how=How.VALUE)
    install(state)
    assert definer.flag is True
    assert importer.unrelated is False
    assert verify(state) is None
    definer.flag = False
    assert "False" in verify(state)


def test_a_class_is_replaced_by_its_subclass_everywhere(modules):
    definer, importer = modules
    before = definer.Info
    state = state_for("Info", "subclass", how=How.VALUE)
    install(state)
    assert definer.Info is importer.Info
    assert issubclass(definer.Info, before) and definer.Info.extra == 1
    assert verify(state) is None


def test_a_name_that_only_rocm_has_can_be_added(modules):
    definer, _ = modules
    state = state_for("aiter_topk", "switched_on", how=How.VALUE, adds=True)
    install(state)
    assert definer.aiter_topk is True and verify(state) is None
    uninstall(state)
    assert not hasattr(definer, "aiter_topk")


@pytest.mark.parametrize(
    "target, function, expected",
    [
        ("missing", "around", "missing"),
        ("Method.missing", "around", "missing"),
        ("Missing.apply", "around", "Missing"),
        ("rank", "no_such_function", "no_such_function"),
        ("Info", "around", "not a function"),
        ("flag", "around", "not a function"),
    ],
)
def test_what_cannot_be_patched_is_refused_with_the_reason(modules, target, function, expected):
    state = state_for(target, function)
    install(state)
    assert state.status is Status.REFUSED
    assert expected in state.reason


def test_a_value_that_cannot_be_made_is_refused(modules):
    state = state_for("flag", "broken", how=How.VALUE)
    install(state)
    assert state.status is Status.REFUSED and "cannot be made" in state.reason


def test_an_inherited_method_is_not_taken_for_the_class_own(modules):
    definer, _ = modules
    definer.Child = type("Child", (definer.Method,), {})
    state = state_for("Child.apply")
    install(state)
    assert state.status is Status.REFUSED and "does not define" in state.reason


def test_another_plugins_wrapper_on_top_is_accepted_and_a_bare_replacement_is_not(modules):
    definer, _ = modules
    state = state_for("rank")
    install(state)
    ours = definer.rank

    @functools.wraps(ours)
    def theirs(x):
        return ours(x)

    definer.rank = theirs
    assert verify(state) is None
    definer.rank = lambda x: x
    assert "replaced" in verify(state)


def test_uninstall_restores_every_reference(modules):
    definer, importer = modules
    before = definer.rank
    state = state_for("rank", "replace", how=How.REPLACE)
    install(state)
    assert importer.rank_here(1) == ("replaced", (1,))
    uninstall(state)
    assert definer.rank is definer.alias is importer.rank_here is before
    assert definer.pool["standard", "aiter"] is before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
