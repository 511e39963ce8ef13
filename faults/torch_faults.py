"""The table of what PyTorch raises about GPUs and about ranks, and of what vLLM raises about its engine, by
full class name, so that reading it needs neither.

What a Gloo or NCCL backend raises as a plain RuntimeError has no row: its class says nothing.
"""

from __future__ import annotations

from typing import Final

_ELASTIC: Final = "torch.distributed.elastic."
_RENDEZVOUS: Final = _ELASTIC + "rendezvous.api.Rendezvous"

TORCH: Final[dict[str, str]] = {
    "torch.OutOfMemoryError": "TASK.GPU_OUT_OF_MEMORY",
    "torch.cuda.OutOfMemoryError": "TASK.GPU_OUT_OF_MEMORY",  # its name before PyTorch 2.5
    "torch.AcceleratorError": "TASK.GPU_FAILED",  # "CUDA error: …", since PyTorch 2.8
    "torch.cuda.CudaError": "TASK.GPU_FAILED",
    "torch.cuda.DeferredCudaCallError": "TASK.GPU_FAILED",
    "torch.distributed.DistError": "TASK.COLLECTIVE_FAILED",
    "torch.distributed.DistBackendError": "TASK.COLLECTIVE_FAILED",
    "torch.distributed.DistNetworkError": "TASK.COLLECTIVE_FAILED",
    "torch.distributed.DistStoreError": "TASK.COLLECTIVE_FAILED",
    "torch.distributed.QueueEmptyError": "TASK.COLLECTIVE_FAILED",
    _RENDEZVOUS + "Error": "TASK.COLLECTIVE_FAILED",
    _RENDEZVOUS + "ClosedError": "TASK.COLLECTIVE_FAILED",
    _RENDEZVOUS + "ConnectionError": "TASK.COLLECTIVE_FAILED",
    _RENDEZVOUS + "GracefulExitError": "TASK.COLLECTIVE_FAILED",
    _RENDEZVOUS + "StateError": "TASK.COLLECTIVE_FAILED",
    _RENDEZVOUS + "TimeoutError": "TASK.COLLECTIVE_FAILED",
    _ELASTIC + "multiprocessing.errors.ChildFailedError": "TASK.PROCESS_EXITED",
    "torch.multiprocessing.spawn.ProcessException": "TASK.WORKER_CRASHED",
    "torch.multiprocessing.spawn.ProcessExitedException": "TASK.WORKER_CRASHED",
    "torch.multiprocessing.spawn.ProcessRaisedException": "TASK.UNSERIALIZABLE",  # a traceback's text
    # Of vLLM inside an actor: its engine core is a process of its own, and gone for good.
    "vllm.v1.engine.exceptions.EngineDeadError": "ENGINE.EXITED",
}
