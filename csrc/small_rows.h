// Small vocabularies (classic action spaces): LANES rows at a time, one row per lane, so that no lane idles and no sum is
// taken across lanes. Same formulas, same treatment of the target, NaN and -inf as rows.h; columns are added in order.
#pragma once
#include "rows.h"

constexpr int SMALL = 64;

template <class T, class CAP>
struct SmallRows {
    const T* x[LANES];  // nullptr: this lane is idle or its row is not valid
    T* grad[LANES];
    int64_t target[LANES];  // negative in `gradient`: in none of these columns
    double temperature[LANES];
    float t[LANES], per_t[LANES], k[LANES], lowest[LANES];  // T, 1 / T, log2(e) / T, and the difference whose e is 0
    float d[SMALL][LANES];  // logits, then their differences from the maximum, held where e_j is 0
    float e[SMALL][LANES];  // 2^(d_j * k)
    float slope[CAP::capped ? SMALL : 1][LANES];
    const CAP cap;

    explicit SmallRows(const CAP& softcap) : cap(softcap) {}

    void set_temperature(int l, double given) {
        temperature[l] = given, t[l] = float(given), per_t[l] = float(1 / given);
        k[l] = float(LOG2E / given), lowest[l] = -127.0f / k[l];
    }

    // Reads the logits into d. Idle lanes hold zeros.
    void read(int n) {
        static const T zeros[SMALL] = {};
        const T* from[LANES];
        for (int l = 0; l < LANES; ++l) from[l] = x[l] ? x[l] : zeros;
        for (int j = 0; j < n; ++j)
            for (int l = 0; l < LANES; ++l) d[j][l] = to_float(from[l][j]);
    }

    // Turns logits in d into differences and fills e.
    void exps(int n, const float* max) {
        for (int l = 0; l < LANES; l += W) {
            const auto below = cap.below(load(max + l));
            const vf k_l = load(k + l), lowest_l = load(lowest + l);
            for (int j = 0; j < n; ++j) {
                vf x_j = load(d[j] + l), d_j = max_nan_b(lowest_l, below(x_j));
                store(d[j] + l, d_j);
                store(e[j] + l, exp2_product(d_j, k_l));
                if (CAP::capped) store(slope[j] + l, cap.slope(x_j));
            }
        }
    }

    void stats(int n, RowStats* out) {
        float max[LANES], x_y[LANES], logprob[LANES], entropy[LANES], sum[LANES], mean[LANES];
        read(n);
        for (int l = 0; l < LANES; ++l) x_y[l] = d[target[l]][l];
        for (int l = 0; l < LANES; l += W) {
            vf m = splat(LOWEST);
            for (int j = 0; j < n; ++j) m = max_nan_b(m, load(d[j] + l));
            store(max + l, m);
        }
        exps(n, max);
        for (int l = 0; l < LANES; l += W) {
            vi y;
            for (int i = 0; i < W; ++i) y[i] = int32_t(target[l + i]);
            vf rest{}, w{}, k_l = load(k + l), per_t_l = load(per_t + l);
            for (int j = 0; j < n; ++j) {
                vf others = (vf)((vi)load(e[j] + l) & (y != j));  // the target is added last
                rest += others;
                w = fma(others, load(d[j] + l), w);
            }
            // As with_target in rows.h: -log1p(rest / e_y) where the target is the larger part.
            vf gap = cap.below(load(max + l))(load(x_y + l));
            vf ln_e_y = gap * per_t_l, d_y = max_nan_b(load(lowest + l), gap);
            vf e_y = exp2_product(d_y, k_l);
            vi larger = e_y >= rest;
            vf log_rest = log1p_unit(larger ? rest / e_y : e_y / rest);
            vf log_s = (larger ? ln_e_y : log_positive(rest)) + log_rest;
            vf s = rest + e_y;
            vf mean_d = fma(e_y, d_y, w) / s;
            store(logprob + l, larger ? 0.0f - log_rest : ln_e_y - log_s);
            store(entropy + l, log_s - mean_d * per_t_l);
            store(sum + l, s);
            store(mean + l, mean_d * per_t_l);
        }
        for (int l = 0; l < LANES; ++l) out[l] = {logprob[l], entropy[l], max[l], sum[l], mean[l]};
    }

    // dL/dx from d and e as `stats` (or `exps`) left them. grad may be x: all logits are in d.
    void gradient(int n, const RowGrad* r) {
        float minus_c[LANES], minus_e[LANES], mean_d[LANES], logprob[LANES];
        float c[LANES], up_e[LANES], d_y[LANES], target_grad[LANES];
        for (int l = 0; l < LANES; ++l) {
            const float per_e = float(1 / (double(r[l].sum) * temperature[l]));
            minus_c[l] = -r[l].c * per_e, minus_e[l] = -r[l].e * per_e / t[l];
            mean_d[l] = r[l].mean * t[l], logprob[l] = r[l].logprob;
            c[l] = r[l].c, up_e[l] = r[l].e, d_y[l] = target[l] < 0 ? 0 : d[target[l]][l];
        }
        for (int l = 0; l < LANES; l += W) {
            const vf minus_rest = expm1_nonpositive(load(logprob + l));  // p_y - 1, to full precision
            const vf p_y = exp_nonpositive(load(logprob + l)), spread_y = (load(d_y + l) - load(mean_d + l)) / load(t + l);
            const vf by_entropy = p_y > 0 ? load(up_e + l) * p_y * spread_y : splat(0);
            store(target_grad + l, (-load(c + l) * minus_rest - by_entropy) / load(t + l));
            for (int j = 0; j < n; ++j) {
                vf spread = load(d[j] + l) - load(mean_d + l);
                store(e[j] + l, load(e[j] + l) * fma(load(minus_e + l), spread, load(minus_c + l)));
            }
        }
        for (int l = 0; l < LANES; ++l) {
            if (!x[l]) continue;
            if (target[l] >= 0) e[target[l]][l] = target_grad[l];
            for (int j = 0; j < n; ++j) from_float(grad[l] + j, CAP::capped ? e[j][l] * slope[j][l] : e[j][l]);
        }
    }
};
