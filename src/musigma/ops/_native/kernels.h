// What the binding and the kernels agree on: raw pointers, no torch. One table of functions for each CPU level.
#pragma once

#include <stdint.h>

#include "dtype.h"

namespace musigma {

// Rows of `width` values; row r of x starts at x + r * x_stride. Parameters are in the compute type: double for
// float64 input, float for every other. The statistics are double.
struct RowNorm {
  DType type;
  int64_t width;
  const void* x;
  int64_t x_stride;
  const void* weight;  // or null
  const void* bias;    // or null
  void* y;             // contiguous
  double* mean;
  double* rstd;
  double eps;
  bool center;
};

struct RowNormBackward {
  DType type;
  int64_t rows, width;
  const void* dy;
  int64_t dy_stride;
  const void* x;
  int64_t x_stride;
  const void* weight;  // or null
  const double* mean;
  const double* rstd;
  void* dx;  // contiguous, or null
  bool center;
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
};

struct Kernels {
  const char* level;
  void (*row_norm)(const RowNorm&, int64_t begin, int64_t end);                    // rows
  void (*row_norm_backward)(const RowNormBackward&, int64_t begin, int64_t end);  // blocks of rows
  void (*fold_sums)(const FoldSums&, int64_t begin, int64_t end);                  // columns
};

// The best this CPU can run.
const Kernels& kernels();

// Doubles that one block of column sums takes.
constexpr int64_t kSumsPerColumn = 6;

}  // namespace musigma
