// Runs every kernel of every level this CPU has, for a build with -fsanitize=address,undefined.
//
// Arrays are heap blocks of their exact size, so that a read or write past either end is an error, or have a margin
// around them that has to stay as it was (the sanitizer doesn't see masked stores); these are misaligned too. Whatever
// a kernel is to fill starts as NaN, and so does its scratch memory: a gap it leaves, or something it reads before it
// wrote it, shows as a result that is not finite. What the values ought to be is the Python tests' business.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../../src/musigma/ops/_native/kernels.h"

using namespace musigma;

namespace {

int failures = 0;
const char* where = "";

void expect(bool ok, const char* what, const char* detail, int64_t n) {
  if (ok) return;
  failures++;
  fprintf(stderr, "%s: %s: %s at size %lld\n", where, what, detail, (long long)n);
}

const DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
const Activation kActivations[] = {
    Activation::kNone, Activation::kRelu, Activation::kSilu, Activation::kGelu, Activation::kGeluTanh};
const int64_t kSizes[] = {1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 1023, 1024, 1025};

int64_t size_of(DType type) { return type == DType::kFloat64 ? 8 : type == DType::kFloat32 ? 4 : 2; }
bool is_double(DType type) { return type == DType::kFloat64; }
DType compute(DType type) { return is_double(type) ? DType::kFloat64 : DType::kFloat32; }

uint32_t seed = 1;
double uniform() {  // in [-1, 1)
  seed = seed * 1664525u + 1013904223u;
  return (double)(int32_t)seed / 2147483648.0;
}

// float32 to the nearest float16 below it: the driver needs plausible values, not rounded ones.
uint16_t half_bits(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  const int exponent = (int)(u >> 23 & 0xff) - 127;
  const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  if (exponent == 128) return sign | 0x7c00 | (u & 0x7fffff ? 0x200 : 0);
  if (exponent > 15) return sign | 0x7bff;
  if (exponent < -14) return sign;
  return (uint16_t)(sign | (exponent + 15) << 10 | (u >> 13 & 0x3ff));
}
float half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return mantissa ? NAN : INFINITY;
  const float v = exponent ? ldexpf(1.0f + (float)mantissa / 1024, exponent - 15) : ldexpf((float)mantissa, -24);
  return h & 0x8000 ? -v : v;
}

// n values: a block of their own, or, with a shift, so many values behind its start and a vector before its end.
class Array {
 public:
  Array(DType type, int64_t n, int64_t shift = 0)
      : type_(type), n_(n), before_(shift * size_of(type)), after_(shift ? 64 : 0), bytes_(n * size_of(type)),
        block_((char*)malloc((size_t)(before_ + bytes_ + after_))), data_(block_ + before_) {
    memset(block_, 0xff, (size_t)(before_ + bytes_ + after_));  // NaN in every type
  }
  ~Array() {
    for (int64_t i = 0; i < before_ + after_; i++)
      if ((uint8_t)block_[i < before_ ? i : i + bytes_] != 0xff)
        expect(false, "array", "its margin was written to", n_);
    free(block_);
  }
  Array(const Array&) = delete;

  Array& random(double mean, double scale) {
    for (int64_t i = 0; i < n_; i++) set(i, (mean + uniform()) * scale);
    return *this;
  }
  void set(int64_t i, double v) {
    if (type_ == DType::kFloat64) ((double*)data_)[i] = v;
    if (type_ == DType::kFloat32) ((float*)data_)[i] = (float)v;
    if (type_ == DType::kFloat16) ((uint16_t*)data_)[i] = half_bits((float)v);
    if (type_ == DType::kBFloat16) {
      const float f = (float)v;
      uint32_t u;
      memcpy(&u, &f, 4);
      ((uint16_t*)data_)[i] = (uint16_t)(u >> 16);
    }
  }
  double get(int64_t i) const {
    if (type_ == DType::kFloat64) return ((double*)data_)[i];
    if (type_ == DType::kFloat32) return ((float*)data_)[i];
    const uint16_t h = ((uint16_t*)data_)[i];
    if (type_ == DType::kFloat16) return half_value(h);
    const uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  bool finite() const {
    for (int64_t i = 0; i < n_; i++)
      if (!isfinite(get(i))) return false;
    return true;
  }
  void* data() { return data_; }
  double* doubles() { return (double*)data_; }

 private:
  DType type_;
  int64_t n_, before_, after_, bytes_;
  char *block_, *data_;
};

// What the values are like: ordinary ones, those that float32 can't square, and those it can't square the other way.
struct Kind {
  double mean, scale;
};
std::vector<Kind> kinds(DType type) {
  if (type == DType::kFloat16) return {{1.0, 1.0}, {1.0, 1e4}};
  return {{1.0, 1.0}, {100.0, 1e-25}, {0.0, 1e25}};
}

void rows(const Kernels& k, DType type, int64_t width, int64_t count, const Kind& kind, int options, Activation act) {
  const bool weighted = options & 1, biased = options & 2, center = options & 4, gaps = options & 8,
             extra = options & 16;
  const int64_t stride = gaps ? width + 3 : width, shift = gaps ? 1 : 0, spanned = (count - 1) * stride + width;
  const DType parameter = extra ? type : compute(type);
  Array x(type, spanned, shift), residual(type, spanned, shift), y(type, count * width, shift);
  Array sum(type, count * width, shift);
  Array weight(parameter, width, shift), bias(parameter, width, 1);
  Array mean(DType::kFloat64, count), rstd(DType::kFloat64, count);
  x.random(kind.mean, kind.scale), residual.random(0, kind.scale), weight.random(0, 1), bias.random(0, 1);
  const void *w = weighted ? weight.data() : nullptr, *b = biased ? bias.data() : nullptr;
  const RowNorm a{
      .type = type,
      .parameter_type = parameter,
      .width = width,
      .x = x.data(),
      .x_stride = stride,
      .residual = extra ? residual.data() : nullptr,
      .residual_stride = stride,
      .sum = extra ? sum.data() : nullptr,
      .weight = w,
      .bias = b,
      .y = y.data(),
      .mean = mean.doubles(),
      .rstd = rstd.doubles(),
      .eps = 1e-5 * kind.scale * kind.scale,
      .center = center,
      .activation = act,
      .stream = extra};
  k.row_norm(a, 0, count);
  expect(y.finite() && mean.finite() && rstd.finite(), "row_norm", "not finite", width);
  expect(!extra || sum.finite(), "row_norm", "the sum is not finite", width);

  Array dy(type, spanned, shift), dsum(type, spanned, shift), dx(type, count * width, shift);
  dy.random(0, kind.scale < 1 ? 1e-10 : 1), dsum.random(0, 1);
  for (const bool summed : {false, true}) {
    const int64_t block = 32, blocks = (count + block - 1) / block;
    Array sums(DType::kFloat64, blocks * kSumsPerColumn * width);
    const RowNormBackward d{
        .type = type,
        .parameter_type = parameter,
        .rows = count,
        .width = width,
        .dy = dy.data(),
        .dy_stride = stride,
        .dsum = extra ? dsum.data() : nullptr,
        .dsum_stride = stride,
        .x = extra ? sum.data() : x.data(),
        .x_stride = extra ? width : stride,
        .weight = w,
        .bias = b,
        .mean = mean.doubles(),
        .rstd = rstd.doubles(),
        .dx = summed && width % 2 ? nullptr : dx.data(),
        .center = center,
        .activation = act,
        .stream = extra,
        .block_rows = block,
        .sums = summed ? sums.doubles() : nullptr};
    k.row_norm_backward(d, 0, blocks);
    for (int64_t which = 0; summed && which < 2; which++)
      for (const DType to : kTypes) {
        Array out(to, width, 1);
        k.fold_sums(
            {.blocks = blocks,
             .width = width,
             .sums = sums.doubles(),
             .which = which,
             .out_type = to,
             .out = out.data(),
             .low = is_double(type)},
            0, width);
        expect(out.finite() || to == DType::kFloat16, "fold_sums", "not finite", width);
      }
    expect(dx.finite() || type == DType::kFloat16, "row_norm_backward", "not finite", width);
  }
}

void channels(const Kernels& k, const Channels& l, const Kind& kind, bool wide, bool extra, Activation act) {
  const int64_t n = l.outer * l.channels * l.inner, C = l.channels;
  wide = wide || is_double(l.type);
  const bool from = extra && is_double(l.type);
  const DType coefficient = wide ? DType::kFloat64 : DType::kFloat32;
  const Parts p = parts_of(l);
  Array x(l.type, n, 1), add(l.type, n), y(l.type, n), dy(l.type, n, 1), g(l.type, n), dx(l.type, n);
  Array part_mean(DType::kFloat64, p.count() * C), part_m2(DType::kFloat64, p.count() * C);
  Array mean(DType::kFloat64, C), m2(DType::kFloat64, C), pivot(DType::kFloat64, C), rstd(DType::kFloat64, C);
  x.random(kind.mean, kind.scale), add.random(0, 1), dy.random(0, 1), pivot.random(kind.mean, kind.scale);
  k.channel_moments(
      {.layout = l,
       .parts = p,
       .wide = wide,
       .x = x.data(),
       .pivot = from ? pivot.doubles() : nullptr,
       .mean = part_mean.doubles(),
       .m2 = part_m2.doubles()},
      0, units(l, p));
  k.join_moments(
      {.layout = l,
       .parts = p,
       .part_mean = part_mean.doubles(),
       .part_m2 = part_m2.doubles(),
       .mean = mean.doubles(),
       .m2 = m2.doubles()},
      0, C);
  expect(mean.finite() && m2.finite(), "channel_moments", "not finite", n);
  k.roots(
      {.square = m2.doubles(),
       .count = (double)(l.outer * l.inner),
       .eps = 1e-5 * kind.scale * kind.scale,
       .rstd = rstd.doubles()},
      C);

  Array weight(DType::kFloat64, C), bias(DType::kFloat64, C), rest(DType::kFloat64, C);
  Array first(coefficient, C, 1), scale(coefficient, C), shift(coefficient, C), roots(coefficient, C, 1);
  weight.random(0, 1), bias.random(0, 1);
  k.channel_coefficients(
      {.wide = wide,
       .mean = from ? pivot.doubles() : mean.doubles(),
       .offset = from ? mean.doubles() : nullptr,
       .rstd = rstd.doubles(),
       .weight = weight.doubles(),
       .bias = bias.doubles(),
       .first = first.data(),
       .scale = scale.data(),
       .shift = shift.data(),
       .out_rstd = roots.data(),
       .rest = rest.doubles()},
      C);
  Coefficients at{
      .wide = wide,
      .first = first.data(),
      .scale = scale.data(),
      .shift = shift.data(),
      .rstd = roots.data(),
      .slope = nullptr,
      .offset = nullptr};
  const int64_t lines = l.inner == 1 ? l.outer : l.outer * C;
  const void* added = extra ? add.data() : nullptr;
  k.channel_affine(
      {.layout = l, .x = x.data(), .add = added, .y = y.data(), .at = at, .activation = act, .stream = extra}, 0,
      lines);
  expect(y.finite(), "channel_affine", "not finite", n);
  const bool kept = extra && act != Activation::kNone;
  for (const bool with_x : {true, false}) {
    if (!with_x && act != Activation::kNone) continue;
    Array sums(DType::kFloat64, p.count() * 2 * C), joined(DType::kFloat64, 2 * C);
    k.channel_sums(
        {.layout = l,
         .parts = p,
         .dy = dy.data(),
         .x = with_x ? x.data() : nullptr,
         .add = added,
         .g = kept ? g.data() : nullptr,
         .at = at,
         .activation = act,
         .sums = sums.doubles()},
        0, units(l, p));
    k.join_sums({.parts = p.count(), .width = 2 * C, .sums = sums.doubles(), .out = joined.doubles()}, 0, 2 * C);
    expect(joined.finite(), "channel_sums", "not finite", n);
    Array slope(coefficient, C), offset(coefficient, C);
    k.channel_slopes(
        {.wide = wide,
         .rstd = rstd.doubles(),
         .rest = rest.doubles(),
         .mean_g = joined.doubles(),
         .mean_product = joined.doubles() + C,
         .slope = slope.data(),
         .offset = offset.data()},
        C);
    if (with_x) at.slope = slope.data(), at.offset = offset.data();
    k.channel_gradient(
        {.layout = l,
         .dy = kept ? g.data() : dy.data(),
         .x = x.data(),
         .dx = dx.data(),
         .at = at,
         .activation = kept ? Activation::kNone : act,
         .stream = extra},
        0, lines);
    expect(dx.finite() || kind.scale < 1, "channel_gradient", "not finite", n);
    at.slope = at.offset = nullptr;
  }
  expect(!kept || g.finite(), "channel_sums", "g is not finite", n);
}

// Two examples of two groups, of more than one value each.
void groups(const Kernels& k, DType type, int64_t width, int64_t positions, const Kind& kind, Activation act) {
  const int64_t C = 2 * width, n = 2 * C * positions;
  Array x(type, n, 1), dy(type, n, 1), y(type, n), dx(type, n);
  Array weight(DType::kFloat64, C), bias(DType::kFloat64, C), mean(DType::kFloat64, 4), m2(DType::kFloat64, 4);
  Array sums(DType::kFloat64, 2 * 2 * C);
  x.random(kind.mean, kind.scale), dy.random(0, 1), weight.random(0, 1), bias.random(0, 1);
  bool* poor = (bool*)malloc(4);
  Groups a{
      .type = type,
      .groups = 2,
      .width = width,
      .positions = positions,
      .x = x.data(),
      .weight = weight.doubles(),
      .bias = bias.doubles(),
      .mean = mean.doubles(),
      .m2 = m2.doubles(),
      .eps = 1e-5 * kind.scale * kind.scale,
      .activation = act,
      .stream = width > 1,
      .poor = poor,
      .y = y.data(),
      .dy = dy.data(),
      .dx = dx.data(),
      .sums = sums.doubles()};
  if (k.group_norm(a, 0, 1) + k.group_norm(a, 1, 4) == 0) expect(y.finite(), "group_norm", "not finite", positions);
  expect(mean.finite() && m2.finite(), "group_norm", "statistics not finite", positions);
  if (k.group_norm_backward(a, 0, 3) + k.group_norm_backward(a, 3, 4) == 0) {
    expect(sums.finite(), "group_norm_backward", "sums not finite", positions);
    expect(dx.finite() || kind.scale < 1, "group_norm_backward", "not finite", positions);
  }
  free(poor);
}

// `varies`: the dims, of outer, channels and inner, along which the weights differ. What has weight 0 is NaN.
void masked(const Kernels& k, const Channels& l, int varies, bool bytes) {
  const int64_t C = l.channels, n = l.outer * C * l.inner;
  const int64_t inner = varies & 1 ? l.inner : 1, channel = varies & 2 ? C : 1, outer = varies & 4 ? l.outer : 1;
  const int64_t count = outer * channel * inner;
  uint8_t* flags = (uint8_t*)malloc((size_t)count);
  Array doubles(DType::kFloat64, count);
  for (int64_t i = 0; i < count; i++) flags[i] = uniform() > 0, doubles.set(i, flags[i] ? 1 + uniform() : 0);
  const Weights w{
      .data = bytes ? (const void*)flags : doubles.data(),
      .bytes = bytes,
      .outer = varies & 4 ? channel * inner : 0,
      .channel = varies & 2 ? inner : 0,
      .inner = varies & 1 ? 1 : 0};
  const Parts p = parts_of(l);
  Array x(l.type, n, 1), dx(l.type, n, 1);
  x.random(1, 1);
  for (int64_t o = 0; o < l.outer; o++)
    for (int64_t c = 0; c < C; c++)
      for (int64_t i = 0; i < l.inner; i++)
        if (!flags[o * w.outer + c * w.channel + i * w.inner]) x.set((o * C + c) * l.inner + i, NAN);
  Array pivot(DType::kFloat64, C), parts(DType::kFloat64, 3 * p.count() * C), joined(DType::kFloat64, 3 * C);
  double *part = parts.doubles(), *out = joined.doubles();
  const int64_t each = p.count() * C;
  const MaskedMoments a{
      .layout = l,
      .parts = p,
      .x = x.data(),
      .weights = w,
      .pivot = pivot.doubles(),
      .count = part,
      .mean = part + each,
      .m2 = part + 2 * each};
  k.masked_pivots(a, 0, C);
  k.masked_moments(a, 0, units(l, p));
  k.join_masked(
      {.channels = C,
       .parts = p.count(),
       .pivot = pivot.doubles(),
       .part_count = part,
       .part_mean = part + each,
       .part_m2 = part + 2 * each,
       .count = out,
       .mean = out + C,
       .m2 = out + 2 * C},
      0, C);
  expect(joined.finite(), "masked_moments", "not finite", n);
  Array slope(DType::kFloat64, C), shift(DType::kFloat64, C);
  slope.random(0, 1), shift.random(0, 1);
  k.masked_gradient(
      {.layout = l,
       .x = x.data(),
       .dx = dx.data(),
       .weights = w,
       .center = out + C,
       .slope = slope.doubles(),
       .shift = shift.doubles()},
      0, l.inner == 1 ? l.outer : l.outer * C);
  expect(dx.finite(), "masked_gradient", "not finite", n);
  free(flags);
}

void all(const Kernels& k, DType type) {
  for (const int64_t size : kSizes)
    for (int varies = 0; varies < 8; varies++)
      for (const Channels l : {Channels{type, 5, size, 1}, Channels{type, 3, 2, size}, Channels{type, 37, 3, 7}})
        masked(k, l, varies, size % 2);
  for (const Kind& kind : kinds(type)) {
    for (const int64_t width : kSizes)
      for (int options = 0; options < 32; options++) {
        if (width > 100 && options % 5) continue;
        rows(k, type, width, width < 100 ? 37 : 5, kind, options, kActivations[options % 5]);
      }
    for (const int64_t size : kSizes)
      for (int options = 0; options < 4; options++) {
        const bool wide = options & 1, extra = options & 2;
        int turn = (int)size + options;
        for (const Channels l :
             {Channels{type, 5, size, 1}, Channels{type, size + 2, 3, 1}, Channels{type, 3, 2, size},
              Channels{type, 2, size, 3}, Channels{type, size, 3, 7}})
          if (l.outer * l.inner > 1) channels(k, l, kind, wide, extra, kActivations[turn++ % 5]);
      }
    for (const int64_t size : kSizes)
      for (int i = 0; size > 1 && !is_double(type) && i < 5; i++)
        groups(k, type, size > 1000 ? 1 + i : 3 - i % 3, size, kind, kActivations[i]);
    channels(k, {type, 2, 3, kPartValues + 5}, kind, false, true, Activation::kRelu);
    channels(k, {type, 2 * kPartRows + 1, 515, 1}, kind, false, true, Activation::kSilu);
  }
}

}  // namespace

int main() {
  Level found[kMaxLevels];
  const int count = levels(found);
  for (int i = 0; i < count; i++) {
    where = found[i].kernels->level;
    if (!found[i].runs) {
      printf("%s: this CPU can't run it\n", where);
      continue;
    }
    for (const DType type : kTypes) all(*found[i].kernels, type);
    printf("%s: %s\n", where, failures ? "FAILED" : "ok");
  }
  return failures != 0;
}
