"""Forms for Hopper GPUs (H100, H200), from AITER's separated and GU-interleaved bytes.

- ``whole_launch.run_whole``: one to four tokens, everything in one launch; fp8 tensor cores, weights by bulk copies.
- ``launch.run_tokens``: a few tokens, two launches; bf16 fragments straight from global memory.
- ``launch.run_list``: the same fragments over a list of blocks, for padded layers.
- ``fp8_launch.run_fp8``: fp8 tensor cores, weights by bulk copies; A16W4 as pairs of e4m3 columns, and A8W4.
- ``prefill_launch.run_prefill``: many tokens, bf16 ``wgmma``.

``table.choose`` picks one; what none of them computes, the portable form does.
"""
