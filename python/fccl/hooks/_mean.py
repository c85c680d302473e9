"""The hooks without state."""

from fccl.hooks._base import GradientHook


class AllReduce(GradientHook):
    """Averages the gradients exactly: summed in float32 or better, divided once, after the sum.

    Over ``"fccl"`` on CPU: one all_reduce in the bucket's own memory, in fixed rank order, with the
    division in the accumulator; float64 is summed in float64. The same bits on every rank, from run to run.

    Over other backends (and for CUDA tensors, which NCCL carries): a sum in the backend's own order, divided
    afterwards. Since such backends round 16-bit floats at every step of a sum, float16 and bfloat16 buckets
    travel as float32 there: twice the bytes, in exchange for the exact mean.

    Complex gradients are averaged as pairs of real numbers.
    """

    _native_name = "AllReduce"


class BF16Compress(GradientHook):
    """Exchanges float32 and float64 gradients as bfloat16: a half or a quarter of the bytes.

    Each rank rounds its gradients to bfloat16 (8 significant bits, the range of float32; a float64 is
    rounded to float32 on the way). Over every backend these are added and divided in float32, in the
    order of the ranks, and rounded once more for the way back; the result is written back in the gradient's own
    dtype. Where ranks share memory that is one all_reduce, elsewhere an all_to_all and an all_gather of bytes.
    CUDA buckets go the second way in builds with CUDA kernels; without, they are summed by NCCL in bfloat16.

    Values beyond bfloat16's largest (3.39e38), and float64 ones beyond float32's, become inf. inf and NaN
    stay what they are. 16-bit, complex and sparse gradients are exchanged as ``AllReduce`` does.

    Compression pays on slow links. On one machine with shared memory it rarely does.
    """

    _native_name = "BF16Compress"


class FP16Compress(GradientHook):
    """Exchanges float32 and float64 gradients as scaled float16: 11 significant bits in half the bytes.

    A gradient is cut into blocks of 256 consecutive elements of one parameter. Each block is scaled by a power of
    two, which loses nothing, so that its largest magnitude comes to between 2**14 and 2**15: neither 1e6 nor
    1e-8 is lost, as both are to a plain cast. The exchange is that of ``BlockQuantize``: values are added and
    divided in float32, in the order of the ranks, and rounded once more for the way back.

    Within a block, magnitudes below 2**-29 of the largest keep fewer bits, and below 2**-39 of it they become 0.
    Blocks of nothing above 2**-80 (8e-25) become 0. Values within a factor of 1 - 2**-12 of float32's largest,
    and float64 ones beyond it, become inf. inf and NaN stay what they are. 16-bit, complex and sparse
    gradients are exchanged as ``AllReduce`` does. CUDA buckets need a build with CUDA kernels.
    """

    _native_name = "FP16Compress"
