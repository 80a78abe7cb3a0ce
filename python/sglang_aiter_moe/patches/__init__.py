"""How the patch set gets into a running SGLang, and how it is shown to be there.

``model`` says what a patch is, ``table`` lists them, ``install`` puts one in place and verifies it.
``sglang_aiter_moe.plugin`` decides which apply.
"""
