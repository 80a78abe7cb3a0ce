"""Generated pages and pictures are what the code makes of them today."""

import sys
import xml.etree.ElementTree as ET

import pytest

from sglang_aiter_moe.docsite import generate
from sglang_aiter_moe.docsite.terminal import picture, recording
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

FILES = generate.files()


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_current(name):
    path = generate.ROOT / name
    # A bare comparison: a diff of a picture helps nobody.
    current = path.exists() and path.read_text(encoding="utf-8") == FILES[name]()
    assert current, f"{name}: run `python -m sglang_aiter_moe.docsite.generate`"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".svg")])
def test_a_page_or_the_readme_shows_the_picture(name):
    pages = [generate.ROOT / "README.md", *(generate.ROOT / "docs").rglob("*.md")]
    end = name.removeprefix("docs/")
    assert any(end in page.read_text(encoding="utf-8") for page in pages)
    ET.parse(generate.ROOT / name)


def test_a_change_of_a_command_changes_the_page(monkeypatch):
    import typer

    from sglang_aiter_moe.cli import app

    before = FILES["docs/reference/cli.md"]()
    command = typer.Typer()
    command.command("new")(lambda: None)
    monkeypatch.setattr(
        app, "registered_commands", [*app.registered_commands, *command.registered_commands]
    )
    after = FILES["docs/reference/cli.md"]()
    assert "## new" in after and "## new" not in before


def test_every_command_is_on_the_page():
    page = (generate.ROOT / "docs/reference/cli.md").read_text()
    for name in ("verify", "plan", "doctor", "prebuild", "env", "layout", "eval", "check-tests"):
        assert f"\n## {name}\n" in page
    assert "\n## bench serving\n" in page and "`--remove-stale-locks`" in page


def test_the_doctor_picture_shows_the_contradiction_and_what_to_type():
    text = "".join(ET.parse(generate.ROOT / "docs/images/doctor.svg").getroot().itertext())
    assert "[bad]" in text and "export AITER_SITUV2_A8W4=1" in text and "AITER reads False" in text


def test_text_is_placed_by_columns_and_escaped():
    out = recording(40)
    out.print("[bold]a[/]  <b>")
    out.print("[red]c[/]")
    drawn = list(ET.fromstring(picture(out, "run")).iter())
    lines = [e for e in drawn if e.tag.endswith("text")]
    assert [e.text for e in lines] == ["$ run", "a", "<b>", "c"]
    places = [(float(e.get("x")), int(e.get("y"))) for e in lines]
    assert places[2][0] - places[1][0] == pytest.approx(3 * 7.2, abs=0.11)
    assert places[1][1] == places[2][1] < places[3][1]
    assert lines[1].get("font-weight") == "bold" and lines[3].get("fill") == "#e06c75"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
