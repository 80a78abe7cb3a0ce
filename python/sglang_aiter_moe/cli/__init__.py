"""The command `sglang-aiter-moe`: one file a command, put together in `app.py`."""

from sglang_aiter_moe.cli.app import app

__all__ = ["app"]
