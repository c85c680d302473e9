"""fccl.cuda where there is no GPU: what it says then. The kernels themselves are tested in C++ (tests/cpp/cuda)."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl import _registration
from fccl_testing import run_ranks

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


def unknown_inner_is_refused(rank, world_size, folder):
    with pytest.raises(ValueError, match=r"FCCL_CUDA_INNER is 'mpi', expected one of nccl, gloo"):
        dist.init_process_group(
            "fccl", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )


def test_inner_engine_must_be_known(tmp_path):
    run_ranks(unknown_inner_is_refused, 2, str(tmp_path), backend=None, env={"FCCL_CUDA_INNER": "mpi"})


class _Options:
    """What torch gives to the maker of a backend, as far as it is looked at before the refusal."""

    def __init__(self, rank, world_size):
        self.group_rank, self.group_size = rank, world_size
        self.timeout = timedelta(seconds=10)
        self.global_ranks_in_group = list(range(world_size))
        self.group_id = "never made"


def goes_on_without_a_gpu(rank, world_size):
    assert _registration.cuda_inner() == "gloo"
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (ones == world_size).all()
    with pytest.raises(TypeError, match="Gloo|gloo"):  # there is no NCCL that these could be for
        _registration.create_backend(_Options(rank, world_size), pg_options=object())


@no_gpu
def test_gloo_as_the_inner_engine_without_a_gpu():
    run_ranks(goes_on_without_a_gpu, 2, env={"FCCL_CUDA_INNER": "gloo"})
