"""Which SGLang a directory holds: a source tree or an installed one, and which release."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.intree.manifest import read_manifest
from sglang_aiter_moe.srt import releases

FIRST, LAST = Version(releases.FIRST), Version(releases.LAST)
#: What makes a directory SGLang's package, whatever the release.
_MARKS = ("version.py", "srt/layers/moe/topk.py", "srt/layers/quantization/mxfp4.py")


@dataclass(frozen=True)
class Tree:
    """One SGLang.

    Attributes:
        root: the directory that was given.
        package: SGLang's package, ``python/sglang`` of a source tree, ``sglang`` of site-packages.
        release: which release, without what a build adds to it.
        tests: ``test/registered`` of a source tree; None where SGLang's tests are not.
    """

    root: Path
    package: Path
    release: Version
    tests: Path | None

    def shown(self, path: Path) -> str:
        """``path`` as people write it: from the root of the tree on."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def find_tree(root: Path, release: str | None = None) -> Tree:
    """Looks at a directory.

    Args:
        root: of a source checkout (with ``python/sglang``), or the directory that holds ``sglang``
            (site-packages, or where a wheel was unpacked).
        release: overrides what the tree says of itself.

    Raises:
        ContractError: it is no SGLang, its release is unknown or not one of 0.5.17 to 0.5.23, or a Python
            before 3.11 runs it.
    """
    root = root.absolute()
    packages = [path for path in (root / "python" / "sglang", root / "sglang") if _is_package(path)]
    if not packages:
        inside = _is_package(root)
        raise ContractError(
            f"{root} is no SGLang tree: neither python/sglang nor sglang in it has {_MARKS[1]}",
            allowed="a checkout of SGLang, or the directory that holds an unpacked release",
            fix=f"give {_above(root)}" if inside else "give the directory above `sglang`",
        )
    package = packages[0]
    _refuse_old_python(package)
    source = package.parent != root
    found = _stated(release) if release else _release_of(root, package, source)
    if not FIRST <= found <= LAST:
        newer = (
            "check out a release in this range, or state the one that the tree is based on with "
            f"--release {LAST}: each edit still looks at the code before it is made"
        )
        raise ContractError(
            f"{root} is SGLang {found}",
            allowed=f"{FIRST} to {LAST}",
            fix=newer
            if found > LAST
            else f"check out a release in this range, or use the plugin ({releases.FIRST_WITH_GPT_OSS} and newer; "
            f"before {FIRST} for gpt-oss alone)",
        )
    return Tree(root, package, found, root / "test" / "registered" if source else None)


def _is_package(path: Path) -> bool:
    return all((path / mark).is_file() for mark in _MARKS)


def _refuse_old_python(package: Path) -> None:
    """What is placed needs Python 3.11 (StrEnum); an installed SGLang says which one runs it."""
    for part in package.parts:
        found = re.fullmatch(r"python3\.(\d+)", part)
        if found and int(found.group(1)) < 11:
            raise ContractError(
                f"{package} is run by Python 3.{found.group(1)}",
                allowed="Python 3.11 or newer",
                fix="install SGLang with a newer Python",
            )


def _stated(release: str) -> Version:
    try:
        return Version(Version(release.removeprefix("v")).base_version)
    except InvalidVersion:
        raise ContractError(
            f"--release is {release!r}",
            allowed=f"a release such as {LAST}",
            fix="state the release that the tree is based on",
        ) from None


def _release_of(root: Path, package: Path, source: bool) -> Version:
    manifest = read_manifest(package)
    if manifest is not None:
        # What was stated then counts for reverting, also where tags have moved on.
        return _stated(manifest.release)
    candidates = [_written(package / "_version.py")]
    if source:
        candidates.append(_tag(root))
    else:
        candidates += [
            path.name.removeprefix("sglang-").removesuffix(".dist-info")
            for path in sorted(package.parent.glob("sglang-*.dist-info"))
        ]
    for text in candidates:
        try:
            if text:
                # 0.5.23.post1, or 120 commits after v0.5.23: what the tree is based on.
                return Version(Version(text).base_version)
        except InvalidVersion:
            continue
    where = "_version.py and git describe" if source else "_version.py and *.dist-info"
    checkout = root.parent if root.name == "python" else None
    raise ContractError(
        f"the release of {package} is unknown: {where} do not say",
        allowed=f"a tree of SGLang {FIRST} to {LAST}",
        fix=f"give {checkout}"
        if checkout and (checkout / ".git").exists()
        else f"state it with --release, for example --release {LAST}",
    )


def _above(package: Path) -> Path:
    """What to give in place of a package: the checkout, or the directory that holds the package."""
    return package.parents[1] if package.parent.name == "python" else package.parent


def _written(path: Path) -> str | None:
    """``__version__`` of the file that SGLang's build writes."""
    if not path.is_file():
        return None
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "__version__" in names and isinstance(node.value.value, str):
                return node.value.value
    return None


def _tag(root: Path) -> str | None:
    """The newest release tag of a checkout: ``v0.5.23-4-gabc`` is 0.5.23 and more."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--tags", "--match", "v[0-9]*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    found = re.match(r"v(\d[\w.]*?)(-\d+-g[0-9a-f]+)?$", done.stdout.strip())
    return found.group(1) if found else None
