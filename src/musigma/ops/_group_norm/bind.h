// group_norm at the dispatcher: CPU, autograd.
#pragma once

#include <atomic>

#include "../_native/channels.h"

namespace musigma::group_norm {

using Result = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Result(const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, double, Name);
using Backward = Result(
    const Tensor&, const Tensor&, int64_t, const MaybeTensor&, const MaybeTensor&, const Tensor&, const Tensor&, double,
    Name, std::array<bool, 3>);

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
// as many of its groups as stay in cache between one pass over them and the next. Groups that stay in the first cache
// have a kernel of their own, and then a unit is one of them.
struct Shape {
  DType type;
  bool last;   // channels last
  bool close;  // with such a kernel
  int64_t units, per_example, groups, channels, positions, bytes;

  Shape(const Image& x, int64_t all_groups) : type(x.layout.type), per_example(1), groups(all_groups) {
    const int64_t examples = x.held.size(0);
    channels = x.held.size(1);
    positions = x.held.numel() / examples / channels;
    last = x.format != at::MemoryFormat::Contiguous;
    bytes = x.bytes() / examples;
    const int64_t of_group = channels / groups * positions;
    close = !last && type != DType::kFloat64 && positions >= kLine && of_group <= kPartValues;
    if (close)
      per_example = groups;
    else if (!last)
      for (int64_t parts = std::min(groups, (bytes + kUnitBytes - 1) / kUnitBytes); parts <= groups; parts++)
        if (groups % parts == 0) {
          per_example = parts;
          break;
        }
    units = examples * per_example;
    groups /= per_example, channels /= per_example, bytes /= per_example;
  }
  static constexpr int64_t kUnitBytes = 1 << 16;
  static constexpr int64_t kLine = 16;  // values, the most a vector holds
  // The first channel of a unit.
  int64_t channel(int64_t unit) const { return unit % per_example * channels; }
  int64_t width() const { return channels / groups; }
  double count() const { return (double)(width() * positions); }
  // A unit for arithmetic with one coefficient a channel, and for statistics: with channels last those are taken of
  // channels and then merged, else of whole groups.
  Channels elements() const {
    return last ? Channels{type, positions, channels, 1} : Channels{type, 1, channels, positions};
  }
  Channels sets() const { return last ? elements() : Channels{type, 1, groups, width() * positions}; }
};

// What one unit needs while it is worked on; a thread has one for all of its units.
struct Workspace {
  const Shape& s;
  Scratch scratch;
  double *parts, *mean, *m2, *pivot;                      // of sets
  double *group_pivot, *group_offset, *group_rstd;        // of groups
  double *first, *offset, *rstd, *mean_g, *mean_product;  // of channels
  Coefficient at;

  explicit Workspace(const Shape& s) : s(s), at(s.channels, scratch) {
    const Channels sets = s.sets(), elements = s.elements();
    const int64_t of_sets = parts_of(sets).count() * sets.channels,
                  of_elements = parts_of(elements).count() * s.channels;
    const auto take = [&](int64_t n, auto&... arrays) { ((arrays = scratch.take<double>(n)), ...); };
    take(2 * std::max(of_sets, of_elements), parts);
    take(sets.channels, mean, m2, pivot);
    take(s.groups, group_pivot, group_offset, group_rstd);
    take(s.channels, first, offset, rstd, mean_g, mean_product);
  }

  // Mean (one double) and M2 of every group of the unit at x, and the mean in two parts for float64.
  void statistics(const char* x, double* means, double* m2s) {
    const Channels l = s.sets();
    const Parts p = parts_of(l);
    const bool in_two = s.type == DType::kFloat64;
    const int64_t each = l.channels / s.groups;
    if (in_two)
      for (int64_t c = 0; c < l.channels; c++) pivot[c] = ((const double*)x)[s.last ? c / each * each : c * l.inner];
    double* part_m2 = parts + p.count() * l.channels;
    const ChannelMoments a{l, p, false, x, in_two ? pivot : nullptr, parts, part_m2};
    const int64_t total = units(l, p);
    parallel(
        total, s.channels * s.positions / total, [&](int64_t b, int64_t e) { kernels().channel_moments(a, b, e); });
    kernels().join_moments({l, p, parts, part_m2, mean, m2}, 0, l.channels);
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

  // A group's values, for each of its channels.
  void spread(const double* of_groups, double* of_channels) const {
    for (int64_t g = 0; g < s.groups; g++) std::fill_n(of_channels + g * s.width(), s.width(), of_groups[g]);
  }

  // The coefficients of the unit, by statistics that `statistics` (for float64) or somebody before it has found.
  void coefficients(const double* means, const double* m2s, double eps, const double* weight, const double* bias) {
    const bool in_two = s.type == DType::kFloat64;
    const bool fits = kernels().roots({m2s, s.count(), eps, group_rstd}, s.groups);
    spread(group_rstd, rstd), spread(in_two ? group_pivot : means, first);
    if (in_two) spread(group_offset, offset);
    at.forward(
        in_two || !fits, Statistics{first, nullptr, in_two ? first : nullptr, in_two ? offset : nullptr}, rstd, weight,
        bias);
  }

  // And those of the way back, by the sums of g and of g·x̂.
  void backward(const double* of_g, const double* of_product, const double* weight) {
    for (int64_t g = 0; g < s.groups; g++) {
      const int64_t begin = g * s.width(), end = begin + s.width();
      // Four sums side by side, where one would wait for each addition.
      double g0[4] = {}, g1[4] = {};
      for (int64_t c = begin; c < end; c++) {
        const int64_t k = (c - begin) % 4;
        g0[k] += weight[c] * of_g[c], g1[k] += weight[c] * of_product[c];
      }
      const double sum0 = (g0[0] + g0[1]) + (g0[2] + g0[3]), sum1 = (g1[0] + g1[1]) + (g1[2] + g1[3]);
      std::fill(mean_g + begin, mean_g + end, sum0 / s.count());
      std::fill(mean_product + begin, mean_product + end, sum1 / s.count());
    }
    at.backward(rstd, mean_g, mean_product);
  }
};

// What the kernel of close groups is told by either direction.
inline Groups groups_of(const Shape& s, const void* x, const double* weight, const double* bias, double eps) {
  Groups a{};
  a.type = s.type, a.groups = s.per_example, a.width = s.channels, a.positions = s.positions;
  a.x = x, a.weight = weight, a.bias = bias, a.eps = eps;
  return a;
}

// Close groups by their kernel; f then works on those whose spread asks for double.
template <class F>
void for_groups(const Shape& s, Groups a, int64_t (*kernel)(const Groups&, int64_t, int64_t), Scratch& scratch, F f) {
  a.poor = scratch.take<bool>(s.units);
  std::atomic<int64_t> poor{0};
  parallel(s.units, s.channels * s.positions, [&](int64_t begin, int64_t end) { poor += kernel(a, begin, end); });
  if (!poor) return;
  Workspace work(s);
  for (int64_t n = 0; n < s.units; n++)
    if (a.poor[n]) f(work, n);
}

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
    const Tensor& input, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias, double eps,
    Name activation) {
  DType type;
  Activation kind;
  if (!supported(input, groups, weight, bias, type) || !activation_of(activation, kind))
    return reference().call(input, groups, weight, bias, eps, activation);
  Scratch scratch;
  const Image x(input, type);
  const Shape s(x, groups);
  Tensor y = x.like(), mean = doubles({input.size(0), groups}), m2 = doubles({input.size(0), groups});
  const double *w = values_of(weight, 1.0, input.size(1), scratch), *b = values_of(bias, 0.0, input.size(1), scratch);
  const char* from = (const char*)x.data();
  char* to = (char*)y.mutable_data_ptr();
  double *means = mean.mutable_data_ptr<double>(), *m2s = m2.mutable_data_ptr<double>();
  const bool streamed = streams(x.bytes());
  const auto normalize = [&](Workspace& work, int64_t n) {
    const int64_t first = s.channel(n);
    double *mean_n = means + n * s.groups, *m2_n = m2s + n * s.groups;
    work.statistics(from + n * s.bytes, mean_n, m2_n);
    work.coefficients(mean_n, m2_n, eps, w + first, b + first);
    const ChannelAffine a{s.elements(), from + n * s.bytes, nullptr, to + n * s.bytes, work.at.get(), kind, streamed};
    over_lines(a.layout, [&](int64_t b, int64_t e) { kernels().channel_affine(a, b, e); });
  };
  if (s.close) {
    Groups a = groups_of(s, from, w, b, eps);
    a.mean = means, a.m2 = m2s, a.activation = kind, a.stream = streamed, a.y = to;
    for_groups(s, a, kernels().group_norm, scratch, normalize);
  } else {
    for_units(s, normalize);
  }
  return {std::move(y), std::move(mean), std::move(m2)};
}

inline Result backward(
    const Tensor& grad, const Tensor& input, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias,
    const Tensor& mean, const Tensor& m2, double eps, Name activation, std::array<bool, 3> needs) {
  DType type;
  Activation kind;
  if (!supported(input, groups, weight, bias, type) || !activation_of(activation, kind) || !is_like(grad, input) ||
      !is_statistic(mean, input.size(0) * groups) || !is_statistic(m2, input.size(0) * groups))
    return backward_reference().call(grad, input, groups, weight, bias, mean, m2, eps, activation, needs);
  Scratch scratch;
  const Image x(input, type);
  const Tensor dy = x.alike(grad);
  const Shape s(x, groups);
  const Tensor mean_c = mean.contiguous(), m2_c = m2.contiguous();
  Tensor dx = needs[0] ? x.like() : none(input);
  const int64_t channels = input.size(1);
  double* sums = scratch.take<double>(s.units * 2 * s.channels);
  const double *w = values_of(weight, 1.0, channels, scratch), *b = values_of(bias, 0.0, channels, scratch);
  const char *from = (const char*)x.data(), *up = (const char*)dy.const_data_ptr();
  char* to = needs[0] ? (char*)dx.mutable_data_ptr() : nullptr;
  const bool streamed = streams(x.bytes());
  const auto go_back = [&](Workspace& work, int64_t n) {
    const int64_t first = s.channel(n);
    const double* means = mean_c.const_data_ptr<double>() + n * s.groups;
    const double* m2s = m2_c.const_data_ptr<double>() + n * s.groups;
    // The saved mean is one double: float64 has to find its second part again.
    if (type == DType::kFloat64) work.statistics(from + n * s.bytes, work.mean_g, work.mean_product);
    work.coefficients(means, m2s, eps, w + first, b + first);
    const Channels l = s.elements();
    const Parts p = parts_of(l);
    double *of_g = sums + n * 2 * s.channels, *of_product = of_g + s.channels;
    const ChannelSums a{l, p, up + n * s.bytes, from + n * s.bytes, nullptr, nullptr, work.at.get(), kind, work.parts};
    const int64_t total = units(l, p);
    parallel(total, s.channels * s.positions / total, [&](int64_t b, int64_t e) { kernels().channel_sums(a, b, e); });
    kernels().join_sums({p.count(), 2 * s.channels, work.parts, of_g}, 0, 2 * s.channels);
    work.at.complete(work.rstd, of_g, of_product);
    if (!to) return;
    work.backward(of_g, of_product, w + first);
    const ChannelGradient d{l, a.dy, a.x, to + n * s.bytes, work.at.get(), kind, streamed};
    over_lines(l, [&](int64_t b, int64_t e) { kernels().channel_gradient(d, b, e); });
  };
  if (s.close) {
    Groups a = groups_of(s, from, w, b, eps);
    a.mean = (double*)mean_c.const_data_ptr<double>(), a.m2 = (double*)m2_c.const_data_ptr<double>();
    a.activation = kind, a.stream = streamed, a.dy = up, a.dx = to, a.sums = sums;
    for_groups(s, a, kernels().group_norm_backward, scratch, go_back);
  } else {
    for_units(s, go_back);
  }
  // Of all examples, still unit by unit; then of all channels.
  double *joined = scratch.take<double>(2 * channels), *total = scratch.take<double>(2 * channels);
  kernels().join_sums({input.size(0), 2 * channels, sums, joined}, 0, 2 * channels);
  for (int64_t c = 0; c < channels; c++) {
    const int64_t at = c / s.channels * 2 * s.channels + c % s.channels;
    total[c] = joined[at], total[channels + c] = joined[at + s.channels];
  }
  const auto parameter = parameter_type(input, weight);
  return {
      std::move(dx), needs[1] ? as_type(total + channels, channels, parameter) : none(input),
      needs[2] ? as_type(total, channels, parameter) : none(input)};
}

struct Op {
  static constexpr const char* kName = "GroupNormBackward";
  static constexpr int kInputs = 3, kSaved = 5;  // x, weight, bias; and mean, m2
  using Plain = std::tuple<int64_t, double, int64_t>;

  static variable_list backward(
      const variable_list& grads, const std::array<Tensor, kSaved>& saved, const Plain& plain,
      const std::array<bool, kInputs>& needs) {
    const auto& [groups, eps, activation] = plain;
    auto [dx, dweight, dbias] = backward_op().call(
        grads[0], saved[0], groups, maybe(saved[1]), maybe(saved[2]), saved[3], saved[4], eps, name_of(activation),
        needs);
    return {needs[0] ? dx : Tensor(), needs[1] ? dweight : Tensor(), needs[2] ? dbias : Tensor()};
  }
};

inline Result forward_autograd(
    c10::DispatchKeySet keys, const Tensor& x, int64_t groups, const MaybeTensor& weight, const MaybeTensor& bias,
    double eps, Name activation) {
  Activation kind;
  if (has_tangent(x, weight, bias) || !activation_of(activation, kind))
    return reference().call(x, groups, weight, bias, eps, activation);
  return record<Op>(
      [&] {
        return forward_op().redispatch(keys & c10::after_autograd_keyset, x, groups, weight, bias, eps, activation);
      },
      {groups, eps, (int64_t)kind},
      [&](Result& r) {
        return std::array<Tensor, 5>{
            x, tensor(weight), kind != Activation::kNone ? tensor(bias) : Tensor(), std::get<1>(r), std::get<2>(r)};
      },
      [](Result& r) { return std::array<Tensor*, 1>{&std::get<0>(r)}; }, x, weight, bias);
}

inline Result backward_autograd(
    c10::DispatchKeySet keys, const Tensor& dy, const Tensor& x, int64_t groups, const MaybeTensor& weight,
    const MaybeTensor& bias, const Tensor& mean, const Tensor& m2, double eps, Name activation,
    std::array<bool, 3> needs) {
  if (has_tangent(dy, x, weight, bias) || requires_grad(dy, x, weight, bias))
    return backward_reference().call(dy, x, groups, weight, bias, mean, m2, eps, activation, needs);
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_op().redispatch(
      keys & c10::after_autograd_keyset, dy, x, groups, weight, bias, mean, m2, eps, activation, needs);
}

}  // namespace musigma::group_norm
