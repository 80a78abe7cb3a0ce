"""The SGLang releases that the patch set is made for."""

#: Every model that takes AITER's MXFP4 path, from this release on ...
FIRST = "0.5.17"
#: ... and gpt-oss alone from this one on: before FIRST SGLang has no Kimi-K3, and its loader of MXFP4
#: experts takes whole tensors only (it tests ``not expert_id``, which expert 0 passes too).
FIRST_WITH_GPT_OSS = "0.5.13"
LAST = "0.5.23"
