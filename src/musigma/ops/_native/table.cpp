// The table of one CPU level.
#include "kernels.h"
#include "level.h"

#define MUSIGMA_STRING(x) #x
#define MUSIGMA_NAME(x) MUSIGMA_STRING(x)

namespace MUSIGMA_NAMESPACE {

void row_norm(const RowNorm&, int64_t, int64_t);
void row_norm_backward(const RowNormBackward&, int64_t, int64_t);
void fold_sums(const FoldSums&, int64_t, int64_t);
void channel_moments(const ChannelMoments&, int64_t, int64_t);
void join_moments(const JoinMoments&, int64_t, int64_t);
void join_sums(const JoinSums&, int64_t, int64_t);
void channel_sums(const ChannelSums&, int64_t, int64_t);
void channel_affine(const ChannelAffine&, int64_t, int64_t);
void channel_gradient(const ChannelGradient&, int64_t, int64_t);
int64_t group_norm(const Groups&, int64_t, int64_t);
int64_t group_norm_backward(const Groups&, int64_t, int64_t);
void masked_pivots(const MaskedMoments&, int64_t, int64_t);
void masked_moments(const MaskedMoments&, int64_t, int64_t);
void join_masked(const JoinMasked&, int64_t, int64_t);
void masked_gradient(const MaskedGradient&, int64_t, int64_t);
void masked_finite(const MaskedFinite&, int64_t, int64_t);
void widen(const Widen&, int64_t);
bool roots(const Roots&, int64_t);
void channel_coefficients(const ChannelCoefficients&, int64_t);
void channel_slopes(const ChannelSlopes&, int64_t);

extern const Kernels table;
const Kernels table = {
    MUSIGMA_NAME(MUSIGMA_LEVEL),
    row_norm,
    row_norm_backward,
    fold_sums,
    channel_moments,
    join_moments,
    join_sums,
    channel_sums,
    channel_affine,
    channel_gradient,
    group_norm,
    group_norm_backward,
    masked_pivots,
    masked_moments,
    join_masked,
    masked_gradient,
    masked_finite,
    widen,
    roots,
    channel_coefficients,
    channel_slopes,
};

}  // namespace MUSIGMA_NAMESPACE
