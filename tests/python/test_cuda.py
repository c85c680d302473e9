"""fccl.cuda where there is no GPU: what it says then. The kernels themselves are tested in C++ (tests/cpp/cuda)."""

import pytest
import torch
import torch.distributed as dist

import fccl

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def says_so(rank, world_size):
    assert fccl.cuda.why_no_kernels() == ""  # nothing is settled before the first CUDA tensor
    assert fccl.cuda.launch_counts() == {}
    with pytest.raises(RuntimeError, match="sees no GPU"):
        fccl.cuda.warm_up()
    # Nothing of it disturbs the group.
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (ones == world_size).all()


@no_gpu
def test_without_a_gpu(rank_pool):
    rank_pool(2).run(says_so)


def test_needs_a_group():
    with pytest.raises(ValueError, match="no default process group"):
        fccl.cuda.why_no_kernels()


def others_refuse(rank, world_size):
    with pytest.raises(ValueError, match="does not use fccl"):
        fccl.cuda.launch_counts()


def test_needs_a_group_of_fccl(rank_pool):
    rank_pool(1, "gloo").run(others_refuse)
