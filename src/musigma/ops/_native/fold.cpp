// Where parts that were computed side by side are joined, in order.
#include "sums.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// The sum of a + b, and what it rounds off (Knuth).
inline double two_sum(double a, double b, double& rounded_off) {
  const double s = a + b, t = s - a;
  rounded_off += (a - (s - t)) + (b - t);
  return s;
}

template <class T>
void put(void* out, int64_t j, double value) {
  if constexpr (sizeof(T) == 2)
    store<float>((T*)out + j, splat<float>((float)value), First{1});
  else
    ((T*)out)[j] = (T)value;
}

template <class T>
void fold(const FoldSums& a, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 256;  // both sums of so many columns stay in the first cache
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t n = first + kColumns < end ? kColumns : end - first;
    double high[kColumns] = {}, low[kColumns] = {};
    for (int64_t b = 0; b < a.blocks; b++) {
      const double* block = a.sums + b * kSumsPerColumn * a.width;
      const double* high_b = block + a.which * a.width + first;
      const double* low_b = high_b + 2 * a.width;
      for (int64_t j = 0; j < n; j++) {
        high[j] = two_sum(high[j], high_b[j], low[j]);
      }
      for (int64_t j = 0; a.low && j < n; j++) low[j] += low_b[j];
    }
    for (int64_t j = 0; j < n; j++) put<T>(a.out, first + j, high[j] + low[j]);
  }
}

}  // namespace

void join_sums(const JoinSums& a, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 256;
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t n = first + kColumns < end ? kColumns : end - first;
    double high[kColumns] = {}, low[kColumns] = {};
    for (int64_t p = 0; p < a.parts; p++) {
      const double* part = a.sums + p * a.width + first;
      for (int64_t j = 0; j < n; j++) high[j] = two_sum(high[j], part[j], low[j]);
    }
    for (int64_t j = 0; j < n; j++) a.out[first + j] = high[j] + low[j];
  }
}

void join_moments(const JoinMoments& a, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 256;
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t n = first + kColumns < end ? kColumns : end - first;
    double *mean = a.mean + first, *m2 = a.m2 + first;
    for (int64_t j = 0; j < n; j++) mean[j] = a.part_mean[first + j], m2[j] = a.part_m2[first + j];
    double count = (double)part_count(a.layout, a.parts, 0);
    for (int64_t p = 1; p < a.parts.count(); p++) {
      const double more = (double)part_count(a.layout, a.parts, p), both = count + more;
      const double share = more / both, between = count * share;
      const double* mean_p = a.part_mean + p * a.layout.channels + first;
      const double* m2_p = a.part_m2 + p * a.layout.channels + first;
      for (int64_t j = 0; j < n; j++) {
        const double delta = mean_p[j] - mean[j];
        mean[j] += delta * share;
        m2[j] += m2_p[j] + delta * delta * between;
      }
      count = both;
    }
  }
}

void fold_sums(const FoldSums& a, int64_t begin, int64_t end) {
  switch (a.out_type) {
    case DType::kFloat32: return fold<float>(a, begin, end);
    case DType::kFloat64: return fold<double>(a, begin, end);
    case DType::kBFloat16: return fold<bfloat16>(a, begin, end);
    case DType::kFloat16: return fold<float16>(a, begin, end);
  }
}

}  // namespace MUSIGMA_NAMESPACE
