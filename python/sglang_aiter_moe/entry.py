"""SGLang's way in. Standard library only: what cannot be imported must not be what says so.

SGLang's plugin loader logs every ``Exception`` of a plugin, also one while it is imported, and serves on
without it.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


class PluginStop(SystemExit):
    """Leaves through SGLang's plugin loader, which catches every ``Exception``."""


def register() -> None:
    """The entry point ``aiter_moe`` of group ``sglang.srt.plugins``.

    Raises:
        PluginStop: the plugin is broken, and SGLANG_AITER_MOE_ENABLE does not switch it off.
    """
    try:
        from sglang_aiter_moe import plugin

        plugin.register()
    except Exception as error:
        if os.environ.get("SGLANG_AITER_MOE_ENABLE", "1") == "0":
            logger.info("sglang-aiter-moe is switched off, and broken: %s", error)
            return
        raise PluginStop(
            f"sglang-aiter-moe cannot be used: {type(error).__name__}: {error}. Install it again with its "
            "dependencies, run `sglang-aiter-moe doctor`, or switch it off with SGLANG_AITER_MOE_ENABLE=0"
        ) from error
