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
    float d[SMALL][LANES];  // x_j - m, at least where e_j is 0
    float e[SMALL][LANES];  // 2^(d_j * k)

    // Reads the logits and fills d and e against the given maxima.
    void exps(int n, float k, const float* max) {
        for (int l = 0; l < LANES; ++l)
            for (int j = 0; j < n; ++j) d[j][l] = x[l] ? to_float(x[l][j]) : 0.0f;
        for (int l = 0; l < LANES; l += W)
            for (int j = 0; j < n; ++j) {
                vf dj = max_nan_b(splat(-127.0f / k), load(d[j] + l) - load(max + l));
                store(d[j] + l, dj);
                store(e[j] + l, exp2_product(dj, splat(k)));
            }
    }

    void stats(int n, double temperature, RowStats* out) {
        const float k = float(LOG2E / temperature);
        float max[LANES], rest[LANES], weighted[LANES];
        for (int l = 0; l < LANES; ++l) {
            max[l] = LOWEST;
            for (int j = 0; j < n && x[l]; ++j) max[l] = std::max(max[l], to_float(x[l][j]));
            if (!x[l]) max[l] = 0;
        }
        exps(n, k, max);
        for (int l = 0; l < LANES; l += W) {
            vi y;
            for (int i = 0; i < W; ++i) y[i] = int32_t(target[l + i]);
            vf s{}, w{};
            for (int j = 0; j < n; ++j) {
                vf ej = load(e[j] + l);
                ej = (vf)((vi)ej & (y != j));  // the target is added last
                s += ej;
                w = fma(ej, load(d[j] + l), w);
            }
            store(rest + l, s);
            store(weighted + l, w);
        }
        for (int l = 0; l < LANES; ++l)
            if (x[l]) out[l] = with_target(rest[l], weighted[l], to_float(x[l][target[l]]), max[l], k, temperature);
    }

    // dL/dx from d and e as `stats` (or `exps`) left them.
    void gradient(int n, double temperature, const RowGrad* r) {
        float minus_c[LANES], minus_e[LANES], mean_d[LANES];
        for (int l = 0; l < LANES; ++l) {
            const double per_e = 1 / (double(r[l].sum) * temperature);
            minus_c[l] = float(-r[l].c * per_e), minus_e[l] = float(-r[l].e * per_e / temperature), mean_d[l] = float(r[l].mean * temperature);
        }
        for (int l = 0; l < LANES; l += W)
            for (int j = 0; j < n; ++j) {
                vf spread = load(d[j] + l) - load(mean_d + l);
                store(e[j] + l, load(e[j] + l) * fma(load(minus_e + l), spread, load(minus_c + l)));
            }
        for (int l = 0; l < LANES; ++l) {
            if (!x[l]) continue;
            const float x_y = to_float(x[l][target[l]]);  // grad may be x
            for (int j = 0; j < n; ++j) from_float(grad[l] + j, e[j][l]);
            write_target(grad[l] + target[l], x_y, r[l], temperature);
        }
    }
};
