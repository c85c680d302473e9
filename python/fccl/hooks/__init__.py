"""Gradient hooks for ``DistributedDataParallel`` that run in C++, without the GIL.

    ddp = DistributedDataParallel(model)
    fccl.hooks.register(ddp, fccl.hooks.BF16Compress())

``AllReduce`` exchanges the exact mean of the gradients. ``BF16Compress`` and ``FP16Compress`` halve the bytes,
``BlockQuantize`` quarters them. All work over any backend of ``torch.distributed``; over ``"fccl"`` the mean is
formed inside the engine.

With all hooks, as with DDP alone:

- ``gradient_as_bucket_view``, ``find_unused_parameters``, ``static_graph``, ``no_sync()`` and
  ``join()``, with either value of ``divide_by_initial_world_size``, work;
- inf and NaN gradients reach every rank, so that a gradient scaler sees them everywhere;
- sparse gradients are exchanged as they are and averaged;
- an error in the exchange is raised by ``backward()``, and the model can be used again if the group can.

One difference: DDP alone divides every gradient before the sum, the hooks divide the sum. A sum beyond
the largest float32 (3.4e38) is therefore inf, even if the mean is below it; in return, small gradients
lose no bits to the division.
"""

from fccl.hooks._base import GradientHook
from fccl.hooks._block_quantize import BlockQuantize
from fccl.hooks._mean import AllReduce, BF16Compress, FP16Compress
from fccl.hooks._register import check_hook as check_hook
from fccl.hooks._register import register

__all__ = ["AllReduce", "BF16Compress", "BlockQuantize", "FP16Compress", "GradientHook", "register"]
