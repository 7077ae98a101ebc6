// Weight and bias along a row, with or without each.
#pragma once

#include "simd.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// The type that values of storage type T are computed in.
template <class T>
struct Compute {
  typedef float type;
};
template <>
struct Compute<double> {
  typedef double type;
};
template <class T>
using ComputeOf = typename Compute<T>::type;

// A weight of 1 and a bias of -0 change no bit, so that one multiplication and addition serves all four cases.
template <class A, class P>
struct Affine {
  const P *weights, *biases;
  Affine(const void* weight, const void* bias) : weights((const P*)weight), biases((const P*)bias) {}

  template <class Part>
  Lanes<A> weight(int64_t i, Part part) const {
    return weights ? load<A>(weights + i, part) : splat<A>((A)1);
  }
  template <class Part>
  Lanes<A> bias(int64_t i, Part part) const {
    return biases ? load<A>(biases + i, part) : -Lanes<A>{};
  }
};

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
