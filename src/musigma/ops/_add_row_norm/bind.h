// add_row_norm at the dispatcher: CPU, autograd. The kernels are row_norm's.
#pragma once

#include "../_row_norm/run.h"

namespace musigma::add_row_norm {

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using Forward =
    Result(const Tensor&, const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, double, bool, Name);
using Backward = Gradients(
    const MaybeTensor&, const MaybeTensor&, const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&,
    const Tensor&, const Tensor&, double, bool, Name, std::array<bool, 4>);

inline auto& forward_op() {
  static auto h = op<Forward>("musigma::add_row_norm");
  return h;
}
inline auto& backward_op() {
  static auto h = op<Backward>("musigma::add_row_norm_backward");
  return h;
}
inline auto& reference() {
  static auto h = op<Forward>("musigma::add_row_norm_reference");
  return h;
}
inline auto& backward_reference() {
  static auto h = op<Backward>("musigma::add_row_norm_backward_reference");
  return h;
}

inline Result forward(
    const Tensor& x, const Tensor& residual, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps, bool center, Name activation) {
  const rows::Call call(x, n_dims, weight, bias, activation);
  if (!call.taken || !is_like(residual, x))
    return reference().call(x, residual, n_dims, weight, bias, eps, center, activation);
  auto f = rows::forward(call, x, &residual, n_dims, weight, bias, eps, center);
  return {std::move(f.y), std::move(f.sum), std::move(f.mean), std::move(f.rstd)};
}

inline Gradients backward(
    const MaybeTensor& dy, const MaybeTensor& dsum, const Tensor& sum, int64_t n_dims, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, double eps, bool center, Name activation,
    std::array<bool, 4> needs) {
  const rows::Call call(sum, n_dims, weight, bias, activation);
  if (!rows::fits(call, sum, mean, rstd) || !dy || !is_like(*dy, sum) || (dsum && !is_like(*dsum, sum)))
    return backward_reference().call(dy, dsum, sum, n_dims, weight, bias, mean, rstd, eps, center, activation, needs);
  return rows::backward(
      call, *dy, dsum ? &*dsum : nullptr, sum, n_dims, weight, bias, mean, rstd, center,
      {needs[0] || needs[1], needs[2], needs[3]});
}

struct Op {
  static constexpr const char* kName = "AddRowNormBackward";
  static constexpr int kInputs = 4, kSaved = 5;  // x, residual, weight, bias; sum, weight, bias, mean, rstd
  using Plain = std::tuple<int64_t, double, bool, int64_t>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    const auto& [n_dims, eps, center, activation] = plain;
    if (!grads[0].defined())  // y was not used: what is left is an addition
      return {needs[0] ? grads[1] : Tensor(), needs[1] ? grads[1] : Tensor(), Tensor(), Tensor()};
    auto [d, dweight, dbias] = backward_op().call(
        maybe(grads[0]), maybe(grads[1]), saved[0], n_dims, maybe(saved[1]), maybe(saved[2]), saved[3], saved[4], eps,
        center, name_of(activation), needs);
    return {
        needs[0] ? d : Tensor(), needs[1] ? d : Tensor(), needs[2] ? dweight : Tensor(), needs[3] ? dbias : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, const Tensor& residual, int64_t n_dims, const MaybeTensor& weight,
    const MaybeTensor& bias, double eps, bool center, Name activation) {
  Activation kind;
  if (has_tangent(x, residual, weight, bias) || !activation_of(activation, kind))
    return reference().call(x, residual, n_dims, weight, bias, eps, center, activation);
  return record<Op>(
      [&] {
        return forward_op().redispatch(
            keys & c10::after_autograd_keyset, x, residual, n_dims, weight, bias, eps, center, activation);
      },
      {n_dims, eps, center, (int64_t)kind},
      [&](Result& r) {
        return std::array<Tensor, 5>{std::get<1>(r), tensor(weight), tensor(bias), std::get<2>(r), std::get<3>(r)};
      },
      [](Result& r) { return std::array<Tensor*, 2>{&std::get<0>(r), &std::get<1>(r)}; }, x, residual, weight, bias);
}

inline Gradients backward_autograd(
    c10::DispatchKeySet keys, const MaybeTensor& dy, const MaybeTensor& dsum, const Tensor& sum, int64_t n_dims,
    const MaybeTensor& weight, const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, double eps, bool center,
    Name activation, std::array<bool, 4> needs) {
  if (has_tangent(dy, dsum, sum, weight, bias) || requires_grad(dy, dsum, sum, weight, bias))
    return backward_reference().call(dy, dsum, sum, n_dims, weight, bias, mean, rstd, eps, center, activation, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(
      keys & c10::after_autograd_keyset, dy, dsum, sum, n_dims, weight, bias, mean, rstd, eps, center, activation,
      needs);
}

}  // namespace musigma::add_row_norm
