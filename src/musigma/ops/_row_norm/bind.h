// row_norm at the dispatcher: CPU, autograd.
#pragma once

#include "../_native/tensors.h"

namespace musigma::row_norm {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, double, bool);
using Backward = Result(
    const Tensor&, const Tensor&, int64_t, const MaybeTensor&, const Tensor&, const Tensor&, double, bool,
    std::array<bool, 3>);

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

// What the kernels take. Whatever else comes (a mistake included) is the reference's, which says what is wrong with it.
inline bool supported(const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias, DType& type) {
  if (!enabled || !storage_type(x, type) || n_dims < 1 || n_dims > x.dim() || x.numel() == 0) return false;
  const auto row = x.sizes().slice(x.dim() - n_dims);
  return is_parameter(weight, row) && is_parameter(bias, row);
}

inline Result forward(
    const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias, double eps, bool center) {
  DType type;
  if (!supported(x, n_dims, weight, bias, type)) return reference().call(x, n_dims, weight, bias, eps, center);
  const auto lead = x.sizes().slice(0, x.dim() - n_dims);
  const int64_t width = c10::multiply_integers(x.sizes().slice(x.dim() - n_dims));
  const Rows rows(x, width, n_dims);
  const Parameter w(weight, compute_type(type)), b(bias, compute_type(type));
  Tensor y = output(x.sizes(), x.scalar_type());
  Tensor mean = output(lead, at::kDouble);
  Tensor rstd = output(lead, at::kDouble);
  const RowNorm a{type, width, rows.data, rows.stride, w.data, b.data, y.mutable_data_ptr(),
                  mean.mutable_data_ptr<double>(), rstd.mutable_data_ptr<double>(), eps, center};
  const auto run = kernels().row_norm;
  parallel(rows.count, width, [&](int64_t begin, int64_t end) { run(a, begin, end); });
  return {std::move(y), std::move(mean), std::move(rstd)};
}

inline Result backward(
    const Tensor& dy, const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const Tensor& mean, const Tensor& rstd,
    double eps, bool center, std::array<bool, 3> needs) {
  DType type;
  const auto taken = [&] {
    if (!supported(x, n_dims, weight, std::nullopt, type) || !is_like(dy, x)) return false;
    const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - n_dims));
    return is_statistic(mean, rows) && is_statistic(rstd, rows);
  };
  if (!taken())
    return backward_reference().call(dy, x, n_dims, weight, mean, rstd, eps, center, needs);
  const auto row = x.sizes().slice(x.dim() - n_dims);
  const int64_t width = c10::multiply_integers(row);
  const Rows rows(x, width, n_dims), upstream(dy, width, n_dims);
  const Parameter w(weight, compute_type(type));
  const Tensor mean_c = mean.contiguous(), rstd_c = rstd.contiguous();
  Tensor dx = needs[0] ? output(x.sizes(), x.scalar_type()) : none(x);
  const int64_t size = block_rows(rows.count), blocks = (rows.count + size - 1) / size;
  Tensor sums;
  if (needs[1] || needs[2]) sums = output({blocks * kSumsPerColumn * width}, at::kDouble);
  const RowNormBackward a{type, rows.count, width, upstream.data, upstream.stride, rows.data, rows.stride, w.data,
                          mean_c.const_data_ptr<double>(), rstd_c.const_data_ptr<double>(),
                          needs[0] ? dx.mutable_data_ptr() : nullptr, center, size,
                          sums.defined() ? sums.mutable_data_ptr<double>() : nullptr};
  const auto run = kernels().row_norm_backward;
  parallel(blocks, size * width, [&](int64_t begin, int64_t end) { run(a, begin, end); });
  const auto parameter = parameter_type(x, weight);
  const bool low = type == DType::kFloat64;
  return {std::move(dx), needs[1] ? fold(sums, blocks, width, 0, row, parameter, low) : none(x),
          needs[2] ? fold(sums, blocks, width, 1, row, parameter, low) : none(x)};
}

struct Op {
  static constexpr const char* kName = "RowNormBackward";
  static constexpr int kInputs = 3, kSaved = 4;  // x, weight, bias; x, weight, mean, rstd
  using Plain = std::tuple<int64_t, double, bool>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    const auto& [n_dims, eps, center] = plain;
    if (!grads[0].defined()) return variable_list(kInputs);
    auto [dx, dweight, dbias] = backward_op().call(
        grads[0], saved[0], n_dims, maybe(saved[1]), saved[2], saved[3], eps, center, needs);
    return {needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), needs[2] ? dbias : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps, bool center) {
  if (has_tangent(x, weight, bias)) return reference().call(x, n_dims, weight, bias, eps, center);
  return record<Op>(
      [&] { return forward_op().redispatch(keys & c10::after_autograd_keyset, x, n_dims, weight, bias, eps, center); },
      {n_dims, eps, center},
      [&](Result& r) { return std::array<Tensor, 4>{x, tensor(weight), std::get<1>(r), std::get<2>(r)}; },
      [](Result& r) { return std::array<Tensor*, 1>{&std::get<0>(r)}; }, x, weight, bias);
}

inline Result backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, int64_t n_dims, const MaybeTensor& weight,
    const Tensor& mean, const Tensor& rstd, double eps, bool center, std::array<bool, 3> needs) {
  if (has_tangent(dy, x, weight) || requires_grad(dy, x, weight))
    return backward_reference().call(dy, x, n_dims, weight, mean, rstd, eps, center, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(
      keys & c10::after_autograd_keyset, dy, x, n_dims, weight, mean, rstd, eps, center, needs);
}

}  // namespace musigma::row_norm
