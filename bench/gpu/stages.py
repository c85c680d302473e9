"""The stages, in the order in which they run."""

from __future__ import annotations

import build
import groups
import kernels
from stage import Stage

STAGES = [
    Stage("build", "fccl with its kernels, by pip", 240, build.build_fccl, needs_gpu=False),
    Stage("programs", "the standalone programs, tried on fibres", 240, build.build_programs, needs_gpu=False),
    Stage("buckets", "encode, reduce and decode: the CPU's bits", 60, kernels.check_of("buckets")),
    Stage("pack", "pack and unpack: a plain loop's bits", 60, kernels.check_of("pack")),
    Stage(
        "collectives", "one-shot, two-shot, all_gather, broadcast: exact", 60, kernels.check_of("collectives")
    ),
    Stage("sanitizer", "the same under compute-sanitizer, small sizes", 120, kernels.sanitize),
    Stage("bandwidth", "bucket and packing kernels beside a copy", 90, kernels.measurement_of("bandwidth")),
    Stage("latency", "the protocol's floor, without a link", 45, kernels.measurement_of("latency")),
    Stage("processes", "collectives of 2 and 4 processes on one GPU", 120, groups.collectives),
    Stage("hooks", "gradient hooks on CUDA buckets: the CPU's bits", 60, groups.hooks),
    Stage("ddp", "DDP: 1 rank over NCCL, 2 and 4 over Gloo", 90, groups.ddp),
    Stage("graphs", "capture and replay", 45, groups.graphs),
    Stage("failures", "a killed rank, and one that does not come", 60, groups.failures),
    Stage("pytest", "the Python tests of CUDA", 90, groups.python_tests, needs_gpu=False),
]
