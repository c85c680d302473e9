"""Broadcast of any Python object in one small message, and of a tensor without pickling it.

Every broadcast starts with one header of fixed size, so that receivers need to know nothing in advance.
The header says what follows: a tensor (dtype, shape, and then its bytes), a pickle, or that the source
could not pickle its object. What fits travels in the header itself: flags, numbers, paths and small tensors
take a single broadcast.

The header is bytes from another process. A receiver checks every field of it before it allocates anything.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import direct

_MAGIC = b"FCOB"
_MAX_DIMS = 8
# magic, kind, number of dimensions, flags, a byte of padding, bytes in the body, dtype, shape
_LAYOUT = struct.Struct(f"<4sBBBxQ24s{_MAX_DIMS}q")
_HEADER_BYTES = 1024
_INLINE_BYTES = _HEADER_BYTES - _LAYOUT.size
# A body above this is a damaged header, not an object.
_MAX_BODY_BYTES = 1 << 40

_TENSOR, _PICKLE, _ERROR = 1, 2, 3
_REQUIRES_GRAD, _PARAMETER, _ACCELERATOR = 1, 2, 4
_ALL_FLAGS = _REQUIRES_GRAD | _PARAMETER | _ACCELERATOR


@dataclasses.dataclass(frozen=True)
class _Header:
    """What a message holds; ``nbytes`` is the size of its body."""

    kind: int
    nbytes: int
    flags: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def is_inline(self) -> bool:
        """Whether the body is in the header. A device's bytes are not: that would cost a copy to the host."""
        return self.nbytes <= _INLINE_BYTES and not self.flags & _ACCELERATOR

    def pack(self, body: Tensor) -> bytearray:
        """The header's bytes, with ``body`` (uint8, 1-D) in it if it fits."""
        data = bytearray(_HEADER_BYTES)
        shape = self.shape + (0,) * (_MAX_DIMS - len(self.shape))
        dtype = self.dtype.encode()
        _LAYOUT.pack_into(data, 0, _MAGIC, self.kind, len(self.shape), self.flags, self.nbytes, dtype, *shape)
        if self.is_inline and self.nbytes:
            torch.frombuffer(data, dtype=torch.uint8, offset=_LAYOUT.size, count=self.nbytes).copy_(body)
        return data

    @classmethod
    def unpack(cls, data: bytearray, src: int) -> _Header:
        """Reads and checks a header.

        Raises:
            RuntimeError: the bytes are not a header that ``pack`` can have made.
        """
        magic, kind, ndim, flags, nbytes, dtype, *shape = _LAYOUT.unpack_from(data)
        header = cls(kind, nbytes, flags, dtype.rstrip(b"\0").decode("ascii", "replace"), tuple(shape[:ndim]))
        if magic != _MAGIC:
            problem = "does not start a broadcast of fccl's strategy: did that rank make another call?"
        elif kind not in (_TENSOR, _PICKLE, _ERROR) or ndim > _MAX_DIMS or flags & ~_ALL_FLAGS:
            problem = f"has an unknown form (kind {kind}, {ndim} dimensions, flags {flags})"
        elif nbytes > _MAX_BODY_BYTES or (kind == _ERROR and nbytes > _INLINE_BYTES):
            problem = f"announces {nbytes} bytes, more than there can be"
        elif kind == _TENSOR and not header._describes_a_tensor():
            problem = f"announces {nbytes} bytes for a tensor of dtype {header.dtype!r}, shape {header.shape}"
        else:
            return header
        raise RuntimeError(f"broadcast on rank {dist.get_rank()}: the message from rank {src} {problem}")

    def _describes_a_tensor(self) -> bool:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in self.shape):
            return False
        return math.prod(self.shape) * dtype.itemsize == self.nbytes


def broadcast_object(obj: Any, src: int, control_device: torch.device, root_device: torch.device) -> Any:
    """Broadcasts ``obj`` from rank ``src`` over the default process group.

    A strided tensor travels as its own bytes; its strides and Python attributes do not. Everything else is
    pickled, as ``torch.distributed.broadcast_object_list`` does, so the same trust in the peers is needed.

    Args:
        obj: the object, used on rank ``src`` only.
        src: the global rank that sends.
        control_device: where the group can broadcast a few bytes best, the same kind on every rank.
        root_device: this rank's accelerator (or the CPU). A tensor that is on an accelerator at ``src``
            arrives here on this device.

    Returns:
        ``obj`` itself on rank ``src``, an equal object elsewhere.

    Raises:
        RuntimeError: ``src`` could not pickle its object, or sent something else.
    """
    if dist.get_rank() == src:
        _send(obj, src, control_device, root_device)
        return obj
    return _receive(src, control_device, root_device)


def _send(obj: Any, src: int, control_device: torch.device, root_device: torch.device) -> None:
    failure: Exception | None = None
    try:
        header, body = _encode(obj)
    except Exception as error:  # pickling runs the object's own code
        failure = error
        text = f"{type(error).__name__}: {error}".encode()[:_INLINE_BYTES]
        header, body = _Header(_ERROR, len(text)), _bytes_tensor(text)
    _broadcast_header(header.pack(body), src, control_device)
    if failure is not None:
        raise failure
    if not header.is_inline:
        direct.broadcast(body.to(_wire_device(header, control_device, root_device)), src)


def _receive(src: int, control_device: torch.device, root_device: torch.device) -> Any:
    data = bytearray(_HEADER_BYTES)
    _broadcast_header(data, src, control_device)
    header = _Header.unpack(data, src)
    if header.is_inline:
        body = _bytes_tensor(data[_LAYOUT.size : _LAYOUT.size + header.nbytes])
    else:
        device = _wire_device(header, control_device, root_device)
        body = torch.empty(header.nbytes, dtype=torch.uint8, device=device)
        if header.nbytes:
            direct.broadcast(body, src)
    if header.kind == _ERROR:
        text = bytes(body.tolist()).decode(errors="replace")
        raise RuntimeError(
            f"broadcast on rank {dist.get_rank()}: rank {src} could not pickle its object ({text})"
        )
    if header.kind == _PICKLE:
        return pickle.loads(_to_bytes(body))
    return _decode_tensor(header, body, root_device)


def _broadcast_header(data: bytearray, src: int, device: torch.device) -> None:
    """Broadcasts ``data`` in place."""
    host = torch.frombuffer(data, dtype=torch.uint8)
    wire = host.to(device)
    direct.broadcast(wire, src)
    if wire is not host:
        host.copy_(wire)


def _wire_device(header: _Header, control: torch.device, root: torch.device) -> torch.device:
    """Where the body travels: a group without CPU support takes everything over the accelerator."""
    return root if header.flags & _ACCELERATOR or control.type != "cpu" else control


def _encode(obj: Any) -> tuple[_Header, Tensor]:
    if not _is_plain_tensor(obj):
        body = _bytes_tensor(pickle.dumps(obj))
        return _Header(_PICKLE, body.numel()), body
    flags = _REQUIRES_GRAD if obj.requires_grad else 0
    flags |= _PARAMETER if type(obj) is torch.nn.Parameter else 0
    dense = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    body = dense.view(torch.uint8)
    if body.device.type != "cpu" and body.numel():
        flags |= _ACCELERATOR
    name = str(obj.dtype).removeprefix("torch.")
    return _Header(_TENSOR, body.numel(), flags, name, tuple(obj.shape)), body


def _is_plain_tensor(obj: Any) -> bool:
    return (
        type(obj) in (Tensor, torch.nn.Parameter)
        and obj.layout == torch.strided
        and obj.device.type != "meta"
        and not obj.is_quantized
        and obj.ndim <= _MAX_DIMS
    )


def _decode_tensor(header: _Header, body: Tensor, root_device: torch.device) -> Tensor:
    tensor = body.view(getattr(torch, header.dtype)).reshape(header.shape)
    tensor = tensor.to(root_device if header.flags & _ACCELERATOR else "cpu")
    if header.flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(header.flags & _REQUIRES_GRAD))
    if header.flags & _REQUIRES_GRAD and not tensor.is_inference():
        tensor.requires_grad_()
    return tensor


def _bytes_tensor(data: bytes | bytearray) -> Tensor:
    """``data`` as a uint8 tensor in memory of torch's own, aligned for every dtype."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _to_bytes(body: Tensor) -> bytearray:
    data = bytearray(body.numel())
    torch.frombuffer(data, dtype=torch.uint8).copy_(body)
    return data
