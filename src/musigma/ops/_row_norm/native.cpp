// LayerNorm and RMSNorm, forward and backward. op.py says what they compute.
#include "../_native/rows.h"
#include "../_native/sums.h"

namespace MUSIGMA_NAMESPACE {
namespace {

template <class A, bool kWeight, bool kBias, class T, class P>
void write_row(const T* x, const Center<A>& center, A rstd, const P* weight, const P* bias, T* y, int64_t n) {
  transform<A>(n, y, [&](int64_t i, auto part) {
    Lanes<A> v = center(load<A>(x + i, part)) * rstd;
    if constexpr (kWeight && kBias)
      v = madd<A>(v, load<A>(weight + i, part), load<A>(bias + i, part));
    else if constexpr (kWeight)
      v *= load<A>(weight + i, part);
    else if constexpr (kBias)
      v += load<A>(bias + i, part);
    return v;
  });
}

template <class A, class T, class P>
bool forward_row(const RowNorm& a, int64_t r) {
  const int64_t n = a.width;
  const T* x = (const T*)a.x + r * a.x_stride;
  T* y = (T*)a.y + r * n;
  const P* weight = (const P*)a.weight;
  const P* bias = (const P*)a.bias;
  double mean = 0;
  Center<A> center;
  if (a.center) center = center_of<A>(x, n, mean);
  const double square = m2_around<A>(x, n, center) / (double)n + a.eps;
  if (sizeof(A) == 4 && !in_range(square)) return false;
  const double rstd = 1.0 / __builtin_sqrt(square);
  a.mean[r] = mean;
  a.rstd[r] = rstd;
  if (weight && bias)
    write_row<A, true, true>(x, center, (A)rstd, weight, bias, y, n);
  else if (weight)
    write_row<A, true, false>(x, center, (A)rstd, weight, bias, y, n);
  else if (bias)
    write_row<A, false, true>(x, center, (A)rstd, weight, bias, y, n);
  else
    write_row<A, false, false>(x, center, (A)rstd, weight, bias, y, n);
  return true;
}

template <class T>
void forward(const RowNorm& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++)
    if (!forward_row<float, T, float>(a, r)) forward_row<double, T, float>(a, r);
}
template <>
void forward<double>(const RowNorm& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) forward_row<double, double, double>(a, r);
}

// One row of the backward. S is the type of the column sums, which stays the input's compute type when a row is done in
// double (A) for its range.
template <class A, class S, bool kWeight, class T, class P>
void backward_row(const RowNormBackward& a, int64_t r, ColumnSums<S>* sums) {
  const int64_t n = a.width;
  const T* x = (const T*)a.x + r * a.x_stride;
  const T* dy = (const T*)a.dy + r * a.dy_stride;
  const P* weight = (const P*)a.weight;
  const A rstd = (A)a.rstd[r];
  Center<A> center;
  double mean;
  if (a.center) {
    // The saved mean is one double: enough for float32, while a float64 row has to find its second part again.
    if constexpr (sizeof(T) == 8)
      center = center_of<A>(x, n, mean);
    else
      center = center_at<A>(a.mean[r]);
  }
  Total<A> total[2];
  reduce<A, 2>(n, total, [&](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> upstream = load<A>(dy + i, part);
    const Lanes<A> normalized = keep<A>(center(load<A>(x + i, part)) * rstd, part);
    Lanes<A> g = upstream;
    if constexpr (kWeight) g *= load<A>(weight + i, part);
    acc[0] += g;
    acc[1] = madd<A>(g, normalized, acc[1]);
    if (sums) {
      store<A>(sums->run0 + i, load<A>(sums->run0 + i, part) + upstream * normalized, part);
      store<A>(sums->run1 + i, load<A>(sums->run1 + i, part) + upstream, part);
    }
  });
  if (!a.dx) return;
  T* dx = (T*)a.dx + r * n;
  const A mean_g = a.center ? (A)(total[0].value() / (double)n) : (A)0;
  const A mean_gx = (A)(total[1].value() / (double)n);
  transform<A>(n, dx, [&](int64_t i, auto part) {
    const Lanes<A> normalized = center(load<A>(x + i, part)) * rstd;
    Lanes<A> g = load<A>(dy + i, part);
    if constexpr (kWeight) g *= load<A>(weight + i, part);
    return (madd<A>(normalized, splat<A>(-mean_gx), g) - mean_g) * rstd;
  });
}

// R rows of float at once, the same bits as one by one: the column sums are read and written once for all of them.
template <int R, bool kWeight, class T>
void backward_rows(const RowNormBackward& a, int64_t r, ColumnSums<float>& sums) {
  typedef float A;
  const int64_t n = a.width;
  const A* weight = (const A*)a.weight;
  const T *x[R], *dy[R];
  T* dx[R];
  Center<A> center[R];
  A rstd[R], mean_g[R], mean_gx[R];
  for (int k = 0; k < R; k++) {
    x[k] = (const T*)a.x + (r + k) * a.x_stride;
    dy[k] = (const T*)a.dy + (r + k) * a.dy_stride;
    dx[k] = a.dx ? (T*)a.dx + (r + k) * n : nullptr;
    rstd[k] = (A)a.rstd[r + k];
    if (a.center) center[k] = center_at<A>(a.mean[r + k]);
    if (!a.dx) continue;
    Total<A> total[2];
    reduce<A, 2>(n, total, [&](int64_t i, auto part, Lanes<A>* acc) {
      const Lanes<A> normalized = keep<A>(center[k](load<A>(x[k] + i, part)) * rstd[k], part);
      Lanes<A> g = load<A>(dy[k] + i, part);
      if constexpr (kWeight) g *= load<A>(weight + i, part);
      acc[0] += g;
      acc[1] = madd<A>(g, normalized, acc[1]);
    });
    mean_g[k] = a.center ? (A)(total[0].value() / (double)n) : (A)0;
    mean_gx[k] = (A)(total[1].value() / (double)n);
  }
  sweep<A>(n, [&](int64_t i, auto part) {
    Lanes<A> sum0 = load<A>(sums.run0 + i, part), sum1 = load<A>(sums.run1 + i, part), out[R];
    for (int k = 0; k < R; k++) {
      const Lanes<A> normalized = center[k](load<A>(x[k] + i, part)) * rstd[k];
      Lanes<A> g = load<A>(dy[k] + i, part);
      sum0 += g * normalized;
      sum1 += g;
      if (!a.dx) continue;
      if constexpr (kWeight) g *= load<A>(weight + i, part);
      out[k] = (madd<A>(normalized, splat<A>(-mean_gx[k]), g) - mean_g[k]) * rstd[k];
    }
    store<A>(sums.run0 + i, sum0, part);
    store<A>(sums.run1 + i, sum1, part);
    if (a.dx)
      for (int k = 0; k < R; k++) store<A>(dx[k] + i, out[k], part);
  });
}

template <class T, class P, bool kWeight>
void backward_block(const RowNormBackward& a, int64_t block) {
  const int64_t begin = block * a.block_rows;
  const int64_t end = begin + a.block_rows < a.rows ? begin + a.block_rows : a.rows;
  if (!a.sums) {
    for (int64_t r = begin; r < end; r++) {
      if (sizeof(P) == 8 || !in_range(a.rstd[r]))
        backward_row<double, P, kWeight, T, P>(a, r, nullptr);
      else
        backward_row<P, P, kWeight, T, P>(a, r, nullptr);
    }
    return;
  }
  // Four rows of x, dy and dx, and the sums, have to fit into the second cache.
  const bool fit = a.width * (int64_t)sizeof(T) <= (1 << 14);
  ColumnSums<P> sums(a.sums + block * kSumsPerColumn * a.width, a.width);
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = run + kRun < end ? run + kRun : end;
    for (int64_t r = run; r < stop; r++) {
      if constexpr (sizeof(P) == 4) {
        if (fit && r + 4 <= stop && in_range(a.rstd[r]) && in_range(a.rstd[r + 1]) && in_range(a.rstd[r + 2]) &&
            in_range(a.rstd[r + 3])) {
          backward_rows<4, kWeight, T>(a, r, sums);
          r += 3;
          continue;
        }
      }
      if (sizeof(P) == 8 || !in_range(a.rstd[r]))
        backward_row<double, P, kWeight, T, P>(a, r, &sums);
      else
        backward_row<P, P, kWeight, T, P>(a, r, &sums);
    }
    sums.flush();
  }
}

template <class T, class P>
void backward(const RowNormBackward& a, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; block++) {
    if (a.weight)
      backward_block<T, P, true>(a, block);
    else
      backward_block<T, P, false>(a, block);
  }
}

}  // namespace

void row_norm(const RowNorm& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case DType::kFloat32: return forward<float>(a, begin, end);
    case DType::kFloat64: return forward<double>(a, begin, end);
    case DType::kBFloat16: return forward<bfloat16>(a, begin, end);
    case DType::kFloat16: return forward<float16>(a, begin, end);
  }
}

void row_norm_backward(const RowNormBackward& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case DType::kFloat32: return backward<float, float>(a, begin, end);
    case DType::kFloat64: return backward<double, double>(a, begin, end);
    case DType::kBFloat16: return backward<bfloat16, float>(a, begin, end);
    case DType::kFloat16: return backward<float16, float>(a, begin, end);
  }
}

}  // namespace MUSIGMA_NAMESPACE
