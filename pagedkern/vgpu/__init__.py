"""The virtual GPU: runs the PTX of Hopper kernels on the CPU, checks every access and counts the traffic.

module = vgpu.Module(ptx_text)
report = module.launch("kernel", grid=(8, 1, 1), block=(128, 1, 1), args=[x, y, 1024])

vgpu.load_ops()
with vgpu.session(seed=1) as s:
    torch.ops.pagedkern_vgpu.copy_blocks(key_caches, value_caches, block_mapping)
print(s.reports[0])

with vgpu.capture() as graph:  # as a CUDA graph is captured
    torch.ops.pagedkern_vgpu.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
graph.replay()  # of what the tensors hold now
"""

from pagedkern.vgpu._core import (
    KernelFault,
    LaunchError,
    ParseError,
    executed_forms,
    find_form,
    instruction_forms,
)
from pagedkern.vgpu.graph import Graph, capture
from pagedkern.vgpu.module import Freed, Module, TensorMap, Uninitialized
from pagedkern.vgpu.ops import load_ops
from pagedkern.vgpu.report import Report
from pagedkern.vgpu.session import Session, session
from pagedkern.vgpu.tensor_map import tensor_map

__all__ = [
    "Freed",
    "Graph",
    "KernelFault",
    "LaunchError",
    "Module",
    "ParseError",
    "Report",
    "Session",
    "TensorMap",
    "Uninitialized",
    "capture",
    "executed_forms",
    "find_form",
    "instruction_forms",
    "load_ops",
    "session",
    "tensor_map",
]
