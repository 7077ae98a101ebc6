// group_norm at the dispatcher: CPU, autograd.
#pragma once

#include <vector>

#include "../_native/channels.h"

namespace musigma::group_norm {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, double);
using Backward = Result(
    const Tensor&, const Tensor&, int64_t, const MaybeTensor&, const Tensor&, const Tensor&, double, std::array<bool, 3>);

inline auto& forward_op() {
  static auto h = op<Forward>("musigma::group_norm");
  return h;
}
inline auto& backward_op() {
  static auto h = op<Backward>("musigma::group_norm_backward");
  return h;
}
inline auto& reference() {
  static auto h = op<Forward>("musigma::group_norm_reference");
  return h;
}
inline auto& backward_reference() {
  static auto h = op<Backward>("musigma::group_norm_backward_reference");
  return h;
}

inline bool supported(
    const Tensor& x, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias, DType& type) {
  if (!enabled || !storage_type(x, type) || x.dim() < 2 || x.numel() == 0) return false;
  if (groups < 1 || x.size(1) % groups) return false;
  const auto channels = x.sizes().slice(1, 1);
  return is_parameter(weight, channels) && is_parameter(bias, channels) && readable(weight) && readable(bias);
}

// What all units of work share, and where in memory each one lies. A unit is an example, or, where channels are not last,
// as many of its groups as stay in cache between one pass over them and the next.
struct Shape {
  DType type;
  bool last;  // channels last
  int64_t units, per_example, groups, channels, positions, bytes;

  Shape(const Image& x, int64_t all_groups) : type(x.layout.type), per_example(1), groups(all_groups) {
    const int64_t examples = x.held.size(0);
    channels = x.held.size(1);
    positions = x.held.numel() / examples / channels;
    last = x.format != at::MemoryFormat::Contiguous;
    bytes = x.held.element_size() * channels * positions;
    if (!last)
      for (int64_t parts = std::min(groups, (bytes + kUnitBytes - 1) / kUnitBytes); parts <= groups; parts++)
        if (groups % parts == 0) {
          per_example = parts;
          break;
        }
    units = examples * per_example;
    groups /= per_example, channels /= per_example, bytes /= per_example;
  }
  static constexpr int64_t kUnitBytes = 1 << 16;
  // The first channel of a unit.
  int64_t channel(int64_t unit) const { return unit % per_example * channels; }
  int64_t width() const { return channels / groups; }
  double count() const { return (double)(width() * positions); }
  // A unit for arithmetic with one coefficient a channel, and for statistics: with channels last those are taken of
  // channels and then merged, else of whole groups.
  Channels elements() const { return last ? Channels{type, positions, channels, 1} : Channels{type, 1, channels, positions}; }
  Channels sets() const { return last ? elements() : Channels{type, 1, groups, width() * positions}; }
};

// What one unit needs while it is worked on; a thread has one for all of its units.
struct Workspace {
  const Shape& s;
  std::vector<double> parts, mean, m2, pivot, sums;
  std::vector<double> group_pivot, group_offset;
  std::vector<double> coefficients;  // five arrays of doubles, or of floats

  explicit Workspace(const Shape& s) : s(s) {
    const Channels sets = s.sets(), elements = s.elements();
    const int64_t of_sets = parts_of(sets).count() * sets.channels, of_elements = parts_of(elements).count() * s.channels;
    parts.resize(2 * std::max(of_sets, of_elements));
    mean.resize(sets.channels), m2.resize(sets.channels), pivot.resize(sets.channels);
    group_pivot.resize(s.groups), group_offset.resize(s.groups);
    sums.resize(2 * s.channels);
    coefficients.resize(5 * s.channels);
  }

  // Mean (one double) and M2 of every group of the unit at x, and the mean in two parts for float64.
  void statistics(const char* x, double* means, double* m2s) {
    const Channels l = s.sets();
    const Parts p = parts_of(l);
    const bool in_two = s.type == DType::kFloat64;
    const int64_t each = l.channels / s.groups;
    if (in_two)
      for (int64_t c = 0; c < l.channels; c++)
        pivot[c] = ((const double*)x)[s.last ? c / each * each : c * l.inner];
    double* part_m2 = parts.data() + p.count() * l.channels;
    const ChannelMoments a{l, p, false, x, in_two ? pivot.data() : nullptr, parts.data(), part_m2};
    const int64_t total = units(l, p);
    parallel(total, s.channels * s.positions / total, [&](int64_t b, int64_t e) { kernels().channel_moments(a, b, e); });
    kernels().join_moments({l, p, parts.data(), part_m2, mean.data(), m2.data()}, 0, l.channels);
    for (int64_t g = 0; g < s.groups; g++) {
      double center = mean[g * each], square = m2[g * each];
      for (int64_t k = 1; k < each; k++) {
        const double delta = mean[g * each + k] - center, share = 1.0 / (double)(k + 1);
        center += delta * share;
        square += m2[g * each + k] + delta * delta * (double)k * share * (double)l.outer;
      }
      group_pivot[g] = in_two ? pivot[g * each] : 0.0;
      group_offset[g] = center;
      means[g] = group_pivot[g] + center;
      m2s[g] = square;
    }
  }

  bool wide(const double* m2s, double eps) const {
    if (s.type == DType::kFloat64) return true;
    for (int64_t g = 0; g < s.groups; g++)
      if (!float_range(m2s[g] / s.count() + eps)) return true;
    return false;
  }

  void set(int k, int64_t c, double v, bool wide) {
    if (wide)
      coefficients[k * s.channels + c] = v;
    else
      ((float*)coefficients.data())[k * s.channels + c] = (float)v;
  }
  // The center of a group, for all of its channels.
  void center(int64_t g, const double* means, bool wide) {
    double first = wide ? means[g] : (double)(float)means[g], second = means[g] - first;
    if (s.type == DType::kFloat64) first = group_pivot[g], second = group_offset[g];
    for (int64_t c = g * s.width(); c < (g + 1) * s.width(); c++) set(0, c, first, wide), set(1, c, second, wide);
  }
  const void* array(int k, bool wide) const {
    return (const char*)coefficients.data() + k * s.channels * (wide ? 8 : 4);
  }
  Coefficients get(bool wide) const { return {wide, array(0, wide), array(1, wide), array(2, wide), array(3, wide)}; }
};

// Units side by side where there are enough of them, else one after the other with the threads inside each.
template <class F>
void for_units(const Shape& s, F f) {
  const auto some = [&](int64_t begin, int64_t end) {
    Workspace work(s);
    for (int64_t n = begin; n < end; n++) f(work, n);
  };
  if (s.units >= at::get_num_threads())
    parallel(s.units, s.channels * s.positions, some);
  else
    some(0, s.units);
}

inline Result forward(
    const Tensor& input, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias, double eps) {
  DType type;
  if (!supported(input, groups, weight, bias, type)) return reference().call(input, groups, weight, bias, eps);
  const Image x(input, type);
  const Shape s(x, groups);
  Tensor y = x.like(), mean = doubles(input, {input.size(0), groups}), m2 = doubles(input, {input.size(0), groups});
  const Values w(weight, 1.0), b(bias, 0.0);
  const char* from = (const char*)x.data();
  char* to = (char*)y.mutable_data_ptr();
  double *means = mean.mutable_data_ptr<double>(), *m2s = m2.mutable_data_ptr<double>();
  for_units(s, [&](Workspace& work, int64_t n) {
    const int64_t first = s.channel(n);
    double *mean_n = means + n * s.groups, *m2_n = m2s + n * s.groups;
    work.statistics(from + n * s.bytes, mean_n, m2_n);
    const bool wide = work.wide(m2_n, eps);
    for (int64_t g = 0; g < s.groups; g++) {
      const double rstd = 1.0 / std::sqrt(m2_n[g] / s.count() + eps);
      work.center(g, mean_n, wide);
      for (int64_t c = g * s.width(); c < (g + 1) * s.width(); c++)
        work.set(2, c, w[first + c] * rstd, wide), work.set(3, c, b[first + c], wide);
    }
    const ChannelAffine a{s.elements(), from + n * s.bytes, to + n * s.bytes, work.get(wide)};
    const int64_t all = lines(a.layout);
    parallel(all, s.channels * s.positions / all, [&](int64_t b, int64_t e) { kernels().channel_affine(a, b, e); });
  });
  return {std::move(y), std::move(mean), std::move(m2)};
}

inline Result backward(
    const Tensor& grad, const Tensor& input, int64_t groups, const MaybeTensor& weight, const Tensor& mean,
    const Tensor& m2, double eps, std::array<bool, 3> needs) {
  DType type;
  if (!supported(input, groups, weight, std::nullopt, type) || !is_like(grad, input) ||
      !is_statistic(mean, input.size(0) * groups) || !is_statistic(m2, input.size(0) * groups))
    return backward_reference().call(grad, input, groups, weight, mean, m2, eps, needs);
  const Image x(input, type);
  const Tensor dy = x.alike(grad);
  const Shape s(x, groups);
  const Tensor mean_c = mean.contiguous(), m2_c = m2.contiguous();
  Tensor dx = needs[0] ? x.like() : none(input);
  const Tensor sums = doubles(input, {s.units, 2, s.channels});
  const Values w(weight, 1.0);
  const char *from = (const char*)x.data(), *up = (const char*)dy.const_data_ptr();
  char* to = needs[0] ? (char*)dx.mutable_data_ptr() : nullptr;
  for_units(s, [&](Workspace& work, int64_t n) {
    const int64_t first = s.channel(n);
    const double *means = mean_c.const_data_ptr<double>() + n * s.groups;
    const double *m2s = m2_c.const_data_ptr<double>() + n * s.groups;
    // The saved mean is one double: float64 has to find its second part again.
    if (type == DType::kFloat64) {
      std::vector<double> again(2 * s.groups);
      work.statistics(from + n * s.bytes, again.data(), again.data() + s.groups);
    }
    const bool wide = work.wide(m2s, eps);
    const auto rstd = [&](int64_t g) { return 1.0 / std::sqrt(m2s[g] / s.count() + eps); };
    for (int64_t g = 0; g < s.groups; g++) {
      work.center(g, means, wide);
      const double r = rstd(g);
      for (int64_t c = g * s.width(); c < (g + 1) * s.width(); c++) work.set(2, c, r, wide);
    }
    const Channels l = s.elements();
    const Parts p = parts_of(l);
    double* sum = sums.mutable_data_ptr<double>() + n * 2 * s.channels;  // of dy, then of dy·x̂
    const ChannelSums a{l, p, up + n * s.bytes, from + n * s.bytes, work.get(wide), work.parts.data()};
    const int64_t total = units(l, p);
    parallel(total, s.channels * s.positions / total, [&](int64_t b, int64_t e) { kernels().channel_sums(a, b, e); });
    kernels().join_sums({p.count(), 2 * s.channels, work.parts.data(), sum}, 0, 2 * s.channels);
    if (!to) return;
    for (int64_t g = 0; g < s.groups; g++) {
      double g0 = 0, g1 = 0;
      for (int64_t c = g * s.width(); c < (g + 1) * s.width(); c++)
        g0 += w[first + c] * sum[c], g1 += w[first + c] * sum[s.channels + c];
      const double r = rstd(g);
      for (int64_t c = g * s.width(); c < (g + 1) * s.width(); c++) {
        work.set(2, c, r * w[first + c], wide);
        work.set(3, c, -r * (g0 / s.count()), wide);
        work.set(4, c, -r * r * (g1 / s.count()), wide);
      }
    }
    const ChannelGradient d{l, a.dy, a.x, to + n * s.bytes, work.get(wide), work.array(4, wide)};
    const int64_t all = lines(l);
    parallel(all, s.channels * s.positions / all, [&](int64_t b, int64_t e) { kernels().channel_gradient(d, b, e); });
  });
  // Of all examples, still unit by unit; then of all channels.
  const int64_t channels = input.size(1);
  std::vector<double> joined(2 * channels), total(2 * channels);
  kernels().join_sums({input.size(0), 2 * channels, sums.const_data_ptr<double>(), joined.data()}, 0, 2 * channels);
  for (int64_t c = 0; c < channels; c++) {
    const int64_t at = c / s.channels * 2 * s.channels + c % s.channels;
    total[c] = joined[at], total[channels + c] = joined[at + s.channels];
  }
  const auto parameter = parameter_type(input, weight);
  return {std::move(dx), needs[1] ? as_type(total.data() + channels, channels, input, parameter) : none(input),
          needs[2] ? as_type(total.data(), channels, input, parameter) : none(input)};
}

struct Op {
  static constexpr const char* kName = "GroupNormBackward";
  static constexpr int kInputs = 3, kSaved = 4;  // x, weight, bias; x, weight, mean, m2
  using Plain = std::tuple<int64_t, double>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    const auto& [groups, eps] = plain;
    auto [dx, dweight, dbias] =
        backward_op().call(grads[0], saved[0], groups, maybe(saved[1]), saved[2], saved[3], eps, needs);
    return {needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), needs[2] ? dbias : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps) {
  if (has_tangent(x, weight, bias)) return reference().call(x, groups, weight, bias, eps);
  return record<Op>(
      [&] { return forward_op().redispatch(keys & c10::after_autograd_keyset, x, groups, weight, bias, eps); },
      {groups, eps},
      [&](Result& r) { return std::array<Tensor, 4>{x, tensor(weight), std::get<1>(r), std::get<2>(r)}; },
      [](Result& r) { return std::array<Tensor*, 1>{&std::get<0>(r)}; }, x, weight, bias);
}

inline Result backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, int64_t groups, const MaybeTensor& weight,
    const Tensor& mean, const Tensor& m2, double eps, std::array<bool, 3> needs) {
  if (has_tangent(dy, x, weight) || requires_grad(dy, x, weight))
    return backward_reference().call(dy, x, groups, weight, mean, m2, eps, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(keys & c10::after_autograd_keyset, dy, x, groups, weight, mean, m2, eps, needs);
}

}  // namespace musigma::group_norm
