// The C ABI of the native library; ppo_kernels/native.py binds it. All pointers are to CPU memory, all checks were made there.
#include <string>
#include <vector>

#include "gae.h"
#include "parallel.h"
#include "rows.h"
#include "small_rows.h"
#include "token_loss.h"

#ifndef PPK_LEVEL
#define PPK_LEVEL "generic"
#endif
#define API extern "C" __attribute__((visibility("default")))

enum Dtype : int64_t { F32, BF16, F16 };

// Rows of logits: row n = (o, i) of [outer, inner] starts at o * stride_outer + i * stride_inner. `shift` = 1: each o has one
// more row in memory, which scores nothing, and row i scores tokens[o, i + 1].
struct Rows {
    const void* logits;
    void* grad;  // may be logits
    const int64_t* tokens;
    const uint8_t* valid;  // or nullptr
    int64_t dtype, outer, inner, shift, stride_outer, stride_inner, grad_stride_outer, grad_stride_inner, columns, vocab;
    double temperature;          // of all rows,
    const double* temperatures;  // or of each; or nullptr
    double softcap;              // infinite: none

    // Out of PPOLossConfig's range: NaN, which the row's results then are. Python has checked the values if it could.
    double temperature_of(int64_t n) const {
        const double t = temperatures ? temperatures[n] : temperature;
        return t >= 1e-30 && t <= 1e30 ? t : std::nan("");
    }
    int64_t count() const { return outer * inner; }
    bool is_valid(int64_t n) const { return !valid || valid[n]; }
    int64_t outer_of(int64_t n) const { return outer == 1 ? 0 : n / inner; }
    int64_t token(int64_t n) const { return tokens[n + (outer_of(n) + 1) * shift]; }
    bool known(int64_t token) const { return uint64_t(token) < uint64_t(vocab); }
    int64_t target(int64_t n) const { return known(token(n)) ? token(n) : -1; }
    bool is_last(int64_t n) const { return n - outer_of(n) * inner == inner - 1; }
    template <class T>
    const T* row(int64_t n) const {
        const int64_t o = outer_of(n);
        return static_cast<const T*>(logits) + o * stride_outer + (n - o * inner) * stride_inner;
    }
    template <class T>
    T* grad_row(int64_t n) const {
        const int64_t o = outer_of(n);
        return static_cast<T*>(grad) + o * grad_stride_outer + (n - o * inner) * grad_stride_inner;
    }
};

struct RowOutputs {  // each [N]; entropy and mean may be nullptr
    float *logprobs, *entropy, *max, *sum, *mean;

    void put(int64_t n, const RowStats& r) const {
        logprobs[n] = r.logprob, max[n] = r.max, sum[n] = r.sum;
        if (entropy) entropy[n] = r.entropy, mean[n] = r.mean;
    }
};

struct RowInputs {  // each [N]; mean and grad_entropy may be nullptr
    const float *logprobs, *max, *sum, *mean, *grad_logprobs, *grad_entropy;

    RowGrad at(int64_t n) const {
        return {logprobs[n], max[n], sum[n], mean ? mean[n] : 0, grad_logprobs[n], grad_entropy ? grad_entropy[n] : 0};
    }
};

// Rows per task: a function of V alone, so that sums over tasks do not depend on the number of threads.
static int64_t rows_per_task(int64_t vocab) { return std::max<int64_t>(1, std::min<int64_t>(512, 65536 / vocab)); }

// Scratch for one row, kept by each thread from call to call.
static Scratch thread_scratch(int64_t vocab) {
    static thread_local std::vector<float> exps, block_max;
    exps.resize(size_t((vocab + LANES - 1) / LANES * LANES));
    block_max.resize(size_t((vocab + BLOCK - 1) / BLOCK));
    return {exps.data(), block_max.data()};
}

template <bool KEEP, class T, class CAP>
static RowStats stats_of(const Rows& rows, const CAP& cap, int64_t n, bool entropy, Scratch scratch) {
    const T* x = rows.row<T>(n);
    const double temperature = rows.temperature_of(n);
    return entropy ? row_stats<true, KEEP>(x, rows.vocab, rows.token(n), temperature, cap, scratch)
                   : row_stats<false, KEEP>(x, rows.vocab, rows.token(n), temperature, cap, scratch);
}

// Writes zeros where row n has no gradient: all of it, or its padding columns; and the row after it that scores nothing.
template <class T>
static void zero_fill(const Rows& rows, int64_t n, bool whole_row) {
    T* grad = rows.grad_row<T>(n);
    std::fill(grad + (whole_row ? 0 : rows.vocab), grad + rows.columns, T{});
    if (rows.shift && rows.is_last(n)) {
        T* last = grad + rows.grad_stride_inner;
        std::fill(last, last + rows.columns, T{});
    }
}

template <bool KEPT, class T, class CAP>
static void grad_of(const Rows& rows, const CAP& cap, int64_t n, const RowGrad& r, Scratch scratch) {
    const bool zero = !rows.is_valid(n) || (r.c == 0 && r.e == 0);
    const double temperature = rows.temperature_of(n);
    if (!zero) row_grad<KEPT>(rows.row<T>(n), rows.vocab, rows.target(n), temperature, cap, r, scratch, rows.grad_row<T>(n));
    zero_fill<T>(rows, n, zero);
}

// Fills one group of small rows; lanes whose row is not valid (or beyond `end`) stay idle.
template <class T, class CAP>
static void gather(const Rows& rows, int64_t begin, int64_t end, SmallRows<T, CAP>& small) {
    for (int l = 0; l < LANES; ++l) {
        const int64_t n = begin + l;
        const bool live = n < end && rows.is_valid(n);
        small.x[l] = live ? rows.row<T>(n) : nullptr;
        small.grad[l] = live && rows.grad ? rows.grad_row<T>(n) : nullptr;
        small.target[l] = live ? rows.target(n) : 0;
    }
    if (!rows.temperatures) return;
    for (int l = 0; l < LANES; ++l) small.set_temperature(l, small.x[l] ? rows.temperature_of(begin + l) : 1);
}

template <class T, class CAP>
static SmallRows<T, CAP> small_rows(const Rows& rows, const CAP& cap) {
    SmallRows<T, CAP> small(cap);
    for (int l = 0; l < LANES; ++l) small.set_temperature(l, rows.temperature);
    return small;
}

constexpr RowStats NOT_VALID{0, 0, 0, 1, 0};

template <class T, class CAP>
static void stats_task(const Rows& rows, const CAP& cap, int64_t begin, int64_t end, const RowOutputs& out) {
    if (rows.vocab > SMALL) {
        for (int64_t n = begin; n < end; ++n)
            out.put(n, rows.is_valid(n) ? stats_of<false, T>(rows, cap, n, out.entropy, {}) : NOT_VALID);
        return;
    }
    auto small = small_rows<T>(rows, cap);
    RowStats stats[LANES];
    for (int64_t first = begin; first < end; first += LANES) {
        gather(rows, first, end, small);
        small.stats(int(rows.vocab), stats);
        for (int l = 0; l < LANES && first + l < end; ++l) out.put(first + l, small.x[l] ? stats[l] : NOT_VALID);
    }
}

template <class T, class CAP>
static void grad_task(const Rows& rows, const CAP& cap, int64_t begin, int64_t end, const RowInputs& in) {
    if (rows.vocab > SMALL) {
        for (int64_t n = begin; n < end; ++n) grad_of<false, T>(rows, cap, n, in.at(n), {});
        return;
    }
    auto small = small_rows<T>(rows, cap);
    RowGrad grads[LANES] = {};
    float max[LANES] = {};
    for (int64_t first = begin; first < end; first += LANES) {
        gather(rows, first, end, small);
        for (int l = 0; l < LANES && first + l < end; ++l) {
            grads[l] = in.at(first + l), max[l] = grads[l].max;
            if (grads[l].c == 0 && grads[l].e == 0) small.x[l] = nullptr;
        }
        small.read(int(rows.vocab));
        small.exps(int(rows.vocab), max);
        small.gradient(int(rows.vocab), grads);
        for (int l = 0; l < LANES && first + l < end; ++l) zero_fill<T>(rows, first + l, !small.x[l]);
    }
}

template <class T, class CAP>
static void fused_task(
    const Rows& rows, const CAP& cap, int64_t begin, int64_t end, const Tokens& tokens, const RowOutputs& out, Sums& sums) {
    auto loss = [&](int64_t n, const RowStats& r) -> RowGrad {
        Coefficients c = token_loss(tokens, n, r.logprob, r.entropy, sums);
        value_loss(tokens, n, sums);
        out.put(n, r);
        tokens.grad_logprobs[n] = c.logprob, tokens.grad_entropy[n] = c.entropy;
        return {r.logprob, r.max, r.sum, r.mean, c.logprob, c.entropy};
    };
    if (rows.vocab > SMALL) {
        const Scratch scratch = thread_scratch(rows.vocab);
        for (int64_t n = begin; n < end; ++n) {
            RowGrad r = loss(n, rows.is_valid(n) ? stats_of<true, T>(rows, cap, n, out.entropy, scratch) : NOT_VALID);
            grad_of<true, T>(rows, cap, n, r, scratch);
        }
        return;
    }
    auto small = small_rows<T>(rows, cap);
    RowStats stats[LANES];
    RowGrad grads[LANES] = {};
    for (int64_t first = begin; first < end; first += LANES) {
        gather(rows, first, end, small);
        small.stats(int(rows.vocab), stats);
        for (int l = 0; l < LANES && first + l < end; ++l) {
            grads[l] = loss(first + l, small.x[l] ? stats[l] : NOT_VALID);
            if (grads[l].c == 0 && grads[l].e == 0) small.x[l] = nullptr;
        }
        small.gradient(int(rows.vocab), grads);
        for (int l = 0; l < LANES && first + l < end; ++l) zero_fill<T>(rows, first + l, !small.x[l]);
    }
}

// Splits N rows into tasks and calls f(T{}, softcap, task, begin, end) with T the logits' element type.
template <class F>
static void for_rows(const Rows& rows, int threads, const F& f) {
    const int64_t n = rows.count(), step = rows_per_task(rows.vocab);
    parallel((n + step - 1) / step, threads, [&](int64_t task) {
        const int64_t begin = task * step, end = std::min(n, begin + step);
        auto run = [&](const auto& cap) {
            switch (rows.dtype) {
                case F32: f(float{}, cap, task, begin, end); break;
                case BF16: f(bf16{}, cap, task, begin, end); break;
                default: f(f16{}, cap, task, begin, end); break;
            }
        };
        std::isinf(rows.softcap) ? run(NoSoftcap{}) : run(Softcap(rows.softcap));
    });
}

API int ppk_abi_version() { return 6; }
API const char* ppk_level() { return PPK_LEVEL; }

// Whether this CPU runs `level`; asked of the build for the lowest level.
API int ppk_cpu_supports(const char* level) {
#if defined(__x86_64__)
    const std::string name = level;
    if (name == "v2") return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
    if (name == "v3")
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("f16c");
    if (name == "v4")
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
    return 0;
#else
    return std::string(level) == PPK_LEVEL;
#endif
}

static void expect_new_gradient(const Rows& rows) {  // a new gradient is contiguous
    const int64_t elements = rows.outer * (rows.inner + rows.shift) * rows.columns;
    if (rows.grad != rows.logits) expect_first_write(rows.grad, elements * (rows.dtype == F32 ? 4 : 2));
}

// The first valid row whose token is outside the vocabulary, or -1.
API int64_t ppk_first_bad_token(const Rows* rows) {
    for (int64_t n = 0; n < rows->count(); ++n) {
        if (rows->is_valid(n) && !rows->known(rows->token(n))) return n;
    }
    return -1;
}

API void ppk_row_stats(const Rows* rows, const RowOutputs* out, int threads) {
    for_rows(*rows, threads, [&](auto type, const auto& cap, int64_t, int64_t begin, int64_t end) {
        stats_task<decltype(type)>(*rows, cap, begin, end, *out);
    });
}

API void ppk_row_grad(const Rows* rows, const RowInputs* in, int threads) {
    expect_new_gradient(*rows);
    for_rows(*rows, threads, [&](auto type, const auto& cap, int64_t, int64_t begin, int64_t end) {
        grad_task<decltype(type)>(*rows, cap, begin, end, *in);
    });
}

// Adds the tasks' sums in order.
static void reduce(const std::vector<Sums>& parts, const LossParams& params, float* terms, float* metrics) {
    Sums all;
    for (const Sums& part : parts) all.add(part);
    finish(all, params, terms, metrics);
}

API void ppk_row_fused(const Rows* rows, const Tokens* tokens, const RowOutputs* out, float* terms, float* metrics, int threads) {
    const int64_t step = rows_per_task(rows->vocab);
    std::vector<Sums> parts(size_t((rows->count() + step - 1) / step));
    expect_new_gradient(*rows);
    for_rows(*rows, threads, [&](auto type, const auto& cap, int64_t task, int64_t begin, int64_t end) {
        fused_task<decltype(type)>(*rows, cap, begin, end, *tokens, *out, parts[size_t(task)]);
    });
    reduce(parts, tokens->params, terms, metrics);
}

API void ppk_token_loss(const Tokens* tokens, const float* logprobs, const float* entropy, float* terms, float* metrics, int threads) {
    constexpr int64_t step = 512;
    std::vector<Sums> parts(size_t((tokens->n + step - 1) / step));
    parallel(int64_t(parts.size()), threads, [&](int64_t task) {
        for (int64_t n = task * step; n < std::min(tokens->n, (task + 1) * step); ++n) {
            Coefficients c = token_loss(*tokens, n, logprobs[n], entropy ? entropy[n] : 0, parts[size_t(task)]);
            value_loss(*tokens, n, parts[size_t(task)]);
            tokens->grad_logprobs[n] = c.logprob;
            if (entropy) tokens->grad_entropy[n] = c.entropy;
        }
    });
    reduce(parts, tokens->params, terms, metrics);
}

API void ppk_gae(const Gae* g, int threads) {
    constexpr int64_t step = GAE_ROWS;
    const int64_t bytes = 4 * (g->segments[g->sequences] - g->segments[0]);
    expect_first_write(g->advantages, bytes), expect_first_write(g->returns, bytes);
    parallel((g->sequences + step - 1) / step, threads, [&](int64_t task) {
        gae_rows(*g, task * step, std::min(g->sequences, (task + 1) * step));
    });
}
