// Tensors of channels, (n, c, *spatial), on their way to the kernels: layout, statistics, coefficients.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "tensors.h"

namespace musigma {

// A tensor dense in the memory format that its result takes: channels last if it is so already, else contiguous.
struct Image {
  Tensor held;
  Channels layout;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;

  Image(const Tensor& x, DType type) : held(x) {
    if (!x.is_contiguous()) {
      if (x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast))
        format = at::MemoryFormat::ChannelsLast;
      else if (x.dim() == 5 && x.is_contiguous(at::MemoryFormat::ChannelsLast3d))
        format = at::MemoryFormat::ChannelsLast3d;
      else
        held = x.contiguous();
    }
    const int64_t c = x.size(1), positions = x.numel() / x.size(0) / c;
    layout = format == at::MemoryFormat::Contiguous ? Channels{type, x.size(0), c, positions}
                                                    : Channels{type, x.size(0) * positions, c, 1};
  }
  // A view of the caller's making.
  Image(const Tensor& x, const Channels& layout) : held(x), layout(layout) {}
  const void* data() const { return held.const_data_ptr(); }
  int64_t count() const { return layout.outer * layout.inner; }
  Tensor like() const { return output(held.sizes(), held.scalar_type(), format); }
  Tensor alike(const Tensor& other) const { return other.contiguous(format); }
  int64_t bytes() const { return held.numel() * held.element_size(); }
};

inline Tensor doubles(at::IntArrayRef shape) { return output(shape, at::kDouble); }

// Memory that a call needs for itself: on the stack as far as it goes.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  template <class T>
  T* take(int64_t n) {
    const int64_t bytes = (n * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    if (used_ + bytes <= kNear) {
      used_ += bytes;
      return (T*)(near_ + used_ - bytes);
    }
    void* far = ::operator new(bytes, std::align_val_t(kAlign));
    far_.emplace_back(far);
    return (T*)far;
  }

 private:
  static constexpr int64_t kNear = 1 << 16, kAlign = 64;
  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(kAlign)); }
  };
  int64_t used_ = 0;
  std::vector<std::unique_ptr<void, Free>> far_;
  alignas(kAlign) char near_[kNear];
};

// Mean and M2 of every channel. For float64 the mean is pivot + offset as well; for every other type those are null.
struct Statistics {
  const double *mean, *m2, *pivot = nullptr, *offset = nullptr;
};

inline Statistics statistics(const Image& x, double* mean, double* m2, Scratch& scratch, bool wide = false) {
  const Channels& l = x.layout;
  const Parts parts = parts_of(l);
  double *pivot = nullptr, *offset = mean;
  if (l.type == DType::kFloat64) {
    pivot = scratch.take<double>(l.channels), offset = scratch.take<double>(l.channels);
    for (int64_t c = 0; c < l.channels; c++) pivot[c] = ((const double*)x.data())[c * l.inner];
  }
  double* part_mean = scratch.take<double>(2 * parts.count() * l.channels);
  double* part_m2 = part_mean + parts.count() * l.channels;
  const ChannelMoments a{l, parts, wide, x.data(), pivot, part_mean, part_m2};
  const int64_t total = units(l, parts);
  parallel(total, x.held.numel() / total, [&](int64_t b, int64_t e) { kernels().channel_moments(a, b, e); });
  const JoinMoments j{l, parts, part_mean, part_m2, offset, m2};
  parallel(l.channels, parts.count(), [&](int64_t b, int64_t e) { kernels().join_moments(j, b, e); });
  if (!pivot) return {mean, m2};
  for (int64_t c = 0; c < l.channels; c++) mean[c] = pivot[c] + offset[c];
  return {mean, m2, pivot, offset};
}

// A parameter's values as doubles, whatever its type; `otherwise` where there is none.
inline const double* values_of(const MaybeTensor& p, double otherwise, int64_t n, Scratch& scratch) {
  double* values = scratch.take<double>(n);
  if (!p) {
    std::fill_n(values, n, otherwise);
    return values;
  }
  const auto held = p->expect_contiguous();
  DType type = DType::kFloat64;
  storage_type(*held, type);
  kernels().widen({type, held->const_data_ptr(), values}, n);
  return values;
}

inline bool readable(const MaybeTensor& p) {
  DType type;
  return !p || storage_type(*p, type);
}

// 1/√(square/count + eps) of some channels or groups, and whether arithmetic with it has to be double.
struct Spread {
  double* rstd;
  bool wide;
};

inline Spread spread_of(DType type, const double* square, double count, double eps, int64_t n, Scratch& scratch) {
  double* rstd = scratch.take<double>(n);
  const bool fits = kernels().roots({square, count, eps, rstd}, n);
  return {rstd, type == DType::kFloat64 || !fits};
}

// The coefficients of some channels. Those of the gradient are wanted later, if at all.
class Coefficient {
 public:
  Coefficient(int64_t channels, Scratch& scratch) : channels_(channels), data_(scratch.take<double>(7 * channels)) {}

  // For y = (x - mean) * weight * rstd + bias, and x̂ = (x - mean) * rstd. For float64 the mean is pivot + offset.
  void forward(bool wide, const Statistics& s, const double* rstd, const double* weight, const double* bias) {
    wide_ = wide, with_slope_ = false;
    const double* first = s.pivot ? s.pivot : s.mean;
    kernels().channel_coefficients(
        {wide_, first, s.pivot ? s.offset : nullptr, rstd, weight, bias, array(1), array(2), array(3), array(4), data_},
        channels_);
  }
  // For the way back through the statistics, given the means of w·g and of w·g·x̂ over what has them in common.
  void backward(const double* rstd, const double* mean_g, const double* mean_product) {
    kernels().channel_slopes({wide_, rstd, data_, mean_g, mean_product, array(5), array(6)}, channels_);
    with_slope_ = true;
  }
  // What `first` leaves of the mean is missing from the sums of g·x̂ that were formed with it.
  void complete(const double* rstd, const double* of_g, double* of_product) const {
    for (int64_t c = 0; c < channels_; c++) of_product[c] -= data_[c] * rstd[c] * of_g[c];
  }

  Coefficients get() const {
    return {wide_, array(1), array(2), array(3), array(4), with_slope_ ? array(5) : nullptr, array(6)};
  }

 private:
  void* array(int k) const { return (char*)(data_ + channels_) + (k - 1) * channels_ * (wide_ ? 8 : 4); }

  bool wide_ = false, with_slope_ = false;
  int64_t channels_;
  double* data_;  // what `first` leaves, then six arrays in the compute type
};

inline int64_t lines(const Channels& l) { return l.inner == 1 ? l.outer : l.outer * l.channels; }

// f over the lines of x, from the last to the first: what was read last is still in a cache.
template <class F>
void over_lines(const Channels& l, F f) {
  const int64_t all = lines(l), each = l.outer * l.channels * l.inner / all;
  const int64_t step = std::max<int64_t>(1, (1 << 16) / each);
  parallel(all, each, [&](int64_t begin, int64_t end) {
    for (int64_t stop = end; stop > begin; stop -= step) f(std::max(begin, stop - step), stop);
  });
}

struct Epilogue {
  const void* add = nullptr;
  Activation activation = Activation::kNone;
};

inline Tensor run_affine(const Image& x, const Coefficient& at, const Epilogue& after = {}) {
  Tensor y = x.like();
  const ChannelAffine a{x.layout, x.data(),         after.add,         y.mutable_data_ptr(),
                        at.get(), after.activation, streams(x.bytes())};
  over_lines(x.layout, [&](int64_t b, int64_t e) { kernels().channel_affine(a, b, e); });
  return y;
}

// The sums of g, and of g·x̂ (of none if x is not looked at), of all channels: (2, channels). With `g` that is kept too.
inline double* run_sums(
    const Image& x, const Tensor& dy, const Coefficient& at, const double* rstd, Scratch& scratch,
    const Epilogue& after = {}, void* g = nullptr, bool with_x = true) {
  const Channels& l = x.layout;
  const Parts parts = parts_of(l);
  double* held = scratch.take<double>(parts.count() * 2 * l.channels);
  const ChannelSums a{
      l, parts, dy.const_data_ptr(), with_x ? x.data() : nullptr, after.add, g, at.get(), after.activation, held};
  const int64_t total = units(l, parts);
  parallel(total, 2 * x.held.numel() / total, [&](int64_t b, int64_t e) { kernels().channel_sums(a, b, e); });
  double* out = scratch.take<double>(2 * l.channels);
  const JoinSums j{parts.count(), 2 * l.channels, held, out};
  parallel(2 * l.channels, parts.count(), [&](int64_t b, int64_t e) { kernels().join_sums(j, b, e); });
  if (with_x) at.complete(rstd, out, out + l.channels);
  return out;
}

inline Tensor run_gradient(const Image& x, const void* dy, const Coefficient& at, Activation activation) {
  Tensor dx = x.like();
  const ChannelGradient a{x.layout, dy, x.data(), dx.mutable_data_ptr(), at.get(), activation, streams(x.bytes())};
  over_lines(x.layout, [&](int64_t b, int64_t e) { kernels().channel_gradient(a, b, e); });
  return dx;
}

// Doubles as a vector of another type.
inline Tensor as_type(const double* values, int64_t n, at::ScalarType type) {
  Tensor out = output({n}, type);
  switch (type) {
    case at::kFloat: std::copy_n(values, n, out.mutable_data_ptr<float>()); break;
    case at::kDouble: std::copy_n(values, n, out.mutable_data_ptr<double>()); break;
    case at::kBFloat16:
      for (int64_t i = 0; i < n; i++) out.mutable_data_ptr<c10::BFloat16>()[i] = (float)values[i];
      break;
    default:
      for (int64_t i = 0; i < n; i++) out.mutable_data_ptr<c10::Half>()[i] = (float)values[i];
  }
  return out;
}

// What may be added to x's affine natively; of another layout it is copied.
inline bool is_add(const MaybeTensor& add, const Tensor& x) { return !add || is_like(*add, x); }

}  // namespace musigma
