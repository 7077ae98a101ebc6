// The last step of dweight and dbias: the blocks' column sums, added in order.
#include "sums.h"

namespace MUSIGMA_NAMESPACE {
namespace {

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
        const double s = high[j] + high_b[j], t = s - high[j];
        low[j] += ((high[j] - (s - t)) + (high_b[j] - t)) + low_b[j];
        high[j] = s;
      }
    }
    for (int64_t j = 0; j < n; j++) put<T>(a.out, first + j, high[j] + low[j]);
  }
}

}  // namespace

void fold_sums(const FoldSums& a, int64_t begin, int64_t end) {
  switch (a.out_type) {
    case DType::kFloat32: return fold<float>(a, begin, end);
    case DType::kFloat64: return fold<double>(a, begin, end);
    case DType::kBFloat16: return fold<bfloat16>(a, begin, end);
    case DType::kFloat16: return fold<float16>(a, begin, end);
  }
}

}  // namespace MUSIGMA_NAMESPACE
