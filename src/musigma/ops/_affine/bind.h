// affine at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/channels.h"

namespace musigma::affine {

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Forward =
    Tensor(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, double);
using Backward = Grads(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double, std::array<bool, 5>);

inline auto& forward_op() {
  static auto h = op<Forward>("musigma::affine");
  return h;
}
inline auto& backward_op() {
  static auto h = op<Backward>("musigma::affine_backward");
  return h;
}
inline auto& reference() {
  static auto h = op<Forward>("musigma::affine_reference");
  return h;
}
inline auto& backward_reference() {
  static auto h = op<Backward>("musigma::affine_backward_reference");
  return h;
}

inline bool supported(
    const Tensor& x, const Tensor& mean, const Tensor& var, const MaybeTensor& weight, const MaybeTensor& bias,
    DType& type) {
  if (!enabled || !storage_type(x, type) || x.dim() < 2 || x.numel() == 0) return false;
  const auto channels = x.sizes().slice(1, 1);
  for (const MaybeTensor& v : {MaybeTensor(mean), MaybeTensor(var), weight, bias})
    if (!is_parameter(v, channels) || !readable(v)) return false;
  return true;
}

inline bool wide(const Image& x, const Values& var, double eps) {
  if (x.layout.type == DType::kFloat64) return true;
  for (int64_t c = 0; c < x.layout.channels; c++)
    if (!float_range(var[c] + eps)) return true;
  return false;
}

inline Tensor forward(
    const Tensor& input, const Tensor& mean, const Tensor& var, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps) {
  DType type;
  if (!supported(input, mean, var, weight, bias, type)) return reference().call(input, mean, var, weight, bias, eps);
  const Image x(input, type);
  const Values m(mean, 0.0), v(var, 1.0), w(weight, 1.0), b(bias, 0.0);
  Coefficient at(x.held, x.layout.channels, wide(x, v, eps));
  for (int64_t c = 0; c < x.layout.channels; c++) {
    at.center(c, m[c]);
    at.scale(c, w[c] / std::sqrt(v[c] + eps));
    at.shift(c, b[c]);
  }
  return run_affine(x, at);
}

inline Grads backward(
    const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& var, const MaybeTensor& weight, double eps,
    std::array<bool, 5> needs) {
  DType type;
  if (!supported(input, mean, var, weight, std::nullopt, type) || !is_like(grad, input))
    return backward_reference().call(grad, input, mean, var, weight, eps, needs);
  const Image x(input, type);
  const Tensor dy = x.alike(grad);
  const int64_t channels = x.layout.channels;
  const Values m(mean, 0.0), v(var, 1.0), w(weight, 1.0);
  Coefficient at(x.held, channels, wide(x, v, eps));
  const auto rstd = [&](int64_t c) { return 1.0 / std::sqrt(v[c] + eps); };
  for (int64_t c = 0; c < channels; c++) at.center(c, m[c]), at.scale(c, rstd(c));
  Tensor dx = none(input), dmean = dx, dvar = dx, dweight = dx, dbias = dx;
  if (needs[1] || needs[2] || needs[3] || needs[4]) {
    const Tensor sums = run_sums(x, dy, at, needs[2] || needs[3]);
    const double *sum = sums.const_data_ptr<double>(), *product = sum + channels;  // of dy, of dy·x̂
    std::vector<double> values(channels);
    const auto vector = [&](at::ScalarType to, auto f) {
      for (int64_t c = 0; c < channels; c++) values[c] = f(c);
      return as_type(values.data(), channels, input, to);
    };
    const auto parameter = parameter_type(input, weight);
    if (needs[1]) dmean = vector(mean.scalar_type(), [&](int64_t c) { return -w[c] * rstd(c) * sum[c]; });
    if (needs[2])
      dvar = vector(var.scalar_type(), [&](int64_t c) { return -0.5 * w[c] * rstd(c) * rstd(c) * product[c]; });
    if (needs[3]) dweight = as_type(product, channels, input, parameter);
    if (needs[4]) dbias = as_type(sum, channels, input, parameter);
  }
  if (needs[0]) {
    for (int64_t c = 0; c < channels; c++) at.scale(c, w[c] * rstd(c));
    dx = run_gradient(x, dy, at, false);
  }
  return {dx, dmean, dvar, dweight, dbias};
}

struct Op {
  static constexpr const char* kName = "AffineBackward";
  static constexpr int kInputs = 5, kSaved = 4;  // x, mean, var, weight, bias; x, mean, var, weight
  using Plain = std::tuple<double>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    auto [dx, dmean, dvar, dweight, dbias] =
        backward_op().call(grads[0], saved[0], saved[1], saved[2], maybe(saved[3]), std::get<0>(plain), needs);
    return {needs[0] ? dx : Tensor(), needs[1] ? dmean : Tensor(), needs[2] ? dvar : Tensor(),
            needs[3] ? dweight : Tensor(), needs[4] ? dbias : Tensor()};
  }
};

inline Tensor forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, const Tensor& mean, const Tensor& var, const MaybeTensor& weight,
    const MaybeTensor& bias, double eps) {
  if (has_tangent(x, mean, var, weight, bias)) return reference().call(x, mean, var, weight, bias, eps);
  return record<Op>(
      [&] { return forward_op().redispatch(keys & c10::after_autograd_keyset, x, mean, var, weight, bias, eps); }, {eps},
      [&](Tensor&) { return std::array<Tensor, 4>{x, mean, var, tensor(weight)}; },
      [](Tensor& y) { return std::array<Tensor*, 1>{&y}; }, x, mean, var, weight, bias);
}

inline Grads backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& var,
    const MaybeTensor& weight, double eps, std::array<bool, 5> needs) {
  if (has_tangent(dy, x, mean, var, weight) || requires_grad(dy, x, mean, var, weight))
    return backward_reference().call(dy, x, mean, var, weight, eps, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(keys & c10::after_autograd_keyset, dy, x, mean, var, weight, eps, needs);
}

}  // namespace musigma::affine
