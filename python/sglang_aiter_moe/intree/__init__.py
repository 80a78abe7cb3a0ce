"""The patch set as a change of SGLang's source: ``sglang-aiter-moe apply TREE``.

``tree`` finds SGLang, ``packages`` places what the call sites need, ``edit_*`` put the call sites into one
file each, ``transaction`` writes all of it or nothing, ``run`` is the order of work. LibCST is needed
(``pip install 'sglang-aiter-moe[apply]'``), and only here.
"""
