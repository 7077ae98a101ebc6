// What stands once a channel, in vectors all the same: a square root and a division for each of 512 channels would take
// as long as the arithmetic on a small image.
#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace MUSIGMA_NAMESPACE {
namespace {

template <class A>
void coefficients(const ChannelCoefficients& a, int64_t channels) {
  const double* __restrict mean = a.mean, * __restrict rstd = a.rstd, * __restrict weight = a.weight;
  const double* __restrict bias = a.bias, * __restrict offset = a.offset;
  A* __restrict first = (A*)a.first, * __restrict scale = (A*)a.scale, * __restrict shift = (A*)a.shift;
  A* __restrict out_rstd = (A*)a.out_rstd;
  double* __restrict rest = a.rest;
  if (offset)
    for (int64_t c = 0; c < channels; c++) {
      const double s = mean[c] + offset[c], t = s - mean[c];  // Knuth's two-sum
      first[c] = (A)s, rest[c] = (mean[c] - (s - t)) + (offset[c] - t);
    }
  else
    for (int64_t c = 0; c < channels; c++) {
      first[c] = (A)mean[c];
      rest[c] = mean[c] - (double)first[c];
    }
  for (int64_t c = 0; c < channels; c++) {
    const double s = weight[c] * rstd[c];
    scale[c] = (A)s, shift[c] = (A)(bias[c] - rest[c] * s), out_rstd[c] = (A)rstd[c];
  }
}

// dx = rstd·(w·g - mean(w·g) - x̂·mean(w·g·x̂)), with x̂ = (x - first - rest)·rstd.
template <class A>
void slopes(const ChannelSlopes& a, int64_t channels) {
  const double* __restrict rstd = a.rstd, * __restrict rest = a.rest;
  const double* __restrict mean_g = a.mean_g, * __restrict mean_product = a.mean_product;
  A* __restrict slope = (A*)a.slope, * __restrict offset = (A*)a.offset;
  for (int64_t c = 0; c < channels; c++) {
    const double s = -rstd[c] * rstd[c] * mean_product[c];
    slope[c] = (A)s, offset[c] = (A)(-rstd[c] * mean_g[c] - rest[c] * s);
  }
}

template <class T>
void widen_from(const T* from, double* to, int64_t count) {
  sweep<double>(count, [&](int64_t i, auto part) { store<double>(to + i, load<double>(from + i, part), part); });
}

}  // namespace

bool roots(const Roots& a, int64_t count) {
  const double* __restrict square = a.square;
  double* __restrict rstd = a.rstd;
  const double share = 1.0 / a.count, eps = a.eps;
  int64_t poor = 0;
  for (int64_t i = 0; i < count; i++) {
    const double r = 1.0 / sqrt(square[i] * share + eps);
    rstd[i] = r;
    poor += !((r >= 0x1p-50) & (r <= 0x1p50));
  }
  return poor == 0;
}

void widen(const Widen& a, int64_t count) {
  switch (a.type) {
    case DType::kFloat32: return widen_from((const float*)a.from, a.to, count);
    case DType::kFloat64: return widen_from((const double*)a.from, a.to, count);
    case DType::kBFloat16: return widen_from((const bfloat16*)a.from, a.to, count);
    case DType::kFloat16: return widen_from((const float16*)a.from, a.to, count);
  }
}

void channel_coefficients(const ChannelCoefficients& a, int64_t channels) {
  a.wide ? coefficients<double>(a, channels) : coefficients<float>(a, channels);
}

void channel_slopes(const ChannelSlopes& a, int64_t channels) {
  a.wide ? slopes<double>(a, channels) : slopes<float>(a, channels);
}

}  // namespace MUSIGMA_NAMESPACE
