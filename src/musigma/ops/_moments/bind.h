// moments at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/channels.h"

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

// x as (outer, channels, inner) with the kept dims, in order, as channels. Masks, and kept dims that don't lie side by
// side in memory, are the reference's.
struct View {
  Tensor held;
  Channels layout;
  std::vector<int64_t> kept;
  bool fits = false;

  View(const Tensor& x, at::IntArrayRef dims, DType type) : held(x) {
    std::vector<bool> gone(x.dim(), false);
    for (const int64_t d : dims) {
      if (d < -x.dim() || d >= x.dim() || gone[d < 0 ? d + x.dim() : d]) return;
      gone[d < 0 ? d + x.dim() : d] = true;
    }
    // Dims from the outermost in memory to the innermost.
    std::vector<int64_t> order(x.dim());
    for (int64_t d = 0; d < x.dim(); d++) order[d] = d;
    if (!x.is_contiguous()) {
      if (!x.is_non_overlapping_and_dense()) held = x.contiguous();
      const auto strides = held.strides();
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
    }
    layout = {type, 1, 1, 1};
    int64_t last = -1;
    bool after = false;
    for (const int64_t d : order) {
      const int64_t n = x.size(d);
      if (n == 1) continue;
      if (gone[d]) {
        (last < 0 ? layout.outer : layout.inner) *= n;
        after = last >= 0;
      } else {
        if (after || d < last) return;
        layout.channels *= n;
        last = d;
      }
    }
    // Without kept dims everything came before the first: one channel, whose values lie along it.
    if (last < 0) std::swap(layout.outer, layout.inner);
    for (int64_t d = 0; d < x.dim(); d++)
      if (!gone[d]) kept.push_back(x.size(d));
    fits = true;
  }
};

inline bool supported(const Tensor& x, const MaybeTensor& mask, DType& type) {
  return enabled && storage_type(x, type) && x.numel() > 0 && !mask;
}

inline Result forward(const Tensor& input, at::IntArrayRef dims, const MaybeTensor& mask) {
  DType type;
  if (!supported(input, mask, type)) return reference().call(input, dims, mask);
  const View v(input, dims, type);
  if (!v.fits) return reference().call(input, dims, mask);
  Image x(v.held, v.layout);
  Statistics s = statistics(x, true);
  return {at::full({}, (double)x.count(), input.options().dtype(at::kDouble)), s.mean.view(v.kept), s.m2.view(v.kept)};
}

inline Tensor backward(
    const MaybeTensor& dmean, const MaybeTensor& dm2, const Tensor& input, at::IntArrayRef dims, const MaybeTensor& mask,
    const Tensor& count, const Tensor& mean, std::array<bool, 1> needs) {
  DType type;
  const auto slow = [&] { return backward_reference().call(dmean, dm2, input, dims, mask, count, mean, needs); };
  if (!supported(input, mask, type) || !needs[0]) return slow();
  const View v(input, dims, type);
  // The reference returns a contiguous gradient.
  if (!v.fits || !v.held.is_contiguous()) return slow();
  const auto fits = [&](const MaybeTensor& t) { return !t || is_statistic(*t, v.layout.channels); };
  if (!is_statistic(mean, v.layout.channels) || !fits(dmean) || !fits(dm2)) return slow();
  Image x(v.held, v.layout);
  const int64_t channels = v.layout.channels;
  const Values m(mean, 0.0), a(dmean, 0.0), b(dm2, 0.0);
  bool wide = type == DType::kFloat64;
  for (int64_t c = 0; c < channels; c++) wide = wide || std::abs(b[c]) > 0x1p50 || (b[c] != 0 && std::abs(b[c]) < 0x1p-50);
  Coefficient at(x.held, channels, wide);
  const double n = (double)x.count();
  for (int64_t c = 0; c < channels; c++) at.center(c, m[c]), at.scale(c, 2.0 * b[c]), at.shift(c, a[c] / n);
  return run_affine(x, at);
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
