// What functional.batch_norm does with plain arguments: by the batch's statistics, which the running ones then take in, or
// by the running ones.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../_affine/bind.h"
#include "../_running/bind.h"
#include "bind.h"

namespace musigma::layer {

struct Call {
  Tensor x;
  MaybeTensor running_mean, running_var, tracked, weight, bias;
  bool training = false;
  std::optional<double> momentum;
  double eps = 0;
  MaybeTensor add;
  Name activation;
};

// Statistics that can't be are told of; looking at a few hundred takes no time beside asking what is known of them.
template <class T>
bool within(const Tensor& t, T low) {
  const T *values = t.const_data_ptr<T>(), high = std::numeric_limits<T>::max();
  const int64_t n = t.numel();
  int bad = 0;
  for (int64_t c = 0; c < n; c++) bad += !((values[c] >= low) & (values[c] <= high));
  return bad == 0;
}
inline bool within(const Tensor& t, double low) {
  if (!running::float_vector(t)) return false;
  return t.scalar_type() == at::kFloat ? within<float>(t, (float)std::max(low, -(double)std::numeric_limits<float>::max()))
                                       : within<double>(t, low);
}

inline bool fits_evaluation(const Call& call) {
  return call.running_mean && call.eps >= 0 && within(*call.running_var, 0.0) &&
         within(*call.running_mean, -std::numeric_limits<double>::max());
}

inline bool fits_training(const Call& call) {
  if (!(call.eps > 0) || call.x.numel() / call.x.size(1) < 2) return false;
  return !call.running_mean || call.momentum || call.tracked;
}

// Whether nothing about the call is special or wrong.
inline bool right(const Call& call) {
  DType type;
  Activation kind;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return false;
  if (!call.x.is_cpu() || call.x.layout() != at::kStrided || !activation_of(call.activation, kind) ||
      !batch_norm::supported(call.x, call.weight, call.bias, call.add, type))
    return false;
  const auto channels = call.x.sizes().slice(1, 1);
  if (call.running_mean.has_value() != call.running_var.has_value() || !is_parameter(call.running_mean, channels) ||
      !is_parameter(call.running_var, channels) || !readable(call.running_mean))
    return false;
  return call.training ? fits_training(call) : fits_evaluation(call);
}

inline Tensor run(Call& call) {
  if (!call.training)
    return affine::forward_op().call(call.x, *call.running_mean, *call.running_var, call.weight, call.bias, call.eps, call.add,
                                     call.activation, std::nullopt);
  auto [y, mean, m2] =
      batch_norm::forward_op().call(call.x, call.weight, call.bias, call.eps, call.add, call.activation);
  if (call.running_mean) {
    Tensor n = doubles({});
    *n.mutable_data_ptr<double>() = (double)(call.x.numel() / call.x.size(1));
    running::op().call(*call.running_mean, *call.running_var, call.tracked, n, mean, m2, call.momentum);
  }
  return std::move(y);
}

}  // namespace musigma::layer
