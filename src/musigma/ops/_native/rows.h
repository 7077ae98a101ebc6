// The statistics of a row: read once from memory, then again from cache.
#pragma once

#include "simd.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// What is subtracted from a value to center it, in two steps: (x - first) - second. One float32 can't hold a mean well
// enough (at mean/std 1e6 its rounding alone is 4e4 units of the result); near the mean both subtractions are exact.
template <class A>
struct Center {
  A first = 0, second = 0;
  Lanes<A> operator()(Lanes<A> v) const { return (v - first) - second; }
};

struct Spread {
  double mean;  // 0 without centering
  double m2;    // the sum of squared deviations from it
};

// The sum of x - pivot. With the pivot a value of the row, a constant row gives exactly 0, and what is summed is small.
template <class A, class T>
inline Total<A> sum_from(const T* x, int64_t n, A pivot) {
  Total<A> total[1];
  reduce<A, 1>(
      n, total, [&](int64_t i, auto part, Lanes<A>* acc) { acc[0] += keep<A>(load<A>(x + i, part) - pivot, part); });
  return total[0];
}

template <class A, class T>
inline Center<A> center_of(const T* x, int64_t n, double& mean) {
  Center<A> center;
  const A pivot = one<A>(x);
  const Total<A> total = sum_from<A>(x, n, pivot);
  const double offset = total.value() / (double)n;
  mean = (double)pivot + offset;
  if constexpr (sizeof(A) == 4) {
    center.first = (float)mean;
    center.second = (float)(mean - (double)center.first);
  } else {
    center.first = pivot;
    center.second = offset;
  }
  return center;
}

template <class A>
inline Center<A> center_at(double mean) {
  Center<A> center;
  center.first = (A)mean;
  center.second = (A)(mean - (double)center.first);
  return center;
}

template <class A, class T>
inline double m2_around(const T* x, int64_t n, const Center<A>& center) {
  Total<A> total[1];
  reduce<A, 1>(n, total, [&](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> d = keep<A>(center(load<A>(x + i, part)), part);
    acc[0] = madd<A>(d, d, acc[0]);
  });
  return total[0].value();
}

// Whether float32 squared and summed without overflow or underflow. Below 2^-100 squares may have vanished; a sum that
// overflowed is inf, and NaN fails every comparison. Such rows are done again in double.
inline bool in_range(double square) { return square >= 0x1p-100 && square <= 0x1p100; }

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
