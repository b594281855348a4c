// A thin vector type over the compiler's vector extensions: W floats, W fixed by the -march of this build.
// Arithmetic, comparisons and selection are the built-in operators; only what they cannot say is spelled out below.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// Rows are read in groups of LANES columns, held in two vectors.
constexpr int LANES = 2 * W;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline vf splat(float x) { return vf{} + x; }

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// max(a, b) that returns b when either is NaN: a NaN in the data, passed as b, stays visible.
static inline vf max_nan_b(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

// 2^(d * k) for -127 <= d * k < 128: exactly 1 at d = 0, 0 at -127 (flushed below 2^-126), NaN for NaN. Relative error below
// 1.7e-7: a polynomial of degree 5, minimax on [-1/2, 1/2] under p(0) = 1.
static inline vf exp2_product(vf d, vf k) {
    const vf magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 leaves round(d * k) + 127 in the low mantissa bits
    vf shifted = fma(d, k, magic);
    vf f = fma(d, k, magic - shifted);
    vf p = splat(1.32647273e-3f);
    p = fma(p, f, splat(9.67151299e-3f));
    p = fma(p, f, splat(5.55073358e-2f));
    p = fma(p, f, splat(2.40222424e-1f));
    p = fma(p, f, splat(6.93147004e-1f));
    p = fma(p, f, splat(1.0f));
    return p * (vf)((vu)shifted << 23);
}

// 2^u and 2^u - 1 for u = d * (k + k_low) <= 0, each to about an ulp of itself; u is held where 2^u is exactly 0. NaN for NaN.
struct Power {
    vf value, less_one;
};

static inline Power power_of_two(vf d, float k, float k_low) {
    const vf magic = splat(12582912.0f + 127.0f);  // as in exp2_product
    d = max_nan_b(splat(-127.0f / k), d);
    vf shifted = fma(d, splat(k), magic);
    vf f = fma(d, splat(k_low), fma(d, splat(k), magic - shifted));
    vf scale = (vf)((vu)shifted << 23);
    const float ln2_over_factorial[] = {0.693147181f, 0.240226507f, 5.55041087e-2f, 9.61812911e-3f, 1.33335581e-3f, 1.54035304e-4f};
    vf p = splat(1.52527338e-5f);
    for (int i = 5; i >= 0; --i) p = fma(p, f, splat(ln2_over_factorial[i]));
    p = p * f;  // 2^f - 1
    return {fma(scale, p, scale), fma(scale, p, scale - 1.0f)};
}

// e^x for x <= 0, flushed to 0 below 2^-126; NaN for NaN.
static inline vf exp_nonpositive(vf x) { return exp2_product(max_nan_b(splat(-88.02969f), x), splat(1.44269504f)); }

// e^x - 1 for x <= 0, to a few 2^-24 of itself; NaN for NaN.
static inline vf expm1_nonpositive(vf x) {
    const float inverse_factorial[] = {1 / 2.0f, 1 / 6.0f, 1 / 24.0f, 1 / 120.0f, 1 / 720.0f, 1 / 5040.0f};
    vf p = splat(1 / 40320.0f);
    for (int i = 5; i >= 0; --i) p = fma(p, x, splat(inverse_factorial[i]));
    vf near_zero = fma(p * x, x, x);
    vf far = exp_nonpositive(x) - 1.0f;
    return x > -0.5f ? near_zero : far;
}

// ln(1 + u) for 0 <= u <= 1, to a few 2^-24 of itself: 2 atanh(u / (2 + u)) by its series.
static inline vf log1p_unit(vf u) {
    vf r = u / (u + 2.0f), q = r * r;
    vf p = splat(1.0f / 15);
    for (int odd = 13; odd > 1; odd -= 2) p = fma(p, q, splat(1.0f / float(odd)));
    return fma(p * q, r, r) * 2.0f;
}

// ln(x) for normal x > 0.
static inline vf log_positive(vf x) {
    vu bits = (vu)x;
    vf exponent = __builtin_convertvector((vi)(bits >> 23) - 127, vf);
    vf mantissa = (vf)((bits & 0x7fffff) | 0x3f800000);  // in [1, 2)
    return fma(exponent, splat(0.693147180f), log1p_unit(mantissa - 1.0f));
}

static inline vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

static inline vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vh h;
    std::memcpy(&h, p, sizeof h);
    vu bits = __builtin_convertvector(h, vu);
    vu magnitude = (bits & 0x7fff) << 13;
    vf scaled = (vf)magnitude * 5.192296858534828e33f;  // 2^112 moves the exponent bias, subnormals included
    vu special = (vu)((bits & 0x7c00) == 0x7c00);       // infinity and NaN
    vu result = (special & (magnitude | 0x7f800000)) | (~special & (vu)scaled);
    return (vf)(result | ((bits & 0x8000) << 16));
#endif
}

static inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

static inline uint16_t half_from_float(float x) {  // round to nearest even
    uint32_t u;
    std::memcpy(&u, &x, 4);
    uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (a >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
    if (a < 0x38800000) {                                 // subnormal: let the addition of 0.5 round it
        float f;
        std::memcpy(&f, &a, 4);
        f += 0.5f;
        std::memcpy(&u, &f, 4);
        return uint16_t(sign | (u - 0x3f000000));
    }
    a += 0xfff + ((a >> 13) & 1) - 0x38000000;
    return uint16_t(sign | (a >> 13));
}

static inline void store(f16* p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < W; ++i) p[i].bits = half_from_float(x[i]);
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
static inline float to_float(f16 x) {
    f16 lane[W] = {};
    lane[0] = x;
    return load(lane)[0];
}

static inline void from_float(float* p, float x) { *p = x; }
static inline void from_float(f16* p, float x) { p->bits = half_from_float(x); }
static inline void from_float(bf16* p, float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    p->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// A group of LANES columns. The order of columns within it is the type's own, the same for load, store and kept groups.
struct Pair {
    vf a, b;
};

static inline Pair load_pair(const float* p) { return {load(p), load(p + W)}; }
static inline Pair load_pair(const f16* p) { return {load(p), load(p + W)}; }
static inline void store_pair(float* p, Pair x) { store(p, x.a), store(p + W, x.b); }
static inline void store_pair(f16* p, Pair x) { store(p, x.a), store(p + W, x.b); }

// bf16 columns are split into even and odd ones, which are the low and high halves of 32-bit words: no shuffles.
static inline Pair load_pair(const bf16* p) {
    vu words;
    std::memcpy(&words, p, sizeof words);
    return {(vf)(words << 16), (vf)(words & 0xffff0000)};
}

static inline vu rounded(vf x) {  // to nearest even, the result in the high half
    vu u = (vu)x;
    return u + 0x7fff + ((u >> 16) & 1);
}

static inline void store_pair(bf16* p, Pair x) {
    vu words = (rounded(x.a) >> 16) | (rounded(x.b) & 0xffff0000);
    std::memcpy(p, &words, sizeof words);
}

static inline void minus_infinity(float* p) { *p = -__builtin_inff(); }
static inline void minus_infinity(bf16* p) { p->bits = 0xff80; }
static inline void minus_infinity(f16* p) { p->bits = 0xfc00; }

// The sum over both vectors, always in the same order: halves are added until one is left.
static inline double sum_lanes(Pair v) {
    float lane[LANES];
    store_pair(lane, v);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
}
