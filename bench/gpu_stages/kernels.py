"""Every CUDA source, compiled by CuPy for the GPU that is here; the other stages then find it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_stages.tell import STANDIN, gpu, tell


def main() -> None:
    with gpu() as cupy:
        from minidist.kernels import source

        def compiled(module: Any) -> str | None:
            """Return what the compiler says of a module that it refuses."""
            try:
                with cupy.cuda.Device(0):
                    kernel = source.kernel(module, module.kernels[0])
                    if not STANDIN:
                        kernel.compile()
            except Exception as failure:
                return f"{module.source} {module.dtype} {module.to}: {failure}"
            return None

        modules = source.modules()
        compiled(modules[0])  # by one thread: it makes CUDA ready
        started = time.perf_counter()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            failures = list(filter(None, threads.map(compiled, modules)))
        took = round(time.perf_counter() - started, 1)
        tell("sources compiled", took, "s", good=not failures, count=len(modules))
        for failure in failures[:5]:
            tell(failure.partition(":")[0], failure[:1000], good=False)


if __name__ == "__main__":
    main()
