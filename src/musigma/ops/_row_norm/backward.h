// The backward of rows.
#pragma once

#include "../_native/activation.h"
#include "../_native/parameters.h"
#include "../_native/standard.h"
#include "../_native/sums.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// Whether there is an activation to go back through.
template <class Act>
constexpr bool kActive = true;
template <>
constexpr bool kActive<Activated<Activation::kNone>> = false;

// dy behind the activation becomes dz before it, in the compute type, where its derivative is not formed twice; as exactly
// as the weights' type holds their gradients, which are sums of these.
template <class A, class T, class P, class Act>
void before_activation(
    const RowNormBackward& a, const T* dy, const T* x, const Standard<A>& of, A* dz, Act activation) {
  const Affine<A, P> affine(a.weight, a.bias);
  const Standard<A> standard = of;
  transform<A>(a.width, dz, [&](int64_t i, auto part) {
    const Lanes<A> z = madd<A>(standard(load<A>(x + i, part)), affine.weight(i, part), affine.bias(i, part));
    return load<A>(dy + i, part) * activation.template derivative<A, P>(z);
  });
}

// What a row's dx is made of besides its values: dx = dz·weight·rstd + x̂·by_x + offset.
template <class A>
struct Paths {
  A by_x, offset;
};

template <class A, class U, class T, class P>
Paths<A> paths_of(const RowNormBackward& a, const U* dz, const T* x, const Standard<A>& of) {
  const Affine<A, P> affine(a.weight, nullptr);
  const Standard<A> standard = of;
  const int64_t n = a.width;
  Total<A> total[2];
  reduce<A, 2>(n, total, [&](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> g = load<A>(dz + i, part) * affine.weight(i, part);
    acc[0] += g;
    // In float x - first will do: what the second part of the mean adds is known from the other sum.
    const Lanes<A> value = load<A>(x + i, part);
    const Lanes<A> x_hat = keep<A>(sizeof(A) == 4 ? value - standard.first : standard(value), part);
    acc[1] = madd<A>(g, x_hat, acc[1]);
  });
  const double sum = total[0].value(), rstd = (double)standard.rstd;
  double along = total[1].value();
  if (sizeof(A) == 4) along = along * rstd + sum * (double)standard.shift;
  const double scale = -rstd / (double)n;
  return {(A)(scale * along), a.center ? (A)(scale * sum) : (A)0};
}

// Tensors larger than this come from farther away than the second cache.
constexpr int64_t kSecondCache = 1 << 19;

// R rows at once, the same bits as one by one: weight and column sums are read and written once for all of them.
template <int R, class A, class S, class U, class T, class P>
void write_gradients(
    const RowNormBackward& a, int64_t r, const U* const* upstream, const T* const* rows, const Standard<A>* standards,
    const Paths<A>* all_paths, ColumnSums<S>* sums) {
  const Affine<A, P> affine(a.weight, nullptr);
  Standard<A> standard[R];
  Paths<A> paths[R];
  const U* dz[R];
  const T *x[R], *extra[R];
  T* dx[R];
  S *run0 = sums ? sums->run0 : nullptr, *run1 = sums ? sums->run1 : nullptr;
  bool stream = a.stream;
  const bool added = a.dsum;
  for (int k = 0; k < R; k++) {
    standard[k] = standards[k], paths[k] = all_paths[k], dz[k] = upstream[k], x[k] = rows[k];
    dx[k] = a.dx ? (T*)a.dx + (r + k) * a.width : nullptr;
    extra[k] = added ? (const T*)a.dsum + (r + k) * a.dsum_stride : nullptr;
    stream = stream && (uintptr_t)dx[k] % kBytes == 0;
  }
  // The next rows come in while these are written: what reads ahead on its own stops at the end of a page.
  const int64_t next = r + R;
  const T *next_x = (const T*)a.x + next * a.x_stride, *next_dy = (const T*)a.dy + next * a.dy_stride;
  const bool ahead = next + R <= a.rows && a.rows * a.width * (int64_t)sizeof(T) > kSecondCache;
  sweep<A>(a.width, [&](int64_t i, auto part) {
    Lanes<A> x_hat[R], g[R];
    for (int k = 0; ahead && k < R; k++) {
      __builtin_prefetch(next_x + k * a.x_stride + i, 0, 2);
      __builtin_prefetch(next_dy + k * a.dy_stride + i, 0, 2);
    }
    for (int k = 0; k < R; k++) x_hat[k] = standard[k](load<A>(x[k] + i, part)), g[k] = load<A>(dz[k] + i, part);
    if (run0) {
      Lanes<A> sum0 = load<A>(run0 + i, part), sum1 = load<A>(run1 + i, part);
      for (int k = 0; k < R; k++) sum0 = madd<A>(g[k], x_hat[k], sum0), sum1 += g[k];
      store<A>(run0 + i, sum0, part);
      store<A>(run1 + i, sum1, part);
    }
    if (!dx[0]) return;
    const Lanes<A> weight = affine.weight(i, part);
    for (int k = 0; k < R; k++) {
      const Lanes<A> centered = madd<A>(x_hat[k], splat<A>(paths[k].by_x), splat<A>(paths[k].offset));
      g[k] = madd<A>(g[k] * weight, splat<A>(standard[k].rstd), centered);
      if (added) g[k] += load<A>(extra[k] + i, part);
    }
    for (int k = 0; k < R; k++) put<A>(dx[k] + i, g[k], part, stream);
  });
}

// A is the type the rows are done in, S that of the column sums: the input's compute type even where a row's range asks
// for double.
template <int R, class A, class S, class T, class P, class Act>
void backward_rows(const RowNormBackward& a, int64_t r, ColumnSums<S>* sums, A* scratch, Act activation) {
  const T *x[R], *dy[R];
  const A* dz[R];
  Standard<A> standard[R];
  Paths<A> paths[R] = {};
  for (int k = 0; k < R; k++) {
    x[k] = (const T*)a.x + (r + k) * a.x_stride;
    dy[k] = (const T*)a.dy + (r + k) * a.dy_stride;
    standard[k] = standard_of<A>(x[k], a.width, a.center, a.mean[r + k], a.rstd[r + k]);
    if constexpr (kActive<Act>) {
      before_activation<A, T, P>(a, dy[k], x[k], standard[k], scratch + k * a.width, activation);
      dz[k] = scratch + k * a.width;
      if (a.dx) paths[k] = paths_of<A, A, T, P>(a, dz[k], x[k], standard[k]);
    } else {
      if (a.dx) paths[k] = paths_of<A, T, T, P>(a, dy[k], x[k], standard[k]);
    }
  }
  if constexpr (kActive<Act>)
    write_gradients<R, A, S, A, T, P>(a, r, dz, x, standard, paths, sums);
  else
    write_gradients<R, A, S, T, T, P>(a, r, dy, x, standard, paths, sums);
}

// Where float can hold rstd, its square and the products of both.
inline bool ordinary(double rstd) { return in_range(rstd * rstd); }

template <class T, class P, class Act>
void backward_block(const RowNormBackward& a, int64_t block, double* scratch, Act activation) {
  typedef ComputeOf<T> A;
  constexpr int R = 4;
  const int64_t begin = block * a.block_rows;
  const int64_t end = begin + a.block_rows < a.rows ? begin + a.block_rows : a.rows;
  // Four rows of x, dy and dx, and the sums, have to fit into the second cache.
  const bool together = a.width * (int64_t)sizeof(T) <= (1 << 14);
  ColumnSums<A> held(a.sums ? a.sums + block * kSumsPerColumn * a.width : nullptr, a.sums ? a.width : 0);
  ColumnSums<A>* sums = a.sums ? &held : nullptr;
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = run + kRun < end ? run + kRun : end;
    for (int64_t r = run; r < stop; r++) {
      if constexpr (sizeof(A) == 8) {
        backward_rows<1, double, A, T, P>(a, r, sums, scratch, activation);
      } else if (
          together && r + R <= stop && ordinary(a.rstd[r]) && ordinary(a.rstd[r + 1]) && ordinary(a.rstd[r + 2]) &&
          ordinary(a.rstd[r + 3])) {
        backward_rows<R, A, A, T, P>(a, r, sums, (A*)scratch, activation);
        r += R - 1;
      } else if (ordinary(a.rstd[r])) {
        backward_rows<1, A, A, T, P>(a, r, sums, (A*)scratch, activation);
      } else {
        backward_rows<1, double, A, T, P>(a, r, sums, scratch, AnyActivated{a.activation});
      }
    }
    if (sums) sums->flush();
  }
}

template <class T, class P>
void backward(const RowNormBackward& a, int64_t begin, int64_t end) {
  // For dz: four rows of floats, or one of doubles, which the rare rows in double write in any case.
  double* scratch = new double[2 * a.width];
  with_activation(a.activation, [&](auto activation) {
    for (int64_t block = begin; block < end; block++) backward_block<T, P>(a, block, scratch, activation);
  });
  delete[] scratch;
  end_of_stream(a.stream);
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
