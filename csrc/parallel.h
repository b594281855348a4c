// Tasks on the OpenMP pool PyTorch already has: its GOMP entry points are in the process when torch is imported, so no
// OpenMP runtime is linked here and no second one spins beside it. Without one (weak symbols are null), plain threads.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
}

// Calls task(i) once for every i in [0, tasks), on at most `threads` threads; which thread runs which task is not fixed,
// so a task may only write what belongs to it.
template <class Task>
void parallel(int64_t tasks, int threads, const Task& task) {
    struct Shared {
        std::atomic<int64_t> next;
        int64_t tasks;
        const Task* task;
    } shared{{0}, tasks, &task};
    auto body = [](void* data) {
        auto* s = static_cast<Shared*>(data);
        for (int64_t i; (i = s->next.fetch_add(1, std::memory_order_relaxed)) < s->tasks;) (*s->task)(i);
    };
    if (threads > tasks) threads = int(tasks);
    if (threads <= 1) {
        body(&shared);
    } else if (GOMP_parallel) {
        GOMP_parallel(body, &shared, unsigned(threads), 0);
    } else {
        std::vector<std::thread> pool;
        for (int i = 1; i < threads; ++i) pool.emplace_back(body, &shared);
        body(&shared);
        for (auto& t : pool) t.join();
    }
}

// Asks for huge pages under a large output that is about to be written for the first time: at 4 KiB a page, the faults would
// take longer than the kernel. A hint; where it does nothing, nothing changes.
static inline void expect_first_write(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = uintptr_t(1) << 21, begin = (uintptr_t(memory) + page - 1) & ~(page - 1);
    const uintptr_t end = (uintptr_t(memory) + uintptr_t(bytes)) & ~(page - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}
