"""The hook that sends one byte per gradient element, and keeps what that loses."""

import fnmatch
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fccl import _extension
from fccl.hooks._base import GradientHook

FORMATS = ("int8", "fp8_e4m3", "fp8_e5m2")
BLOCKS = (128, 256, 512, 1024)
AUTO_DIMENSIONS = 2  # exempt="auto": parameters with fewer

Format = Literal["int8", "fp8_e4m3", "fp8_e5m2"]
Exempt = Literal["auto"] | None | Sequence[str] | Callable[[str, nn.Parameter], bool]


class BlockQuantize(GradientHook):
    """Exchanges gradients as one byte per element: a quarter of the bytes of float32.

    A parameter's gradient is cut into blocks of consecutive elements. Each is scaled so that its largest finite
    magnitude gets the format's largest code, and rounded to the nearest code:

    ============  =============================================  =====================================
    format        an element's error, at most                    in words
    ============  =============================================  =====================================
    ``int8``      1/254 of its block's largest magnitude         evenly spaced
    ``fp8_e4m3``  1/16 of itself (least step: about 2**-18   4 significant bits
                  of the largest)
    ``fp8_e5m2``  1/8 of itself (least step: about 2**-32    3 significant bits, the widest range
                  of the largest)
    ============  =============================================  =====================================

    Every rank sends each rank its share of the codes; that one adds the values in float32, in the order of the
    ranks, divides, and sends the mean to all, coded once more. All ranks end with the same bits.

    With error feedback (1-bit SGD, Seide et al., 2014; EF-SGD, Karimireddy et al., arXiv:1901.09847), what the
    codes did not say is kept in float32, beside each parameter, and added to its next gradient, so that nothing
    is lost for good. It costs four bytes per element on every rank. A parameter that gets no gradient keeps what
    it has; one whose gradient is not zero again (an unused parameter with ``zero_grad(set_to_none=False)`` has
    zeros, but one with an old gradient still in ``.grad`` has that) sends it like any other. Nothing that is not
    finite enters this memory: inf and NaN reach every rank, as inf or NaN from ``fp8_e5m2``, as NaN from the
    others. If the step is then skipped, as a ``GradScaler`` does, what was sent with it is lost like the rest of
    its gradients, the remainders that had gone into it included.

    The remainders are in units of the gradient, so of the *scaled* loss under a ``GradScaler``: after the scale
    changes, one step adds remainders of the old scale. They are each rank's own: save ``state_dict()`` on every
    rank, in a file of its own. An exchange that failed may leave that step's remainders behind.

    float16 and bfloat16 gradients are compressed as well. Complex and sparse ones are exchanged as ``AllReduce``
    does. CUDA buckets need a build with CUDA kernels (``NotImplementedError`` from ``backward()`` otherwise).

    Args:
        format: ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        block: elements of a block, 128, 256, 512 or 1024. Smaller ones are more exact; a scale takes 4 bytes.
        error_feedback: whether to keep what was lost. Without it the hook has no state.
        exempt: which parameters travel as float32 instead. ``"auto"``: those with fewer than two dimensions,
            that is norms and biases. None: none. A list of shell-style patterns for names as in
            ``ddp.module.named_parameters()`` (``["*.norm.*", "head.weight"]``). Or a function
            ``(name, parameter) -> bool``. The same on every rank.

    Raises:
        ValueError: an argument has none of these values.
        TypeError: ``exempt`` is something else.

    One object serves one model, since it keeps state.
    """

    def __init__(
        self,
        format: Format = "int8",
        block: int = 256,
        error_feedback: bool = True,
        exempt: Exempt = "auto",
    ) -> None:
        super().__init__()
        if format not in FORMATS:
            raise ValueError(f"BlockQuantize(format={format!r}): expected one of {', '.join(FORMATS)}")
        if block not in BLOCKS:
            raise ValueError(
                f"BlockQuantize(block={block!r}): expected one of {', '.join(map(str, BLOCKS))} elements"
            )
        self.format = format
        self.block = int(block)
        self.error_feedback = bool(error_feedback)
        self.exempt = _checked_exempt(exempt)
        self._lock = threading.Lock()
        self._shared: Any = None
        self._module: weakref.ref[nn.Module] | None = None

    # ---- state ----

    def state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """What this rank has not said yet of its gradients.

        Args:
            model: whose parameters name the entries; None: the model the hook was registered with.

        Returns:
            ``{"version": 1, "residuals": {name: tensor}}`` with float32 copies of the parameters' shapes on
            their devices. Parameters that had no compressed gradient yet are left out.

        Raises:
            RuntimeError: ``model`` is None and the hook is registered with no model that still exists.
        """
        native = self._native()
        residuals = {}
        for name, parameter in self._named_parameters(model, "state_dict"):
            remainder = native.remainder(parameter)
            if remainder is not None:
                residuals[name] = remainder
        return {"version": 1, "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any], model: nn.Module | None = None) -> None:
        """Takes up what ``state_dict()`` gave, instead of what the hook has. All of it, or nothing on an error.

        ``format``, ``block`` and ``exempt`` may have changed in between (a residual of a parameter that is now
        exempt is dropped, with a warning). World size and rank should not have: a remainder is what one rank
        still owes.

        Args:
            state: of this rank.
            model: as for ``state_dict``.

        Raises:
            RuntimeError: as ``state_dict``; or the hook was made with ``error_feedback=False``.
            ValueError: ``state`` is of another version, or names parameters or shapes that the model has not.
            TypeError: a residual is not a tensor of floating-point numbers.
        """
        where = f"{self.name}.load_state_dict"
        if not isinstance(state, dict) or state.get("version") != 1 or "residuals" not in state:
            raise ValueError(f"{where}: expected what state_dict() returned, of version 1")
        residuals = state["residuals"]
        if residuals and not self.error_feedback:
            raise RuntimeError(f"{where}: this hook keeps no residuals, as it has error_feedback=False")
        parameters = dict(self._named_parameters(model, "load_state_dict"))
        unknown = [name for name in residuals if name not in parameters]
        if unknown:
            raise ValueError(f"{where}: the model has no parameter {', '.join(map(repr, unknown))}")
        for name, residual in residuals.items():
            if not isinstance(residual, torch.Tensor) or not residual.is_floating_point():
                raise TypeError(
                    f"{where}: the residual of {name!r} is a {type(residual).__name__}, expected a tensor of"
                    " floating-point numbers"
                )
            if residual.shape != parameters[name].shape:
                raise ValueError(
                    f"{where}: the residual of {name!r} has the shape {tuple(residual.shape)} and the parameter"
                    f" {tuple(parameters[name].shape)}"
                )
        exempt = {id(parameter) for parameter in self._exempt_parameters(parameters)}
        dropped = [name for name in residuals if id(parameters[name]) in exempt]
        if dropped:
            warnings.warn(
                f"{where}: dropped the residuals of {', '.join(map(repr, dropped))}, which this hook exempts",
                stacklevel=2,
            )
        kept = [name for name in residuals if name not in dropped]
        self._native().replace_remainders(
            [parameters[name] for name in kept], [residuals[name] for name in kept]
        )

    def _named_parameters(self, model: nn.Module | None, method: str) -> list[tuple[str, nn.Parameter]]:
        if model is None:
            model = self._module() if self._module is not None else None
            if model is None:
                raise RuntimeError(
                    f"{self.name}.{method}: the hook is registered with no model; call fccl.hooks.register(ddp,"
                    f" hook) first, or pass the model: {method}(..., model=ddp)"
                )
        module = model.module if isinstance(model, DistributedDataParallel) else model
        return list(module.named_parameters())

    # ---- use ----

    def as_python_hook(self, group: Any = None) -> Any:
        """As ``GradientHook.as_python_hook``; such a hook sees no names, so ``exempt`` must be "auto" or None."""
        if self._exempts_by_name:
            raise ValueError(
                f"{self!r}.as_python_hook(): a Python hook sees parameters without names, so exempt= must be"
                ' "auto" or None; fccl.hooks.register(ddp, hook) knows the names'
            )
        return super().as_python_hook(group)

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        other = self._module() if self._module is not None else None
        if other is not None and other is not ddp.module:
            raise RuntimeError(
                f"fccl.hooks.register(ddp, {self!r}): this hook serves another model and keeps its state; make"
                " one hook for each"
            )
        if self._exempts_by_name:
            self._native().set_exempt(self._exempt_parameters(dict(ddp.module.named_parameters())))

    def _attach(self, ddp: DistributedDataParallel) -> None:
        self._module = weakref.ref(ddp.module)  # which may outlive the DDP, and be wrapped again

    @property
    def _exempts_by_name(self) -> bool:
        return self.exempt is not None and self.exempt != "auto"

    def _exempt_parameters(self, parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
        if self.exempt is None:
            return []
        if self.exempt == "auto":
            return [parameter for parameter in parameters.values() if parameter.dim() < AUTO_DIMENSIONS]
        if callable(self.exempt):
            rule = self.exempt
            return [parameter for name, parameter in parameters.items() if rule(name, parameter)]
        assert isinstance(self.exempt, tuple)
        exempt = {}
        for pattern in self.exempt:
            matches = {
                name: parameter
                for name, parameter in parameters.items()
                if fnmatch.fnmatchcase(name, pattern)
            }
            if not matches:
                names = ", ".join(list(parameters)[:8]) + (", ..." if len(parameters) > 8 else "")
                raise ValueError(
                    f"fccl.hooks.register(ddp, {self!r}): the pattern {pattern!r} matches no parameter of the"
                    f" model, which has {names}"
                )
            exempt.update(matches)
        return list(exempt.values())

    def _native(self) -> Any:
        """The one C++ hook of this object, which holds its state."""
        with self._lock:
            if self._shared is None:
                self._shared = _extension.load().BlockQuantize(
                    format=self.format,
                    block=self.block,
                    error_feedback=self.error_feedback,
                    exempt_below_dimensions=AUTO_DIMENSIONS if self.exempt == "auto" else 0,
                )
            return self._shared

    def __repr__(self) -> str:
        arguments = [f"format={self.format!r}", f"block={self.block}"]
        if not self.error_feedback:
            arguments.append("error_feedback=False")
        if self.exempt != "auto":
            exempt = list(self.exempt) if isinstance(self.exempt, tuple) else self.exempt
            arguments.append(f"exempt={exempt!r}")
        return f"{self.name}({', '.join(arguments)})"

    def __reduce__(self) -> Any:
        # What it is, not what it has kept: that is state_dict()'s.
        return type(self), (self.format, self.block, self.error_feedback, self.exempt)


def _checked_exempt(exempt: Any) -> Any:
    if exempt is None or exempt == "auto" or callable(exempt):
        return exempt
    if isinstance(exempt, (list, tuple)) and all(isinstance(pattern, str) for pattern in exempt):
        return tuple(exempt)
    if isinstance(exempt, str):
        raise ValueError(f'BlockQuantize(exempt={exempt!r}): expected "auto", or a list: exempt=[{exempt!r}]')
    raise TypeError(
        f'BlockQuantize(exempt={exempt!r}): expected "auto", None, a list of patterns for names, or a function'
        " (name, parameter) -> bool"
    )
