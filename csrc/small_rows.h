// Small vocabularies (classic action spaces): LANES rows at a time, one row per lane, so that no lane idles and no sum is
// taken across lanes. Same formulas, same treatment of the target, NaN and -inf as rows.h; columns are added in order.
#pragma once
#include "rows.h"

constexpr int SMALL = 64;

template <class T>
struct SmallRows {
    const T* x[LANES];  // nullptr: this lane is idle or its row is not valid
    T* grad[LANES];
    int64_t target[LANES];
    float d[SMALL][LANES];  // logits, then x_j - m, held where e_j is 0
    float e[SMALL][LANES];  // 2^(d_j * k)

    // Reads the logits into d. Idle lanes hold zeros.
    void read(int n) {
        for (int l = 0; l < LANES; ++l)
            for (int j = 0; j < n; ++j) d[j][l] = x[l] ? to_float(x[l][j]) : 0.0f;
    }

    // Turns logits in d into differences and fills e.
    void exps(int n, float k, const float* max) {
        for (int l = 0; l < LANES; l += W)
            for (int j = 0; j < n; ++j) {
                vf dj = max_nan_b(splat(-127.0f / k), load(d[j] + l) - load(max + l));
                store(d[j] + l, dj);
                store(e[j] + l, exp2_product(dj, splat(k)));
            }
    }

    void stats(int n, double temperature, RowStats* out) {
        const float k = float(LOG2E / temperature), per_t = float(1 / temperature);
        float max[LANES], x_y[LANES], logprob[LANES], entropy[LANES], sum[LANES], mean[LANES];
        read(n);
        for (int l = 0; l < LANES; ++l) x_y[l] = d[target[l]][l];
        for (int l = 0; l < LANES; l += W) {
            vf m = splat(LOWEST);
            for (int j = 0; j < n; ++j) m = max_nan_b(m, load(d[j] + l));
            store(max + l, m);
        }
        exps(n, k, max);
        for (int l = 0; l < LANES; l += W) {
            vi y;
            for (int i = 0; i < W; ++i) y[i] = int32_t(target[l + i]);
            vf rest{}, w{};
            for (int j = 0; j < n; ++j) {
                vf others = (vf)((vi)load(e[j] + l) & (y != j));  // the target is added last
                rest += others;
                w = fma(others, load(d[j] + l), w);
            }
            // As with_target in rows.h: -log1p(rest / e_y) where the target is the larger part.
            vf ln_e_y = (load(x_y + l) - load(max + l)) * per_t;
            vf d_y = max_nan_b(splat(-127.0f / k), load(x_y + l) - load(max + l));
            vf e_y = exp2_product(d_y, splat(k));
            vi larger = e_y >= rest;
            vf log_rest = log1p_unit(larger ? rest / e_y : e_y / rest);
            vf log_s = (larger ? ln_e_y : log_positive(rest)) + log_rest;
            vf s = rest + e_y;
            vf mean_d = fma(e_y, d_y, w) / s;
            store(logprob + l, larger ? 0.0f - log_rest : ln_e_y - log_s);
            store(entropy + l, log_s - mean_d * per_t);
            store(sum + l, s);
            store(mean + l, mean_d * per_t);
        }
        for (int l = 0; l < LANES; ++l) out[l] = {logprob[l], entropy[l], max[l], sum[l], mean[l]};
    }

    // dL/dx from d and e as `stats` (or `exps`) left them. grad may be x: all logits are in d.
    void gradient(int n, double temperature, const RowGrad* r) {
        float minus_c[LANES], minus_e[LANES], mean_d[LANES], logprob[LANES], minus_rest[LANES], p_y[LANES];
        for (int l = 0; l < LANES; ++l) {
            const float per_e = float(1 / (double(r[l].sum) * temperature));
            minus_c[l] = -r[l].c * per_e, minus_e[l] = -r[l].e * per_e / float(temperature);
            mean_d[l] = r[l].mean * float(temperature), logprob[l] = r[l].logprob;
        }
        for (int l = 0; l < LANES; l += W) {
            store(minus_rest + l, expm1_nonpositive(load(logprob + l)));  // p_y - 1, to full precision
            store(p_y + l, exp_nonpositive(load(logprob + l)));
            for (int j = 0; j < n; ++j) {
                vf spread = load(d[j] + l) - load(mean_d + l);
                store(e[j] + l, load(e[j] + l) * fma(load(minus_e + l), spread, load(minus_c + l)));
            }
        }
        for (int l = 0; l < LANES; ++l) {
            if (!x[l]) continue;
            const int y = int(target[l]);
            const float spread = (d[y][l] - mean_d[l]) / float(temperature);
            e[y][l] = (-r[l].c * minus_rest[l] - (p_y[l] > 0 ? r[l].e * p_y[l] * spread : 0)) / float(temperature);
            for (int j = 0; j < n; ++j) from_float(grad[l] + j, e[j][l]);
        }
    }
};
