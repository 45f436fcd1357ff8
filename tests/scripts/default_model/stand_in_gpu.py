"""A stand-in for a GPU, and `scripts/train_default_model.py` on it, in a process of its own.

Tensors of the stand-in lie in the memory of the host and say that they are on another device. An operation that gets
tensors of both is an error, as with a GPU. torch has room for one such device in a process, hence the process.

Prints, as its last line, how many products of matrices and convolutions the stand-in and the host have computed.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lib.default_model import pipeline
from lib.default_video import pipeline as video_pipeline
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tridentserve.device import finding
from tridentserve.device.cpu_device import CpuDevice

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_default_model.py"
NAME = "stand_in"

_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
_computed: Counter[str] = Counter()


class StandInTensor(torch.Tensor):
    """A tensor in the memory of the host that says it is on the stand-in."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> StandInTensor:
        made: StandInTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run_operation(function, args, kwargs or {})


class StandInMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this, tensors can be made on the stand-in and copied there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operation(function, args, kwargs or {})


class StandInDevice(CpuDevice):
    """See `ComputeDevice`."""

    is_host = False
    multiplies_bfloat16 = False

    def count_devices(self) -> int | None:
        return 1


def run_operation(function: Any, args: Any, kwargs: Any) -> Any:
    """Run one of torch's operations. Raises `RuntimeError` where it gets tensors of both devices; a single number may
    be of the host, as with a GPU."""
    flat, structure = tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    known = {id(each.host): each for each in tensors if isinstance(each, StandInTensor)}
    of_host = [each for each in tensors if not isinstance(each, StandInTensor) and each.ndim > 0]
    if known and of_host and function not in _COPIES:
        raise RuntimeError(f"{function} got tensors of both devices")
    if function is _aten._fused_sdp_choice.default:
        return 0  # attention by plain products
    wanted = kwargs.get("device")
    is_made_here = bool(known) if wanted is None else torch.device(wanted).type == NAME
    if function.overloadpacket.__name__ in _PRODUCTS:
        _computed[NAME if is_made_here else "host"] += 1
    host_args, host_kwargs = tree_unflatten([_unwrap(each) for each in flat], structure)
    result = function(*host_args, **host_kwargs)
    if function is _aten.copy_.default:
        return args[0]

    def wrap(each: Any) -> Any:
        if id(each) in known:
            return known[id(each)]
        return StandInTensor(each) if is_made_here and isinstance(each, torch.Tensor) else each

    return tree_map(wrap, result)


def _unwrap(value: Any) -> Any:
    if isinstance(value, StandInTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    # Parameters stay the same objects when they are moved, as with a GPU.
    torch.__future__.set_swap_module_params_on_conversion(True)
    place = StandInDevice(torch.device(NAME, 0))
    finding._found.update({torch.device("cuda"): place, torch.device(NAME, 0): place})
    pipeline.GRID_STEPS = video_pipeline.STRIP_STEPS = 2
    with StandInMode():  # type: ignore[no-untyped-call]
        runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.stdout.write(json.dumps(_computed) + "\n")


if __name__ == "__main__":
    main()
