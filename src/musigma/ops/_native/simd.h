// Loops over the values of a row: element by element, and sums in a fixed order.
#pragma once

#include "storage.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// body(i, All or First) for every vector of n values.
template <class A, class Body>
inline void sweep(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) body(i, All{});
  if (i < n) body(i, First{n - i});
}

// y = f(i, All or First) over n values. Four vectors are read before the first is written: alternating between the two
// costs a fifth of what memory can carry.
template <class A, class T, class F>
inline void transform(int64_t n, T* y, F f) {
  constexpr int64_t W = kLanes<A>;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    const Lanes<A> v0 = f(i, All{}), v1 = f(i + W, All{}), v2 = f(i + 2 * W, All{}), v3 = f(i + 3 * W, All{});
    store<A>(y + i, v0, All{});
    store<A>(y + i + W, v1, All{});
    store<A>(y + i + 2 * W, v2, All{});
    store<A>(y + i + 3 * W, v3, All{});
  }
  for (; i + W <= n; i += W) store<A>(y + i, f(i, All{}), All{});
  if (i < n) store<A>(y + i, f(i, First{n - i}), First{n - i});
}

// A sum in double, kept in two parts where the terms are double themselves.
template <class A>
struct Total {
  double high = 0, low = 0;
  void add(A term) {
    if constexpr (sizeof(A) == 4) {
      high += term;
    } else {
      const double s = high + term, t = s - high;  // Knuth's two-sum
      low += (high - (s - t)) + (term - t);
      high = s;
    }
  }
  double value() const { return high + low; }
};

// S sums over n values at once; body(i, All or First, acc) adds its terms to acc[0] … acc[S-1].
//
// Float sums run over blocks of 1024 values, in four vectors side by side, and the blocks are added in double: no sum
// is longer than 64 additions (16 at 16 lanes), which keeps its error under one unit of its largest term.
constexpr int64_t kBlock = 1024;
template <class A, int S, class Body>
inline void reduce(int64_t n, Total<A> (&total)[S], Body body) {
  constexpr int64_t W = kLanes<A>;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    Lanes<A> a0[S] = {}, a1[S] = {}, a2[S] = {}, a3[S] = {};
    int64_t i = begin;
    for (; i + 4 * W <= end; i += 4 * W) {
      body(i, All{}, a0);
      body(i + W, All{}, a1);
      body(i + 2 * W, All{}, a2);
      body(i + 3 * W, All{}, a3);
    }
    if (i + 2 * W <= end) {
      body(i, All{}, a0);
      body(i + W, All{}, a1);
      i += 2 * W;
    }
    if (i + W <= end) {
      body(i, All{}, a2);
      i += W;
    }
    if (i < end) body(i, First{end - i}, a3);
    for (int s = 0; s < S; s++) total[s].add(sum<A>((a0[s] + a1[s]) + (a2[s] + a3[s])));
  }
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
