"""Times on a CUDA device: cold L2, CUDA events, medians; and a stand-in for torch.cuda with which a CPU runs it too."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Run = Callable[[], Any]
MIB = 1 << 20


class DryCuda:
    """The part of torch.cuda used here, on the host's clock. Its numbers mean nothing; its calls are the real ones."""

    captures_until_failure = -1  # one capture fails, so that what follows is rehearsed

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, end: DryCuda.Event) -> float:
            return 1e3 * (end.at - self.at)

    class CUDAGraph:
        def replay(self) -> None:
            pass

    class Stream:
        def wait_stream(self, stream: DryCuda.Stream) -> None:
            pass

    @staticmethod
    @contextlib.contextmanager
    def graph(cuda_graph: DryCuda.CUDAGraph) -> Iterator[None]:
        DryCuda.captures_until_failure -= 1
        if DryCuda.captures_until_failure == 0:
            raise RuntimeError("this capture fails in a dry run")
        yield

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: DryCuda.Stream) -> Iterator[None]:
        yield

    @staticmethod
    def current_stream() -> DryCuda.Stream:
        return DryCuda.Stream()

    @staticmethod
    def synchronize() -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass

    @staticmethod
    def reset_peak_memory_stats() -> None:
        pass

    @staticmethod
    def memory_allocated() -> int:
        return 0

    @staticmethod
    def max_memory_allocated() -> int:
        return 0

    @staticmethod
    def get_device_properties(device: int) -> Any:
        return None


class Timer:
    """Every repetition finds in the L2 what it does not use. `reset`, untimed, runs before it."""

    def __init__(self, dry: bool, seconds: float = 0.12, failing_capture: bool = False) -> None:
        self.cuda: Any = DryCuda if dry else torch.cuda
        DryCuda.captures_until_failure = 3 if failing_capture else -1
        self.clock = "host clock, dry run" if dry else "CUDA events"
        self.seconds, self.fewest, self.most = (0.0, 2, 2) if dry else (seconds, 5, 50)
        self.device = "cpu" if dry else "cuda"
        l2 = getattr(self.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 * MIB
        size = MIB if dry else max(3 * l2, 256 * MIB)
        self.scratch = torch.empty(size // 4, dtype=torch.float32, device=self.device)

    def _flush_l2(self) -> None:
        """Written, then read: no repetition has to write back what is left there."""
        self.scratch.zero_()
        self.scratch.sum()

    def _times(self, run: Run, reset: Run, repetitions: int) -> list[float]:
        """Milliseconds. The host runs ahead while the device flushes the L2."""
        pairs = []
        for _ in range(repetitions):
            reset()
            self._flush_l2()
            start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        self.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def median(self, run: Run, reset: Run) -> dict[str, Any]:
        """{"ms", "ms_p20", "ms_p80", "repetitions"} of warm calls; one call where it takes longer than a second."""
        self._times(run, reset, 1)
        times = self._times(run, reset, 1)
        if times[0] < 1e3:
            estimate = max(self._times(run, reset, 1)[0], 1e-3)
            times = self._times(run, reset, min(self.most, max(self.fewest, int(1e3 * self.seconds / estimate))))
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        return {"ms": deciles[4], "ms_p20": deciles[1], "ms_p80": deciles[7], "repetitions": len(times)}

    def graph_median(self, run: Run, reset: Run) -> dict[str, Any]:
        """The same of one captured call, replayed; or {"not_captured": why}."""
        try:
            side = self.cuda.Stream()
            side.wait_stream(self.cuda.current_stream())
            with self.cuda.stream(side):
                for _ in range(2):
                    reset()
                    run()
            self.cuda.current_stream().wait_stream(side)
            reset()
            graph = self.cuda.CUDAGraph()
            with self.cuda.graph(graph):
                results = run()
            timed = self.median(graph.replay, reset)
            del graph, results
            return timed
        except Exception as error:
            return {"not_captured": f"{type(error).__name__}: {str(error)[:200]}"}

    def peak_bytes(self, run: Run, reset: Run) -> int:
        """Device memory of one warm call beyond what was there before it, its results included."""
        reset()
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        before = self.cuda.memory_allocated()
        run()
        return int(self.cuda.max_memory_allocated() - before)

    def copy_bandwidth(self) -> dict[str, Any]:
        """Bytes read plus bytes written per second of a large device-to-device copy: the ceiling of everything else."""
        size = MIB if self.clock != "CUDA events" else 4096 * MIB
        source = torch.empty(size // 4, dtype=torch.int32, device=self.device).random_()
        target = torch.empty_like(source)
        timed = self.median(lambda: target.copy_(source), lambda: None)
        return {"gigabytes": 2 * size / 1e9, "bytes_per_s": 2 * size / timed["ms"] * 1e3, **timed}
