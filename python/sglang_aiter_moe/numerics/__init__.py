"""Number formats, activations, metrics and the oracle. Depends on torch alone."""

from sglang_aiter_moe.numerics.activations import Activation, apply_gate_up
from sglang_aiter_moe.numerics.metrics import cosine, logits_diff, relative_error
from sglang_aiter_moe.numerics.mxfp4 import (
    ScaleRounding,
    decode_e2m1,
    decode_e8m0,
    dequantize_mxfp4,
    encode_e2m1,
    pack_e2m1,
    quantize_mxfp4,
    quantize_mxfp4_epilogue,
    unpack_e2m1,
)
from sglang_aiter_moe.numerics.mxfp8 import (
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_epilogue,
)
from sglang_aiter_moe.numerics.oracle import RawExperts, routed_moe

__all__ = [
    "Activation",
    "RawExperts",
    "ScaleRounding",
    "apply_gate_up",
    "cosine",
    "decode_e2m1",
    "decode_e8m0",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "encode_e2m1",
    "logits_diff",
    "pack_e2m1",
    "quantize_mxfp4",
    "quantize_mxfp4_epilogue",
    "quantize_mxfp8",
    "quantize_mxfp8_epilogue",
    "relative_error",
    "routed_moe",
    "unpack_e2m1",
]
