// Activations whose results are rounded to a half type, in half the steps of float32's.
//
// Values are within 2^-13 of the exact ones, relatively, so that a float16 is off by an eighth of its last place more
// than by rounding and a bfloat16 by a sixty-fourth; slopes are within 2^-12 of 1. The far negative tails end at 0 or
// below 1e-34. Not a number stays so; infinities give what activation.h says.
//
// The polynomials have the least largest relative error (Remez, 40 digits). 2^f on [0, 1]: 2.6e-6. (a + k)·R(a), Mills'
// ratio as in activation.h, in powers of u = a/(a + k): 5.3e-5. The reciprocal is x86's estimate where it has 14 bits.
#pragma once

#include "simd.h"

namespace MUSIGMA_NAMESPACE {
namespace {

namespace rough {

typedef Lanes<float> V;

constexpr float kLog2E = 1.44269504f;
constexpr float kMillsCenter = 4.0f;
constexpr float kMills[] = {1.999899311f, -4.383708744f, 5.270419819f, -3.444320261f, 0.9627726359f};
constexpr float kExp2[] = {1.000002593f, 0.693003834f, 0.2414427592f, 0.05201145757f, 0.0135341693f};
constexpr float kTanhLinear = 1.59576912f, kTanhCubic = 1.59576912f * 0.044715f;
constexpr float kFlat = 40;  // both gelus are 0 or z beyond

MUSIGMA_INLINE V reciprocal(V v) {
#if defined(__AVX512F__)
  return _mm512_rcp14_ps(v);
#else
  return 1.0f / v;
#endif
}

// 2^x, of any x.
MUSIGMA_INLINE V exp2(V x) {
#if defined(__AVX512DQ__)
  const V fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(polynomial<float>(kExp2, fraction), x);  // which takes x's floor
#else
  typedef Integers<float> I;
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const V held = clamp<float>(x, -126.0f, 127.0f), shifted = (held - 0.5f) + kRound;
  const I exponent = bits<I>(shifted) - bits<I>(splat<float>(kRound)) + 127;
  const V y = polynomial<float>(kExp2, held - (shifted - kRound)) * bits<V>(exponent << 23);
  return x < -126.0f ? V{} : x > 127.0f ? splat<float>(__builtin_inff()) : y;
#endif
}

// z·σ(w); `scaled` is -w/ln2.
MUSIGMA_INLINE V times_logistic(V z, V scaled) { return z * reciprocal(exp2(scaled) + 1.0f); }

// The derivative of z·σ(w) by z: σ(w)·(1 + z·w'·σ(-w)). Needs 2^scaled to be finite.
MUSIGMA_INLINE V logistic_slope(V z, V scaled, V dw) {
  const V e = exp2(scaled), high = reciprocal(e + 1.0f);
  return high * madd<float>(z * dw, e * high, splat<float>(1));
}

MUSIGMA_INLINE V silu(V z) { return times_logistic(z, z * -kLog2E); }

MUSIGMA_INLINE V silu_slope(V z) {
  const V held = clamp<float>(z, -87.0f, 1000.0f);
  return logistic_slope(held, held * -kLog2E, splat<float>(1));
}

MUSIGMA_INLINE V gelu_tanh(V z) {
  const V inner = madd<float>(z * z, splat<float>(-kTanhCubic * kLog2E), splat<float>(-kTanhLinear * kLog2E));
  return times_logistic(z, z * inner);
}

MUSIGMA_INLINE V gelu_tanh_slope(V z) {
  const V held = clamp<float>(z, -9.9f, kFlat), square = held * held;
  const V inner = madd<float>(square, splat<float>(-kTanhCubic * kLog2E), splat<float>(-kTanhLinear * kLog2E));
  const V dw = madd<float>(square, splat<float>(3 * kTanhCubic), splat<float>(kTanhLinear));
  return logistic_slope(held, held * inner, dw);
}

// Φ(z); `density` becomes exp(-z²/2).
MUSIGMA_INLINE V normal_below(V z, V& density) {
  const V a = at_most<float>(magnitude<float>(z), kFlat), inverse = reciprocal(a + kMillsCenter);
  density = exp2(z * (z * (-0.5f * kLog2E)));
  const V tail = density * (polynomial<float>(kMills, a * inverse) * inverse);
  return z < V{} ? tail : 1.0f - tail;
}

MUSIGMA_INLINE V gelu(V z) {
  V density;
  return z * normal_below(z, density);
}

MUSIGMA_INLINE V gelu_slope(V z) {
  const V held = clamp<float>(z, -kFlat, kFlat);
  V density;
  const V below = normal_below(held, density);
  return madd<float>(held * 0.39894228f, density, below);
}

}  // namespace rough
}  // namespace
}  // namespace MUSIGMA_NAMESPACE
