"""Fair timing on a noisy machine: every contender runs once per round, in turn, and medians are compared."""

import statistics
import time
from collections.abc import Callable
from typing import Any

BUDGET_S = 8.0  # per race, after warm-up
MAX_ROUNDS, MIN_ROUNDS = 15, 3


def race(benchmark: Any, contenders: dict[str, Callable[[], Any]], reset: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds of each contender; the one called "ours" is pytest-benchmark's own measurement.

    `reset` runs before each contender, untimed. Results are stored in benchmark.extra_info.
    """
    warm = 0.0
    for contender in contenders.values():
        reset()
        contender()  # compiles, allocates
        reset()
        start = time.perf_counter()
        contender()
        warm += time.perf_counter() - start
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(BUDGET_S / warm)))
    times: dict[str, list[float]] = {name: [] for name in contenders}

    def others() -> None:
        for name, contender in contenders.items():
            if name == "ours":
                continue
            reset()
            start = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - start)
        reset()

    benchmark.pedantic(contenders["ours"], setup=others, rounds=rounds, iterations=1)
    times["ours"] = list(benchmark.stats.stats.data)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    benchmark.extra_info.update(rounds=rounds, median_ms={name: round(ms, 4) for name, ms in medians.items()})
    return medians
