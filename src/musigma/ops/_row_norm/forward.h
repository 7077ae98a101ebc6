// The forward of rows.
#pragma once

#include "../_native/activation.h"
#include "../_native/parameters.h"
#include "../_native/standard.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// The row to normalize: x, or x + residual, rounded to their type as torch rounds it.
template <class T>
const T* row(const RowNorm& a, int64_t r) {
  typedef ComputeOf<T> A;
  const T* x = (const T*)a.x + r * a.x_stride;
  if (!a.residual) return x;
  const T* residual = (const T*)a.residual + r * a.residual_stride;
  T* sum = (T*)a.sum + r * a.width;
  transform<A>(a.width, sum, [&](int64_t i, auto part) { return load<A>(x + i, part) + load<A>(residual + i, part); });
  return sum;
}

// R rows at once, the same bits as one by one: weight and bias are read once for all of them.
template <int R, class A, class T, class P, class Act>
void write_rows(const RowNorm& a, int64_t r, const T* const* rows, const Standard<A>* standards, Act activation) {
  const Affine<A, P> affine(a.weight, a.bias);
  // Copies that nobody else can see stay in registers.
  Standard<A> standard[R];
  const T* x[R];
  T* y[R];
  bool stream = a.stream;
  for (int k = 0; k < R; k++) {
    standard[k] = standards[k], x[k] = rows[k];
    y[k] = (T*)a.y + (r + k) * a.width;
    stream = stream && (uintptr_t)y[k] % kBytes == 0;
  }
  sweep<A>(a.width, [&](int64_t i, auto part) {
    const Lanes<A> weight = affine.weight(i, part), bias = affine.bias(i, part);
    Lanes<A> v[R];
    for (int k = 0; k < R; k++) {
      const Lanes<A> x_hat = standard[k](load<A>(x[k] + i, part));
      v[k] = activation.template value<A, T>(madd<A>(x_hat, weight, bias));
    }
    for (int k = 0; k < R; k++) put<A>(y[k] + i, v[k], part, stream);
  });
}

// A row in double.
template <class T, class P, class Act>
void wide_row(const RowNorm& a, int64_t r, const T* x, Act activation) {
  Center<double> at;
  const double inverse = 1.0 / (double)a.width;
  const double square = spread<double>(x, a.width, inverse, a.center, a.eps, a.mean[r], at);
  a.rstd[r] = 1.0 / __builtin_sqrt(square);
  const Standard<double> standard(at, a.rstd[r]);
  write_rows<1, double, T, P>(a, r, &x, &standard, activation);
}

template <int R, class T, class P, class Act>
void forward_rows(const RowNorm& a, int64_t r, Act activation) {
  typedef float A;
  const double inverse = 1.0 / (double)a.width;
  const T* x[R];
  Center<A> at[R];
  Standard<A> standard[R];
  double square[R], rstd[R];
  bool all = true;
  for (int k = 0; k < R; k++) {
    x[k] = row<T>(a, r + k);
    square[k] = spread<A>(x[k], a.width, inverse, a.center, a.eps, a.mean[r + k], at[k]);
    all = all && in_range(square[k]);
  }
  for (int k = 0; k < R; k++) rstd[k] = 1.0 / __builtin_sqrt(square[k]);
  for (int k = 0; k < R; k++) standard[k] = Standard<A>(at[k], rstd[k]), a.rstd[r + k] = rstd[k];
  if (all) return write_rows<R, A, T, P>(a, r, x, standard, activation);
  for (int k = 0; k < R; k++) {
    if (in_range(square[k]))
      write_rows<1, A, T, P>(a, r + k, x + k, standard + k, activation);
    else
      wide_row<T, P>(a, r + k, x[k], AnyActivated{a.activation});
  }
}

// Bytes of a row up to which four are done together: they, and their results, stay in the first cache.
constexpr int64_t kTogether = 2048;

template <class T, class P>
void forward(const RowNorm& a, int64_t begin, int64_t end) {
  with_activation(a.activation, [&](auto activation) {
    if constexpr (sizeof(T) == 8) {
      for (int64_t r = begin; r < end; r++) wide_row<T, P>(a, r, row<T>(a, r), activation);
    } else {
      constexpr int R = 4;
      int64_t r = begin;
      if (a.width * (int64_t)sizeof(T) <= kTogether)
        for (; r + R <= end; r += R) forward_rows<R, T, P>(a, r, activation);
      for (; r < end; r++) forward_rows<1, T, P>(a, r, activation);
    }
  });
  end_of_stream(a.stream);
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
