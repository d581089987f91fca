"""Runs an op on the GPU for tests that hold their tensors on the CPU: whole allocations go there and come back."""

from collections.abc import Callable

import torch


class Mirror:
    """Tensors on a device with the sizes, strides, offsets and shared allocations of those on the CPU."""

    def __init__(self, device: str):
        self.device = device
        self.storages = {}  # address -> (bytes on the CPU, bytes on the device)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = (host, host.to(self.device, copy=True))
        bytes_there = self.storages[storage.data_ptr()][1]
        there = torch.empty(0, dtype=tensor.dtype, device=self.device)
        offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        return there.set_(bytes_there.untyped_storage(), offset, size, stride)

    def argument(self, value):
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        return [self.tensor(item) for item in value] if isinstance(value, list) else value

    def bring_back(self) -> None:
        for host, there in self.storages.values():
            host.copy_(there)


def on_device(function: Callable, device: str, stays: tuple[str, ...] = ()) -> Callable:
    """function on CPU tensors, run on the device; `stays` names the parameters whose tensors stay on the CPU."""
    names = [argument.name for argument in function.default._schema.arguments]

    def call(*args, **kwargs):
        mirror = Mirror(device)
        given = dict(zip(names, args, strict=False)) | kwargs
        moved = {name: value if name in stays else mirror.argument(value) for name, value in given.items()}
        try:
            result = function(**moved)
        finally:
            mirror.bring_back()
        return result

    return call
