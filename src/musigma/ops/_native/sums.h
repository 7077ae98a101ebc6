// Sums down the columns of many rows (dweight = Σ dy·x̂, dbias = Σ dy), two at a time.
//
// Rows are cut into blocks whose size depends on the shape alone; each block has its own sums and the blocks are added
// in order, so the bits don't depend on the number of threads. Within a block 16 rows are added in the compute type
// and then flushed into double: at 16 rows the rounding of such a sum has a standard deviation of 0.15·16·eps·rms,
// which over all rows comes to 0.6 eps·√rows·rms, where longer runs would grow with the root of their length. Double
// input keeps what the flush rounds off in a second double.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace MUSIGMA_NAMESPACE {
namespace {

constexpr int64_t kRun = 16;

template <class A>
struct ColumnSums {
  int64_t width;
  double *high0, *high1, *low0, *low1;
  A *run0, *run1;  // the current run of up to kRun rows

  ColumnSums(double* block, int64_t width) : width(width) {
    high0 = block, high1 = high0 + width, low0 = high1 + width, low1 = low0 + width;
    run0 = (A*)(low1 + width), run1 = run0 + width;
    // The low parts are double's alone.
    for (int64_t j = 0; j < (sizeof(A) == 4 ? 2 : 4) * width; j++) block[j] = 0;
    clear();
  }
  void clear() {
    for (int64_t j = 0; j < 2 * width; j++) run0[j] = 0;
  }
  void flush() {
    if constexpr (sizeof(A) == 4) {
      for (int64_t j = 0; j < width; j++) high0[j] += run0[j], run0[j] = 0;
      for (int64_t j = 0; j < width; j++) high1[j] += run1[j], run1[j] = 0;
    } else {
      for (int64_t j = 0; j < width; j++) add(high0[j], low0[j], run0[j]), add(high1[j], low1[j], run1[j]);
      clear();
    }
  }
  static void add(double& high, double& low, double term) {
    const double s = high + term, t = s - high;
    low += (high - (s - t)) + (term - t);
    high = s;
  }
};

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
