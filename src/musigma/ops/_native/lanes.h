// Vectors of the compiler's own (GCC and Clang extensions).
//
// Everything that decides bits is spelled out: the order of a sum, where a product is fused into an addition, and
// that the last, partial vector of a row goes through the same arithmetic as the others. So a row has one result,
// whatever its position, its alignment, or the number of threads.
#pragma once

#include <stdint.h>

#include "dtype.h"
#include "level.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Small steps on vectors, which a call would cost more than they do.
#define MUSIGMA_INLINE inline __attribute__((always_inline))

namespace MUSIGMA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class T, int N>
struct Vector {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};
template <class T, int N>
using VectorOf = typename Vector<T, N>::type;

// The number of values of the compute type A (float or double) that are handled at a time.
template <class A>
constexpr int kLanes = kBytes / sizeof(A);
template <class A>
using Lanes = VectorOf<A, kLanes<A>>;

template <class A>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  typedef int32_t type;
};
template <>
struct IntegerOf<double> {
  typedef int64_t type;
};
template <class A>
using Integers = VectorOf<typename IntegerOf<A>::type, kLanes<A>>;

template <class V, class T>
inline V read(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V, class T>
inline void write(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

template <class To, class From>
inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &v, sizeof(To));
  return to;
}

template <class A>
inline Lanes<A> splat(A a) {
  return a - Lanes<A>{};  // which keeps a zero's sign, and costs nothing
}

// a * b + c, rounded once where the level has such an instruction. (-ffp-contract=off forbids it everywhere else.)
template <class A>
inline Lanes<A> madd(Lanes<A> a, Lanes<A> b, Lanes<A> c) {
#if defined(__FMA__) || defined(__aarch64__)
  Lanes<A> r;
  for (int i = 0; i < kLanes<A>; i++) {
    if constexpr (sizeof(A) == 4)
      r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    else
      r[i] = __builtin_fma(a[i], b[i], c[i]);
  }
  return r;
#else
  return a * b + c;
#endif
}

#if defined(__AVX512F__)
template <>
inline Lanes<float> madd<float>(Lanes<float> a, Lanes<float> b, Lanes<float> c) {
  return _mm512_fmadd_ps(a, b, c);
}
template <>
inline Lanes<double> madd<double>(Lanes<double> a, Lanes<double> b, Lanes<double> c) {
  return _mm512_fmadd_pd(a, b, c);
}
#elif defined(__FMA__)
template <>
inline Lanes<float> madd<float>(Lanes<float> a, Lanes<float> b, Lanes<float> c) {
  return _mm256_fmadd_ps(a, b, c);
}
template <>
inline Lanes<double> madd<double>(Lanes<double> a, Lanes<double> b, Lanes<double> c) {
  return _mm256_fmadd_pd(a, b, c);
}
#endif

// Σ c[i]·xⁱ.
template <class A, int N>
MUSIGMA_INLINE Lanes<A> polynomial(const A (&c)[N], Lanes<A> x) {
  Lanes<A> y = splat<A>(c[N - 1]);
  for (int i = N - 2; i >= 0; i--) y = madd<A>(y, x, splat<A>(c[i]));
  return y;
}

template <class A>
MUSIGMA_INLINE Lanes<A> magnitude(Lanes<A> v) {
  typedef typename IntegerOf<A>::type Integer;
  const Integer all_but_sign = sizeof(A) == 4 ? (Integer)INT32_MAX : (Integer)INT64_MAX;
  return bits<Lanes<A>>(bits<Integers<A>>(v) & (Integers<A>{} + all_but_sign));
}

// The larger and the smaller of v and a limit; NaN stays.
template <class A>
MUSIGMA_INLINE Lanes<A> at_least(Lanes<A> v, A limit) {
  const Lanes<A> l = splat<A>(limit);
#if defined(__AVX512F__)
  // GCC 12 makes two steps of the comparison.
  if constexpr (sizeof(A) == 4) return _mm512_max_ps(l, v);
  if constexpr (sizeof(A) == 8) return _mm512_max_pd(l, v);
#endif
  return l > v ? l : v;
}
template <class A>
MUSIGMA_INLINE Lanes<A> at_most(Lanes<A> v, A limit) {
  const Lanes<A> l = splat<A>(limit);
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) return _mm512_min_ps(l, v);
  if constexpr (sizeof(A) == 8) return _mm512_min_pd(l, v);
#endif
  return l < v ? l : v;
}
template <class A>
MUSIGMA_INLINE Lanes<A> clamp(Lanes<A> v, A low, A high) {
  return at_least<A>(at_most<A>(v, high), low);
}

// The sum of the lanes, as a tree of halves.
template <class T, int N>
inline T tree(VectorOf<T, N> v) {
  if constexpr (N == 2) {
    return v[0] + v[1];
  } else {
    typedef VectorOf<T, N / 2> Half;
    struct {
      Half low, high;
    } h;
    __builtin_memcpy(&h, &v, sizeof(v));
    return tree<T, N / 2>(h.low + h.high);
  }
}
template <class A>
inline A sum(Lanes<A> v) {
  return tree<A, kLanes<A>>(v);
}

#if defined(__AVX512F__)
// The same tree, in registers: GCC takes the halves by way of memory.
template <>
inline float sum<float>(Lanes<float> v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
#endif

// How many lanes of a vector are real: all of them, or the first `n`.
struct All {};
struct First {
  int64_t n;
};

template <class A>
inline Lanes<A> keep(Lanes<A> v, All) {
  return v;
}
template <class A>
inline Lanes<A> keep(Lanes<A> v, First part) {
  Integers<A> lane;
  for (int i = 0; i < kLanes<A>; i++) lane[i] = i;
  Integers<A> limit = Integers<A>{} + (typename IntegerOf<A>::type)part.n;
  return lane < limit ? v : Lanes<A>{};
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
