// batch_norm at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/channels.h"

namespace musigma::batch_norm {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, const MaybeTensor&, const MaybeTensor&, double);
using Backward = Result(
    const Tensor&, const Tensor&, const MaybeTensor&, const Tensor&, const Tensor&, double, std::array<bool, 3>);

inline auto& forward_op() {
  static auto h = op<Forward>("musigma::batch_norm");
  return h;
}
inline auto& backward_op() {
  static auto h = op<Backward>("musigma::batch_norm_backward");
  return h;
}
inline auto& reference() {
  static auto h = op<Forward>("musigma::batch_norm_reference");
  return h;
}
inline auto& backward_reference() {
  static auto h = op<Backward>("musigma::batch_norm_backward_reference");
  return h;
}

inline bool supported(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, DType& type) {
  if (!enabled || !storage_type(x, type) || x.dim() < 2 || x.numel() == 0) return false;
  const auto channels = x.sizes().slice(1, 1);
  return is_parameter(weight, channels) && is_parameter(bias, channels) && readable(weight) && readable(bias);
}

inline void center(Coefficient& at, const Statistics& s, int64_t c) {
  if (s.pivot.defined())
    at.center(c, s.pivot.const_data_ptr<double>()[c], s.offset.const_data_ptr<double>()[c]);
  else
    at.center(c, s.mean.const_data_ptr<double>()[c]);
}

inline bool wide(const Image& x, const double* m2, double eps) {
  if (x.layout.type == DType::kFloat64) return true;
  for (int64_t c = 0; c < x.layout.channels; c++)
    if (!float_range(m2[c] / (double)x.count() + eps)) return true;
  return false;
}

inline Result forward(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  DType type;
  if (!supported(input, weight, bias, type)) return reference().call(input, weight, bias, eps);
  const Image x(input, type);
  Statistics s = statistics(x);
  const double* m2 = s.m2.const_data_ptr<double>();
  Coefficient at(x.held, x.layout.channels, wide(x, m2, eps));
  const Values w(weight, 1.0), b(bias, 0.0);
  for (int64_t c = 0; c < x.layout.channels; c++) {
    center(at, s, c);
    at.scale(c, w[c] / std::sqrt(m2[c] / (double)x.count() + eps));
    at.shift(c, b[c]);
  }
  Tensor y = run_affine(x, at);
  return {std::move(y), std::move(s.mean), std::move(s.m2)};
}

inline Result backward(
    const Tensor& grad, const Tensor& input, const MaybeTensor& weight, const Tensor& mean, const Tensor& m2_, double eps,
    std::array<bool, 3> needs) {
  DType type;
  if (!supported(input, weight, std::nullopt, type) || !is_like(grad, input) ||
      !is_statistic(mean, input.size(1)) || !is_statistic(m2_, input.size(1)))
    return backward_reference().call(grad, input, weight, mean, m2_, eps, needs);
  const Image x(input, type);
  const Tensor dy = x.alike(grad);
  const int64_t channels = x.layout.channels;
  // The saved mean is one double, enough for every type but float64.
  const Statistics s = type == DType::kFloat64 ? statistics(x) : Statistics{mean.contiguous(), m2_.contiguous(), {}, {}};
  const double* m2 = s.m2.const_data_ptr<double>();
  Coefficient at(x.held, channels, wide(x, m2, eps));
  const double n = (double)x.count();
  for (int64_t c = 0; c < channels; c++) center(at, s, c), at.scale(c, 1.0 / std::sqrt(m2[c] / n + eps));
  const Tensor sums = run_sums(x, dy, at);
  const double* sum = sums.const_data_ptr<double>();  // of dy, then of dy·x̂
  Tensor dx;
  if (needs[0]) {
    // dx = rstd·w·(dy − mean(dy) − x̂·mean(dy·x̂))
    const Values w(weight, 1.0);
    for (int64_t c = 0; c < channels; c++) {
      const double rstd = 1.0 / std::sqrt(m2[c] / n + eps), scale = w[c] * rstd;
      at.scale(c, scale);
      at.slope(c, -scale * rstd * (sum[channels + c] / n));
      at.shift(c, -scale * (sum[c] / n));
    }
    dx = run_gradient(x, dy, at, true);
  }
  const auto parameter = parameter_type(input, weight);
  return {needs[0] ? dx : none(input), needs[1] ? as_type(sum + channels, channels, input, parameter) : none(input),
          needs[2] ? as_type(sum, channels, input, parameter) : none(input)};
}

struct Op {
  static constexpr const char* kName = "BatchNormBackward";
  static constexpr int kInputs = 3, kSaved = 4;  // x, weight, bias; x, weight, mean, m2
  using Plain = std::tuple<double>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    if (!grads[0].defined()) return variable_list(kInputs);
    auto [dx, dweight, dbias] =
        backward_op().call(grads[0], saved[0], maybe(saved[1]), saved[2], saved[3], std::get<0>(plain), needs);
    return {needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), needs[2] ? dbias : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  if (has_tangent(x, weight, bias)) return reference().call(x, weight, bias, eps);
  return record<Op>(
      [&] { return forward_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, eps); }, {eps},
      [&](Result& r) { return std::array<Tensor, 4>{x, tensor(weight), std::get<1>(r), std::get<2>(r)}; },
      [](Result& r) { return std::array<Tensor*, 1>{&std::get<0>(r)}; }, x, weight, bias);
}

inline Result backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, const MaybeTensor& weight, const Tensor& mean,
    const Tensor& m2, double eps, std::array<bool, 3> needs) {
  if (has_tangent(dy, x, weight) || requires_grad(dy, x, weight))
    return backward_reference().call(dy, x, weight, mean, m2, eps, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(keys & c10::after_autograd_keyset, dy, x, weight, mean, m2, eps, needs);
}

}  // namespace musigma::batch_norm
