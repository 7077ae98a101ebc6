// How a row is standardized, and the pass over it that finds out.
#pragma once

#include "rows.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// x̂ of a row. In float the second part of the mean, at most half a unit of the first, goes into the scaling:
// (x - first)·rstd + shift. In double it may be as large as the spread, and is subtracted.
template <class A>
struct Standard {
  A first = 0, second = 0, rstd = 0, shift = 0;

  Standard() = default;
  Standard(const Center<A>& center, double scale)
      : first(center.first), second(center.second), rstd((A)scale), shift(-second * rstd) {}

  MUSIGMA_INLINE Lanes<A> operator()(Lanes<A> v) const {
    if constexpr (sizeof(A) == 4)
      return madd<A>(v - first, splat<A>(rstd), splat<A>(shift));
    else
      return ((v - first) - second) * rstd;
  }
};

// Mean and spread of a row of floats around a pivot of its own, in one pass: sums of d = x - pivot and of d². The pivot
// is the mean of the first vector, exact where all values are equal. It is good if taking its distance from the mean
// out of the squares cancels no more than half of them, which at worst doubles their error; if not, a second pass
// measures from the mean itself.
template <class T>
inline Spread spread_of(const T* x, int64_t n, double inverse) {
  typedef float A;
  double mean;
  if (n < kLanes<A>) {
    const Center<A> center = center_of<A>(x, n, mean);
    return {mean, m2_around<A>(x, n, center)};
  }
  const A pivot = sum<A>(load<A>(x, All{}) * ((A)1 / kLanes<A>));
  Total<A> total[2];
  reduce<A, 2>(n, total, [&](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> d = keep<A>(load<A>(x + i, part) - pivot, part);
    acc[0] += d;
    acc[1] = madd<A>(d, d, acc[1]);
  });
  const double offset = total[0].value() * inverse, moved = offset * total[0].value(), square = total[1].value();
  mean = (double)pivot + offset;
  if (moved <= 0.5 * square) return {mean, square - moved};
  return {mean, m2_around<A>(x, n, center_at<A>(mean))};
}

// A row's mean, and its mean square around it plus eps.
template <class A, class T>
inline double spread(const T* x, int64_t n, double inverse, bool center, double eps, double& mean, Center<A>& at) {
  Spread s{0, 0};
  at = Center<A>();
  if constexpr (sizeof(A) == 4) {
    s = center ? spread_of(x, n, inverse) : Spread{0, m2_around<A>(x, n, at)};
    at = center_at<A>(s.mean);
  } else {
    if (center) at = center_of<A>(x, n, s.mean);
    s.m2 = m2_around<A>(x, n, at);
  }
  mean = s.mean;
  return (sizeof(A) == 4 ? s.m2 * inverse : s.m2 / (double)n) + eps;
}

// The same of a row whose statistics are known. One double can't hold the mean of a row of doubles well enough: its
// second part has to be found again.
template <class A, class T>
inline Standard<A> standard_of(const T* x, int64_t n, bool center, double mean, double rstd) {
  if constexpr (sizeof(T) == 8) {
    Center<A> at;
    if (center) at = center_of<A>(x, n, mean);
    return Standard<A>(at, rstd);
  } else {
    return Standard<A>(center_at<A>(mean), rstd);
  }
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
