"""Float64 all the way: the float32 islands of a float64 run (norms, rotary tables, softmax, loss) become float64."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["PromoteFloat32"]


# take no tensors of several types: what is left in float32 is promoted with the rest
_ONE_DTYPE = frozenset(
    {
        F.grid_sample,
        F.linear,
        torch.matmul,
        torch.bmm,
        Tensor.matmul,
        Tensor.bmm,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.__setitem__,
    }
)
# make tensors out of nothing; where float64 is the default, float32 is asked for by name only
_FACTORIES = frozenset({torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.linspace})


def _is_exact(tensor: Tensor) -> bool:
    """Whether a cast to float32 would lose what the run keeps: of float64, and of integers that it computes with."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.dtype is torch.float64
    return torch.get_default_dtype() is torch.float64


class PromoteFloat32(TorchFunctionMode):
    """Within it, casting a float64 tensor to float32 leaves it in float64.

    Models cast to float32 for accuracy, which in a float64 run is the opposite: two orders of summation then differ by
    1e-7 and hide what a test at 1e-9 looks for. Wrap the whole fit, so that recomputation in backward is inside too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if func in _ONE_DTYPE and any(getattr(value, "dtype", None) is torch.float64 for value in args):
            args = tuple(
                value.double() if isinstance(value, Tensor) and value.dtype is torch.float32 else value
                for value in args
            )
        if func in _FACTORIES and torch.get_default_dtype() is torch.float64 and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if args and isinstance(args[0], Tensor) and _is_exact(args[0]):
            if func is torch.Tensor.float:
                return args[0].double()
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Runs the engine with the mode on, for recomputation; torch turns modes off around its own `backward`."""
        seed = torch.ones_like(loss) if gradient is None else gradient
        retain = create_graph if retain_graph is None else retain_graph
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                (loss,),
                (seed,),
                retain,
                create_graph,
                tuple(inputs or ()),
                allow_unreachable=True,
                accumulate_grad=True,
            )
