// Activations behind a normalization, and their derivatives, on whole vectors: no branch, no table, no call. Where the
// result is stored in a half type, rough.h has cheaper ones.
//
// All of them come down to one exponential of something that is not positive, so nothing overflows on the way. σ is the
// logistic function, Φ and φ are the normal distribution's.
//
//   silu       z·σ(z)
//   gelu       z·Φ(z), where Φ(-a) = exp(-a²/2)·R(a) for a ≥ 0 and R is smooth (Mills' ratio over √2π)
//   gelu_tanh  z·½(1 + tanh u) = z·σ(2u), with 2u = z·(p + q·z²)
//
// Against the exact functions of the same z they are off by at most 2.5 units in the last place of the result for
// z ≥ 0, and for z < 0 by at most 2.5·(1 + z²) units of results that are ever smaller, about as much as z's own rounding
// costs; where the exponential is no normal number any more they fade to 0. Slopes are within 2 units of 1 (in double 3).
// NaN stays NaN; +inf gives +inf, and its slope 1; -inf gives NaN, as torch's do (relu's 0), and its slope 0.
//
// The polynomials are interpolations at Chebyshev nodes (50 digits, mpmath), expanded into powers and rounded. exp: the
// q of e^r = 1 + r + r²·q(r) on |r| ≤ ln2/2, off by 8e-9 in float32 and 1e-17 in double. R: (a + k)·R(a) in powers of
// t = (a - k)/(a + k), which maps [0, ∞) to [-1, 1), on all a whose Φ(-a) is not 0; k = 4 and 5 where the degree that
// reaches the last place is least, off by 2e-8 and 1e-16.
#pragma once

#include "kernels.h"
#include "rough.h"

namespace MUSIGMA_NAMESPACE {
namespace {

template <class A>
struct Approximation;

template <>
struct Approximation<float> {
  static constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 1.42860677e-06f;  // high · n is exact
  static constexpr float kSmallest = -87.0f, kNothing = -105.0f;              // e^x is still normal, is 0
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kExp[] = {0.5f, 0.166665763f, 0.0416664667f, 0.00836318173f, 0.00139336521f};
  static constexpr float kMillsCenter = 4.0f;
  static constexpr float kMills[] = {0.755285144f,   -0.607896626f,   0.387136638f,    -0.186522767f,
                                     0.0604069903f,  -0.00752836652f, -0.00352625246f, 0.00157028204f,
                                     0.00019919379f, -0.000120822122f};
};

template <>
struct Approximation<double> {
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42fefa2000p-1, kLn2Low = 7.3710025651677989e-13;
  static constexpr double kSmallest = -708.0, kNothing = -747.0;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kExp[] = {0.50000000000000011,    0.16666666666666671,   0.041666666666624122,
                                    0.0083333333333261341,  0.0013888888917215586, 0.00019841269874822307,
                                    2.4801521293463862e-05, 2.755725539833871e-06, 2.7620089481954589e-07,
                                    2.5105217695684516e-08};
  static constexpr double kMillsCenter = 5.0;
  static constexpr double kMills[] = {
      0.76919304975006297,     -0.66538250289005663,   0.4953056159699748,      -0.31353315667130865,
      0.16502036617046686,     -0.069118638706165109,  0.020795066798258335,    -0.0029933767729504275,
      -0.00079786938224585355, 0.0005448990879468571,  -5.9375820046037402e-05, -4.9762947974289855e-05,
      1.6681525249555708e-05,  3.9813870412999551e-06, -2.7698911941100372e-06, -3.37723782856099e-07,
      4.3381165667204734e-07,  4.3822451173418007e-08, -6.6167998696264411e-08, -1.0517063176986913e-08,
      7.4562581396121121e-09,  2.1523045093548758e-09};
};

#if defined(__AVX512F__)
// To the nearest integer, and v·2^n down to 0: one step each, where other levels work in the bits.
MUSIGMA_INLINE Lanes<float> nearest(Lanes<float> v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
MUSIGMA_INLINE Lanes<double> nearest(Lanes<double> v) { return _mm512_roundscale_pd(v, _MM_FROUND_TO_NEAREST_INT); }
MUSIGMA_INLINE Lanes<float> scale(Lanes<float> v, Lanes<float> n) { return _mm512_scalef_ps(v, n); }
MUSIGMA_INLINE Lanes<double> scale(Lanes<double> v, Lanes<double> n) { return _mm512_scalef_pd(v, n); }
#endif

// e^x for x ≤ 0, and NaN: 2^n·e^r with x = n·ln2 + r.
template <class A>
MUSIGMA_INLINE Lanes<A> exp_negative(Lanes<A> x) {
  typedef Approximation<A> C;
  const Lanes<A> to_base_2 = splat<A>((A)1.4426950408889634);
#if defined(__AVX512F__)
  const Lanes<A> held = at_least<A>(x, C::kNothing), n = nearest(held * to_base_2);
#else
  const Lanes<A> held = at_least<A>(x, C::kSmallest), round = splat<A>(C::kRound);
  const Lanes<A> shifted = madd<A>(held, to_base_2, round), n = shifted - round;
#endif
  const Lanes<A> r = madd<A>(n, splat<A>(-C::kLn2Low), madd<A>(n, splat<A>(-C::kLn2High), held));
  const Lanes<A> power = madd<A>(r * r, polynomial<A>(C::kExp, r), r) + (A)1;
#if defined(__AVX512F__)
  return scale(power, n);
#else
  typedef Integers<A> I;
  const I exponent = bits<I>(shifted) - bits<I>(round) + (typename IntegerOf<A>::type)C::kBias;
  const Lanes<A> y = power * bits<Lanes<A> >(exponent << C::kMantissa);
  return x < C::kSmallest ? Lanes<A>{} : y;
#endif
}

// z·σ(w), for w of z's sign.
template <class A>
MUSIGMA_INLINE Lanes<A> times_logistic(Lanes<A> z, Lanes<A> w) {
  const Lanes<A> e = exp_negative<A>(-magnitude<A>(w));
  return (w < Lanes<A>{} ? z * e : z) / (e + (A)1);
}

// The derivative of z·σ(w) by z: σ(w)·(1 + z·w'·σ(-w)).
template <class A>
MUSIGMA_INLINE Lanes<A> logistic_slope(Lanes<A> z, Lanes<A> w, Lanes<A> dw) {
  const Lanes<A> e = exp_negative<A>(-magnitude<A>(w)), one = splat<A>((A)1), high = one / (e + one), low = e * high;
  const auto negative = w < Lanes<A>{};
  return (negative ? low : high) * madd<A>(z * dw, negative ? high : low, one);
}

constexpr double kTanhLinear = 1.5957691216057308;  // 2·√(2/π)
constexpr double kTanhCubic = 1.5957691216057308 * 0.044715;
constexpr double kFlat = 40;  // both gelus are 0 or z beyond, in either type

// Φ(z); `density` becomes exp(-z²/2).
template <class A>
MUSIGMA_INLINE Lanes<A> normal_below(Lanes<A> z, Lanes<A>& density) {
  typedef Approximation<A> C;
  const Lanes<A> one = splat<A>((A)1), a = at_most<A>(magnitude<A>(z), (A)kFlat), inverse = one / (a + C::kMillsCenter);
  density = exp_negative<A>(z * z * (A)-0.5);
  // t = 2·a/(a + k) - 1, which is exact where a is small and its error would count most.
  const Lanes<A> t = madd<A>(a * inverse, splat<A>((A)2), -one);
  const Lanes<A> tail = density * (polynomial<A>(C::kMills, t) * inverse);
  return z < Lanes<A>{} ? tail : one - tail;
}

template <class A>
MUSIGMA_INLINE Lanes<A> silu(Lanes<A> z) {
  return times_logistic<A>(z, z);
}

// Slopes are exactly 0 or 1 far out, and held there nothing overflows.
template <class A>
MUSIGMA_INLINE Lanes<A> silu_slope(Lanes<A> z) {
  const Lanes<A> held = clamp<A>(z, (A)-1000, (A)1000);
  return logistic_slope<A>(held, held, splat<A>((A)1));
}

template <class A>
MUSIGMA_INLINE Lanes<A> gelu(Lanes<A> z) {
  Lanes<A> density;
  return z * normal_below<A>(z, density);
}

template <class A>
MUSIGMA_INLINE Lanes<A> gelu_slope(Lanes<A> z) {
  const Lanes<A> held = clamp<A>(z, (A)-kFlat, (A)kFlat);
  Lanes<A> density;
  const Lanes<A> below = normal_below<A>(held, density);
  return madd<A>(held * (A)0.3989422804014327, density, below);
}

template <class A>
MUSIGMA_INLINE Lanes<A> gelu_tanh(Lanes<A> z) {
  return times_logistic<A>(z, z * madd<A>(z * z, splat<A>((A)kTanhCubic), splat<A>((A)kTanhLinear)));
}

template <class A>
MUSIGMA_INLINE Lanes<A> gelu_tanh_slope(Lanes<A> z) {
  const Lanes<A> held = clamp<A>(z, (A)-kFlat, (A)kFlat), square = held * held, linear = splat<A>((A)kTanhLinear);
  return logistic_slope<A>(
      held, held * madd<A>(square, splat<A>((A)kTanhCubic), linear),
      madd<A>(square, splat<A>((A)(3 * kTanhCubic)), linear));
}

// Whether a result that is computed in A and stored as T is rounded to so few bits that a rough one will do.
template <class A, class T>
constexpr bool kRough = sizeof(A) == 4 && sizeof(T) == 2;

// The activation of z for results of storage type T.
template <Activation K, class A, class T = A>
MUSIGMA_INLINE Lanes<A> activate(Lanes<A> z) {
  if constexpr (K == Activation::kNone) return z;
  if constexpr (K == Activation::kRelu) return z < Lanes<A>{} ? Lanes<A>{} : z;
  if constexpr (kRough<A, T>) {
    if constexpr (K == Activation::kSilu) return rough::silu(z);
    if constexpr (K == Activation::kGelu) return rough::gelu(z);
    if constexpr (K == Activation::kGeluTanh) return rough::gelu_tanh(z);
  } else {
    if constexpr (K == Activation::kSilu) return silu<A>(z);
    if constexpr (K == Activation::kGelu) return gelu<A>(z);
    if constexpr (K == Activation::kGeluTanh) return gelu_tanh<A>(z);
  }
}

// Its derivative at z, for gradients of storage type T.
template <Activation K, class A, class T = A>
MUSIGMA_INLINE Lanes<A> slope(Lanes<A> z) {
  const Lanes<A> one = splat<A>((A)1);
  if constexpr (K == Activation::kNone) return one;
  if constexpr (K == Activation::kRelu) return z <= Lanes<A>{} ? Lanes<A>{} : one;
  if constexpr (kRough<A, T>) {
    if constexpr (K == Activation::kSilu) return rough::silu_slope(z);
    if constexpr (K == Activation::kGelu) return rough::gelu_slope(z);
    if constexpr (K == Activation::kGeluTanh) return rough::gelu_tanh_slope(z);
  } else {
    if constexpr (K == Activation::kSilu) return silu_slope<A>(z);
    if constexpr (K == Activation::kGelu) return gelu_slope<A>(z);
    if constexpr (K == Activation::kGeluTanh) return gelu_tanh_slope<A>(z);
  }
}

// One activation, known to the compiler.
template <Activation K>
struct Activated {
  template <class A, class T>
  MUSIGMA_INLINE Lanes<A> value(Lanes<A> z) const {
    return activate<K, A, T>(z);
  }
  template <class A, class T>
  MUSIGMA_INLINE Lanes<A> derivative(Lanes<A> z) const {
    return slope<K, A, T>(z);
  }
};

// f(Activated<K>{}) for the K that `activation` is: chosen once, outside of the loops.
template <class F>
inline void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone: return f(Activated<Activation::kNone>{});
    case Activation::kRelu: return f(Activated<Activation::kRelu>{});
    case Activation::kSilu: return f(Activated<Activation::kSilu>{});
    case Activation::kGelu: return f(Activated<Activation::kGelu>{});
    case Activation::kGeluTanh: return f(Activated<Activation::kGeluTanh>{});
  }
}

// An activation chosen at every vector: for the rare loops that are not worth being compiled for each.
struct AnyActivated {
  Activation kind;
  template <class A, class T>
  Lanes<A> value(Lanes<A> z) const {
    with_activation(kind, [&](auto known) { z = known.template value<A, T>(z); });
    return z;
  }
  template <class A, class T>
  Lanes<A> derivative(Lanes<A> z) const {
    with_activation(kind, [&](auto known) { z = known.template derivative<A, T>(z); });
    return z;
  }
};

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
