// How each storage type gets in and out of lanes, whole vectors and the last, partial one of a row.
#pragma once

#include "lanes.h"

namespace MUSIGMA_NAMESPACE {
namespace {

template <int N>
inline VectorOf<float, N> from_bfloat16(VectorOf<uint16_t, N> v) {
#if defined(__AVX512BW__)
  if constexpr (N == 16) {
    // A value into the upper half of each lane, and 0 into the lower: one step, where widening and shifting are two.
    const __m512i upper = _mm512_set_epi16(
        15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return bits<__m512>(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, upper, _mm512_castsi256_si512(bits<__m256i>(v))));
  }
#elif defined(__AVX2__)
  // GCC 12 widens in halves what one instruction does.
  if constexpr (N == 8) return bits<VectorOf<float, N>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits<__m128i>(v)), 16));
#endif
  return bits<VectorOf<float, N>>(__builtin_convertvector(v, VectorOf<uint32_t, N>) << 16);
}

template <int N>
inline VectorOf<uint16_t, N> to_bfloat16(VectorOf<float, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    // To nearest, ties to even, in additions that pass over NaN. What is stored comes out of arithmetic, so that a NaN
    // has its quiet bit, and stays one without its lower half. (The CPUs' own instruction turns subnormals into 0, and
    // would save no more than a sixth of loading, scaling and storing.)
    const __m512i u = bits<__m512i>(v);
    const __mmask16 number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
    const __mmask16 odd = _mm512_mask_test_epi32_mask(number, u, _mm512_set1_epi32(0x10000));
    const __m512i almost = _mm512_mask_add_epi32(u, number, u, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_mask_add_epi32(almost, odd, almost, _mm512_set1_epi32(1));
    return bits<VectorOf<uint16_t, N>>(_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
#endif
  typedef VectorOf<uint32_t, N> U;
  U u = bits<U>(v);
  U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // to nearest, ties to even
  U quiet = (u >> 16) | 0x40u;                         // a NaN stays one
  const U result = (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
  return __builtin_convertvector(result, VectorOf<uint16_t, N>);
}

template <int N>
inline VectorOf<float, N> from_float16(VectorOf<uint16_t, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return _mm512_cvtph_ps(bits<__m256i>(v));
  if constexpr (N == 8) return _mm256_cvtph_ps(bits<__m128i>(v));
#elif defined(__F16C__)
  if constexpr (N == 8) return _mm256_cvtph_ps(bits<__m128i>(v));
#endif
  // Shift the exponent into place, then scale: the product also normalizes what was subnormal.
  typedef VectorOf<uint32_t, N> U;
  typedef VectorOf<float, N> F;
  U u = __builtin_convertvector(v, U);
  U sign = (u & 0x8000u) << 16;
  F magnitude = bits<F>((u & 0x7fffu) << 13) * 0x1p112f;
  U m = bits<U>(magnitude);
  U special = (u & 0x7c00u) == 0x7c00u ? U{} + 0x7f800000u : U{};
  return bits<F>(m | special | sign);
}

template <int N>
inline VectorOf<uint16_t, N> to_float16(VectorOf<float, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16)
    return bits<VectorOf<uint16_t, N>>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  if constexpr (N == 8)
    return bits<VectorOf<uint16_t, N>>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  if constexpr (N == 8)
    return bits<VectorOf<uint16_t, N>>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  typedef VectorOf<uint32_t, N> U;
  typedef VectorOf<float, N> F;
  U u = bits<U>(v);
  U sign = (u >> 16) & 0x8000u;
  U a = u & 0x7fffffffu;
  // Normal results: rebias the exponent and round to nearest even in the bits. Subnormal ones: adding 0.5 puts the
  // rounding at 2^-24, float16's smallest step, and the addition itself rounds to nearest even.
  U normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  U subnormal = bits<U>(bits<F>(a) + 0.5f) - 0x3f000000u;
  U finite = a < 0x38800000u ? subnormal : normal;
  U result = a >= 0x477ff000u ? (a > 0x7f800000u ? U{} + 0x7e00u : U{} + 0x7c00u) : finite;
  return __builtin_convertvector(result | sign, VectorOf<uint16_t, N>);
}

template <class T, class A>
struct Storage;

template <class A>
struct Storage<A, A> {
  typedef Lanes<A> Raw;
  static Lanes<A> up(Raw v) { return v; }
  static Raw down(Lanes<A> v) { return v; }
};
template <>
struct Storage<bfloat16, float> {
  typedef VectorOf<uint16_t, kLanes<float>> Raw;
  static Lanes<float> up(Raw v) { return from_bfloat16<kLanes<float>>(v); }
  static Raw down(Lanes<float> v) { return to_bfloat16<kLanes<float>>(v); }
};
template <>
struct Storage<float16, float> {
  typedef VectorOf<uint16_t, kLanes<float>> Raw;
  static Lanes<float> up(Raw v) { return from_float16<kLanes<float>>(v); }
  static Raw down(Lanes<float> v) { return to_float16<kLanes<float>>(v); }
};
template <>
struct Storage<float, double> {
  typedef VectorOf<float, kLanes<double>> Raw;
  static Lanes<double> up(Raw v) { return __builtin_convertvector(v, Lanes<double>); }
  static Raw down(Lanes<double> v) { return __builtin_convertvector(v, Raw); }
};
// Half types in double: only rows whose spread float32 can't square go through here, so two steps will do. (The step
// in the middle rounds a second time; float32's 13 or more spare bits make that matter once in thousands of values.)
template <class T>
struct HalfInDouble {
  typedef VectorOf<uint16_t, kLanes<double>> Raw;
  typedef VectorOf<float, kLanes<double>> Middle;
};
template <>
struct Storage<bfloat16, double> : HalfInDouble<bfloat16> {
  static Lanes<double> up(Raw v) { return __builtin_convertvector(from_bfloat16<kLanes<double>>(v), Lanes<double>); }
  static Raw down(Lanes<double> v) { return to_bfloat16<kLanes<double>>(__builtin_convertvector(v, Middle)); }
};
template <>
struct Storage<float16, double> : HalfInDouble<float16> {
  static Lanes<double> up(Raw v) { return __builtin_convertvector(from_float16<kLanes<double>>(v), Lanes<double>); }
  static Raw down(Lanes<double> v) { return to_float16<kLanes<double>>(__builtin_convertvector(v, Middle)); }
};

template <class A, class T>
inline Lanes<A> load(const T* p, All) {
  return Storage<T, A>::up(read<typename Storage<T, A>::Raw>(p));
}

template <class A, class T>
inline void store(T* p, Lanes<A> v, All) {
  write(p, Storage<T, A>::down(v));
}

// The first part.n values; the other lanes are 0.
template <class A, class T>
inline Lanes<A> load(const T* p, First part) {
  typedef typename Storage<T, A>::Raw Raw;
#if defined(__AVX512F__)
  const uint32_t mask = (1u << part.n) - 1;
  if constexpr (sizeof(Raw) == 64 && sizeof(T) == 4) return Storage<T, A>::up(_mm512_maskz_loadu_ps(mask, p));
  if constexpr (sizeof(Raw) == 64 && sizeof(T) == 8) return Storage<T, A>::up(_mm512_maskz_loadu_pd(mask, p));
  if constexpr (sizeof(Raw) == 32 && sizeof(T) == 2)
    return Storage<T, A>::up(bits<Raw>(_mm256_maskz_loadu_epi16(mask, p)));
#endif
  T values[kLanes<A>] = {};
  for (int64_t i = 0; i < part.n; i++) values[i] = p[i];
  return Storage<T, A>::up(read<Raw>(values));
}

template <class A, class T>
inline void store(T* p, Lanes<A> v, First part) {
  typedef typename Storage<T, A>::Raw Raw;
  Raw raw = Storage<T, A>::down(v);
#if defined(__AVX512F__)
  const uint32_t mask = (1u << part.n) - 1;
  if constexpr (sizeof(Raw) == 64 && sizeof(T) == 4) return _mm512_mask_storeu_ps(p, mask, bits<__m512>(raw));
  if constexpr (sizeof(Raw) == 64 && sizeof(T) == 8) return _mm512_mask_storeu_pd(p, mask, bits<__m512d>(raw));
  if constexpr (sizeof(Raw) == 32 && sizeof(T) == 2) return _mm256_mask_storeu_epi16(p, mask, bits<__m256i>(raw));
#endif
  T values[kLanes<A>];
  write(values, raw);
  for (int64_t i = 0; i < part.n; i++) p[i] = values[i];
}

// Writes past the caches, to addresses that are a multiple of what is written. What is read next is not what was
// written a cache ago, and memory is spared the read that an ordinary write begins with.
template <class A, class T>
inline void stream(T* p, Lanes<A> v) {
  const auto raw = Storage<T, A>::down(v);
#if defined(__AVX512F__)
  if constexpr (sizeof(raw) == 64) return _mm512_stream_si512((__m512i*)p, bits<__m512i>(raw));
#endif
#if defined(__AVX__)
  if constexpr (sizeof(raw) == 32) return _mm256_stream_si256((__m256i*)p, bits<__m256i>(raw));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(raw) == 16) return _mm_stream_si128((__m128i*)p, bits<__m128i>(raw));
#endif
  write(p, raw);
}

// Streamed writes are not ordered with others; whoever wakes another thread afterwards calls this first.
inline void end_of_stream(bool streamed) {
#if defined(__SSE2__)
  if (streamed) _mm_sfence();
#else
  (void)streamed;
#endif
}

template <class A, class T>
inline void put(T* p, Lanes<A> v, All part, bool streamed) {
  if (streamed)
    stream<A>(p, v);
  else
    store<A>(p, v, part);
}
template <class A, class T>
inline void put(T* p, Lanes<A> v, First part, bool) {
  store<A>(p, v, part);
}

// One value, for pivots.
template <class A, class T>
inline A one(const T* p) {
  return load<A>(p, First{1})[0];
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
