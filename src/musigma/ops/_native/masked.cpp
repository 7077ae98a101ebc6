// Statistics of the values that a mask keeps, or of all by weights, and their gradient, on (outer, channels, inner).
//
// All of it in double, whatever the type: masks are rare beside the layers they serve, and the cost of reading memory
// hides most of the arithmetic. A value of weight 0 is replaced before anything is done with it.
#include "kernels.h"
#include "simd.h"

namespace MUSIGMA_NAMESPACE {
namespace {

constexpr int64_t kWidth = kLanes<double>;

// ---- weights -------------------------------------------------------------------------------------------------

inline Lanes<double> widen(VectorOf<uint8_t, kWidth> v) {
  // By way of int32: GCC 12 takes bytes to doubles one by one.
  return __builtin_convertvector(__builtin_convertvector(v, VectorOf<int32_t, kWidth>), Lanes<double>);
}

inline Lanes<double> weights_at(const uint8_t* p, All) { return widen(read<VectorOf<uint8_t, kWidth>>(p)); }
inline Lanes<double> weights_at(const uint8_t* p, First part) {
  uint8_t values[kWidth] = {};
  for (int64_t i = 0; i < part.n; i++) values[i] = p[i];
  return widen(read<VectorOf<uint8_t, kWidth>>(values));
}
template <class Part>
inline Lanes<double> weights_at(const double* p, Part part) {
  return load<double>(p, part);
}

inline Lanes<double> where(Lanes<double> weight, Lanes<double> v) { return weight != 0.0 ? v : Lanes<double>{}; }

// The weights of one row: one each, or one for all.
template <class M, bool kEach>
struct RowWeights {
  const M* at;
  template <class Part>
  Lanes<double> operator()(int64_t i, Part part) const {
    if constexpr (kEach)
      return weights_at(at + i, part);
    else
      return keep<double>(splat<double>((double)*at), part);
  }
  bool none() const { return !kEach && *at == 0; }
};

// ---- along a channel -----------------------------------------------------------------------------------------

// One part of one channel: `rows` rows of n values.
template <class T, class M, bool kEach>
struct Piece {
  const T* x;
  const M* weights;
  int64_t rows, n, x_step, weight_step, at;

  Piece(const MaskedMoments& a, int64_t unit) {
    const Channels& l = a.layout;
    const int64_t k = unit % a.parts.chunks, c = unit / a.parts.chunks % l.channels;
    const int64_t o = unit / a.parts.chunks / l.channels;
    const int64_t row = o * a.parts.rows, value = k * a.parts.values;
    x = (const T*)a.x + (row * l.channels + c) * l.inner + value;
    weights = (const M*)a.weights.data + row * a.weights.outer + c * a.weights.channel + value * a.weights.inner;
    rows = row + a.parts.rows < l.outer ? a.parts.rows : l.outer - row;
    n = value + a.parts.values < l.inner ? a.parts.values : l.inner - value;
    x_step = l.channels * l.inner, weight_step = a.weights.outer;
    at = (o * a.parts.chunks + k) * l.channels + c;
  }

  // S sums over the piece; body(values, weights, acc) adds a vector's terms.
  template <int S, class Body>
  void reduce_over(Total<double> (&total)[S], Body body) const {
    Lanes<double> even[S] = {}, odd[S] = {};
    for (int64_t r = 0; r < rows; r++) {
      const T* p = x + r * x_step;
      const RowWeights<M, kEach> w{weights + r * weight_step};
      if (w.none()) continue;
      const auto add = [&](int64_t i, auto part, Lanes<double>* acc) {
        body(load<double>(p + i, part), w(i, part), acc);
      };
      if (rows == 1) return reduce<double, S>(n, total, add);
      int64_t i = 0;
      for (; i + 2 * kWidth <= n; i += 2 * kWidth) add(i, All{}, even), add(i + kWidth, All{}, odd);
      if (i + kWidth <= n) add(i, All{}, even), i += kWidth;
      if (i < n) add(i, First{n - i}, odd);
    }
    for (int s = 0; s < S; s++) total[s].add(sum<double>(even[s] + odd[s]));
  }
};

template <class T, class M, bool kEach>
void moments_along(const MaskedMoments& a, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; u++) {
    const Piece<T, M, kEach> p(a, u);
    const Lanes<double> pivot = splat<double>(a.pivot[p.at % a.layout.channels]);
    Total<double> first[2], squares[1];
    p.template reduce_over<2>(first, [&](Lanes<double> v, Lanes<double> w, Lanes<double>* acc) {
      acc[0] += w;
      acc[1] = madd<double>(w, where(w, v - pivot), acc[1]);
    });
    const double count = first[0].value(), offset = count == 0 ? 0 : first[1].value() / count;
    const Lanes<double> center = splat<double>(offset);
    p.template reduce_over<1>(squares, [&](Lanes<double> v, Lanes<double> w, Lanes<double>* acc) {
      const Lanes<double> d = where(w, (v - pivot) - center);
      acc[0] = madd<double>(w * d, d, acc[0]);
    });
    a.count[p.at] = count, a.mean[p.at] = offset, a.m2[p.at] = squares[0].value();
  }
}

template <class T, class M, bool kEach>
void gradient_along(const MaskedGradient& a, int64_t begin, int64_t end) {
  const int64_t n = a.layout.inner, C = a.layout.channels;
  for (int64_t r = begin; r < end; r++) {
    const int64_t c = r % C;
    const T* x = (const T*)a.x + r * n;
    const RowWeights<M, kEach> w{(const M*)a.weights.data + r / C * a.weights.outer + c * a.weights.channel};
    const Lanes<double> center = splat<double>(a.center[c]), slope = splat<double>(a.slope[c]);
    const Lanes<double> shift = splat<double>(a.shift[c]);
    transform<double>(n, (T*)a.dx + r * n, [&](int64_t i, auto part) {
      const Lanes<double> weight = w(i, part);
      return where(weight, weight * madd<double>(load<double>(x + i, part) - center, slope, shift));
    });
  }
}

// ---- across channels -----------------------------------------------------------------------------------------

// So many channels at a time, whose sums stay in the first cache.
constexpr int64_t kPanel = 256;

// Rows are added in registers in runs of 16, and those to what stands in memory.
constexpr int64_t kRun = 16;

template <class T, class M, bool kEach>
struct Panel {
  const T* x;
  const M* weights;
  const double* pivot;
  int64_t rows, n, x_step, weight_step;

  // sums[s][j] += body's terms of every row; body(j, All or First, x - pivot, weight, acc).
  template <int S, class Body>
  void reduce_over(double* const (&sums)[S], Body body) const {
    for (int64_t begin = 0; begin < rows; begin += kRun) {
      const int64_t end = begin + kRun < rows ? begin + kRun : rows;
      sweep<double>(n, [&](int64_t j, auto part) {
        const Lanes<double> from = load<double>(pivot + j, part);
        Lanes<double> acc[S] = {};
        for (int64_t r = begin; r < end; r++) {
          const RowWeights<M, kEach> w{weights + r * weight_step};
          if (!w.none()) body(j, part, load<double>(x + r * x_step + j, part) - from, w(j, part), acc);
        }
        for (int s = 0; s < S; s++) store<double>(sums[s] + j, load<double>(sums[s] + j, part) + acc[s], part);
      });
    }
  }
};

template <class T, class M, bool kEach>
void panel_moments(const MaskedMoments& a, int64_t u, int64_t start, int64_t n) {
  const int64_t C = a.layout.channels, row = u * a.parts.rows;
  const Panel<T, M, kEach> p{
      (const T*)a.x + row * C + start,
      (const M*)a.weights.data + row * a.weights.outer + start * a.weights.channel,
      a.pivot + start,
      row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row,
      n,
      C,
      a.weights.outer};
  double *count = a.count + u * C + start, *mean = a.mean + u * C + start, *m2 = a.m2 + u * C + start;
  for (int64_t j = 0; j < n; j++) count[j] = mean[j] = m2[j] = 0;
  p.template reduce_over<2>({count, mean}, [&](int64_t, auto, Lanes<double> d, Lanes<double> w, Lanes<double>* acc) {
    acc[0] += w;
    acc[1] = madd<double>(w, where(w, d), acc[1]);
  });
  for (int64_t j = 0; j < n; j++) mean[j] = count[j] == 0 ? 0 : mean[j] / count[j];
  p.template reduce_over<1>({m2}, [&](int64_t j, auto part, Lanes<double> d, Lanes<double> w, Lanes<double>* acc) {
    const Lanes<double> e = where(w, d - load<double>(mean + j, part));
    acc[0] = madd<double>(w * e, e, acc[0]);
  });
}

template <class T, class M, bool kEach>
void moments_across(const MaskedMoments& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  for (int64_t u = begin; u < end; u++)
    for (int64_t start = 0; start < C; start += kPanel)
      panel_moments<T, M, kEach>(a, u, start, start + kPanel < C ? kPanel : C - start);
}

template <class T, class M, bool kEach>
void gradient_across(const MaskedGradient& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  for (int64_t r = begin; r < end; r++) {
    const T* x = (const T*)a.x + r * C;
    const RowWeights<M, kEach> w{(const M*)a.weights.data + r * a.weights.outer};
    transform<double>(C, (T*)a.dx + r * C, [&](int64_t j, auto part) {
      const Lanes<double> weight = w(j, part), d = load<double>(x + j, part) - load<double>(a.center + j, part);
      return where(weight, weight * madd<double>(d, load<double>(a.slope + j, part), load<double>(a.shift + j, part)));
    });
  }
}

// ---- what is dropped and not finite --------------------------------------------------------------------------

template <class T, class M, bool kEach>
void finite(const MaskedFinite& a, int64_t begin, int64_t end) {
  const bool across = a.layout.inner == 1;
  const int64_t C = a.layout.channels, n = across ? C : a.layout.inner;
  const auto bad = [](Lanes<double> x, Lanes<double> weight) { return (weight == 0.0) & (x - x != 0.0); };
  for (int64_t r = begin; r < end; r++) {
    const int64_t outer = across ? r : r / C, c = across ? 0 : r % C;
    const T* x = (const T*)a.x + r * n;
    const RowWeights<M, kEach> w{(const M*)a.weights.data + outer * a.weights.outer + c * a.weights.channel};
    if (!kEach && !w.none() && !a.y) continue;
    if (a.y) {
      transform<double>(n, (T*)a.y + r * n, [&](int64_t i, auto part) {
        return bad(load<double>(x + i, part), w(i, part)) ? Lanes<double>{}
                                                          : load<double>((const T*)a.v + r * n + i, part);
      });
      continue;
    }
    Integers<double> any = {};
    sweep<double>(n, [&](int64_t i, auto part) { any |= bad(load<double>(x + i, part), w(i, part)); });
    for (int i = 0; i < kWidth; i++)
      if (any[i]) return __atomic_store_n(a.found, 1, __ATOMIC_RELAXED);
  }
}

// ---- pivots --------------------------------------------------------------------------------------------------

template <class T, class M>
void pivots(const MaskedMoments& a, int64_t begin, int64_t end) {
  const Channels& l = a.layout;
  const M* weights = (const M*)a.weights.data;
  // Without a step along inner, all values of a row have the weight of its first.
  const int64_t values = a.weights.inner ? l.inner : 1;
  int64_t outer = 0, inner = 0;
  const auto search = [&](int64_t c) {
    for (outer = 0; outer < l.outer; outer++)
      for (inner = 0; inner < values; inner++)
        if (weights[outer * a.weights.outer + c * a.weights.channel + inner * a.weights.inner] != 0) return;
  };
  for (int64_t c = begin; c < end; c++) {
    if (a.weights.channel || c == begin) search(c);
    a.pivot[c] = outer < l.outer ? one<double>((const T*)a.x + (outer * l.channels + c) * l.inner + inner) : 0;
  }
}

// ---- which of them -------------------------------------------------------------------------------------------

// f<T, M, kEach>() with kEach where the values a vector holds have a weight each.
template <class F>
inline void by_type(const Channels& l, const Weights& w, F f) {
  const bool each = (l.inner == 1 ? w.channel : w.inner) != 0;
  const auto with = [&]<class T>() {
    if (w.bytes)
      each ? f.template operator()<T, uint8_t, true>() : f.template operator()<T, uint8_t, false>();
    else
      each ? f.template operator()<T, double, true>() : f.template operator()<T, double, false>();
  };
  switch (l.type) {
    case DType::kFloat32: return with.template operator()<float>();
    case DType::kFloat64: return with.template operator()<double>();
    case DType::kBFloat16: return with.template operator()<bfloat16>();
    case DType::kFloat16: return with.template operator()<float16>();
  }
}

}  // namespace

void masked_pivots(const MaskedMoments& a, int64_t begin, int64_t end) {
  by_type(a.layout, a.weights, [&]<class T, class M, bool kEach>() { pivots<T, M>(a, begin, end); });
}

void masked_moments(const MaskedMoments& a, int64_t begin, int64_t end) {
  by_type(a.layout, a.weights, [&]<class T, class M, bool kEach>() {
    a.layout.inner == 1 ? moments_across<T, M, kEach>(a, begin, end) : moments_along<T, M, kEach>(a, begin, end);
  });
}

void join_masked(const JoinMasked& a, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; c++) {
    double count = 0, mean = 0, m2 = 0;
    for (int64_t p = 0; p < a.parts; p++) {
      const int64_t at = p * a.channels + c;
      const double n = a.part_count[at];
      if (n == 0) continue;
      count += n;
      const double delta = a.part_mean[at] - mean, share = n / count;
      mean += delta * share;
      m2 += a.part_m2[at] + delta * delta * (count - n) * share;
    }
    a.count[c] = count, a.mean[c] = count == 0 ? 0 : a.pivot[c] + mean, a.m2[c] = m2;
  }
}

void masked_gradient(const MaskedGradient& a, int64_t begin, int64_t end) {
  by_type(a.layout, a.weights, [&]<class T, class M, bool kEach>() {
    a.layout.inner == 1 ? gradient_across<T, M, kEach>(a, begin, end) : gradient_along<T, M, kEach>(a, begin, end);
  });
}

void masked_finite(const MaskedFinite& a, int64_t begin, int64_t end) {
  by_type(a.layout, a.weights, [&]<class T, class M, bool kEach>() { finite<T, M, kEach>(a, begin, end); });
}

}  // namespace MUSIGMA_NAMESPACE
