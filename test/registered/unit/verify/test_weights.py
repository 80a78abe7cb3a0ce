"""The weight files are real safetensors files of Gaussian-like MXFP4 tensors, equal for equal seeds."""

import sys
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file

from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.verify.weights import LayerShape, read_checkpoint, write_checkpoint

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SHAPE = LayerShape(experts=3, hidden=256, intermediate=96, bias=True, seed=5)


def test_file_holds_the_stated_tensors(tmp_path):
    path = tmp_path / "layer.safetensors"
    write_checkpoint(SHAPE, path)
    tensors = load_file(path)  # the safetensors library reads it, and checks header and sizes
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "w13_weight": (3, 192, 128),
        "w13_weight_scale": (3, 192, 8),
        "w2_weight": (3, 256, 48),
        "w2_weight_scale": (3, 256, 3),
        "w13_weight_bias": (3, 192),
        "w2_weight_bias": (3, 256),
    }
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == SHAPE.num_bytes
    for name, tensor in read_checkpoint(path).items():
        assert torch.equal(tensor, tensors[name])


def test_equal_seeds_are_equal_and_others_differ(tmp_path):
    first, second, other = (tmp_path / name for name in "abc")
    write_checkpoint(SHAPE, first)
    write_checkpoint(SHAPE, second)
    write_checkpoint(LayerShape(experts=3, hidden=256, intermediate=96, seed=6), other)
    assert first.read_bytes() == second.read_bytes()
    weights = read_checkpoint(first)["w13_weight"]
    assert not torch.equal(weights, read_checkpoint(other)["w13_weight"])
    assert not torch.equal(weights[0], weights[1])


def test_fewer_experts_are_the_first_ones(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    write_checkpoint(LayerShape(experts=2, hidden=64, intermediate=32), few)
    write_checkpoint(LayerShape(experts=4, hidden=64, intermediate=32), many)
    for name, tensor in read_checkpoint(few).items():
        assert torch.equal(tensor, read_checkpoint(many)[name][:2]), name


def test_codes_are_gaussian_and_scales_near_2_to_the_minus_6(tmp_path):
    path = tmp_path / "layer"
    write_checkpoint(LayerShape(experts=4, hidden=1024, intermediate=256), path)
    tensors = read_checkpoint(path)
    packed = tensors["w13_weight"].flatten()
    codes = torch.cat([packed & 15, packed >> 4]).long()
    share = torch.bincount(codes, minlength=16) / codes.numel()
    # P(code) of a normal of standard deviation 2 between the midpoints of E2M1's magnitudes.
    magnitude = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    edges = torch.cat([(magnitude[1:] + magnitude[:-1]) / 2, torch.tensor([float("inf")])])
    below = torch.erf(edges / (2 * 2**0.5))
    expected = torch.diff(below, prepend=torch.zeros(1)) / 2
    assert torch.allclose(share[:8], expected, atol=0.005)
    assert torch.allclose(share[8:], expected, atol=0.005)
    assert tensors["w13_weight_scale"].unique().tolist() == [120, 121, 122]


def test_writing_takes_the_memory_of_one_expert(tmp_path):
    shape = LayerShape(experts=64, hidden=1024, intermediate=128)
    tracemalloc.start()
    write_checkpoint(shape, tmp_path / "layer")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < shape.num_bytes / 4


def test_private_mapping_leaves_the_file_alone(tmp_path):
    path = tmp_path / "layer"
    write_checkpoint(SHAPE, path)
    before = path.read_bytes()
    first, second = read_checkpoint(path)["w13_weight"], read_checkpoint(path)["w13_weight"]
    first.fill_(0)
    assert second.any()
    assert path.read_bytes() == before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
