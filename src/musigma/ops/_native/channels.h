// Tensors of channels, (n, c, *spatial), on their way to the kernels: layout, statistics, coefficients.
#pragma once

#include <cmath>
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
};

inline Tensor doubles(const Tensor&, at::IntArrayRef shape) { return output(shape, at::kDouble); }

// Mean and M2 of every channel. For float64 the mean is pivot + offset; for every other type pivot is empty.
struct Statistics {
  Tensor mean, m2, pivot, offset;
};

inline Statistics statistics(const Image& x, bool wide = false) {
  const Channels& l = x.layout;
  const Parts parts = parts_of(l);
  Statistics s{doubles(x.held, {l.channels}), doubles(x.held, {l.channels}), Tensor(), Tensor()};
  double* pivot = nullptr;
  if (l.type == DType::kFloat64) {
    s.pivot = doubles(x.held, {l.channels});
    pivot = s.pivot.mutable_data_ptr<double>();
    for (int64_t c = 0; c < l.channels; c++) pivot[c] = ((const double*)x.data())[c * l.inner];
  }
  const Tensor held = doubles(x.held, {2, parts.count(), l.channels});
  double* mean = held.mutable_data_ptr<double>();
  double* m2 = mean + parts.count() * l.channels;
  const ChannelMoments a{l, parts, wide, x.data(), pivot, mean, m2};
  const int64_t total = units(l, parts);
  parallel(total, x.held.numel() / total, [&](int64_t b, int64_t e) { kernels().channel_moments(a, b, e); });
  const JoinMoments j{l, parts, mean, m2, s.mean.mutable_data_ptr<double>(), s.m2.mutable_data_ptr<double>()};
  parallel(l.channels, parts.count(), [&](int64_t b, int64_t e) { kernels().join_moments(j, b, e); });
  if (pivot) {
    s.offset = s.mean;
    s.mean = s.pivot + s.offset;
  }
  return s;
}

// A parameter's values as doubles, whatever its type.
class Values {
 public:
  Values(const MaybeTensor& p, double otherwise) : otherwise_(otherwise) {
    if (!p) return;
    held_ = p->contiguous();
    switch (held_.scalar_type()) {
      case at::kFloat: copy<float>(); break;
      case at::kBFloat16: copy<c10::BFloat16>(); break;
      case at::kHalf: copy<c10::Half>(); break;
      default: data_ = held_.const_data_ptr<double>();
    }
  }
  Values(const Values&) = delete;
  double operator[](int64_t c) const { return data_ ? data_[c] : otherwise_; }

 private:
  template <class T>
  void copy() {
    const T* from = held_.const_data_ptr<T>();
    copied_.assign(from, from + held_.numel());
    data_ = copied_.data();
  }

  Tensor held_;
  std::vector<double> copied_;
  const double* data_ = nullptr;
  double otherwise_;
};

inline bool readable(const MaybeTensor& p) {
  DType type;
  return !p || storage_type(*p, type);
}

inline bool float_range(double square) { return square >= 0x1p-100 && square <= 0x1p100; }

// Arrays of one coefficient a channel, in the compute type: five of them, filled channel by channel.
class Coefficient {
 public:
  Coefficient(const Tensor&, int64_t channels, bool wide)
      : wide_(wide), channels_(channels), held_(output({5, channels}, wide ? at::kDouble : at::kFloat)) {
    data_ = held_.mutable_data_ptr();
  }
  void center(int64_t c, double mean) {
    const double first = wide_ ? mean : (double)(float)mean;
    set(0, c, first), set(1, c, mean - first);
  }
  void center(int64_t c, double pivot, double offset) { set(0, c, pivot), set(1, c, offset); }
  void scale(int64_t c, double v) { set(2, c, v); }
  void shift(int64_t c, double v) { set(3, c, v); }
  void slope(int64_t c, double v) { set(4, c, v); }

  Coefficients get() const { return {wide_, array(0), array(1), array(2), array(3)}; }
  const void* slopes() const { return array(4); }

 private:
  void set(int k, int64_t c, double v) {
    if (wide_)
      ((double*)data_)[k * channels_ + c] = v;
    else
      ((float*)data_)[k * channels_ + c] = (float)v;
  }
  const void* array(int k) const { return (const char*)data_ + k * channels_ * (wide_ ? 8 : 4); }

  bool wide_;
  int64_t channels_;
  Tensor held_;
  void* data_;
};

inline int64_t lines(const Channels& l) { return l.inner == 1 ? l.outer : l.outer * l.channels; }

inline Tensor run_affine(const Image& x, const Coefficient& at) {
  Tensor y = x.like();
  const ChannelAffine a{x.layout, x.data(), y.mutable_data_ptr(), at.get()};
  parallel(lines(x.layout), x.held.numel() / lines(x.layout),
           [&](int64_t b, int64_t e) { kernels().channel_affine(a, b, e); });
  return y;
}

// The sums of dy, and of dy times x centered and scaled (x may be null): (2, channels).
inline Tensor run_sums(const Image& x, const Tensor& dy, const Coefficient& at, bool with_x = true) {
  const Channels& l = x.layout;
  const Parts parts = parts_of(l);
  const Tensor held = doubles(x.held, {parts.count(), 2, l.channels});
  const ChannelSums a{l, parts, dy.const_data_ptr(), with_x ? x.data() : nullptr, at.get(), held.mutable_data_ptr<double>()};
  const int64_t total = units(l, parts);
  parallel(total, 2 * x.held.numel() / total, [&](int64_t b, int64_t e) { kernels().channel_sums(a, b, e); });
  Tensor out = doubles(x.held, {2, l.channels});
  const JoinSums j{parts.count(), 2 * l.channels, a.sums, out.mutable_data_ptr<double>()};
  parallel(2 * l.channels, parts.count(), [&](int64_t b, int64_t e) { kernels().join_sums(j, b, e); });
  return out;
}

inline Tensor run_gradient(const Image& x, const Tensor& dy, const Coefficient& at, bool with_x) {
  Tensor dx = x.like();
  const ChannelGradient a{x.layout, dy.const_data_ptr(), x.data(), dx.mutable_data_ptr(), at.get(),
                          with_x ? at.slopes() : nullptr};
  parallel(lines(x.layout), 2 * x.held.numel() / lines(x.layout),
           [&](int64_t b, int64_t e) { kernels().channel_gradient(a, b, e); });
  return dx;
}

// Doubles as a vector of another type.
inline Tensor as_type(const double* values, int64_t n, const Tensor&, at::ScalarType type) {
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

}  // namespace musigma
