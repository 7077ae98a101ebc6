// The table of one CPU level.
#include "kernels.h"
#include "level.h"

#define MUSIGMA_STRING(x) #x
#define MUSIGMA_NAME(x) MUSIGMA_STRING(x)

namespace MUSIGMA_NAMESPACE {

void row_norm(const RowNorm&, int64_t, int64_t);
void row_norm_backward(const RowNormBackward&, int64_t, int64_t);
void fold_sums(const FoldSums&, int64_t, int64_t);

extern const Kernels table;
const Kernels table = {MUSIGMA_NAME(MUSIGMA_LEVEL), row_norm, row_norm_backward, fold_sums};

}  // namespace MUSIGMA_NAMESPACE
