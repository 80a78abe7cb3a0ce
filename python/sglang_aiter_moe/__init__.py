"""AITER's MXFP4 MoE contract for SGLang: a plan, the layouts, a patch set and an executable check.

Importing this package imports neither SGLang nor AITER and touches no GPU.
"""

__version__ = "0.1.0"
