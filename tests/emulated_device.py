"""A device for tests on machines without an accelerator: its tensors are in main memory, but may not meet others.

Tensors of the device are wrappers that say that they are on `meta`, so that code which creates tensors "on the same
device" creates such wrappers. Every operation is checked: tensors of both devices in one operation are an error, as is
`numpy()`, and reading a value on the host is counted. Indices and numbers may be on the host, as for CUDA.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE = torch.device("meta")
HOST_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)  # indices may be on the host


class DeviceTensor(Tensor):
    """A tensor of the emulated device; its values are in `content`."""

    reads: Counter = Counter()

    @staticmethod
    def __new__(cls, content: Tensor) -> "DeviceTensor":
        layout = {"strides": content.stride(), "storage_offset": content.storage_offset(), "dtype": content.dtype}
        made = Tensor._make_wrapper_subclass(cls, content.size(), device=DEVICE, **layout)
        made.content = content
        return made

    def __repr__(self) -> str:
        return f"DeviceTensor({self.content})"

    def tolist(self) -> Any:
        DeviceTensor.reads["tolist"] += 1
        return self.content.tolist()

    def numpy(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("A tensor of another device cannot be converted to numpy; copy it to the CPU.")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        return call(function, arguments, options or {})


class EveryOperation(TorchDispatchMode):
    """Also operations that create tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        return call(function, arguments, options or {})


def call(function: Any, arguments: tuple, options: dict[str, Any]) -> Any:
    """An operation on the contents; its results are on the device of its arguments or on the one it names."""
    tensors = [one for one in tree_leaves((arguments, options)) if isinstance(one, Tensor)]
    here = [one for one in tensors if isinstance(one, DeviceTensor)]
    if function in HOST_READS and here:
        DeviceTensor.reads[str(function)] += 1
    target = options.get("device")
    on_device = bool(here) if target is None else torch.device(target) == DEVICE
    if function is aten.copy_.default:
        on_device = isinstance(arguments[0], DeviceTensor)
    elif function is aten._to_copy.default:
        DeviceTensor.reads["copy to the CPU"] += bool(here) and not on_device
    else:
        checked = tensors if function not in INDEXED else [arguments[0], *tree_leaves(arguments[2:3])]
        elsewhere = [one for one in checked if isinstance(one, Tensor) and not isinstance(one, DeviceTensor)]
        if here and any(one.dim() > 0 for one in elsewhere):
            raise RuntimeError(f"{function}: expected all tensors to be on the same device")
    if target is not None:
        options = {**options, "device": torch.device("cpu")}
    result = function(*tree_map(host, arguments), **tree_map(host, options))
    if not on_device:
        return result
    known = {id(one.content): one for one in here}  # results of operations in place
    return tree_map(lambda one: known.get(id(one), DeviceTensor(one)) if isinstance(one, Tensor) else one, result)


def host(value: Any) -> Any:
    """The content of a tensor of the device; anything else as it is."""
    return value.content if isinstance(value, DeviceTensor) else value


@contextlib.contextmanager
def emulated_device() -> Iterator[Counter]:
    """Everything that happens inside is checked; yields the number of host reads by operation."""
    make, make_like, autocast = torch.tensor, Tensor.new_tensor, torch.is_autocast_enabled

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = make(data, **options)
        return made if device is None or torch.device(device) != DEVICE else DeviceTensor(made)

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        if not isinstance(self, DeviceTensor):
            return make_like(self, data, **options)
        return DeviceTensor(make(data, dtype=options.get("dtype", self.dtype)))

    def is_autocast_enabled(device: str = "cpu") -> bool:
        return device != DEVICE.type and autocast(device)

    DeviceTensor.reads = Counter()
    with pytest.MonkeyPatch.context() as patch, EveryOperation():
        patch.setattr(torch, "tensor", tensor)  # copies a list to the device, which is no operation
        patch.setattr(Tensor, "new_tensor", new_tensor)
        patch.setattr(torch, "is_autocast_enabled", is_autocast_enabled)  # meta has no autocast
        # Wrappers have no version counter, which tensors of inference mode must not have.
        patch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext())
        yield DeviceTensor.reads


def move(model: nn.Module) -> None:
    """Move a model to the device."""
    moved: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                known = moved.setdefault(id(weight), nn.Parameter(DeviceTensor(weight.data), weight.requires_grad))
                module._parameters[name] = known
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = DeviceTensor(buffer)
