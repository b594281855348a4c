// Generalised advantage estimation, backwards over each sequence in double:
//
//     delta_t = r_t + gamma * (1 - terminated_t) * V_next - V_t
//     A_t = delta_t + gamma * lam * (1 - (terminated_t or truncated_t)) * A_next
//
// returns_t = A_t + V_t, in fp32. GAE_ROWS sequences advance together: the chain is sequential in t, and another one hides
// some of its latency; more of them, at equal distances in memory, would fight for the same cache lines.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int GAE_ROWS = 2;
enum MaskMode : int64_t { SKIP, ZERO, DENSE };

struct Gae {
    const float *rewards, *values;  // flat [N]
    const uint8_t* valid;           // the rest may be nullptr
    const float *bootstrap, *next_values;
    const uint8_t *terminated, *truncated;
    const int64_t* segments;  // sequence i is [segments[i], segments[i + 1])
    int64_t sequences;
    double gamma, lam;
    const double* row_lam;  // of each sequence, instead of lam; may be nullptr
    int64_t mask_mode;
    float *advantages, *returns;
};

struct GaeState {
    double running, next_value, decay;  // decay: gamma * lam of the sequence
};

static inline double multiply_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__ARM_NEON)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// One step back at flat index i. FLAGS: any of next_values, terminated, truncated is given.
template <bool MASK, bool FLAGS>
static inline void gae_step(const Gae& g, int64_t i, GaeState& state) {
    const bool valid = !MASK || g.valid[i];
    if (MASK && !valid && g.mask_mode == SKIP) {
        g.advantages[i] = g.returns[i] = 0;
        return;
    }
    const bool read = valid || g.mask_mode == DENSE;
    const double v = read ? g.values[i] : 0, r = read ? g.rewards[i] : 0;
    double next_value = state.next_value, running = state.running;
    if (FLAGS) {
        const bool ended = g.terminated && g.terminated[i];
        if (g.next_values) next_value = g.next_values[i];
        if (ended) next_value = 0;
        if (ended || (g.truncated && g.truncated[i])) running = 0;
    }
    running = multiply_add(state.decay, running, multiply_add(g.gamma, next_value, r - v));
    state.running = running, state.next_value = v;
    g.advantages[i] = valid ? float(running) : 0;
    g.returns[i] = valid ? g.advantages[i] + g.values[i] : 0;
}

template <bool MASK, bool FLAGS>
static void gae_rows_as(const Gae& g, int64_t begin, int64_t end) {
    GaeState state[GAE_ROWS];
    const int rows = int(end - begin);
    const int64_t* segment = g.segments + begin;
    int64_t shortest = segment[1] - segment[0];
    for (int k = 0; k < rows; ++k) {
        const double lam = g.row_lam ? g.row_lam[begin + k] : g.lam;
        state[k] = {0, g.bootstrap ? g.bootstrap[begin + k] : 0.0, g.gamma * lam};
        shortest = std::min(shortest, segment[k + 1] - segment[k]);
    }
    if (rows == GAE_ROWS)
        for (int64_t step = 1; step <= shortest; ++step)
            for (int k = 0; k < GAE_ROWS; ++k) gae_step<MASK, FLAGS>(g, segment[k + 1] - step, state[k]);
    else
        shortest = 0;
    for (int k = 0; k < rows; ++k)
        for (int64_t i = segment[k + 1] - shortest - 1; i >= segment[k]; --i) gae_step<MASK, FLAGS>(g, i, state[k]);
}

static void gae_rows(const Gae& g, int64_t begin, int64_t end) {
    const bool flags = g.next_values || g.terminated || g.truncated;
    if (g.valid)
        flags ? gae_rows_as<true, true>(g, begin, end) : gae_rows_as<true, false>(g, begin, end);
    else
        flags ? gae_rows_as<false, true>(g, begin, end) : gae_rows_as<false, false>(g, begin, end);
}
