// Vectors along a channel whose values lie side by side: sums over pieces of it, and elementwise work on its rows.
#pragma once

#include "activation.h"
#include "kernels.h"
#include "simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace MUSIGMA_NAMESPACE {
namespace {

// The last n lanes are real; the others came before. A row of at least one vector ends so: a vector that overlaps its
// neighbour costs less than a partial one.
struct Last {
  int64_t n;
};
template <class A>
inline Lanes<A> keep(Lanes<A> v, Last part) {
  Integers<A> lane;
  for (int i = 0; i < kLanes<A>; i++) lane[i] = i;
  return lane >= Integers<A>{} + (typename IntegerOf<A>::type)(kLanes<A> - part.n) ? v : Lanes<A>{};
}
template <class A, class T>
inline Lanes<A> load(const T* p, Last) {
  return load<A>(p, All{});
}
template <class A, class T>
inline void store(T* p, Lanes<A> v, Last) {
  store<A>(p, v, All{});
}

// ---- sums ----------------------------------------------------------------------------------------------------

// One part of one channel: `rows` rows of n values, `stride` apart.
struct Piece {
  int64_t offset, rows, n, stride, part, channel;
  int64_t count() const { return rows * n; }
  // Whether one set of accumulators holds it: then no lane adds more than some 64 terms.
  bool is_short() const { return rows > 1 || n <= kBlock; }
};

// The pieces from unit `begin` on. Neighbours in memory follow each other: channels inside a block of outer rows, chunks
// inside a channel.
struct Pieces {
  const Channels& l;
  const Parts& p;
  int64_t chunk, channel, block;

  Pieces(const Channels& l, const Parts& p, int64_t begin)
      : l(l), p(p), chunk(begin % p.chunks), channel(begin / p.chunks % l.channels),
        block(begin / p.chunks / l.channels) {}
  Piece next() {
    const int64_t row = block * p.rows, value = chunk * p.values;
    const Piece piece{
        (row * l.channels + channel) * l.inner + value,
        row + p.rows < l.outer ? p.rows : l.outer - row,
        value + p.values < l.inner ? p.values : l.inner - value,
        l.channels * l.inner,
        block * p.chunks + chunk,
        channel};
    if (++chunk == p.chunks) {
      chunk = 0;
      if (++channel == l.channels) channel = 0, block++;
    }
    return piece;
  }
};

// S sums over a short piece, lane by lane: body(i, All, First or Last, acc) adds its terms to acc[0] … acc[S-1].
template <class A, int S, class Body>
inline void accumulate(const Piece& p, Lanes<A>* total, Body body) {
  constexpr int64_t W = kLanes<A>;
  Lanes<A> a0[S] = {}, a1[S] = {}, a2[S] = {}, a3[S] = {};
  for (int64_t r = 0; r < p.rows; r++) {
    const int64_t start = p.offset + r * p.stride;
    int64_t i = 0;
    for (; i + 4 * W <= p.n; i += 4 * W) {
      body(start + i, All{}, a0);
      body(start + i + W, All{}, a1);
      body(start + i + 2 * W, All{}, a2);
      body(start + i + 3 * W, All{}, a3);
    }
    if (i + W <= p.n) body(start + i, All{}, a0), i += W;
    if (i + W <= p.n) body(start + i, All{}, a1), i += W;
    if (i + W <= p.n) body(start + i, All{}, a2), i += W;
    if (i == p.n) continue;
#if defined(__AVX512F__)
    body(start + i, First{p.n - i}, a3);  // partial loads cost nothing here
#else
    if (p.n >= W)
      body(start + p.n - W, Last{p.n - i}, a3);
    else
      body(start, First{p.n}, a3);
#endif
  }
  for (int s = 0; s < S; s++) total[s] = (a0[s] + a1[s]) + (a2[s] + a3[s]);
}

// And over a piece of any length, to the end.
template <class A, int S, class Body>
inline void reduce_piece(const Piece& p, Total<A> (&total)[S], Body body) {
  if (!p.is_short())
    return reduce<A, S>(p.n, total, [&](int64_t i, auto part, Lanes<A>* acc) { body(p.offset + i, part, acc); });
  Lanes<A> acc[S];
  accumulate<A, S>(p, acc, body);
  for (int s = 0; s < S; s++) total[s].add(sum<A>(acc[s]));
}

template <class A, int K, bool High>
inline constexpr int kFoldLane(int i) {
  // Segments of K lanes are halved; those of the first vector come before those of the second.
  constexpr int W = kLanes<A>, half = K / 2;
  const int segment = i / half, source = segment < W / K ? 0 : W;
  return source + segment % (W / K) * K + i % half + (High ? half : 0);
}
template <class A, int K, bool High>
inline Integers<A> fold_lanes() {
  Integers<A> lanes;
  for (int i = 0; i < kLanes<A>; i++) lanes[i] = kFoldLane<A, K, High>(i);
  return lanes;
}
template <class A, int K>
inline Lanes<A> halved(Lanes<A> a, Lanes<A> b) {
#if defined(__clang__)
  Lanes<A> low, high;
  for (int i = 0; i < kLanes<A>; i++) {
    const int l = kFoldLane<A, K, false>(i), h = kFoldLane<A, K, true>(i);
    low[i] = l < kLanes<A> ? a[l] : b[l - kLanes<A>], high[i] = h < kLanes<A> ? a[h] : b[h - kLanes<A>];
  }
  return low + high;
#else
  return __builtin_shuffle(a, b, fold_lanes<A, K, false>()) + __builtin_shuffle(a, b, fold_lanes<A, K, true>());
#endif
}

// The sums of as many vectors as one has lanes, each the same tree of halves as `sum` makes.
template <class A, int K = kLanes<A>>
inline Lanes<A> sums_of(Lanes<A>* v) {
  for (int i = 0; i < K / 2; i++) v[i] = halved<A, K>(v[2 * i], v[2 * i + 1]);
  if constexpr (K == 2)
    return v[0];
  else
    return sums_of<A, K / 2>(v);
}

// ---- elementwise ---------------------------------------------------------------------------------------------

// y[i] = f(i, All or First) for n values; x and y do not overlap, since the last vector of a row may be formed twice.
template <class A, class T, class F>
inline void each(int64_t n, T* y, bool streamed, F f) {
  constexpr int64_t W = kLanes<A>;
  if (n < W) return store<A>(y, f(0, First{n}), First{n});
  int64_t i = 0;
  if (streamed && n >= 64 * W) {
    store<A>(y, f(0, All{}), All{});
    constexpr int64_t line = W * sizeof(T);
    i = (line - (int64_t)((uintptr_t)y % line)) % line / sizeof(T);
    for (; i + W <= n; i += W) stream<A>(y + i, f(i, All{}));
  }
  // Four vectors are read before the first is written: alternating costs a fifth of what memory can carry.
  for (; i + 4 * W <= n; i += 4 * W) {
    const Lanes<A> v0 = f(i, All{}), v1 = f(i + W, All{}), v2 = f(i + 2 * W, All{}), v3 = f(i + 3 * W, All{});
    store<A>(y + i, v0, All{});
    store<A>(y + i + W, v1, All{});
    store<A>(y + i + 2 * W, v2, All{});
    store<A>(y + i + 3 * W, v3, All{});
  }
  for (; i + W <= n; i += W) store<A>(y + i, f(i, All{}), All{});
  if (i < n) store<A>(y + n - W, f(n - W, All{}), All{});
}

// ---- which of them -------------------------------------------------------------------------------------------

// f<A, T>() with A double where the coefficients are.
template <class F>
inline void by_type(DType type, bool wide, F f) {
  switch (type) {
    case DType::kFloat32: return wide ? f.template operator()<double, float>() : f.template operator()<float, float>();
    case DType::kFloat64: return f.template operator()<double, double>();
    case DType::kBFloat16:
      return wide ? f.template operator()<double, bfloat16>() : f.template operator()<float, bfloat16>();
    case DType::kFloat16:
      return wide ? f.template operator()<double, float16>() : f.template operator()<float, float16>();
  }
}

// The activations as the loops see them: none and relu are worth loops of their own, beside the others' arithmetic a
// choice in each step is nothing.
struct Plain {
  static constexpr bool kSimple = true, kNone = true;
};
struct Rectified {
  static constexpr bool kSimple = true, kNone = false;
};
struct Smooth {
  static constexpr bool kSimple = false, kNone = false;
  Activation kind;
};

// For results of storage type T.
template <class A, class T>
inline Lanes<A> activated(Plain, Lanes<A> z) {
  return z;
}
template <class A, class T>
inline Lanes<A> activated(Rectified, Lanes<A> z) {
  return activate<Activation::kRelu, A, T>(z);
}
// (Called, not inlined: some fifty loops would hold it otherwise, and a call is a tenth of what it does.)
template <class A, class T>
__attribute__((noinline)) Lanes<A> activated(Smooth f, Lanes<A> z) {
  if (f.kind == Activation::kSilu) return activate<Activation::kSilu, A, T>(z);
  if (f.kind == Activation::kGelu) return activate<Activation::kGelu, A, T>(z);
  return activate<Activation::kGeluTanh, A, T>(z);
}

// dy times the slope at z.
template <class A, class T>
inline Lanes<A> returned(Plain, Lanes<A> dy, Lanes<A>) {
  return dy;
}
template <class A, class T>
inline Lanes<A> returned(Rectified, Lanes<A> dy, Lanes<A> z) {
  return z <= Lanes<A>{} ? Lanes<A>{} : dy;
}
template <class A, class T>
__attribute__((noinline)) Lanes<A> returned(Smooth f, Lanes<A> dy, Lanes<A> z) {
  if (f.kind == Activation::kSilu) return dy * slope<Activation::kSilu, A, T>(z);
  if (f.kind == Activation::kGelu) return dy * slope<Activation::kGelu, A, T>(z);
  return dy * slope<Activation::kGeluTanh, A, T>(z);
}

template <class F>
inline void by_activation(Activation activation, F f) {
  if (activation == Activation::kNone) return f(Plain{});
  if (activation == Activation::kRelu) return f(Rectified{});
  return f(Smooth{activation});
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
