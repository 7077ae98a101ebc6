// running_update_ at the dispatcher: CPU.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>

#include "../_native/channels.h"

namespace musigma::running {

inline auto& reference() {
  static auto h = op<void(Tensor&, Tensor&, MaybeTensor, const Tensor&, const Tensor&, const Tensor&, std::optional<double>)>(
      "musigma::running_update_reference_");
  return h;
}

template <class T>
void blend(Tensor& running, double factor, double (*batch)(double, double, double), const double* mean, const double* m2,
           double count) {
  T* old = running.mutable_data_ptr<T>();
  for (int64_t c = 0; c < running.numel(); c++)
    if (std::isfinite(mean[c]) && std::isfinite(m2[c]))
      // Two products rather than one difference: with factor 1 the batch's own value, to the last bit.
      old[c] = (T)((double)old[c] * (1.0 - factor) + batch(mean[c], m2[c], count) * factor);
}

inline bool float_vector(const Tensor& t) {
  return t.is_cpu() && t.is_contiguous() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble);
}

inline void written(const Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

inline void update(
    Tensor& running_mean, Tensor& running_var, MaybeTensor tracked, const Tensor& count, const Tensor& mean,
    const Tensor& m2, std::optional<double> momentum) {
  const bool taken = enabled && float_vector(running_mean) && float_vector(running_var) && running_mean.sizes() == mean.sizes() &&
      running_var.sizes() == mean.sizes() && m2.sizes() == mean.sizes() && is_statistic(count, 1) &&
      is_statistic(mean, mean.numel()) && is_statistic(m2, mean.numel()) && mean.is_contiguous() && m2.is_contiguous() &&
      (momentum || tracked) &&
      (!tracked || (tracked->is_cpu() && tracked->scalar_type() == at::kLong && tracked->numel() == 1));
  if (!taken) return reference().call(running_mean, running_var, tracked, count, mean, m2, momentum);
  // The forward that activation checkpointing forms again during a backward pass was counted the first time.
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  const double n = *count.const_data_ptr<double>();
  if (!(n > 0)) return;
  double factor = momentum.value_or(0);
  if (tracked) {
    int64_t& batches = *tracked->mutable_data_ptr<int64_t>();
    batches += 1;
    written(*tracked);
    if (!momentum) factor = 1.0 / (double)std::max<int64_t>(batches, 1);
  }
  const double *means = mean.const_data_ptr<double>(), *m2s = m2.const_data_ptr<double>();
  const auto take = [&](Tensor& running, double (*batch)(double, double, double)) {
    running.scalar_type() == at::kFloat ? blend<float>(running, factor, batch, means, m2s, n)
                                        : blend<double>(running, factor, batch, means, m2s, n);
    written(running);
  };
  take(running_mean, [](double mean, double, double) { return mean; });
  if (n > 1) take(running_var, [](double, double m2, double n) { return m2 / (n - 1.0); });
}

}  // namespace musigma::running
