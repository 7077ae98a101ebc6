// Masks on their way to the kernels, and the statistics of what they keep.
#pragma once

#include <numeric>

#include "channels.h"

namespace musigma {

// Whether it broadcasts to x, and can be read here.
inline bool is_mask(const MaybeTensor& mask, const Tensor& x) {
  if (!mask) return true;
  if (!mask->is_cpu() || mask->layout() != at::kStrided || mask->is_complex() || mask->dim() > x.dim()) return false;
  for (int64_t i = 1; i <= mask->dim(); i++)
    if (mask->size(-i) != 1 && mask->size(-i) != x.size(-i)) return false;
  return true;
}

// A mask beside a tensor whose dims, taken in `order`, make up (outer, channels, inner): `groups[d]` says which of the
// three dim d belongs to. It is held at the size of the groups along which it varies.
struct Mask {
  Tensor held;
  Weights weights;

  Mask(
      const Tensor& mask, const Channels& layout, at::IntArrayRef order, at::IntArrayRef groups,
      at::IntArrayRef sizes) {
    const int64_t dims = sizes.size(), missing = dims - mask.dim();
    const auto size = [&](int64_t d) { return d < missing ? 1 : mask.size(d - missing); };
    bool varies[3] = {};
    for (int64_t d = 0; d < dims; d++) varies[groups[d]] = varies[groups[d]] || size(d) != 1;
    std::vector<int64_t> expanded(dims);
    for (int64_t d = 0; d < dims; d++) expanded[d] = varies[groups[d]] ? sizes[d] : 1;
    held = mask.expand(expanded).permute(order);
    weights.bytes = mask.scalar_type() == at::kBool;
    held = (weights.bytes ? held : held.to(at::kDouble)).contiguous();
    weights.data = held.const_data_ptr();
    const int64_t channels = varies[1] ? layout.channels : 1, inner = varies[2] ? layout.inner : 1;
    weights.inner = varies[2];
    weights.channel = varies[1] ? inner : 0;
    weights.outer = varies[0] ? channels * inner : 0;
  }
};

// The memory format a result takes from its input: channels last if that is so, else contiguous.
inline at::MemoryFormat memory_format(const Tensor& x) {
  if (x.is_contiguous()) return at::MemoryFormat::Contiguous;
  if (x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast)) return at::MemoryFormat::ChannelsLast;
  if (x.dim() == 5 && x.is_contiguous(at::MemoryFormat::ChannelsLast3d)) return at::MemoryFormat::ChannelsLast3d;
  return at::MemoryFormat::Contiguous;
}

struct MaskedStatistics {
  Tensor count, mean, m2;
};

inline MaskedStatistics masked_statistics(const Image& x, const Mask& mask) {
  const Channels& l = x.layout;
  const Parts parts = parts_of(l);
  MaskedStatistics s{doubles({l.channels}), doubles({l.channels}), doubles({l.channels})};
  const int64_t size = parts.count() * l.channels;
  const Tensor held = doubles({3 * size + l.channels});
  double* space = held.mutable_data_ptr<double>();
  const MaskedMoments a{l, parts, x.data(), mask.weights, space + 3 * size, space, space + size, space + 2 * size};
  // A search that all channels share is made once.
  if (mask.weights.channel)
    parallel(l.channels, 1, [&](int64_t b, int64_t e) { kernels().masked_pivots(a, b, e); });
  else
    kernels().masked_pivots(a, 0, l.channels);
  const int64_t total = units(l, parts);
  parallel(total, x.held.numel() / total, [&](int64_t b, int64_t e) { kernels().masked_moments(a, b, e); });
  const JoinMasked j{
      l.channels,
      parts.count(),
      a.pivot,
      a.count,
      a.mean,
      a.m2,
      s.count.mutable_data_ptr<double>(),
      s.mean.mutable_data_ptr<double>(),
      s.m2.mutable_data_ptr<double>()};
  parallel(l.channels, parts.count(), [&](int64_t b, int64_t e) { kernels().join_masked(j, b, e); });
  return s;
}

// dx = weight * ((x - mean) * slope + shift), with one coefficient a channel.
inline Tensor masked_gradient(
    const Image& x, const Mask& mask, const Tensor& mean, const std::vector<double>& slope,
    const std::vector<double>& shift) {
  Tensor dx = output(x.held.sizes(), x.held.scalar_type());
  const MaskedGradient a{x.layout,     x.data(),    dx.mutable_data_ptr(), mask.weights, mean.const_data_ptr<double>(),
                         slope.data(), shift.data()};
  const int64_t count = lines(x.layout);
  parallel(count, x.held.numel() / count, [&](int64_t b, int64_t e) { kernels().masked_gradient(a, b, e); });
  return dx;
}

// The mask of an image, (n, c, *spatial).
inline Mask image_mask(const Tensor& mask, const Image& x) {
  const int64_t dims = x.held.dim();
  std::vector<int64_t> order(dims), groups(dims, x.format == at::MemoryFormat::Contiguous ? 2 : 0);
  std::iota(order.begin(), order.end(), 0);
  groups[0] = 0, groups[1] = 1;
  if (x.format != at::MemoryFormat::Contiguous) std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  return Mask(mask, x.layout, order, groups, x.held.sizes());
}

// v, like x in its memory format, but 0 where the mask drops what is not finite in x; v itself where there is no such
// value, which is what most masks are for and costs no more than reading x.
inline Tensor with_zeros(const Image& x, const Mask& mask, const Tensor& v) {
  int32_t found = 0;
  MaskedFinite a{x.layout, x.data(), v.const_data_ptr(), nullptr, &found, mask.weights};
  const int64_t count = lines(x.layout);
  const auto run = [&] {
    parallel(count, x.held.numel() / count, [&](int64_t b, int64_t e) { kernels().masked_finite(a, b, e); });
  };
  run();
  if (!found) return v;
  Tensor y = x.like();
  a.y = y.mutable_data_ptr();
  run();
  return y;
}

}  // namespace musigma
