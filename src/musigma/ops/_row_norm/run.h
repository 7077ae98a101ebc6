// From tensors to the row kernels, for row_norm and add_row_norm.
#pragma once

#include "../_native/tensors.h"

namespace musigma::rows {

// A call that the kernels take, in their terms. Whatever else comes (a mistake included) is the reference's, which says
// what is wrong with it.
struct Call {
  bool taken = false;
  DType type;
  Activation activation;
  at::IntArrayRef lead, row;
  int64_t width;

  Call(const Tensor& x, int64_t n_dims, const MaybeTensor& weight, const MaybeTensor& bias, const Name& name) {
    if (!enabled || !storage_type(x, type) || !activation_of(name, activation)) return;
    if (n_dims < 1 || n_dims > x.dim() || x.numel() == 0) return;
    lead = x.sizes().slice(0, x.dim() - n_dims), row = x.sizes().slice(x.dim() - n_dims);
    width = c10::multiply_integers(row);
    taken = is_parameter(weight, row) && is_parameter(bias, row);
  }
};

// Weight and bias in one type: the input's, or float32 where they differ from a half-precision input or each other.
struct Parameters {
  at::ScalarType scalar;
  DType type = DType::kFloat32;
  Parameter weight, bias;

  Parameters(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b)
      : scalar(common(x, w, b)), weight(w, scalar), bias(b, scalar) {
    if (scalar == x.scalar_type()) storage_type(x, type);
  }

 private:
  static at::ScalarType common(const Tensor& x, const MaybeTensor& w, const MaybeTensor& b) {
    const at::ScalarType own = x.scalar_type();
    const bool like_x = (!w || w->scalar_type() == own) && (!b || b->scalar_type() == own);
    return like_x || own == at::kDouble ? own : at::kFloat;
  }
};

struct Forward {
  Tensor y, sum, mean, rstd;
};

inline Forward forward(
    const Call& call, const Tensor& x, const Tensor* residual, int64_t n_dims, const MaybeTensor& weight,
    const MaybeTensor& bias, double eps, bool center) {
  const Rows rows(x, call.width, n_dims), others(residual ? *residual : x, call.width, n_dims);
  const Parameters parameters(x, weight, bias);
  Forward f{
      output(x.sizes(), x.scalar_type()), residual ? output(x.sizes(), x.scalar_type()) : Tensor(),
      output(call.lead, at::kDouble), output(call.lead, at::kDouble)};
  RowNorm a{};
  a.type = call.type, a.parameter_type = parameters.type, a.width = call.width;
  a.x = rows.data, a.x_stride = rows.stride;
  if (residual) a.residual = others.data, a.residual_stride = others.stride, a.sum = f.sum.mutable_data_ptr();
  a.weight = parameters.weight.data, a.bias = parameters.bias.data;
  a.y = f.y.mutable_data_ptr(), a.mean = f.mean.mutable_data_ptr<double>(), a.rstd = f.rstd.mutable_data_ptr<double>();
  a.eps = eps, a.center = center, a.activation = call.activation;
  a.stream = streams((int64_t)f.y.nbytes());
  const auto run = kernels().row_norm;
  parallel(rows.count, call.width, [&](int64_t begin, int64_t end) { run(a, begin, end); });
  return f;
}

// Whether what a backward was handed is what the kernels expect.
inline bool fits(const Call& call, const Tensor& x, const Tensor& mean, const Tensor& rstd) {
  const int64_t rows = call.taken ? x.numel() / call.width : 0;
  return call.taken && is_statistic(mean, rows) && is_statistic(rstd, rows);
}

// Gradients of x (and of what was added to it), weight and bias; dsum, if given, is the gradient of the sum itself.
inline std::tuple<Tensor, Tensor, Tensor> backward(
    const Call& call, const Tensor& dy, const Tensor* dsum, const Tensor& x, int64_t n_dims, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& rstd, bool center, std::array<bool, 3> needs) {
  const Rows rows(x, call.width, n_dims), upstream(dy, call.width, n_dims);
  const Rows extra(dsum ? *dsum : dy, call.width, n_dims);
  const Parameters parameters(x, weight, bias);
  const Tensor mean_c = mean.contiguous(), rstd_c = rstd.contiguous();
  Tensor dx = needs[0] ? output(x.sizes(), x.scalar_type()) : none(x);
  const int64_t size = block_rows(rows.count), blocks = (rows.count + size - 1) / size;
  Tensor sums;
  if (needs[1] || needs[2]) sums = output({blocks * kSumsPerColumn * call.width}, at::kDouble);
  RowNormBackward a{};
  a.type = call.type, a.parameter_type = parameters.type, a.rows = rows.count, a.width = call.width;
  a.dy = upstream.data, a.dy_stride = upstream.stride;
  if (dsum) a.dsum = extra.data, a.dsum_stride = extra.stride;
  a.x = rows.data, a.x_stride = rows.stride;
  a.weight = parameters.weight.data, a.bias = parameters.bias.data;
  a.mean = mean_c.const_data_ptr<double>(), a.rstd = rstd_c.const_data_ptr<double>();
  if (needs[0]) a.dx = dx.mutable_data_ptr(), a.stream = streams((int64_t)dx.nbytes());
  a.center = center, a.activation = call.activation;
  a.block_rows = size, a.sums = sums.defined() ? sums.mutable_data_ptr<double>() : nullptr;
  const auto run = kernels().row_norm_backward;
  parallel(blocks, size * call.width, [&](int64_t begin, int64_t end) { run(a, begin, end); });
  const bool low = call.type == DType::kFloat64;
  const auto sum = [&](int64_t which, const MaybeTensor& parameter) {
    return fold(sums, blocks, call.width, which, call.row, parameter_type(x, parameter), low);
  };
  return {std::move(dx), needs[1] ? sum(0, weight) : none(x), needs[2] ? sum(1, bias ? bias : weight) : none(x)};
}

}  // namespace musigma::rows
