"""Triton kernels for every op, as torch.ops.pagedkern_triton.*.

`import pagedkern.triton_kernels` registers them. They take tensors of any GPU that Triton supports, and CPU tensors
where the process started with TRITON_INTERPRET=1.
"""

from .register import NAMESPACE

__all__ = ["NAMESPACE"]
