// The PPO loss of one token: the same mathematics as token_loss in ppo_kernels/loss_terms.py.
#pragma once
#include <cmath>
#include <cstdint>
#include <initializer_list>

// ppo_kernels.config.LossParams: same numbers, same order. An option that is off is infinite.
struct LossParams {
    float ratio_low, ratio_high, dual_clip, log_ratio_clamp, entropy_coef, kl_coef, kl_estimator, kl_input_clamp,
        kl_output_clamp, value_clip, vf_coef, value_loss_scale, huber_delta, loss_type, sapo_tau_pos, sapo_tau_neg,
        kl_gradient, ratio_level;
};

// Inputs and outputs of size N; nullptr where absent. `weight` is the share of each token in the loss.
struct Tokens {
    int64_t n;
    const float *old_logprobs, *advantages;
    const uint8_t* valid;
    const float *weight, *ref_logprobs, *values, *old_values, *returns;
    const uint8_t* value_valid;
    const float* value_weight;
    LossParams params;
    float *grad_logprobs, *grad_entropy, *grad_values;
};

static inline double larger(double a, double b) { return a < b ? b : a; }

// ppo_kernels.metrics.NAMES: same sums, same order; before them the loss terms.
struct Sums {
    double policy = 0, entropy_term = 0, kl_term = 0, value_term = 0;
    double tokens = 0, ratio = 0, kl_k1 = 0, kl_k2 = 0, kl_k3 = 0, clip_low = 0, clip_high = 0, dual_clip = 0, clamped = 0,
           entropy = 0, ref_kl = 0, nonfinite = 0, value_tokens = 0, value_clipped = 0;
    double ratio_max = -3.4028234663852886e38, minus_ratio_min = -3.4028234663852886e38;

    void add(const Sums& o) {
        const double* from = &o.policy;
        double* to = &policy;
        for (; to <= &value_clipped; ++to, ++from) *to += *from;
        ratio_max = larger(ratio_max, o.ratio_max);
        minus_ratio_min = larger(minus_ratio_min, o.minus_ratio_min);
    }
};

struct Coefficients {
    float logprob, entropy;
};

static inline float clamp(float x, float bound) { return x < -bound ? -bound : x > bound ? bound : x; }

// e^x - 1 - x, without cancellation near 0; exp_x is e^x.
static inline float excess(float x, float exp_x) {
    float p = 1 / 40320.0f;
    for (float c : {1 / 5040.0f, 1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 1 / 2.0f}) p = p * x + c;
    return std::fabs(x) > 0.5f ? exp_x - 1 - x : p * x * x;
}

// The KL estimate, its derivative by the log-prob, and the sum of both, after the input clamp; see kl_estimate in loss_terms.py.
static inline void kl_estimate(float log_ratio, const LossParams& p, float* value, float* slope, float* both) {
    const float d = clamp(log_ratio, p.kl_input_clamp);
    const bool k3 = int(p.kl_estimator) == 2;
    switch (int(p.kl_estimator)) {
        case 0: *value = d, *slope = 1; break;
        case 1: *value = 0.5f * d * d, *slope = d; break;
        case 2: {
            const float exp_d = std::exp(-d);
            *value = excess(-d, exp_d), *slope = std::fabs(d) > 0.5f ? 1 - exp_d : d - *value;
            break;
        }
        default: *value = std::fabs(d), *slope = float((d > 0) - (d < 0)); break;
    }
    *both = k3 ? d : *value + *slope;
    if (std::fabs(log_ratio) > p.kl_input_clamp) *slope = *both = 0;
}

// The policy loss of a token and its derivative by the log-prob, and whether it was clipped.
struct Policy {
    float value, slope;
    bool low, high, dual;
};

// Selections, not branches: the signs of advantages are not predictable.
static inline Policy ppo(float ratio, float A, const LossParams& p) {
    const bool high = (A > 0) & (ratio > p.ratio_high), low = (A < 0) & (ratio < p.ratio_low);
    const bool dual = (A < 0) & (ratio > p.dual_clip);
    const bool constant = high | low | dual | ((A == 0) & (ratio == ratio));  // 0 * inf is 0 here
    const float held = high ? p.ratio_high : low ? p.ratio_low : dual ? p.dual_clip : 0;
    const float value = -A * (constant ? held : ratio);
    return {value, constant ? 0 : value, low, high, dual};
}

static inline Policy policy_loss(float ratio, float logprob, float A, const LossParams& p) {
    const int kind = int(p.loss_type);
    if (kind == 0) return ppo(ratio, A, p);
    const bool low = ratio < p.ratio_low, high = ratio > p.ratio_high;
    if (kind == 3) {  // sapo
        const float tau = A > 0 ? p.sapo_tau_pos : p.sapo_tau_neg, e = std::exp(-tau * (ratio - 1));
        const float gate = 1 / (1 + e), rest = 1 / (1 + 1 / e);
        return {-A * gate * 4 / tau, -4 * A * (rest == 0 ? 0 : ratio * rest) * gate, low, high, false};
    }
    float slope = -A;  // reinforce
    if (kind == 1) slope = (A == 0) & (ratio == ratio) ? 0 : -A * (low ? p.ratio_low : high ? p.ratio_high : ratio);
    return {slope == 0 ? 0 : slope * logprob, slope, low, high, false};
}

static inline float square(float error, const LossParams& p) {
    const float size = std::fabs(error);
    return size > p.huber_delta ? p.huber_delta * (2 * size - p.huber_delta) : error * error;
}

// Adds token i's share of the loss and metrics to `sums`; returns dL/dlogprob and dL/dentropy.
static inline Coefficients token_loss(const Tokens& t, int64_t i, float logprob, float entropy, Sums& sums) {
    if (t.valid && !t.valid[i]) return {0, 0};
    const LossParams& p = t.params;
    const float bound = p.log_ratio_clamp, A = t.advantages[i], weight = t.weight[i];
    const float log_ratio = logprob - (t.old_logprobs ? t.old_logprobs[i] : logprob);
    const bool is_clamped = std::fabs(log_ratio) > bound;
    const float x = clamp(log_ratio, bound), ratio = std::exp(x);
    const Policy policy = policy_loss(ratio, logprob, A, p);
    const bool by_ratio = (p.loss_type == 0) | (p.loss_type == 3);
    float slope = is_clamped & by_ratio ? 0 : policy.slope;

    float kl = 0, kl_slope = 0, both = 0, token = policy.value;
    if (t.ref_logprobs) {
        const float d = logprob - t.ref_logprobs[i];
        kl_estimate(d, p, &kl, &kl_slope, &both);
        const int gradient = int(p.kl_gradient);
        if (gradient == 2) {
            kl_slope = is_clamped ? kl_slope : both;
            kl = ratio == 0 ? 0 : kl * ratio, kl_slope = ratio == 0 ? 0 : kl_slope * ratio;  // 0 * inf is 0 here
        }
        if (gradient == 3) kl_slope = both;
        if (std::fabs(kl) > p.kl_output_clamp) kl = clamp(kl, p.kl_output_clamp), kl_slope = 0;
        if (gradient == 1) kl_slope = d;
        if (p.kl_coef != 0) slope += p.kl_coef * kl_slope, token += p.kl_coef * kl;
    }
    if (p.entropy_coef != 0) token -= p.entropy_coef * entropy;

    sums.tokens += 1;
    sums.ratio += ratio;
    sums.kl_k1 -= x;
    sums.kl_k2 += 0.5 * double(x) * x;
    sums.kl_k3 += excess(x, ratio);
    sums.clip_low += policy.low;
    sums.clip_high += policy.high;
    sums.dual_clip += policy.dual;
    sums.clamped += is_clamped;
    sums.entropy += entropy;
    sums.ref_kl += kl;
    sums.nonfinite += !std::isfinite(token);
    sums.ratio_max = larger(sums.ratio_max, ratio);
    sums.minus_ratio_min = larger(sums.minus_ratio_min, -ratio);
    if (weight == 0) return {0, 0};  // adds nothing, whatever it holds
    sums.policy += double(weight) * policy.value;
    sums.entropy_term += double(weight) * entropy;
    sums.kl_term += double(weight) * kl;
    return {weight * slope, p.entropy_coef != 0 ? -weight * p.entropy_coef : 0};
}

// The same for the value of step i; writes dL/dvalue.
static inline void value_loss(const Tokens& t, int64_t i, Sums& sums) {
    if (!t.values) return;
    t.grad_values[i] = 0;
    if (t.value_valid && !t.value_valid[i]) return;
    const LossParams& p = t.params;
    float v = t.values[i], ret = t.returns[i], error = v - ret, clip = p.value_clip;
    bool clipped = false;
    if (t.old_values) {
        float moved = v - t.old_values[i];
        float bounded = (moved > 0 ? t.old_values[i] + clip : t.old_values[i] - clip) - ret;
        clipped = std::fabs(moved) > clip && square(bounded, p) > square(error, p);
        if (clipped) error = bounded;
    }
    sums.value_tokens += 1;
    sums.value_clipped += clipped;
    float weight = t.value_weight[i] * p.value_loss_scale;
    if (weight == 0) return;
    sums.value_term += double(weight) * square(error, p);
    if (!clipped) t.grad_values[i] = p.vf_coef * weight * 2 * clamp(error, p.huber_delta);
}

// loss, policy_loss, value_loss, kl and the metrics, from all sums.
static inline void finish(const Sums& s, const LossParams& p, float* terms, float* metrics) {
    double loss = s.policy;
    if (p.entropy_coef != 0) loss -= p.entropy_coef * s.entropy_term;
    if (p.kl_coef != 0) loss += p.kl_coef * s.kl_term;
    loss += p.vf_coef * s.value_term;
    terms[0] = float(loss), terms[1] = float(s.policy), terms[2] = float(s.value_term), terms[3] = float(s.kl_term);
    const double* from = &s.tokens;
    for (int i = 0; i < 16; ++i) metrics[i] = float(from[i]);
}
