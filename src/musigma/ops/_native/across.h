// Vectors across channels that lie side by side (channels last, 2-D).
#pragma once

#include "along.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// body(j, G, All or First) over all channels, widest groups first.
template <class A, class Body>
inline void across(int64_t channels, Body body) {
  constexpr int64_t W = kLanes<A>;
  int64_t j = 0;
  for (; j + 4 * W <= channels; j += 4 * W) body.template operator()<4>(j, All{});
  for (; j + W <= channels; j += W) body.template operator()<1>(j, All{});
  if (j < channels) body.template operator()<1>(j, First{channels - j});
}

// The same for elementwise work, which may end in a vector that overlaps its neighbour.
template <class A, class Body>
inline void each_across(int64_t channels, Body body) {
  constexpr int64_t W = kLanes<A>;
  int64_t j = 0;
  for (; j + 4 * W <= channels; j += 4 * W) body.template operator()<4>(j, All{});
  for (; j + W <= channels; j += W) body.template operator()<1>(j, All{});
  if (j == channels) return;
  if (channels >= W)
    body.template operator()<1>(channels - W, All{});
  else
    body.template operator()<1>(j, First{channels - j});
}

// So many channels at a time, whose sums stay in the first cache beside 16 rows of them.
constexpr int64_t kPanel = 512;

// Elementwise work runs over blocks of so many rows, a few vectors of channels at a time, so that their coefficients
// stay in registers while the block stays in the first cache.
constexpr int64_t kRows = 16;

// But one row at a time where they are wide and come from memory, which brings what is next to the last line well before
// it is asked for, and a few lines of each of 16 rows at half that speed. (2^18 values fill a core's second cache.)
template <class A>
inline int64_t rows_at_once(const Channels& l) {
  return l.channels > 4 * kLanes<A> && l.outer * l.channels > (1 << 18) ? 1 : kRows;
}

// body(j, G, All or First, first row, last row) over runs of 16 rows, which are added in registers first, as in sums.h.
template <class A, class Body>
inline void runs_across(int64_t rows, int64_t channels, Body body) {
  for (int64_t run = 0; run < rows; run += kRows) {
    const int64_t stop = run + kRows < rows ? run + kRows : rows;
    across<A>(channels, [&]<int G>(int64_t j, auto part) { body.template operator()<G>(j, part, run, stop); });
  }
}

}  // namespace
}  // namespace MUSIGMA_NAMESPACE
