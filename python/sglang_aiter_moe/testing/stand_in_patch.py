"""Functions that tests patch stand-ins with."""

from __future__ import annotations

from typing import Any


def around(original: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """Marks the result of what it patches."""
    return ("patched", original(*args, **kwargs))
