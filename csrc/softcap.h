// Differences of logits, as the row kernels take them: of logits x, or of S * tanh(x / S) with a softcap S.
//
// A cap is monotone, so the maximum m of a row is the raw one. With S = 30 a capped logit has an ulp of 2e-6, too coarse for
// log-probs; so the capped difference is taken as a product, to a few ulps of itself. For a = x / S <= b = m / S:
//
//     S * (tanh(a) - tanh(b)) = -S * sinh(b - a) / (cosh(a) * cosh(b)) = 2 S * (e^(2a - 2b) - 1) * f / ((1 + q_a) * (1 + q_b))
//     q_a = e^(-2|a|),   f = q_a where 0 <= a,  1 where a < 0 <= b,  q_b where b < 0;   the slope of the cap is 4 q_a / (1 + q_a)^2
//
// -inf stays -inf, a column that does not exist; its slope is 0.
#pragma once
#include <cmath>

#include "simd.h"

constexpr double LOG2E = 1.44269504088896340736;

struct NoSoftcap {
    static constexpr bool capped = false;

    struct Below {  // x - m
        vf m;
        vf operator()(vf x) const { return x - m; }
    };
    Below below(vf m) const { return {m}; }
    Below below(float m) const { return {splat(m)}; }
    double difference(float x, float m) const { return double(x) - m; }
    double slope(float) const { return 1; }
    vf slope(vf) const { return splat(1); }
};

struct Softcap {
    static constexpr bool capped = true;
    double cap;
    float k, k_low;  // their sum is 2 * log2(e) / S

    explicit Softcap(double softcap)
        : cap(softcap), k(float(2 * LOG2E / softcap)), k_low(float(2 * LOG2E / softcap - double(float(2 * LOG2E / softcap)))) {}

    vf q(vf x) const { return power_of_two((vf)((vu)x | 0x80000000u), k, k_low).value; }  // of -|x|

    struct Below {  // the difference of x <= m and m
        const Softcap& softcap;
        vf m, positive, negative;  // 2 S * f / (1 + q_b) but for q_a, by the sign of x
        vf operator()(vf x) const {
            vf q_a = softcap.q(x), gap = x == m ? splat(0) : x - m;  // infinite logits may be equal
            vf factor = x >= 0 ? positive * q_a : negative;
            vf d = power_of_two(gap, softcap.k, softcap.k_low).less_one * factor / (q_a + 1.0f);
            return x == splat(-__builtin_inff()) ? x : d;
        }
    };
    Below below(float m) const {  // in double: an error here is one of the whole row
        const double q_b = std::exp(-2 * std::fabs(m) / cap), positive = 2 * cap / (1 + q_b);
        return {*this, splat(m), splat(float(positive)), splat(float(m >= 0 ? positive : positive * q_b))};
    }
    Below below(vf m) const {
        Below all = below(0.0f);
        for (int i = 0; i < W; ++i) {
            const Below one = below(m[i]);
            all.m[i] = m[i], all.positive[i] = one.positive[i], all.negative[i] = one.negative[i];
        }
        return all;
    }
    double difference(float x, float m) const {
        if (x == -__builtin_inff()) return x;
        const double q_a = std::exp(-2 * std::fabs(x) / cap), q_b = std::exp(-2 * std::fabs(m) / cap);
        const double gap = x == m ? 0 : (double(x) - m) / cap;
        return 2 * cap * std::expm1(2 * gap) * (x >= 0 ? q_a : m >= 0 ? 1 : q_b) / ((1 + q_a) * (1 + q_b));
    }
    double slope(float x) const { return std::pow(std::cosh(x / cap), -2); }
    vf slope(vf x) const {
        vf q_a = q(x), r = 1.0f / (q_a + 1.0f);
        return q_a * 4.0f * r * r;
    }
};
