// running_update_ at the dispatcher: CPU.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>

#include "../_native/channels.h"

namespace musigma::running {

using Update = void(Tensor&, Tensor&, MaybeTensor, const Tensor&, const Tensor&, const Tensor&, std::optional<double>);

inline auto& op() {
  static auto h = musigma::op<Update>("musigma::running_update_");
  return h;
}
inline auto& reference() {
  static auto h = musigma::op<Update>("musigma::running_update_reference_");
  return h;
}

// A batch as the update reads it, with one count for all channels or one each.
struct Batch {
  const double *count, *mean, *m2;
  int64_t count_step;
  double n(int64_t c) const { return count[c * count_step]; }
};

// Channels of which the batch has more than `above` values.
template <class T>
void blend(Tensor& running, double factor, double (*value)(double, double, double), const Batch& b, double above) {
  T* old = running.mutable_data_ptr<T>();
  for (int64_t c = 0; c < running.numel(); c++)
    if (b.n(c) > above && std::isfinite(b.mean[c]) && std::isfinite(b.m2[c]))
      // Two products rather than one difference: with factor 1 the batch's own value, to the last bit.
      old[c] = (T)((double)old[c] * (1.0 - factor) + value(b.mean[c], b.m2[c], b.n(c)) * factor);
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
  const bool taken = enabled && float_vector(running_mean) && float_vector(running_var) &&
                     running_mean.sizes() == mean.sizes() && running_var.sizes() == mean.sizes() &&
                     m2.sizes() == mean.sizes() && is_statistic(count, count.numel() == 1 ? 1 : mean.numel()) &&
                     count.is_contiguous() && is_statistic(mean, mean.numel()) && is_statistic(m2, mean.numel()) &&
                     mean.is_contiguous() && m2.is_contiguous() && (momentum || tracked) &&
                     (!tracked || (tracked->is_cpu() && tracked->scalar_type() == at::kLong && tracked->numel() == 1));
  if (!taken) return reference().call(running_mean, running_var, tracked, count, mean, m2, momentum);
  // The forward that activation checkpointing forms again during a backward pass was counted the first time.
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  const Batch batch{
      count.const_data_ptr<double>(), mean.const_data_ptr<double>(), m2.const_data_ptr<double>(),
      count.numel() == 1 ? 0 : 1};
  if (!std::any_of(batch.count, batch.count + count.numel(), [](double n) { return n > 0; })) return;
  double factor = momentum.value_or(0);
  if (tracked) {
    int64_t& batches = *tracked->mutable_data_ptr<int64_t>();
    batches += 1;
    written(*tracked);
    if (!momentum) factor = 1.0 / (double)std::max<int64_t>(batches, 1);
  }
  const auto take = [&](Tensor& running, double (*value)(double, double, double), double above) {
    running.scalar_type() == at::kFloat ? blend<float>(running, factor, value, batch, above)
                                        : blend<double>(running, factor, value, batch, above);
    written(running);
  };
  take(running_mean, [](double mean, double, double) { return mean; }, 0.0);
  take(running_var, [](double, double m2, double n) { return m2 / (n - 1.0); }, 1.0);
}

}  // namespace musigma::running
