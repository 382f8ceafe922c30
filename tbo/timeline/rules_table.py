"""Which kernels communicate: the table, in order. The first rule whose pattern is found in a kernel's name takes it.

Names as they stand in traces, demangled or not: a length before a mangled name, as in ``8dispatch``, stands where
``::`` does. What no rule takes is computation. People add rules of their own in front, see `tbo.timeline.classify`.
"""

from __future__ import annotations

from typing import Final

from tbo.timeline.span import Kind

_SCOPE = r"(?:::|(?<=[a-z])\d+)"
_WORD = r"(?<![A-Za-z_])"
_DEEPEP_V1 = rf"(?:internode_ll|internode|intranode){_SCOPE}"

TABLE: Final[tuple[tuple[str, Kind, str], ...]] = (
    # DeepEP, Buffer: also in forks that keep its namespaces (DeepSeek's own `dpsk::ep::internode`, UCCL).
    (
        "DeepEP V1 notify",
        Kind.NOTIFY,
        rf"{_DEEPEP_V1}(?:notify_dispatch|cached_notify\w*|barrier|clean_low_latency_buffer)",
    ),
    (
        "DeepEP V1 transfer",
        Kind.TRANSFER,
        rf"{_DEEPEP_V1}(?:dispatch|combine)(?![a-z_])",
    ),
    # DeepEP, ElasticBuffer and EPBuffer. An epilogue copies out of the buffer, and is a cost of the exchange.
    ("DeepEP V2 notify", Kind.NOTIFY, rf"(?:deep_ep|elastic).*{_WORD}barrier_impl|^(?:void )?barrier_impl"),
    (
        "DeepEP V2 transfer",
        Kind.TRANSFER,
        rf"{_WORD}(?:(?:hybrid_)?(?:dispatch|combine)_impl|pp_(?:send|recv)_impl)(?![a-z_])",
    ),
    (
        "DeepEP V2 epilogue",
        Kind.TRANSFER,
        rf"{_WORD}(?:dispatch_copy|combine_reduce)_epilogue_impl",
    ),
    # FlashInfer and TensorRT-LLM, one-sided and two-sided all-to-all.
    ("FlashInfer all-to-all notify", Kind.NOTIFY, r"moeA2APrepare(?:Dispatch|Combine)Kernel"),
    ("FlashInfer all-to-all transfer", Kind.TRANSFER, r"moeA2A(?:Dispatch|Combine)Kernel|moeAllToAllKernel"),
    # AMD before NCCL's names, which RCCL shares.
    ("RCCL", Kind.TRANSFER, r"rccl_main_kernel|mscclKernel_|ncclDevKernel_Generic_\d"),
    ("MSCCL++ notify", Kind.NOTIFY, r"mscclpp.*(?:barrier|[sS]yncer)"),
    ("MSCCL++ transfer", Kind.TRANSFER, r"mscclpp"),
    ("NCCL", Kind.TRANSFER, r"nccl(?:Symk?)?(?:Dev)?Kernel"),
    # torch.distributed._symmetric_memory: its own kernels and those over NVSHMEM.
    (
        "torch symmetric memory notify",
        Kind.NOTIFY,
        rf"\(anonymous namespace\)::(?:barrier|put_signal|wait_signal)_kernel|{_WORD}exchangeSplitAndOffset",
    ),
    (
        "torch symmetric memory transfer",
        Kind.TRANSFER,
        rf"{_WORD}(?:(?:one|two)_shot_all_reduce|multimem_(?:one_shot_)?all_(?:reduce|gather))\w*|{_WORD}allToAllV",
    ),
    (
        "NVSHMEM notify",
        Kind.NOTIFY,
        r"(?:nv|roc)shmem.*(?:barrier|sync|quiet|fence|wait)|(?:barrier|sync)(?:_all)?_on_stream_kernel",
    ),
    ("NVSHMEM transfer", Kind.TRANSFER, r"(?:nv|roc)shmem"),
    # All-reduces that vLLM, SGLang and TensorRT-LLM bring along.
    ("custom all-reduce", Kind.TRANSFER, r"cross_device_reduce_|allreduce_fusion_kernel"),
    # By the copy engine, from one device to another.
    ("copy between devices", Kind.TRANSFER, r"^Memcpy P(?:to|2)P"),
)
