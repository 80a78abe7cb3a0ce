"""The plugin's decisions and its self-check, on a stand-in for SGLang."""

import ast
import dataclasses
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_aiter_moe import entry as entry_point
from sglang_aiter_moe import plugin
from sglang_aiter_moe.errors import PatchError
from sglang_aiter_moe.intree import manifest
from sglang_aiter_moe.patches import glue
from sglang_aiter_moe.patches.model import How, Patch, Status
from sglang_aiter_moe.patches.table import GUARD, PATCHES
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer"


def patch(name, target, **fields):
    return Patch(
        name=name,
        target=f"sglang.stand_in:{target}",
        function="sglang_aiter_moe.testing.stand_in_patch:around",
        why="it would be wrong",
        backends=frozenset({"portable", "inert"}),
        **fields,
    )


TABLE = (
    patch("add", "add"),
    patch("only old", "add", until="0.5.19", upstream="it adds rightly"),
    patch("only new", "not_there_yet", since="0.5.22"),
)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Writes a package ``sglang`` with the module of FusedMoE and one of our table's targets."""
    root = tmp_path / "sglang"
    folder = root / "srt" / "layers" / "moe" / "fused_moe_triton"
    folder.mkdir(parents=True)
    for path in (root, *(p for p in folder.parents if root in p.parents), folder):
        (path / "__init__.py").write_text("")
    (root / "__init__.py").write_text("__version__ = '0.5.20'\n")
    (folder / "layer.py").write_text(
        textwrap.dedent("""
            from sglang.stand_in import add
            class FusedMoE:
                def __init__(self, size):
                    self.size = add(size, 1)
        """)
    )
    (root / "stand_in.py").write_text("def add(a, b):\n    return a + b\n")
    saved = {n: m for n, m in sys.modules.items() if n == "sglang" or n.startswith("sglang.")}
    for name in saved:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugin, "PATCHES", TABLE)
    for name in (plugin.ENABLE, plugin.BACKEND, plugin.ALLOW_UNTESTED):
        monkeypatch.delenv(name, raising=False)
    import sglang

    plugin.unregister()
    yield sglang
    plugin.unregister()
    for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
        del sys.modules[name]
    sys.modules.update(saved)


def build(size=1):
    return importlib.import_module(LAYER).FusedMoE(size)


def by_name():
    return {state.patch.name: state for state in plugin.states()}


def test_patches_apply_when_their_module_is_imported(stand_in):
    plugin.register()
    assert "sglang.stand_in" not in sys.modules
    assert by_name()["add"].status is Status.WAITING
    layer = build()
    assert layer.size == ("patched", 2)
    states = by_name()
    assert states["add"].status is Status.IN_FORCE
    assert states["only old"].status is Status.NOT_NEEDED
    assert "it adds rightly" in states["only old"].reason
    assert states["only new"].status is Status.NOT_NEEDED
    assert "0.5.22" in states["only new"].reason


def test_patches_apply_to_modules_imported_before(stand_in):
    build()
    plugin.register()
    assert by_name()["add"].status is Status.IN_FORCE
    assert build().size == ("patched", 2)


def test_register_twice_patches_once(stand_in):
    plugin.register()
    plugin.register()
    assert build().size == ("patched", 2)
    assert len(plugin.states()) == 1 + len(TABLE)


def test_the_kill_switch(stand_in, monkeypatch):
    monkeypatch.setenv(plugin.ENABLE, "0")
    plugin.register()
    assert build().size == 2
    assert plugin.states() == []


def test_a_missing_target_stops_the_first_moe_layer(stand_in, monkeypatch):
    monkeypatch.setattr(plugin, "PATCHES", (patch("wrong name", "subtract"),))
    plugin.register()
    with pytest.raises(PatchError) as caught:
        build()
    text = str(caught.value)
    assert "wrong name" in text and "sglang.stand_in:subtract" in text
    assert "doctor" in text and plugin.ENABLE in text
    with pytest.raises(PatchError):
        build()


def test_a_patch_that_somebody_undoes_stops_the_first_moe_layer(stand_in):
    plugin.register()
    module = importlib.import_module("sglang.stand_in")
    module.add = lambda a, b: a + b
    with pytest.raises(PatchError, match="replaced"):
        build()


def test_a_module_that_was_imported_again_stops_the_first_moe_layer(stand_in):
    plugin.register()
    importlib.reload(importlib.import_module("sglang.stand_in"))
    with pytest.raises(PatchError, match="replaced"):
        build()


def test_without_the_guard_the_first_mxfp4_layer_is_stopped(stand_in):
    """Its module was imported again, so nothing is around FusedMoE any more."""
    plugin.register()
    build_without_guard = importlib.reload(importlib.import_module(LAYER)).FusedMoE
    assert build_without_guard(1).size == ("patched", 2)
    with pytest.raises(PatchError, match=r"FusedMoE\.__init__"):
        glue.create_weights(None, None, None)


def test_a_missing_guard_leaves_through_the_plugin_loader(stand_in, monkeypatch):
    monkeypatch.setattr(
        plugin, "GUARD", dataclasses.replace(GUARD, target=f"{LAYER}:NoSuchLayer.__init__")
    )
    plugin.register()
    with pytest.raises(plugin.PluginStop, match="NoSuchLayer"):
        importlib.import_module(LAYER)
    assert not issubclass(plugin.PluginStop, Exception)  # SGLang's loader catches Exception


def test_a_module_imported_after_the_check_is_refused_there_and_at_the_next_layer(
    stand_in, monkeypatch
):
    late = dataclasses.replace(patch("late", "gone"), target="sglang.late:gone", when_used=True)
    monkeypatch.setattr(plugin, "PATCHES", (*TABLE, late))
    (importlib.import_module("pathlib").Path(stand_in.__file__).parent / "late.py").write_text("")
    plugin.register()
    assert build().size == ("patched", 2)
    assert by_name()["late"].status is Status.WAITING
    with pytest.raises(PatchError, match="late"):
        importlib.import_module("sglang.late")
    with pytest.raises(PatchError, match="late"):
        build()


@pytest.mark.parametrize("version", ["0.5.12", "0.5.24", "0.5.23.post1", "0.6.0.dev1"])
def test_an_untested_release_is_refused_unless_allowed(stand_in, monkeypatch, version):
    stand_in.__version__ = version
    plugin.register()
    with pytest.raises(PatchError) as caught:
        build()
    assert version in str(caught.value) and plugin.ALLOW_UNTESTED in str(caught.value)
    plugin.unregister()
    monkeypatch.setenv(plugin.ALLOW_UNTESTED, "1")
    monkeypatch.setattr(plugin, "PATCHES", (patch("add", "add", since="0.5.12"),))
    plugin.register()
    assert build().size == ("patched", 2)


@pytest.mark.parametrize("version", ["0.5.13", "0.5.17", "0.5.23", "0.5.20+rocm700"])
def test_the_tested_releases_are_accepted(stand_in, version):
    stand_in.__version__ = version
    assert plugin.release_problem() is None


@pytest.mark.parametrize("value", ["", "Portable", "cpu", "aiter"])
def test_a_backend_that_cannot_be_is_refused(stand_in, monkeypatch, value):
    monkeypatch.setenv(plugin.BACKEND, value)
    plugin.register()
    with pytest.raises(PatchError, match=plugin.BACKEND):
        build()


def test_auto_is_inert_without_rocm_and_says_so(stand_in, monkeypatch):
    only_aiter = dataclasses.replace(TABLE[0], backends=frozenset({"aiter"}))
    monkeypatch.setattr(plugin, "PATCHES", (only_aiter,))
    plugin.register()
    assert build().size == 2
    state = by_name()["add"]
    assert state.status is Status.NOT_NEEDED and "not a ROCm build" in state.reason


def test_portable_registers_itself_as_aiter_and_keeps_the_callers_choice(stand_in, monkeypatch):
    from sglang_aiter_moe import portable

    monkeypatch.setenv(plugin.BACKEND, "portable")
    with portable.installed(arch="gfx942"):
        plugin.register()
        assert portable.current().machine.arch == "gfx942"
    plugin.unregister()
    try:
        plugin.register()
        assert portable.is_portable(sys.modules["aiter"])
    finally:
        portable.uninstall()


@pytest.mark.parametrize("cause", ["kernel", "real AITER"])
def test_a_portable_that_cannot_be_registered_stops_the_first_moe_layer(
    stand_in, monkeypatch, tmp_path, cause
):
    """And not the plugin alone: SGLang would log that and serve on."""
    from sglang_aiter_moe import portable

    monkeypatch.setenv(plugin.BACKEND, "portable")
    if cause == "kernel":
        monkeypatch.setenv(plugin.A16W4_KERNEL, "sideways")
    else:
        (tmp_path / "aiter" / "ops").mkdir(parents=True)
        for path in ("__init__.py", "ops/__init__.py", "ops/shuffle.py"):
            (tmp_path / "aiter" / path).write_text("")
    plugin.register()
    with pytest.raises(PatchError, match="portable AITER"):
        build()
    assert not portable.is_portable(sys.modules.get("aiter"))


def sglangs_loader(register):
    """What SGLang's ``load_plugins`` does with one plugin."""
    try:
        register()
    except Exception:
        return "logged, and served on"
    return "executed"


@pytest.mark.parametrize("error", [ImportError("no module named packaging"), RuntimeError("bug")])
def test_a_broken_plugin_leaves_through_sglangs_loader(monkeypatch, error):
    def broken():
        raise error

    monkeypatch.setattr(plugin, "register", broken)
    monkeypatch.delenv(plugin.ENABLE, raising=False)
    assert sglangs_loader(plugin.register) == "logged, and served on"
    with pytest.raises(SystemExit, match=str(error)):
        sglangs_loader(entry_point.register)
    monkeypatch.setenv(plugin.ENABLE, "0")
    assert sglangs_loader(entry_point.register) == "executed"


def test_the_entry_point_imports_nothing_that_can_be_missing():
    """Its module is imported outside of its own net."""
    code = (
        "import sys; before = set(sys.modules); import sglang_aiter_moe.entry; "
        "print([n for n in set(sys.modules) - before if n.partition('.')[0] not in sys.stdlib_module_names])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout)
    assert set(loaded) == {"sglang_aiter_moe", "sglang_aiter_moe.entry"}


def test_inspect_states_shows_a_broken_patch_instead_of_raising(stand_in, monkeypatch):
    monkeypatch.setattr(plugin, "PATCHES", (*TABLE, patch("wrong name", "subtract")))
    states = {s.patch.name: s for s in plugin.inspect_states()}
    assert states["wrong name"].status is Status.REFUSED
    assert states["add"].status is Status.IN_FORCE
    assert set(states["add"].as_dict()) == {"name", "target", "state", "reason"}


def test_the_table_is_well_formed():
    names = [p.name for p in (GUARD, *PATCHES)]
    assert len(names) == len(set(names))
    for entry in (GUARD, *PATCHES):
        module, _, attribute = entry.function.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), entry.name
        assert entry.why and entry.backends <= {"aiter", "portable", "inert"}
        assert entry.how in How
        assert (entry.until is None) == (not entry.upstream), entry.name


# --- an SGLang that has the patch set in its source ----------------------------------------------


def apply_to(stand_in, patches):
    folder = Path(stand_in.__path__[0]) / manifest.FOLDER
    folder.mkdir(parents=True)
    record = manifest.Manifest("0.0.9", "0.5.20", patches, {}, {})
    (folder / manifest.NAME).write_bytes(record.to_bytes())


def test_what_is_in_the_tree_is_not_patched_again(stand_in, monkeypatch):
    apply_to(stand_in, ["add"])
    monkeypatch.setattr(plugin, "PATCHES", (*TABLE, patch("another", "add")))
    monkeypatch.setenv(plugin.BACKEND, "portable")
    plugin.register()
    layer = build()
    states = by_name()
    assert states["add"].status is Status.NOT_NEEDED
    assert states["add"].reason == "in the tree already, from sglang-aiter-moe 0.0.9"
    assert states["another"].status is Status.IN_FORCE
    assert layer.size == importlib.import_module("sglang.stand_in").add(1, 1)


@pytest.mark.parametrize("what", ["interrupted", "damaged"])
def test_a_half_changed_tree_is_refused(stand_in, monkeypatch, what):
    apply_to(stand_in, ["add"])
    package = Path(stand_in.__path__[0])
    if what == "interrupted":
        (package / manifest.JOURNAL).mkdir()
    else:
        (package / manifest.FOLDER / manifest.NAME).write_text("{}")
    monkeypatch.setenv(plugin.BACKEND, "portable")
    plugin.register()
    with pytest.raises(PatchError, match=r"was interrupted|is not what `apply` wrote"):
        build()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
