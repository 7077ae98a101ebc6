// moments at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/channels.h"
#include "../_native/masked.h"

namespace musigma::moments {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, at::IntArrayRef, const MaybeTensor&);
using Backward = Tensor(
    const MaybeTensor&, const MaybeTensor&, const Tensor&, at::IntArrayRef, const MaybeTensor&, const Tensor&,
    const Tensor&, std::array<bool, 1>);

inline auto& forward_op() {
  static auto h = op<Forward>("musigma::moments");
  return h;
}
inline auto& backward_op() {
  static auto h = op<Backward>("musigma::moments_backward");
  return h;
}
inline auto& reference() {
  static auto h = op<Forward>("musigma::moments_reference");
  return h;
}
inline auto& backward_reference() {
  static auto h = op<Backward>("musigma::moments_backward_reference");
  return h;
}

// x as (outer, channels, inner), with the kept dims, in order, as channels: `held` is x permuted by `order`, contiguous.
// A copy is made only where the kept dims don't lie side by side in memory, or x is not dense.
struct View {
  Tensor held;
  Channels layout;
  std::vector<int64_t> order, groups, kept;  // groups: 0 for a dim that is part of outer, 1 of channels, 2 of inner

  View(const Tensor& x, const std::vector<bool>& gone, DType type) : held(x), order(x.dim()), groups(x.dim()) {
    layout.type = type;
    for (int64_t d = 0; d < x.dim(); d++) order[d] = d;
    for (int64_t d = 0; d < x.dim(); d++)
      if (!gone[d]) kept.push_back(x.size(d));
    if (!x.is_contiguous() && x.is_non_overlapping_and_dense()) {
      // Dims from the outermost in memory to the innermost.
      const auto strides = x.strides();
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
    }
    if (!fits(x, gone)) {
      // What lies innermost stays there.
      const bool last = gone[order.back()];
      std::stable_sort(order.begin(), order.end());
      std::stable_partition(order.begin(), order.end(), [&](int64_t d) { return gone[d] != last; });
      fits(x, gone);
    }
    if (!std::is_sorted(order.begin(), order.end())) held = x.permute(order);
    held = held.contiguous();
  }

  // A tensor like `held` with x's dims in their own order.
  Tensor restored(const Tensor& t) const {
    std::vector<int64_t> inverse(order.size());
    for (size_t i = 0; i < order.size(); i++) inverse[order[i]] = i;
    return t.permute(inverse);
  }

 private:
  bool fits(const Tensor& x, const std::vector<bool>& gone) {
    layout.outer = layout.channels = layout.inner = 1;
    std::fill(groups.begin(), groups.end(), 0);
    int64_t last = -1;
    bool after = false;
    for (const int64_t d : order) {
      const int64_t n = x.size(d);
      if (n == 1) continue;
      if (gone[d]) {
        (last < 0 ? layout.outer : layout.inner) *= n;
        groups[d] = last < 0 ? 0 : 2;
        after = last >= 0;
      } else {
        if (after || d < last) return false;
        layout.channels *= n;
        groups[d] = 1;
        last = d;
      }
    }
    if (last < 0) {
      // Without kept dims everything came before the first: one channel, whose values lie along it.
      std::swap(layout.outer, layout.inner);
      for (int64_t& g : groups) g = 2;
    }
    return true;
  }
};

// The dims to reduce, as flags; false for what the reference has to refuse.
inline bool flags(const Tensor& x, at::IntArrayRef dims, const MaybeTensor& mask, std::vector<bool>& gone) {
  gone.assign(x.dim(), false);
  for (const int64_t d : dims) {
    if (d < -x.dim() || d >= x.dim() || gone[d < 0 ? d + x.dim() : d]) return false;
    gone[d < 0 ? d + x.dim() : d] = true;
  }
  return is_mask(mask, x);
}

inline bool supported(const Tensor& x, DType& type) { return enabled && storage_type(x, type) && x.numel() > 0; }

// Integers in the narrowest floating type that holds all of them, or in double.
inline Tensor floating(const Tensor& x) {
  if (!at::isIntegralType(x.scalar_type(), true)) return x;
  return x.to(x.element_size() <= 2 && x.scalar_type() != at::kUInt16 ? at::kFloat : at::kDouble);
}

inline Result forward(const Tensor& input, at::IntArrayRef dims, const MaybeTensor& mask) {
  DType type;
  std::vector<bool> gone;
  if (!enabled || !flags(input, dims, mask, gone)) return reference().call(input, dims, mask);
  const Tensor values = floating(input);
  if (!supported(values, type)) return reference().call(input, dims, mask);
  const View v(values, gone, type);
  const Image x(v.held, v.layout);
  if (mask) {
    const MaskedStatistics s = masked_statistics(x, Mask(*mask, v.layout, v.order, v.groups, input.sizes()));
    return {s.count.view(v.kept), s.mean.view(v.kept), s.m2.view(v.kept)};
  }
  Scratch scratch;
  Tensor count = doubles({}), mean = doubles(v.kept), m2 = doubles(v.kept);
  *count.mutable_data_ptr<double>() = (double)x.count();
  statistics(x, mean.mutable_data_ptr<double>(), m2.mutable_data_ptr<double>(), scratch, true);
  return {std::move(count), std::move(mean), std::move(m2)};
}

// weight·(2·dm2·(x - mean) + dmean/count)
inline Tensor gradient(
    const View& v, const Tensor& input, const MaybeTensor& mask, const Tensor& count, const Tensor& mean,
    const MaybeTensor& dmean, const MaybeTensor& dm2) {
  Scratch scratch;
  const Image x(v.held, v.layout);
  const int64_t channels = v.layout.channels;
  const double *a = values_of(dmean, 0.0, channels, scratch), *b = values_of(dm2, 0.0, channels, scratch);
  std::vector<double> slope(channels), shift(channels);
  if (mask) {
    const double* n = values_of(count, 1.0, channels, scratch);
    for (int64_t c = 0; c < channels; c++) slope[c] = 2.0 * b[c], shift[c] = n[c] == 0 ? 0.0 : a[c] / n[c];
    const Tensor center = mean.contiguous();
    return masked_gradient(x, Mask(*mask, v.layout, v.order, v.groups, input.sizes()), center, slope, shift);
  }
  // Where float32 holds the slopes.
  bool wide = v.layout.type == DType::kFloat64;
  for (int64_t c = 0; c < channels; c++) {
    slope[c] = 2.0 * b[c], shift[c] = a[c] / (double)x.count();
    wide = wide || std::abs(b[c]) > 0x1p50 || (b[c] != 0 && std::abs(b[c]) < 0x1p-50);
  }
  Coefficient at(channels, scratch);
  at.forward(
      wide, Statistics{values_of(mean, 0.0, channels, scratch), nullptr},
      values_of(std::nullopt, 1.0, channels, scratch), slope.data(), shift.data());
  return run_affine(x, at);
}

inline Tensor backward(
    const MaybeTensor& dmean, const MaybeTensor& dm2, const Tensor& input, at::IntArrayRef dims,
    const MaybeTensor& mask, const Tensor& count, const Tensor& mean, std::array<bool, 1> needs) {
  DType type;
  std::vector<bool> gone;
  const auto slow = [&] { return backward_reference().call(dmean, dm2, input, dims, mask, count, mean, needs); };
  if (!supported(input, type) || !needs[0] || !flags(input, dims, mask, gone)) return slow();
  const View v(input, gone, type);
  const auto fits = [&](const MaybeTensor& t) { return !t || is_statistic(*t, v.layout.channels); };
  if (!fits(mean) || !fits(dmean) || !fits(dm2) || (mask && !fits(count))) return slow();
  const Tensor dx = gradient(v, input, mask, count, mean, dmean, dm2);
  return v.restored(dx).contiguous(memory_format(input));
}

struct Op {
  static constexpr const char* kName = "MomentsBackward";
  static constexpr int kInputs = 1, kSaved = 4;  // x; x, mask, count, mean
  using Plain = std::tuple<std::vector<int64_t>>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    // gradients come in for the outputs that a node was set behind: mean, then M2
    return {backward_op().call(
        maybe(grads[0]), maybe(grads[1]), saved[0], std::get<0>(plain), maybe(saved[1]), saved[2], saved[3], needs)};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, at::IntArrayRef dims, const MaybeTensor& mask) {
  // Gradients for weights of a mask are the reference's.
  if (has_tangent(x, mask) || requires_grad(mask)) return reference().call(x, dims, mask);
  return record<Op>(
      [&] { return forward_op().redispatch(keys & c10::after_autograd_keyset, x, dims, mask); }, {dims.vec()},
      [&](Result& r) { return std::array<Tensor, 4>{x, tensor(mask), std::get<0>(r), std::get<1>(r)}; },
      [](Result& r) { return std::array<Tensor*, 2>{&std::get<1>(r), &std::get<2>(r)}; }, x);
}

inline Tensor backward_autograd(
    c10::DispatchKeySet keys, const MaybeTensor& dmean, const MaybeTensor& dm2, const Tensor& x, at::IntArrayRef dims,
    const MaybeTensor& mask, const Tensor& count, const Tensor& mean, std::array<bool, 1> needs) {
  if (has_tangent(dmean, dm2, x, mask) || requires_grad(dmean, dm2, x, mask))
    return backward_reference().call(dmean, dm2, x, dims, mask, count, mean, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(keys & c10::after_autograd_keyset, dmean, dm2, x, dims, mask, count, mean, needs);
}

}  // namespace musigma::moments
