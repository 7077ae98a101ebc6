// group_norm of contiguous images, a few groups at a time: what is read for the statistics is in the first cache when it
// is read again, and what a group needs on the way stays in registers.
#include <math.h>

#include "lines.h"

namespace MUSIGMA_NAMESPACE {

void channel_moments(const ChannelMoments&, int64_t, int64_t);

namespace {

// So many values of x at a time, which with dy and dx are what the first cache holds.
constexpr int64_t kValues = 3072;

// A group's center and scale in double. They are `poor` where float32 can't square such a spread, or its inverse.
struct Standard {
  double rstd, rest;
  float first;
  bool poor;

  Standard(double mean, double m2, double count, double eps)
      : rstd(1.0 / sqrt(m2 * (1.0 / count) + eps)), first((float)mean), poor(!(rstd >= 0x1p-50 && rstd <= 0x1p50)) {
    rest = mean - (double)first;
  }
  Line<float> line(double weight, double bias) const {
    const double s = weight * rstd;
    return {splat(first), splat((float)s), splat((float)(bias - rest * s))};
  }
};

template <class T, class F>
void normalize(const Groups& a, int64_t group, const Standard& s, F f) {
  const int64_t n = a.positions, c = group % a.groups * a.width;
  const T* x = (const T*)a.x + group * a.width * n;
  T* y = (T*)a.y + group * a.width * n;
  for (int64_t k = 0; k < a.width; k++)
    affine_line<float>(s.line(a.weight[c + k], a.bias[c + k]), n, x + k * n, (const T*)nullptr, y + k * n, a.stream, f);
}

template <class T, class F>
void go_back(const Groups& a, int64_t group, const Standard& s, F f) {
  const int64_t n = a.positions, c = group % a.groups * a.width;
  const int64_t start = group * a.width * n;
  const T *x = (const T*)a.x + start, *dy = (const T*)a.dy + start;
  double *of_g = a.sums + group * 2 * a.width, *of_product = of_g + a.width;
  const double *weight = a.weight + c, *bias = a.bias + c;
  double mean_g = 0, mean_product = 0;
  // What a smooth activation leaves of dy takes longer to form twice than to keep.
  alignas(kBytes) float g[F::kSimple ? 1 : kPartValues];
  for (int64_t k = 0; k < a.width; k++) {
    const Line<float> at = s.line(weight[k], bias[k]);
    const LineTerms<float, T, F, float> terms{at, splat((float)s.rstd), dy, x, nullptr, F::kSimple ? nullptr : g, f};
    Total<float> total[2];
    reduce_piece<float, 2>(Piece{k * n, 1, n, n, 0, 0}, total, terms);
    // What `first` leaves of the mean is missing from the products.
    of_g[k] = total[0].value(), of_product[k] = total[1].value() - s.rest * s.rstd * of_g[k];
    mean_g += weight[k] * of_g[k], mean_product += weight[k] * of_product[k];
  }
  if (!a.dx) return;
  const double share = 1.0 / (double)(a.width * n), slope = -s.rstd * s.rstd * (mean_product * share);
  const double offset = -s.rstd * (mean_g * share) - s.rest * slope;
  T* dx = (T*)a.dx + start;
  for (int64_t k = 0; k < a.width; k++) {
    const auto line = [&](const auto* up, auto back) {
      gradient_line<float>(
          s.line(weight[k], bias[k]), splat((float)slope), splat((float)offset), n, up + k * n, x + k * n, dx + k * n,
          a.stream, back);
    };
    if constexpr (F::kSimple)
      line(dy, f);
    else
      line(g, Plain{});
  }
}

template <class F>
void by_half_type(DType type, F f) {
  switch (type) {
    case DType::kFloat32: return f.template operator()<float>();
    case DType::kBFloat16: return f.template operator()<bfloat16>();
    case DType::kFloat16: return f.template operator()<float16>();
    case DType::kFloat64: return;
  }
}

}  // namespace

int64_t group_norm(const Groups& a, int64_t begin, int64_t end) {
  const int64_t count = a.width * a.positions, some = count < kValues ? kValues / count : 1;
  // To the moments a group is a channel of one part.
  const Channels layout{a.type, 1, end, count};
  const ChannelMoments moments{layout, parts_of(layout), false, a.x, nullptr, a.mean, a.m2};
  int64_t poor = 0;
  by_half_type(a.type, [&]<class T>() {
    by_activation(a.activation, [&](auto f) {
      for (int64_t first = begin; first < end; first += some) {
        const int64_t stop = first + some < end ? first + some : end;
        channel_moments(moments, first, stop);
        for (int64_t group = first; group < stop; group++) {
          const Standard s(a.mean[group], a.m2[group], (double)count, a.eps);
          a.poor[group] = s.poor, poor += s.poor;
          if (!s.poor) normalize<T>(a, group, s, f);
        }
      }
    });
  });
  end_of_stream(a.stream);
  return poor;
}

int64_t group_norm_backward(const Groups& a, int64_t begin, int64_t end) {
  const double count = (double)(a.width * a.positions);
  int64_t poor = 0;
  by_half_type(a.type, [&]<class T>() {
    by_activation(a.activation, [&](auto f) {
      for (int64_t group = begin; group < end; group++) {
        const Standard s(a.mean[group], a.m2[group], count, a.eps);
        a.poor[group] = s.poor, poor += s.poor;
        if (!s.poor) go_back<T>(a, group, s, f);
      }
    });
  });
  end_of_stream(a.stream);
  return poor;
}

}  // namespace MUSIGMA_NAMESPACE
