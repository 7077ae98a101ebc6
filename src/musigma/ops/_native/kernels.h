// What the binding and the kernels agree on: raw pointers, no torch. One table of functions for each CPU level.
#pragma once

#include <stdint.h>

#include "dtype.h"

namespace musigma {

// What is applied to the result before it is rounded to the storage type; see activation.h.
enum class Activation { kNone, kRelu, kSilu, kGelu, kGeluTanh };

// Rows of `width` values; row r of x starts at x + r * x_stride. Parameters are in the input's type, or float beside
// half types. The statistics are double.
struct RowNorm {
  DType type, parameter_type;
  int64_t width;
  const void* x;
  int64_t x_stride;
  const void* residual;  // or null: added to x first, and the sum, rounded, is what is normalized
  int64_t residual_stride;
  void* sum;           // contiguous, or null
  const void* weight;  // or null
  const void* bias;    // or null
  void* y;             // contiguous
  double* mean;
  double* rstd;
  double eps;
  bool center;
  Activation activation;
  bool stream;  // write past the caches: y is larger than they are
};

struct RowNormBackward {
  DType type, parameter_type;
  int64_t rows, width;
  const void* dy;
  int64_t dy_stride;
  const void* dsum;  // or null: added to dx
  int64_t dsum_stride;
  const void* x;  // or the sum
  int64_t x_stride;
  const void* weight;  // or null
  const void* bias;    // or null; read only behind an activation
  const double* mean;
  const double* rstd;
  void* dx;  // contiguous, or null
  bool center;
  Activation activation;
  bool stream;
  // Sums over rows, for dweight and dbias; null if neither is wanted. See sums.h.
  int64_t block_rows;
  double* sums;
};

// Column sums of `blocks` blocks, added in order: out[j] = sum over b of the column's parts.
struct FoldSums {
  int64_t blocks, width;
  const double* sums;
  int64_t which;  // 0: the first of the two sums, 1: the second
  DType out_type;
  void* out;
  bool low;  // whether the sums have low parts, as those of doubles do
};

// A dense tensor seen as (outer, channels, inner): batches of images with inner = the positions, or, with inner = 1,
// channels last. Whatever has one value a channel is an array over `channels`.
struct Channels {
  DType type;
  int64_t outer, channels, inner;
};

// Statistics and sums over a channel are taken in parts, whose size depends on the shape alone, and joined in order.
struct Parts {
  int64_t outer, chunks;  // parts along outer and along inner
  int64_t rows, values;   // of a full part along each
  int64_t count() const { return outer * chunks; }
};

// How a channel is centered, scaled and shifted: (x - first) * scale + shift. The arrays hold floats, or doubles if
// `wide` (float64 input, or a spread that float32 can't square).
//
// One number can't hold a mean well enough (in float32, at mean/std 1e6, its rounding alone is 4e4 units of the result).
// What `first` leaves of it is a fraction of the spread, and is part of the shift.
struct Coefficients {
  bool wide;
  const void *first, *scale, *shift;
  const void* rstd;            // in sums
  const void *slope, *offset;  // in gradients
};

struct ChannelMoments {
  Channels layout;
  Parts parts;
  bool wide;  // sum in double whatever the type: results good to float64's own last digits
  const void* x;
  // Where given (float64), the means are taken from here: at mean/std 1e6 one double can't hold them.
  const double* pivot;  // (channels), or null
  double *mean, *m2;    // (parts, channels)
};

// Merges the parts of channels [begin, end), in order (Chan, Golub & LeVeque 1983).
struct JoinMoments {
  Channels layout;
  Parts parts;
  const double *part_mean, *part_m2;
  double *mean, *m2;  // (channels)
};

struct JoinSums {
  int64_t parts, width;
  const double* sums;  // (parts, width)
  double* out;         // (width)
};

// y = activation((x - first) * scale + shift + add)
struct ChannelAffine {
  Channels layout;
  const void* x;
  const void* add;  // or null
  void* y;
  Coefficients at;
  Activation activation;
  bool stream;  // write past the caches: y is larger than they are
};

// The sums of g, and of g times (x - first) * rstd, with g = dy, or dy times the slope of the activation.
struct ChannelSums {
  Channels layout;
  Parts parts;
  const void *dy, *x;  // x may be null without activation: the second sum is then 0
  const void* add;     // or null
  void* g;             // or null; where it is kept, in the type of dy
  Coefficients at;
  Activation activation;
  double* sums;  // (parts, 2, channels)
};

// dx = g * scale + (x - first) * slope + offset; without slope g * scale.
struct ChannelGradient {
  Channels layout;
  const void *dy, *x;
  void* dx;
  Coefficients at;
  Activation activation;
  bool stream;
};

// Groups of `width` channels with `positions` values each, example after example: contiguous images whose groups are no
// longer than a part, in a type narrower than double. For the statistics and the sums see above.
struct Groups {
  DType type;
  int64_t groups, width, positions;  // groups of an example
  const void* x;
  const double *weight, *bias;  // (channels)
  double *mean, *m2;            // (examples, groups): written forward, read backward
  double eps;
  Activation activation;
  bool stream;
  bool* poor;  // set where float32 can't square the spread or its inverse; nothing else is done to such a group
  void* y;     // forward
  const void* dy;
  void* dx;      // or null
  double* sums;  // (examples, groups, 2, width)
};

// Values of any type as doubles.
struct Widen {
  DType type;
  const void* from;
  double* to;
};

// rstd[i] = 1 / sqrt(square[i] / count + eps)
struct Roots {
  const double* square;
  double count, eps;
  double* rstd;
};

// Weights beside a tensor of channels, dense along the dims they vary over; a step of 0 is a dim whose values share one.
struct Weights {
  const void* data;
  bool bytes;  // of 0 or 1; else doubles
  int64_t outer, channel, inner;
};

// A value of weight 0 is never used, so it may be NaN. All in double.
struct MaskedMoments {
  Channels layout;
  Parts parts;
  const void* x;
  Weights weights;
  double* pivot;              // (channels), the first value of each that has a weight
  double *count, *mean, *m2;  // (parts, channels); the mean less the pivot
};

// Merges the parts of channels [begin, end), in order, into (channels).
struct JoinMasked {
  int64_t channels, parts;
  const double *pivot, *part_count, *part_mean, *part_m2;
  double *count, *mean, *m2;
};

// dx = weight * ((x - center) * slope + shift)
struct MaskedGradient {
  Channels layout;
  const void* x;
  void* dx;
  Weights weights;
  const double *center, *slope, *shift;  // (channels)
};

// From statistics, weight and bias to first, scale, shift and rstd. With an offset (float64) the mean is mean + offset.
// `rest` becomes what `first` leaves of the mean.
struct ChannelCoefficients {
  bool wide;
  const double *mean, *offset, *rstd, *weight, *bias;
  void *first, *scale, *shift, *out_rstd;
  double* rest;
};

// From the means of w·g and of w·g·x̂ over what was normalized together to slope and offset.
struct ChannelSlopes {
  bool wide;
  const double *rstd, *rest, *mean_g, *mean_product;
  void *slope, *offset;
};

// y = v, but 0 where the weight is 0 and x is not finite.
struct MaskedFinite {
  Channels layout;
  const void *x, *v;
  void* y;         // may be v
  int32_t* found;  // set to 1 where there is such a value; with y null that is all
  Weights weights;
};

struct Kernels {
  const char* level;
  void (*row_norm)(const RowNorm&, int64_t begin, int64_t end);                   // rows
  void (*row_norm_backward)(const RowNormBackward&, int64_t begin, int64_t end);  // blocks of rows
  void (*fold_sums)(const FoldSums&, int64_t begin, int64_t end);                 // columns
  void (*channel_moments)(const ChannelMoments&, int64_t begin, int64_t end);     // units, see channels.h
  void (*join_moments)(const JoinMoments&, int64_t begin, int64_t end);           // channels
  void (*join_sums)(const JoinSums&, int64_t begin, int64_t end);                 // columns
  void (*channel_sums)(const ChannelSums&, int64_t begin, int64_t end);           // units
  void (*channel_affine)(const ChannelAffine&, int64_t begin, int64_t end);       // rows of inner, or of channels
  void (*channel_gradient)(const ChannelGradient&, int64_t begin, int64_t end);   // the same
  int64_t (*group_norm)(const Groups&, int64_t begin, int64_t end);               // groups; how many are poor
  int64_t (*group_norm_backward)(const Groups&, int64_t begin, int64_t end);      // the same
  void (*masked_pivots)(const MaskedMoments&, int64_t begin, int64_t end);        // channels
  void (*masked_moments)(const MaskedMoments&, int64_t begin, int64_t end);       // units
  void (*join_masked)(const JoinMasked&, int64_t begin, int64_t end);             // channels
  void (*masked_gradient)(const MaskedGradient&, int64_t begin, int64_t end);     // as channel_gradient
  void (*masked_finite)(const MaskedFinite&, int64_t begin, int64_t end);         // the same
  void (*widen)(const Widen&, int64_t count);
  bool (*roots)(const Roots&, int64_t count);  // whether float32 can square such spreads and their inverses
  void (*channel_coefficients)(const ChannelCoefficients&, int64_t channels);
  void (*channel_slopes)(const ChannelSlopes&, int64_t channels);
};

// The best this CPU can run, unless `use_level` chose another.
const Kernels& kernels();

// What was compiled, from the lowest level up, and whether this CPU can run it.
constexpr int kMaxLevels = 3;
struct Level {
  const Kernels* kernels;
  bool runs;
};
int levels(Level (&found)[kMaxLevels]);

// Before the first call of a kernel. False, and no change, for a level that is unknown or that this CPU can't run.
bool use_level(const char* name);

constexpr int64_t kPartRows = 64;      // at most so many rows in a part along outer, twice as many of single values
constexpr int64_t kPartValues = 8192;  // and so many values along inner, which stay in the first cache

static inline Parts parts_of(const Channels& layout) {
  Parts p;
  p.values = layout.inner < kPartValues ? layout.inner : kPartValues;
  p.chunks = (layout.inner + p.values - 1) / p.values;
  // Short rows share a part, or the end of a sum would cost more than the sum.
  p.rows = 2048 / layout.inner;
  p.rows = p.rows < 1 ? 1 : p.rows > kPartRows ? kPartRows : p.rows;
  if (layout.inner == 1) p.rows = 2 * kPartRows;
  p.outer = (layout.outer + p.rows - 1) / p.rows;
  return p;
}

// Values of a channel in a part.
static inline int64_t part_count(const Channels& layout, const Parts& p, int64_t part) {
  const int64_t row = part / p.chunks * p.rows, value = part % p.chunks * p.values;
  const int64_t rows = layout.outer - row < p.rows ? layout.outer - row : p.rows;
  const int64_t values = layout.inner - value < p.values ? layout.inner - value : p.values;
  return rows * values;
}

// Units of work over the parts: with inner = 1 a part with all its channels, else a part of one channel.
static inline int64_t units(const Channels& layout, const Parts& parts) {
  return parts.count() * (layout.inner == 1 ? 1 : layout.channels);
}

// Doubles that one block of column sums takes.
constexpr int64_t kSumsPerColumn = 6;

}  // namespace musigma
