// One row of logits at a time. For the row x [V] with target y, temperature T, k = log2(e)/T:
//
//     m = max(x),  d_i = x_i - m,  e_i = 2^(d_i * k),  s = sum(e_i),  w = sum(e_i * d_i)
//     logprob = d_y / T - ln(s),   entropy H = ln(s) - w / (s * T)
//     dL/dx_i = (c * (1[i=y] - p_i) - e * p_i * (ln p_i + H)) / T,   p_i = e_i / s,   ln p_i + H = (d_i - w / s) / T
//
// With a softcap S the differences are those of S * tanh(x / S), and dL/dx_i has its slope as a factor: softcap.h.
// The first pass walks blocks of BLOCK columns and keeps their exponentials in `scratch`; the second pass multiplies them.
// A block is taken against the largest logit of the blocks before it, so that its own maximum costs no pass of its own; the
// rare block that exceeds it by 2^RAISE is done again. Within a block sums are fp32 in LANES lanes, across blocks double.
// The target is left out of the lanes and added last in double, so that a target that holds nearly all probability keeps its
// 1 - p: its logprob is -log1p(rest) to full relative precision.
// A NaN reaches s; -inf gives e_i = 0 exactly; an all -inf row gives s = 0 and so NaN.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "softcap.h"

constexpr int BLOCK = 4096;
constexpr float RAISE = 4;
constexpr uintptr_t PREFETCH = 2048;  // bytes ahead
constexpr double LN2 = 0.693147180559945309417;
constexpr float LOWEST = -std::numeric_limits<float>::max();

struct RowStats {
    float logprob, entropy, max, sum, mean;  // mean = w / (s * T), the expectation of (x_i - m) / T
};

// e_i of the first pass, and the maximum each block was taken against. In fp32 for every type of logits: next to a target
// that holds nearly all probability, the others' shares are the whole gradient, however small.
struct Scratch {
    float* exps;       // [V rounded up to LANES]
    float* block_max;  // [V / BLOCK rounded up]
};

struct BlockSums {
    Pair s{}, w{};
    Pair max{splat(LOWEST), splat(LOWEST)};
};

// A difference d, held where 2^(d * k) is exactly 0.
static inline vf held(vf d, float k) { return max_nan_b(splat(-127.0f / k), d); }

template <bool ENTROPY, bool KEEP, class T, class BELOW>
static inline void add_groups(const T* x, int from, int to, const BELOW& below, float k, float* exps, BlockSums& sums) {
    BlockSums local = sums;
    for (int i = from; i < to; i += LANES) {
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x + i) + PREFETCH));
        Pair v = load_pair(x + i);
        local.max.a = max_nan_b(local.max.a, v.a), local.max.b = max_nan_b(local.max.b, v.b);
        vf da = held(below(v.a), k), db = held(below(v.b), k);
        vf ea = exp2_product(da, splat(k)), eb = exp2_product(db, splat(k));
        if (KEEP) store_pair(exps + i, {ea, eb});
        local.s.a += ea, local.s.b += eb;
        if (ENTROPY) local.w.a = fma(ea, da, local.w.a), local.w.b = fma(eb, db, local.w.b);
    }
    sums = local;
}

// Sums over the columns [0, size) of a block but for column y, if y is one of them.
template <bool ENTROPY, bool KEEP, class T, class BELOW>
static inline BlockSums add_block(const T* x, int size, int64_t y, const BELOW& below, float k, float* exps) {
    BlockSums sums;
    const int whole = size - size % LANES;
    const int group_of_y = y >= 0 && y < size ? int(y) / LANES * LANES : whole;
    auto padded = [&](int at) {  // the group of the target without it, or the ragged last group
        T group[LANES];
        for (int i = 0; i < LANES; ++i) {
            if (at + i < size && at + i != y) group[i] = x[at + i];
            else minus_infinity(group + i);
        }
        add_groups<ENTROPY, KEEP>(group, 0, LANES, below, k, KEEP ? exps + at : nullptr, sums);
    };
    add_groups<ENTROPY, KEEP>(x, 0, std::min(group_of_y, whole), below, k, exps, sums);
    if (group_of_y < whole) {
        padded(group_of_y);
        add_groups<ENTROPY, KEEP>(x, group_of_y + LANES, whole, below, k, exps, sums);
    }
    if (whole < size) padded(whole);
    return sums;
}

template <class T>
static inline Pair group_at(const T* x, int at, int size) {  // columns from `at`, -inf beyond the end
    if (at + LANES <= size) return load_pair(x + at);
    T group[LANES];
    for (int i = 0; i < LANES; ++i) {
        if (at + i < size) group[i] = x[at + i];
        else minus_infinity(group + i);
    }
    return load_pair(group);
}

static inline float max_lanes(Pair v) {
    float lane[LANES], m = LOWEST;
    store_pair(lane, v);
    for (float a : lane) m = std::max(m, a);
    return m;
}

template <class T>
static inline float first_maximum(const T* x, int size) {
    Pair best{splat(LOWEST), splat(LOWEST)};
    for (int i = 0; i < size; i += LANES) {
        Pair v = group_at(x, i, size);
        best.a = max_nan_b(best.a, v.a), best.b = max_nan_b(best.b, v.b);
    }
    return max_lanes(best);
}

// s and w against a running maximum m that may rise.
struct RunningSums {
    float m = LOWEST, k;
    double s = 0, w = 0;

    template <class CAP>
    void raise(float higher, const CAP& cap) {
        if (s != 0) {
            const double d = cap.difference(m, higher), scale = std::exp2(d * k);
            w = scale * (w + s * d), s = scale * s;
        }
        m = higher;
    }
};

// Adds the target, `gap` from the maximum m, to sums over all other columns.
static inline RowStats with_target(double s, double w, double gap, float m, float k, double temperature) {
    const double d_y = std::max(gap, -1100.0 / k), e_y = std::exp2(d_y * k);
    const double log_rest = std::log1p(e_y >= s ? s / e_y : e_y / s);  // ln(s + e_y) less the larger one's logarithm
    const double ln_t_y = gap / temperature;
    const double log_s = (e_y >= s ? ln_t_y : std::log(s)) + log_rest;
    const double logprob = e_y >= s ? 0 - log_rest : ln_t_y - log_s;
    s += e_y, w += e_y * d_y;
    const double mean = w / s / temperature;
    return {float(logprob), float(log_s - mean), m, float(s), float(mean)};
}

// Pass 1. The target column may be anywhere in [0, n).
template <bool ENTROPY, bool KEEP, class T, class CAP>
static RowStats row_stats(const T* x, int64_t n, int64_t target, double temperature, const CAP& cap, Scratch scratch) {
    RunningSums row;
    row.k = float(LOG2E / temperature);
    const float x_y = to_float(x[target]);
    for (int64_t begin = 0, b = 0; begin < n; begin += BLOCK, ++b) {
        const int size = int(std::min<int64_t>(BLOCK, n - begin));
        float* exps = KEEP ? scratch.exps + begin : nullptr;
        auto block = [&] { return add_block<ENTROPY, KEEP>(x + begin, size, target - begin, cap.below(row.m), row.k, exps); };
        if (row.m == LOWEST || CAP::capped) {  // a cap's differences are for x <= m only
            const float first = first_maximum(x + begin, size);
            if (first > row.m) row.raise(first, cap);
        }
        BlockSums sums = block();
        const float highest = max_lanes(sums.max);
        if (!CAP::capped && (highest - row.m) * row.k > RAISE) {
            row.raise(highest, cap);
            sums = block();
        }
        if (KEEP) scratch.block_max[b] = row.m;
        row.s += sum_lanes(sums.s);
        if (ENTROPY) row.w += sum_lanes(sums.w);
        if (highest > row.m) row.raise(highest, cap);
    }
    if (x_y > row.m) row.raise(x_y, cap);
    return with_target(row.s, row.w, cap.difference(x_y, row.m), row.m, row.k, temperature);
}

struct RowGrad {
    float logprob, max, sum, mean, c, e;  // c = dL/dlogprob, e = dL/dentropy
};

// dL/dx of the target column.
template <class T, class CAP>
static inline void write_target(T* grad, float x_y, const RowGrad& r, double temperature, const CAP& cap) {
    const float minus_rest = expm1_nonpositive(splat(r.logprob))[0];  // p - 1, to full precision
    double dx = -double(r.c) * minus_rest;
    const float p = std::exp(r.logprob);
    if (r.e != 0 && p > 0) dx -= double(r.e) * p * (cap.difference(x_y, r.max) / temperature - r.mean);
    from_float(grad, float(dx / temperature * cap.slope(x_y)));
}

// Pass 2. KEPT: multiplies the exponentials of pass 1; otherwise takes them again. grad may be x. A negative target is in
// none of these columns: they are a part of the vocabulary.
template <bool ENTROPY, bool KEPT, class T, class CAP>
static void row_grad_as(
    const T* x, int64_t n, int64_t target, double temperature, const CAP& cap, const RowGrad& r, Scratch scratch, T* grad) {
    const float k = float(LOG2E / temperature), x_y = target < 0 ? 0 : to_float(x[target]);
    const auto below = cap.below(r.max);
    const float mean_d = float(r.mean * temperature);  // ln p_i + H = (x_i - m - mean_d) / T
    for (int64_t begin = 0, b = 0; begin < n; begin += BLOCK, ++b) {
        const int size = int(std::min<int64_t>(BLOCK, n - begin)), whole = size - size % LANES;
        const T* from = x + begin;
        T* to = grad + begin;
        const float* exps = KEPT ? scratch.exps + begin : nullptr;
        const double rescale = KEPT ? std::exp2(cap.difference(scratch.block_max[b], r.max) * k) : 1.0;
        const double per_e = rescale / (double(r.sum) * temperature);  // e_i * per_e = p_i / T
        const float minus_c = float(-r.c * per_e), minus_e = float(-r.e * per_e / temperature);
        auto group = [&](int i) -> Pair {
            Pair v, e, factor{splat(minus_c), splat(minus_c)};
            if (ENTROPY || !KEPT || CAP::capped) v = group_at(from, i, size);
            if (ENTROPY || !KEPT) {
                vf da = held(below(v.a), k), db = held(below(v.b), k);
                if (!KEPT) e = {exp2_product(da, splat(k)), exp2_product(db, splat(k))};
                if (ENTROPY) {
                    factor.a = fma(da - mean_d, splat(minus_e), factor.a);
                    factor.b = fma(db - mean_d, splat(minus_e), factor.b);
                }
            }
            if (KEPT) e = load_pair(exps + i);
            if (CAP::capped) factor.a *= cap.slope(v.a), factor.b *= cap.slope(v.b);
            return {e.a * factor.a, e.b * factor.b};
        };
        for (int i = 0; i < whole; i += LANES) store_pair(to + i, group(i));
        if (whole < size) {
            T last[LANES];
            store_pair(last, group(whole));
            std::copy(last, last + (size - whole), to + whole);
        }
    }
    if (target >= 0) write_target(grad + target, x_y, r, temperature, cap);
}

template <bool KEPT, class T, class CAP>
static void row_grad(
    const T* x, int64_t n, int64_t target, double temperature, const CAP& cap, const RowGrad& r, Scratch scratch, T* grad) {
    r.e != 0 ? row_grad_as<true, KEPT>(x, n, target, temperature, cap, r, scratch, grad)
             : row_grad_as<false, KEPT>(x, n, target, temperature, cap, r, scratch, grad);
}
