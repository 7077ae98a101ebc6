// row_norm at the dispatcher: CPU, autograd.
#pragma once

#include "run.h"

namespace musigma::row_norm {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, double, bool, Name);
using Backward = Result(
    const Tensor&, const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, const Tensor&, const Tensor&, double,
    bool, Name, std::array<bool, 3>);

inline auto& forward_op() {
  static auto h = op<Forward>("musigma::row_norm");
  return h;
}
inline auto& backward_op() {
  static auto h = op<Backward>("musigma::row_norm_backward");
  return h;
}
inline auto& reference() {
  static auto h = op<Forward>("musigma::row_norm_reference");
  return h;
}
inline auto& backward_reference() {
  static auto h = op<Backward>("musigma::row_norm_backward_reference");
  return h;
}

inline Result forward(
    const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias, double eps, bool center,
    Name activation) {
  const rows::Call call(x, n_dims, weight, bias, activation);
  if (!call.taken) return reference().call(x, n_dims, weight, bias, eps, center, activation);
  auto f = rows::forward(call, x, nullptr, n_dims, weight, bias, eps, center);
  return {std::move(f.y), std::move(f.mean), std::move(f.rstd)};
}

inline Result backward(
    const Tensor& dy, const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& rstd, double eps, bool center, Name activation, std::array<bool, 3> needs) {
  const rows::Call call(x, n_dims, weight, bias, activation);
  if (!rows::fits(call, x, mean, rstd) || !is_like(dy, x))
    return backward_reference().call(dy, x, n_dims, weight, bias, mean, rstd, eps, center, activation, needs);
  return rows::backward(call, dy, nullptr, x, n_dims, weight, bias, mean, rstd, center, needs);
}

struct Op {
  static constexpr const char* kName = "RowNormBackward";
  static constexpr int kInputs = 3, kSaved = 5;  // x, weight, bias; x, weight, bias, mean, rstd
  using Plain = std::tuple<int64_t, double, bool, int64_t>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    const auto& [n_dims, eps, center, activation] = plain;
    if (!grads[0].defined()) return variable_list(kInputs);
    auto [dx, dweight, dbias] = backward_op().call(
        grads[0], saved[0], n_dims, maybe(saved[1]), maybe(saved[2]), saved[3], saved[4], eps, center,
        name_of(activation), needs);
    return {needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), needs[2] ? dbias : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps, bool center, Name activation) {
  Activation kind;
  if (has_tangent(x, weight, bias) || !activation_of(activation, kind))
    return reference().call(x, n_dims, weight, bias, eps, center, activation);
  return record<Op>(
      [&] {
        return forward_op().redispatch(
            keys & c10::after_autograd_keyset, x, n_dims, weight, bias, eps, center, activation);
      },
      {n_dims, eps, center, (int64_t)kind},
      [&](Result& r) { return std::array<Tensor, 5>{x, tensor(weight), tensor(bias), std::get<1>(r), std::get<2>(r)}; },
      [](Result& r) { return std::array<Tensor*, 1>{&std::get<0>(r)}; }, x, weight, bias);
}

inline Result backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, int64_t n_dims, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, double eps, bool center, Name activation,
    std::array<bool, 3> needs) {
  if (has_tangent(dy, x, weight, bias) || requires_grad(dy, x, weight, bias))
    return backward_reference().call(dy, x, n_dims, weight, bias, mean, rstd, eps, center, activation, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(
      keys & c10::after_autograd_keyset, dy, x, n_dims, weight, bias, mean, rstd, eps, center, activation, needs);
}

}  // namespace musigma::row_norm
