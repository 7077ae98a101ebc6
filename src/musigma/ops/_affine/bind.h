// affine at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/channels.h"
#include "../_native/masked.h"

namespace musigma::affine {

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Forward = Tensor(
    const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, double, const MaybeTensor&,
    Name, const MaybeTensor&);
using Backward = Grads(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, double,
    const MaybeTensor&, Name, const MaybeTensor&, std::array<bool, 6>);

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
    const MaybeTensor& add, const MaybeTensor& mask, DType& type) {
  if (!enabled || !storage_type(x, type) || x.dim() < 2 || x.numel() == 0) return false;
  if (!is_add(add, x) || !is_mask(mask, x)) return false;
  const auto channels = x.sizes().slice(1, 1);
  const auto fits = [&](const MaybeTensor& v) { return is_parameter(v, channels) && readable(v); };
  return fits(mean) && fits(var) && fits(weight) && fits(bias);
}

// What forward and backward derive from the same arguments.
struct Given {
  const Spread spread;
  const double* weight;
  Coefficient at;

  Given(
      DType type, int64_t channels, const Tensor& mean, const Tensor& var, const MaybeTensor& weight,
      const MaybeTensor& bias, double eps, Scratch& scratch)
      : spread(spread_of(type, values_of(var, 1.0, channels, scratch), 1.0, eps, channels, scratch)),
        weight(values_of(weight, 1.0, channels, scratch)), at(channels, scratch) {
    at.forward(
        spread.wide, Statistics{values_of(mean, 0.0, channels, scratch), nullptr}, spread.rstd, this->weight,
        values_of(bias, 0.0, channels, scratch));
  }
};

// x with 0 for what the mask drops and is not finite.
inline Image seen(Image x, const MaybeTensor& mask) {
  if (mask) x.held = with_zeros(x, image_mask(*mask, x), x.held);
  return x;
}

inline Tensor forward(
    const Tensor& input, const Tensor& mean, const Tensor& var, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps, const MaybeTensor& add, Name activation, const MaybeTensor& mask) {
  DType type;
  Activation kind;
  if (!supported(input, mean, var, weight, bias, add, mask, type) || !activation_of(activation, kind))
    return reference().call(input, mean, var, weight, bias, eps, add, activation, mask);
  Scratch scratch;
  const Image x = seen(Image(input, type), mask);
  const Tensor more = add ? x.alike(*add) : Tensor();
  const Given given(type, x.layout.channels, mean, var, weight, bias, eps, scratch);
  return run_affine(x, given.at, {add ? more.const_data_ptr() : nullptr, kind});
}

inline Grads backward(
    const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& var, const MaybeTensor& weight,
    const MaybeTensor& bias, double eps, const MaybeTensor& add, Name activation, const MaybeTensor& mask,
    std::array<bool, 6> needs) {
  DType type;
  Activation kind;
  if (!supported(input, mean, var, weight, bias, add, mask, type) || !activation_of(activation, kind) ||
      !is_like(grad, input))
    return backward_reference().call(grad, input, mean, var, weight, bias, eps, add, activation, mask, needs);
  Scratch scratch;
  const Image given_x(input, type), x = seen(given_x, mask);
  const Tensor dy = x.alike(grad), more = add ? x.alike(*add) : Tensor();
  const int64_t channels = x.layout.channels;
  const Given given(type, channels, mean, var, weight, bias, eps, scratch);
  const double *rstd = given.spread.rstd, *w = given.weight;
  // What comes back through an activation behind a sum is the gradient of what was added, and the rest goes on from it.
  const bool through_sum = kind != Activation::kNone && add.has_value();
  Tensor dx = none(input), dmean = dx, dvar = dx, dweight = dx, dbias = dx;
  Tensor dadd = through_sum ? x.like() : needs[5] ? dy.clone() : none(input);
  if (through_sum || needs[1] || needs[2] || needs[3] || needs[4]) {
    const bool with_x = kind != Activation::kNone || needs[2] || needs[3];
    const double* sum = run_sums(
        x, dy, given.at, rstd, scratch, {add ? more.const_data_ptr() : nullptr, kind},
        through_sum ? dadd.mutable_data_ptr() : nullptr, with_x);
    const double* product = sum + channels;  // of g·x̂, after that of g
    double* values = scratch.take<double>(channels);
    const auto vector = [&](at::ScalarType to, auto f) {
      for (int64_t c = 0; c < channels; c++) values[c] = f(c);
      return as_type(values, channels, to);
    };
    const auto parameter = parameter_type(input, weight);
    if (needs[1]) dmean = vector(mean.scalar_type(), [&](int64_t c) { return -w[c] * rstd[c] * sum[c]; });
    if (needs[2])
      dvar = vector(var.scalar_type(), [&](int64_t c) { return -0.5 * w[c] * rstd[c] * rstd[c] * product[c]; });
    if (needs[3]) dweight = as_type(product, channels, parameter);
    if (needs[4]) dbias = as_type(sum, channels, parameter);
  }
  if (needs[0])
    dx = through_sum ? run_gradient(x, dadd.const_data_ptr(), given.at, Activation::kNone)
                     : run_gradient(x, dy.const_data_ptr(), given.at, kind);
  // What was replaced has no part in the result.
  if (needs[0] && !x.held.is_same(given_x.held)) dx = with_zeros(given_x, image_mask(*mask, given_x), dx);
  return {std::move(dx),      std::move(dmean), std::move(dvar),
          std::move(dweight), std::move(dbias), needs[5] ? std::move(dadd) : none(input)};
}

struct Op {
  static constexpr const char* kName = "AffineBackward";
  static constexpr int kInputs = 6, kSaved = 7;  // x, mean, var, weight, bias, add; and the mask
  using Plain = std::tuple<double, int64_t>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      std::array<bool, kInputs> needs) {
    const auto& [eps, activation] = plain;
    // Without an activation what was added gets dy itself.
    const bool passed = activation == 0 && needs[5];
    needs[5] = needs[5] && !passed;
    auto [dx, dmean, dvar, dweight, dbias, dadd] = backward_op().call(
        grads[0], saved[0], saved[1], saved[2], maybe(saved[3]), maybe(saved[4]), eps, maybe(saved[5]),
        name_of(activation), maybe(saved[6]), needs);
    return {needs[0] ? dx : Tensor(),      needs[1] ? dmean : Tensor(), needs[2] ? dvar : Tensor(),
            needs[3] ? dweight : Tensor(), needs[4] ? dbias : Tensor(), passed ? grads[0] : needs[5] ? dadd : Tensor()};
  }
};

inline Tensor forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, const Tensor& mean, const Tensor& var, const MaybeTensor& weight,
    const MaybeTensor& bias, double eps, const MaybeTensor& add, Name activation, const MaybeTensor& mask) {
  Activation kind;
  if (has_tangent(x, mean, var, weight, bias, add) || !activation_of(activation, kind))
    return reference().call(x, mean, var, weight, bias, eps, add, activation, mask);
  const bool active = kind != Activation::kNone;
  return record<Op>(
      [&] {
        return forward_op().redispatch(
            keys & c10::after_autograd_keyset, x, mean, var, weight, bias, eps, add, activation, mask);
      },
      {eps, (int64_t)kind},
      [&](Tensor&) {
        return std::array<Tensor, 7>{
            x,           mean, var, tensor(weight), active ? tensor(bias) : Tensor(), active ? tensor(add) : Tensor(),
            tensor(mask)};
      },
      [](Tensor& y) { return std::array<Tensor*, 1>{&y}; }, x, mean, var, weight, bias, add);
}

inline Grads backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& var,
    const MaybeTensor& weight, const MaybeTensor& bias, double eps, const MaybeTensor& add, Name activation,
    const MaybeTensor& mask, std::array<bool, 6> needs) {
  if (has_tangent(dy, x, mean, var, weight, bias, add) || requires_grad(dy, x, mean, var, weight, bias, add))
    return backward_reference().call(dy, x, mean, var, weight, bias, eps, add, activation, mask, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(
      keys & c10::after_autograd_keyset, dy, x, mean, var, weight, bias, eps, add, activation, mask, needs);
}

}  // namespace musigma::affine
