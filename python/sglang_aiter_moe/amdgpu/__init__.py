"""Executes AMD GPU code on a CPU: assembly text of a gfx942 or gfx950 kernel in, memory out.

``assembly.parse`` reads the text, ``memory.Memory`` holds what the kernel's pointers name, ``machine.run`` executes a
grid. docs/amd-execution.md says what is modelled and what is not.
"""
