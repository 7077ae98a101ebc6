// LayerNorm and RMSNorm, forward and backward, alone or behind a residual's addition. op.py says what they compute.
#include "backward.h"
#include "forward.h"

namespace MUSIGMA_NAMESPACE {

// Parameters come in the input's type, or float beside half types.
void row_norm(const RowNorm& a, int64_t begin, int64_t end) {
  const bool wide = a.parameter_type == DType::kFloat32;
  switch (a.type) {
    case DType::kFloat32: return forward<float, float>(a, begin, end);
    case DType::kFloat64: return forward<double, double>(a, begin, end);
    case DType::kBFloat16:
      return wide ? forward<bfloat16, float>(a, begin, end) : forward<bfloat16, bfloat16>(a, begin, end);
    case DType::kFloat16:
      return wide ? forward<float16, float>(a, begin, end) : forward<float16, float16>(a, begin, end);
  }
}

void row_norm_backward(const RowNormBackward& a, int64_t begin, int64_t end) {
  const bool wide = a.parameter_type == DType::kFloat32;
  switch (a.type) {
    case DType::kFloat32: return backward<float, float>(a, begin, end);
    case DType::kFloat64: return backward<double, double>(a, begin, end);
    case DType::kBFloat16:
      return wide ? backward<bfloat16, float>(a, begin, end) : backward<bfloat16, bfloat16>(a, begin, end);
    case DType::kFloat16:
      return wide ? backward<float16, float>(a, begin, end) : backward<float16, float16>(a, begin, end);
  }
}

}  // namespace MUSIGMA_NAMESPACE
