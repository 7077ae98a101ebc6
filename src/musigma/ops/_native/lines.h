// What is done to one line of a channel: the values of one row that lie side by side.
#pragma once

#include <type_traits>

#include "along.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// One value of each coefficient, in every lane.
template <class A>
struct Line {
  Lanes<A> first, scale, shift;
};

template <class A>
inline Line<A> line_at(const Coefficients& at, int64_t c) {
  return {splat(((const A*)at.first)[c]), splat(((const A*)at.scale)[c]), splat(((const A*)at.shift)[c])};
}

// y = activation((x - first) * scale + shift + add)
template <class A, class T, class F>
inline void affine_line(const Line<A>& at, int64_t n, const T* x, const T* add, T* y, bool streamed, F f) {
  const auto line = [&](int64_t i, auto part) { return madd<A>(load<A>(x + i, part) - at.first, at.scale, at.shift); };
  if (add)
    each<A>(n, y, streamed, [&](int64_t i, auto part) {
      return activated<A, T>(f, line(i, part) + load<A>(add + i, part));
    });
  else
    each<A>(n, y, streamed, [&](int64_t i, auto part) { return activated<A, T>(f, line(i, part)); });
}

// What a line adds to the sums of g and of g·x̂, where g is dy on its way back through the activation. (In full: the
// gradients of float32 weights beside half types are these sums.)
template <class A, class T, class F, class G = T>
struct LineTerms {
  Line<A> at;
  Lanes<A> rstd;
  const T *dy, *x, *add;
  G* g;  // or null: where g is kept
  F f;

  template <class Part>
  void operator()(int64_t i, Part part, Lanes<A>* acc) const {
    Lanes<A> up = load<A>(dy + i, part);
    const Lanes<A> d = load<A>(x + i, part) - at.first;
    if constexpr (!F::kNone) {
      Lanes<A> z = madd<A>(d, at.scale, at.shift);
      if (add) z += load<A>(add + i, part);
      up = returned<A, A>(f, up, z);
      if (g) store<A>(g + i, up, part);
    }
    // Beyond a row's end g is 0, and with it both terms.
    if constexpr (std::is_same_v<Part, Last>) up = keep<A>(up, part);
    acc[0] += up;
    acc[1] = madd<A>(up, d * rstd, acc[1]);
  }
};

// dx = g * scale + (x - first) * slope + offset
template <class A, class G, class T, class F>
inline void gradient_line(
    const Line<A>& at, Lanes<A> slope, Lanes<A> offset, int64_t n, const G* dy, const T* x, T* dx, bool streamed, F f) {
  each<A>(n, dx, streamed, [&](int64_t i, auto part) {
    const Lanes<A> d = load<A>(x + i, part) - at.first;
    Lanes<A> g = load<A>(dy + i, part);
    if constexpr (!F::kNone) g = returned<A, T>(f, g, madd<A>(d, at.scale, at.shift));
    return madd<A>(g, at.scale, madd<A>(d, slope, offset));
  });
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
