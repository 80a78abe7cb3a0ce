"""Mutants of what runs inside SGLang alone, against the matrix's kept results.

``python -m sglang_aiter_moe.testing.mutation_matrix RESULTS [--share S] [--minutes M]``, from the checkout's root and
with an SGLang of 0.5.23. For each mutant the package is copied, changed, and runs every fourth of the covering cells
with the patch set; a cell that is not as ``docs/matrix.json`` has it kills the mutant, as in the test
``test/registered/e2e/test_matrix.py``. Results go where those of ``mutation_run`` go, and are gone on with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sglang_aiter_moe.testing.mutation_run import IN_THE_MATRIX, PACKAGE, chosen, distinct, sources

_PARTS = 4
_CHECK = """
import sys
from pathlib import Path
from sglang_aiter_moe.matrix import cells, stored
from sglang_aiter_moe.matrix.run import Side, run, sglang_of
kept = stored.load(Path("docs/matrix.json"))
position = {name: index for index, name in enumerate(kept.names)}
side = Side("0.5.23", True)
outcomes = run(cells.part(cells.covering(), 1, PARTS), side, sglang_of(side.release)).outcomes
row = kept.letters[side.release][side.name]
sys.exit(any(row[position[c.name]] != stored.letter(c, o) for c, o in outcomes.items()))
"""


def passes(package: Path) -> bool:
    """Whether the cells of the package below this folder are as kept."""
    code = _CHECK.replace("PARTS", str(_PARTS))
    env = os.environ | {"PYTHONPATH": str(package)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="of each module's mutants")
    parser.add_argument("--minutes", type=float, default=9)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if not passes(Path(folder)):
            raise SystemExit("the cells are not as docs/matrix.json has them, without any change")
        for name in IN_THE_MATRIX:
            (source,) = sources([name]).values()
            entry = results.get(name, {})
            if entry.get("source") != source:
                entry = {"source": source, "mutants": len(distinct(name)), "ran": {}}
            results[name] = entry
            for mutant in chosen(name, options.share):
                if mutant.name in entry["ran"] or time.monotonic() > end:
                    continue
                (copy / name).write_text(mutant.source)
                verdict = "survived" if passes(Path(folder)) else "killed"
                entry["ran"][mutant.name] = verdict
                options.results.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{verdict:9} {name} {mutant.name}", flush=True)
            shutil.copy(PACKAGE / name, copy / name)


if __name__ == "__main__":
    main()
