// batch_norm at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/channels.h"

namespace musigma::batch_norm {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, const MaybeTensor&, const MaybeTensor&, double, const MaybeTensor&, Name);
using Backward = Grads(
    const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, const Tensor&,
    const Tensor&, double, Name, std::array<bool, 4>);

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

inline bool supported(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& add, DType& type) {
  if (!enabled || !storage_type(x, type) || x.dim() < 2 || x.numel() == 0 || !is_add(add, x)) return false;
  const auto channels = x.sizes().slice(1, 1);
  return is_parameter(weight, channels) && is_parameter(bias, channels) && readable(weight) && readable(bias);
}

inline Result forward(
    const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, double eps, const MaybeTensor& add,
    Name activation) {
  DType type;
  Activation kind;
  if (!supported(input, weight, bias, add, type) || !activation_of(activation, kind))
    return reference().call(input, weight, bias, eps, add, activation);
  Scratch scratch;
  const Image x(input, type);
  const Tensor more = add ? x.alike(*add) : Tensor();
  const int64_t channels = x.layout.channels;
  Tensor mean = doubles({channels}), m2 = doubles({channels});
  const Statistics s = statistics(x, mean.mutable_data_ptr<double>(), m2.mutable_data_ptr<double>(), scratch);
  const auto [rstd, wide] = spread_of(type, s.m2, (double)x.count(), eps, channels, scratch);
  Coefficient at(channels, scratch);
  at.forward(wide, s, rstd, values_of(weight, 1.0, channels, scratch), values_of(bias, 0.0, channels, scratch));
  Tensor y = run_affine(x, at, {add ? more.const_data_ptr() : nullptr, kind});
  return {std::move(y), std::move(mean), std::move(m2)};
}

inline Grads backward(
    const Tensor& grad, const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& add,
    const Tensor& mean, const Tensor& m2, double eps, Name activation, std::array<bool, 4> needs) {
  DType type;
  Activation kind;
  if (!supported(input, weight, bias, add, type) || !activation_of(activation, kind) || !is_like(grad, input) ||
      !is_statistic(mean, input.size(1)) || !is_statistic(m2, input.size(1)))
    return backward_reference().call(grad, input, weight, bias, add, mean, m2, eps, activation, needs);
  Scratch scratch;
  const Image x(input, type);
  const Tensor dy = x.alike(grad), more = add ? x.alike(*add) : Tensor();
  const int64_t channels = x.layout.channels;
  const Tensor mean_c = mean.contiguous(), m2_c = m2.contiguous();
  Statistics s{mean_c.const_data_ptr<double>(), m2_c.const_data_ptr<double>()};
  // The saved mean is one double, enough for every type but float64.
  if (type == DType::kFloat64)
    s = statistics(x, scratch.take<double>(channels), scratch.take<double>(channels), scratch);
  const double n = (double)x.count();
  const auto [rstd, wide] = spread_of(type, s.m2, n, eps, channels, scratch);
  const double *w = values_of(weight, 1.0, channels, scratch), *b = values_of(bias, 0.0, channels, scratch);
  Coefficient at(channels, scratch);
  at.forward(wide, s, rstd, w, b);
  // What comes back through an activation behind a sum is the gradient of what was added, and the rest goes on from it.
  const bool through_sum = kind != Activation::kNone && add.has_value();
  Tensor dadd = through_sum ? x.like() : needs[3] ? dy.clone() : none(input);
  const double* sum = run_sums(
      x, dy, at, rstd, scratch, {add ? more.const_data_ptr() : nullptr, kind},
      through_sum ? dadd.mutable_data_ptr() : nullptr);
  Tensor dx = none(input);
  if (needs[0]) {
    double *mean_g = scratch.take<double>(channels), *mean_product = scratch.take<double>(channels);
    for (int64_t c = 0; c < channels; c++)
      mean_g[c] = w[c] * sum[c] / n, mean_product[c] = w[c] * sum[channels + c] / n;
    at.backward(rstd, mean_g, mean_product);
    dx = through_sum ? run_gradient(x, dadd.const_data_ptr(), at, Activation::kNone)
                     : run_gradient(x, dy.const_data_ptr(), at, kind);
  }
  const auto parameter = parameter_type(input, weight);
  return {
      std::move(dx), needs[1] ? as_type(sum + channels, channels, parameter) : none(input),
      needs[2] ? as_type(sum, channels, parameter) : none(input), needs[3] ? std::move(dadd) : none(input)};
}

struct Op {
  static constexpr const char* kName = "BatchNormBackward";
  static constexpr int kInputs = 4, kSaved = 6;  // x, weight, bias, add; and mean, m2
  using Plain = std::tuple<double, int64_t>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      std::array<bool, kInputs> needs) {
    const auto& [eps, activation] = plain;
    // Without an activation what was added gets dy itself.
    const bool passed = activation == 0 && needs[3];
    needs[3] = needs[3] && !passed;
    auto [dx, dweight, dbias, dadd] = backward_op().call(
        grads[0], saved[0], maybe(saved[1]), maybe(saved[2]), maybe(saved[3]), saved[4], saved[5], eps,
        name_of(activation), needs);
    return {
        needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), needs[2] ? dbias : Tensor(),
        passed     ? grads[0]
        : needs[3] ? dadd
                   : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, double eps,
    const MaybeTensor& add, Name activation) {
  Activation kind;
  if (has_tangent(x, weight, bias, add) || !activation_of(activation, kind))
    return reference().call(x, weight, bias, eps, add, activation);
  const bool active = kind != Activation::kNone;
  return record<Op>(
      [&] { return forward_op().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, eps, add, activation); },
      {eps, (int64_t)kind},
      [&](Result& r) {
        return std::array<Tensor, 6>{x,
                                     tensor(weight),
                                     active ? tensor(bias) : Tensor(),
                                     active ? tensor(add) : Tensor(),
                                     std::get<1>(r),
                                     std::get<2>(r)};
      },
      [](Result& r) { return std::array<Tensor*, 1>{&std::get<0>(r)}; }, x, weight, bias, add);
}

inline Grads backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& add, const Tensor& mean, const Tensor& m2, double eps, Name activation,
    std::array<bool, 4> needs) {
  if (has_tangent(dy, x, weight, bias, add) || requires_grad(dy, x, weight, bias, add))
    return backward_reference().call(dy, x, weight, bias, add, mean, m2, eps, activation, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(
      keys & c10::after_autograd_keyset, dy, x, weight, bias, add, mean, m2, eps, activation, needs);
}

}  // namespace musigma::batch_norm
