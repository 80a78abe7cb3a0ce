"""An external model package for SGLang: small attention around the real MXFP4 MoE blocks.

Used through ``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_aiter_moe.testing.carrier``.
"""
