// One row of logits at a time. For the row x [V] with target y, temperature T, k = log2(e)/T:
//
//     m = max(x),  t_i = (x_i - m) * k,  e_i = 2^t_i,  s = sum(e_i),  w = sum(e_i * t_i)
//     logprob = ln2 * t_y - ln(s),   entropy = ln(s) - ln2 * w / s
//     dL/dx_i = (c * (1[i=y] - p_i) - e * p_i * (ln p_i + H)) / T,   p_i = e_i / s
//
// The first pass walks blocks of BLOCK columns: the block's maximum raises the running maximum, its exponentials are taken
// against that and kept in `scratch`; the second pass only multiplies them. Within a block sums are fp32 in LANES
// interleaved lanes, across blocks double. The target is left out of the lanes and added last in double, so that a target
// that holds nearly all probability keeps its 1 - p: its logprob is -log1p(rest) to full relative precision.
// A NaN reaches s; -inf gives e_i = 0 exactly; an all -inf row gives s = 0 and so NaN.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

constexpr int BLOCK = 4096;
constexpr double LN2 = 0.693147180559945309417;
constexpr double LOG2E = 1.44269504088896340736;
constexpr float LOWEST = -std::numeric_limits<float>::max();
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

struct RowStats {
    float logprob, entropy, max, sum;
};

// e_i against the running maximum at its block, and that maximum: e_i * 2^((block_max - row_max) * k) is final.
struct Scratch {
    float* exps;        // [V rounded up to LANES], or nullptr: not kept
    float* block_max;  // [V / BLOCK rounded up]
};

struct LaneSums {
    vf s[VECS], w[VECS];
};

// Calls f(pointer to LANES columns, first column) for whole groups, then for the padded last group.
template <class T, class F>
static inline void padded_tail(const T* x, int begin, int end, const F& f) {
    float padded[LANES];
    for (int i = 0; i < LANES; ++i) padded[i] = begin + i < end ? to_float(x[begin + i]) : NEG_INF;
    f(padded, begin);
}

template <class T>
static inline float block_max(const T* x, int n) {
    vf best[VECS];
    for (int v = 0; v < VECS; ++v) best[v] = splat(LOWEST);
    auto group = [&](auto* p, int) {
        for (int v = 0; v < VECS; ++v) best[v] = max_nan_b(best[v], load(p + v * W));
    };
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES) group(x + i, i);
    if (whole < n) padded_tail(x, whole, n, group);
    float lane[LANES], m = LOWEST;
    for (int v = 0; v < VECS; ++v) store(lane + v * W, best[v]);
    for (float a : lane) m = std::max(m, a);
    return m;
}

template <bool ENTROPY, class T>
static inline void exps_group(const T* x, float m, float k, float* exps, LaneSums& sums) {
    for (int v = 0; v < VECS; ++v) {
        vf t = max_nan_b(splat(-127.0f), (load(x + v * W) - m) * k);
        vf e = exp2_nonpositive(t);
        if (exps) store(exps + v * W, e);
        sums.s[v] += e;
        if (ENTROPY) sums.w[v] = fma(e, t, sums.w[v]);
    }
}

// Adds the target to sums over all other columns. s + e_y is near 1 for a peaked row: log1p keeps what is left.
static inline RowStats with_target(double s, double w, float x_y, float m, float k, double temperature) {
    const float t_y = (x_y - m) * k;
    const double e_y = exp2_nonpositive(max_nan_b(splat(-127.0f), splat(t_y)))[0];
    const double log_s = std::log1p(s + (e_y - 1));
    s += e_y;
    if (e_y > 0) w += e_y * t_y;
    return {float((double(x_y) - m) / temperature - log_s), float(log_s - LN2 * w / s), m, float(s)};
}

// Pass 1. The target column may be anywhere in [0, n).
template <bool ENTROPY, class T>
static RowStats row_stats(const T* x, int64_t n, int64_t target, double temperature, Scratch scratch) {
    const float k = float(LOG2E / temperature);
    float m = LOWEST;
    double s = 0, w = 0;
    for (int64_t begin = 0, b = 0; begin < n; begin += BLOCK, ++b) {
        const int size = int(std::min<int64_t>(BLOCK, n - begin));
        const T* block = x + begin;
        float highest = block_max(block, size);
        if (!(highest <= m)) {  // also when NaN
            if (s > 0) {
                double d = (double(m) - highest) * k, scale = std::exp2(d);
                w = scale * (w + s * d), s = scale * s;
            }
            m = highest;
        }
        if (scratch.exps) scratch.block_max[b] = m;
        float* exps = scratch.exps ? scratch.exps + begin : nullptr;

        LaneSums sums{};
        const int whole = size - size % LANES;
        const int64_t y = target - begin;
        const bool inside = y >= 0 && y < size;
        const int group_of_y = inside ? int(y) / LANES * LANES : whole;
        auto groups = [&](int from, int to) {
            for (int i = from; i < to; i += LANES) exps_group<ENTROPY>(block + i, m, k, exps ? exps + i : nullptr, sums);
        };
        groups(0, std::min(group_of_y, whole));
        if (inside) groups(std::min(group_of_y + LANES, whole), whole);
        auto special = [&](int at) {  // the padded tail, or the group of the target with the target left out
            float padded[LANES];
            for (int i = 0; i < LANES; ++i) padded[i] = at + i < size && at + i != y ? to_float(block[at + i]) : NEG_INF;
            exps_group<ENTROPY>(padded, m, k, exps ? exps + at : nullptr, sums);
        };
        if (inside) special(group_of_y);
        if (whole < size && !(inside && group_of_y == whole)) special(whole);
        s += sum_lanes(sums.s);
        if (ENTROPY) w += sum_lanes(sums.w);
    }
    return with_target(s, w, to_float(x[target]), m, k, temperature);
}

struct RowGrad {
    float logprob, entropy, max, sum, c, e;  // c = dL/dlogprob, e = dL/dentropy
};

// dL/dx of the target column.
template <class T>
static inline void write_target(T* grad, int64_t target, const RowGrad& r, double temperature) {
    const double lp = r.logprob, minus_rest = std::expm1(lp), p = 1 + minus_rest;  // p - 1, to full precision
    double dx = -double(r.c) * minus_rest;
    if (r.e != 0 && p > 0) dx -= double(r.e) * p * (lp + r.entropy);
    store_one(grad + target, float(dx / temperature));
}

// Pass 2. `exps` from pass 1 (scaled per block), or nullptr: recomputed. grad may be x.
template <class T>
static void row_grad(const T* x, int64_t n, int64_t target, double temperature, const RowGrad& r, Scratch scratch, T* grad) {
    const float k = float(LOG2E / temperature);
    const double per_p = 1 / (double(r.sum) * temperature);
    const float log_s = float(std::log(double(r.sum)));
    const bool with_entropy = r.e != 0;
    for (int64_t begin = 0, b = 0; begin < n; begin += BLOCK, ++b) {
        const int size = int(std::min<int64_t>(BLOCK, n - begin));
        const T* from = x + begin;
        T* to = grad + begin;
        const float* exps = scratch.exps ? scratch.exps + begin : nullptr;
        double rescale = exps ? std::exp2((double(scratch.block_max[b]) - r.max) * k) : 1.0;
        const float share = float(per_p * rescale);  // e_i * share = p_i / T
        const float minus_c = -r.c * share, minus_e = -r.e * share;
        const float e_offset = r.entropy - log_s;     // ln p_i + H = ln2 * t_i + e_offset
        auto group = [&](const auto* xs, auto* out, const float* kept) {
            for (int v = 0; v < VECS; ++v) {
                if (!with_entropy && kept) {
                    store(out + v * W, load(kept + v * W) * minus_c);
                    continue;
                }
                vf t = max_nan_b(splat(-127.0f), (load(xs + v * W) - r.max) * k);
                vf e = kept ? load(kept + v * W) : exp2_nonpositive(t);
                vf factor = with_entropy ? fma(splat(minus_e), fma(t, splat(float(LN2)), splat(e_offset)), splat(minus_c))
                                         : splat(minus_c);
                store(out + v * W, e * factor);
            }
        };
        const int whole = size - size % LANES;
        for (int i = 0; i < whole; i += LANES) group(from + i, to + i, exps ? exps + i : nullptr);
        if (whole < size) {
            float padded[LANES], kept[LANES];
            T out[LANES];
            for (int i = 0; i < LANES; ++i) {
                padded[i] = whole + i < size ? to_float(from[whole + i]) : NEG_INF;
                kept[i] = exps ? exps[whole + i] : 0;
            }
            group(padded, out, exps ? kept : nullptr);
            std::copy(out, out + (size - whole), to + whole);
        }
    }
    write_target(grad, target, r, temperature);
}
