"""The parts of the CPU kernels that no compiler makes of loops. Nobody needs to read them first, or at all: what they compute stands in
their docstrings, and in the loops that call them.

- `panels`, `amx`: the innermost products of the linear layers, in LLVM IR: for AVX-512 and AVX2, and for AMX.
- `decode_products`, `softmax`: those of decode attention, and the online softmax of prefill attention, in LLVM IR.
- `transpose`, `hadamard`: rows to columns, and the Hadamard transform, within vector registers.
- `cache_lock`: processes that compile at once take turns at the cache on disk.
- `thread_pool`, `atomics`: `parallel_for`, and the words of memory that its threads share.
- `memory`: addresses, pointers and prefetching.
- `features`: which instructions this processor has.
- `instructions`: how these functions are written.

A function here is an *intrinsic*: Numba calls it while it compiles the caller, and it writes the instructions with llvmlite. The language
is LLVM's, https://llvm.org/docs/LangRef.html.
"""
