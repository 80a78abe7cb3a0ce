"""Bytes are told apart by their content: every form is recognised, and nothing is guessed."""

import sys

import pytest
import torch

from sglang_aiter_moe.contract import SCALE_LAYOUTS, WEIGHT_LAYOUTS
from sglang_aiter_moe.contract.identity import (
    RAW,
    RAW_ALTERNATING,
    Fingerprint,
    Sizes,
    digest,
    fingerprint,
    forms_of,
    identify,
    one_form,
    read_back,
)
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

# I 192 and H 96 are padded to 256 and 128: the content has to come out without the padding.
SIZES = Sizes(5, 192, 192, 256, 256)


def random(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8)


def padded(raw, name):
    """By hand: gate and up each at the start of their half."""
    _, rows, columns = SIZES.raw_shape(name, padded=True)
    out = torch.full((5, rows, columns), 0x7F if name.endswith("scale") else 0, dtype=torch.uint8)
    if name.startswith("w13"):
        half = raw.shape[1] // 2
        out[:, :half, : raw.shape[2]] = raw[:, :half]
        out[:, rows // 2 : rows // 2 + half, : raw.shape[2]] = raw[:, half:]
    else:
        out[:, : raw.shape[1], : raw.shape[2]] = raw
    return out


def in_form(raw, name, form):
    if form == RAW:
        return raw
    if form == RAW_ALTERNATING:
        return torch.stack(raw.chunk(2, dim=1), dim=2).flatten(1, 2)
    layout = (SCALE_LAYOUTS if name.endswith("scale") else WEIGHT_LAYOUTS)[form]
    return layout.pack(padded(raw, name))


CASES = [
    (name, form)
    for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    for form in forms_of(name)
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_form_is_told_from_every_other(name, form):
    raw = random(SIZES.raw_shape(name))
    stored = in_form(raw, name, form)
    found = identify(name, stored, SIZES, (0, 2, 4), lambda e: digest(raw[e]))
    same_bytes = {"separated", "a16w4"} if name.endswith("scale") else {form}
    assert form in found
    assert set(found) <= {form} | (same_bytes if form in same_bytes else set())
    assert one_form(found) is not None


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_fingerprint_is_the_same_in_every_form(name, form):
    raw = random(SIZES.raw_shape(name))
    print_of = fingerprint({name: in_form(raw, name, form)}, {name: form}, SIZES)
    assert print_of.experts == (0, 2, 4)
    assert print_of.digests[name] == tuple(digest(raw[e]) for e in (0, 2, 4))


def test_other_weights_match_no_form():
    raw, other = (
        random(SIZES.raw_shape("w13_weight")),
        random(SIZES.raw_shape("w13_weight"), seed=1),
    )
    assert identify("w13_weight", raw, SIZES, (0,), lambda e: digest(other[e])) == ()


def test_one_changed_code_is_enough():
    raw = random(SIZES.raw_shape("w2_weight"))
    packed = WEIGHT_LAYOUTS["separated"].pack(padded(raw, "w2_weight"))
    packed[2, 0, 0] ^= 1
    assert identify("w2_weight", packed, SIZES, (2,), lambda e: digest(raw[e])) == ()


def test_bytes_that_allow_several_forms_tell_nothing():
    raw = torch.full(SIZES.raw_shape("w13_weight"), 7, dtype=torch.uint8)
    found = identify("w13_weight", raw, SIZES, (0,), lambda e: digest(raw[e]))
    assert RAW in found and RAW_ALTERNATING in found
    assert one_form(found) is None
    assert one_form(()) is None


def test_a_shape_that_cannot_be_a_form_is_not_read():
    assert read_back("w13_weight", random((5, 64, 64)), RAW, SIZES, 0) is None
    assert read_back("w13_weight", random((5, 64, 64)), "separated", SIZES, 0) is None


def test_a_fingerprint_survives_json_and_refuses_other_things():
    made = Fingerprint((0, 1), {"w2_weight": ("ab", "cd")})
    assert Fingerprint.from_dict(made.to_dict()) == made
    for bad in ({}, {"experts": [0], "w2_weight": ["a", "b"]}, {"experts": ["x"]}):
        with pytest.raises(ContractError, match="fingerprint"):
            Fingerprint.from_dict(bad)


def test_a_fingerprint_of_the_wrong_shape_is_refused():
    with pytest.raises(ContractError, match="w2_weight"):
        fingerprint({"w2_weight": random((5, 8, 8))}, {"w2_weight": RAW}, SIZES)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
