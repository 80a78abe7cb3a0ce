"""Which SGLang is taken: the one given, this environment's, else a cached one of the lock."""

import sys
from pathlib import Path

import pytest

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.serving import sglang_python as pythons
from sglang_aiter_moe.testing import sglang_environment
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture
def built(monkeypatch, tmp_path):
    """What would be built, instead of building it."""
    asked = []

    def build(venv, *, releases=()):
        asked.append((venv, tuple(releases)))
        return venv / "bin" / "python"

    monkeypatch.setattr(sglang_environment, "build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def interpreter(tmp_path, version):
    """A script that answers as a Python with (or without) SGLang does."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho {version}\n" if version else "#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_the_installed_one_is_taken_where_it_fits(monkeypatch, built):
    monkeypatch.setattr(pythons, "installed", lambda: "0.5.20")
    for release in (None, "0.5.20"):
        assert pythons.find(release=release) == pythons.SGLang(Path(sys.executable), "0.5.20")
    assert built == []


def test_else_a_cached_one_is_made(monkeypatch, built, tmp_path):
    monkeypatch.setattr(pythons, "installed", lambda: None)
    main = pythons.find()
    assert main.release == "0.5.23" and len(main.paths) == 1 and "placeholders" in main.paths[0]
    monkeypatch.setattr(pythons, "installed", lambda: "0.5.23")
    old = pythons.find(release="0.5.18")
    assert [Path(p).name for p in old.paths] == ["0.5.18", "transformers-5.12.1", "placeholders"]
    new = pythons.find(release="0.5.22")
    assert [Path(p).name for p in new.paths] == ["0.5.22", "placeholders"]
    folder = tmp_path / "sglang-aiter-moe" / "sglang"
    assert built == [(folder, ()), (folder, ("0.5.18",)), (folder, ("0.5.22",))]
    path = new.environment({"PYTHONPATH": "/mine"})["PYTHONPATH"].split(":")
    assert path[:2] == list(new.paths) and path[-1] == "/mine"


def test_one_that_is_given_has_to_have_it(tmp_path, built):
    given = interpreter(tmp_path, "0.5.19")
    assert pythons.find(given) == pythons.SGLang(given, "0.5.19")
    with pytest.raises(ContractError, match=r"SGLang 0\.5\.19"):
        pythons.find(given, "0.5.20")
    with pytest.raises(ContractError, match="no SGLang"):
        pythons.find(interpreter(tmp_path, None))
    silent = tmp_path / "silent"  # ends well and says nothing, as /bin/true does
    silent.write_text("#!/bin/sh\nexit 0\n")
    silent.chmod(0o755)
    with pytest.raises(ContractError, match="no SGLang"):
        pythons.find(silent)
    with pytest.raises(ContractError, match="--sglang-python"):
        pythons.find(tmp_path / "nowhere")


def test_the_client_gets_a_placeholder_only_where_others_are():
    own = pythons.SGLang(Path("/x/python"), "0.5.23")
    assert pythons.client_environment(own, {"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/mine"}
    made = pythons.SGLang(Path("/x/python"), "0.5.23", (str(pythons.PLACEHOLDERS),))
    path = pythons.client_environment(made, {"HOME": "/h"})["PYTHONPATH"].split(":")
    assert path == [str(pythons.CLIENT_PLACEHOLDERS)]
    env = pythons.client_environment(own, {"PYTHONPATH": f"/mine:{pythons.PLACEHOLDERS}"})
    assert env["PYTHONPATH"].split(":")[-1] == str(pythons.CLIENT_PLACEHOLDERS)
    assert (pythons.CLIENT_PLACEHOLDERS / "datasets").is_dir()


def test_another_release_is_refused(monkeypatch, built):
    monkeypatch.setattr(pythons, "installed", lambda: None)
    with pytest.raises(ContractError, match=r"--release 0\.4\.0"):
        pythons.find(release="0.4.0")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
