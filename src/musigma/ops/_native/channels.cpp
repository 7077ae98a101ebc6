// What moments, affine and batch_norm are made of: statistics of a channel, and arithmetic with one coefficient a
// channel, on (outer, channels, inner). With inner = 1 (channels last, 2-D) vectors run across channels, else along a
// channel.
#include "kernels.h"
#include "rows.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// ---- along a channel -----------------------------------------------------------------------------------------

// One part of one channel: `rows` rows of n values, `stride` apart.
struct Piece {
  int64_t offset, rows, n, stride, part, channel;
  int64_t count() const { return rows * n; }
};

inline Piece piece_of(const Channels& l, const Parts& p, int64_t unit) {
  // Neighbours in memory follow each other: channels inside a block of outer rows, chunks inside a channel.
  const int64_t k = unit % p.chunks, c = unit / p.chunks % l.channels, o = unit / p.chunks / l.channels;
  const int64_t row = o * p.rows, value = k * p.values;
  return {(row * l.channels + c) * l.inner + value, row + p.rows < l.outer ? p.rows : l.outer - row,
          value + p.values < l.inner ? p.values : l.inner - value, l.channels * l.inner, o * p.chunks + k, c};
}

// S sums over a piece, with the block sums of `reduce` for long rows and one set of vectors for many short ones.
template <class A, int S, class Body>
inline void reduce_piece(const Piece& p, Total<A> (&total)[S], Body body) {
  if (p.rows == 1)
    return reduce<A, S>(p.n, total, [&](int64_t i, auto part, Lanes<A>* acc) { body(p.offset + i, part, acc); });
  constexpr int64_t W = kLanes<A>;
  Lanes<A> a0[S] = {}, a1[S] = {}, a2[S] = {};
  for (int64_t r = 0; r < p.rows; r++) {
    const int64_t start = p.offset + r * p.stride;
    int64_t i = 0;
    for (; i + 2 * W <= p.n; i += 2 * W) {
      body(start + i, All{}, a0);
      body(start + i + W, All{}, a1);
    }
    if (i + W <= p.n) {
      body(start + i, All{}, a0);
      i += W;
    }
    if (i < p.n) body(start + i, First{p.n - i}, a2);
  }
  for (int s = 0; s < S; s++) total[s].add(sum<A>(a0[s] + a1[s] + a2[s]));
}

template <class A, class T>
bool piece_moments(const T* x, const Piece& p, const double* from, double& mean, double& m2) {
  const A pivot = from ? (A)from[p.channel] : one<A>(x + p.offset);
  Total<A> deviations[1], squares[1];
  reduce_piece<A, 1>(p, deviations, [&](int64_t i, auto part, Lanes<A>* acc) {
    acc[0] += keep<A>(load<A>(x + i, part) - pivot, part);
  });
  const double offset = deviations[0].value() / (double)p.count();
  mean = from ? offset : (double)pivot + offset;
  Center<A> center = center_at<A>(mean);
  if constexpr (sizeof(A) == 8) center.first = pivot, center.second = offset;
  reduce_piece<A, 1>(p, squares, [&](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> d = keep<A>(center(load<A>(x + i, part)), part);
    acc[0] = madd<A>(d, d, acc[0]);
  });
  m2 = squares[0].value();
  return sizeof(A) == 8 || in_range(m2 / (double)p.count());
}

template <class T>
void moments_along(const ChannelMoments& a, int64_t begin, int64_t end) {
  for (int64_t u = begin; u < end; u++) {
    const Piece p = piece_of(a.layout, a.parts, u);
    const int64_t at = p.part * a.layout.channels + p.channel;
    if constexpr (sizeof(T) < 8)
      if (!a.wide && piece_moments<float>((const T*)a.x, p, nullptr, a.mean[at], a.m2[at])) continue;
    piece_moments<double>((const T*)a.x, p, a.pivot, a.mean[at], a.m2[at]);
  }
}

template <class A>
inline Center<A> center_from(const Coefficients& at, int64_t c) {
  Center<A> center;
  center.first = ((const A*)at.first)[c];
  center.second = ((const A*)at.second)[c];
  return center;
}

template <class A, class T>
void sums_along(const ChannelSums& a, int64_t begin, int64_t end) {
  const T *dy = (const T*)a.dy, *x = (const T*)a.x;
  for (int64_t u = begin; u < end; u++) {
    const Piece p = piece_of(a.layout, a.parts, u);
    double* out = a.sums + p.part * 2 * a.layout.channels + p.channel;
    Total<A> total[2];
    if (x) {
      const Center<A> center = center_from<A>(a.at, p.channel);
      const A scale = ((const A*)a.at.scale)[p.channel];
      reduce_piece<A, 2>(p, total, [&](int64_t i, auto part, Lanes<A>* acc) {
        const Lanes<A> g = load<A>(dy + i, part);
        acc[0] += g;
        acc[1] = madd<A>(g, keep<A>(center(load<A>(x + i, part)) * scale, part), acc[1]);
      });
    } else {
      reduce_piece<A, 2>(p, total, [&](int64_t i, auto part, Lanes<A>* acc) { acc[0] += load<A>(dy + i, part); });
    }
    out[0] = total[0].value();
    out[a.layout.channels] = total[1].value();
  }
}

template <class A, class T>
void affine_along(const ChannelAffine& a, int64_t begin, int64_t end) {
  const int64_t n = a.layout.inner;
  for (int64_t r = begin; r < end; r++) {
    const int64_t c = r % a.layout.channels;
    const T* x = (const T*)a.x + r * n;
    T* y = (T*)a.y + r * n;
    const Center<A> center = center_from<A>(a.at, c);
    const Lanes<A> scale = splat<A>(((const A*)a.at.scale)[c]), shift = splat<A>(((const A*)a.at.shift)[c]);
    sweep<A>(n, [&](int64_t i, auto part) {
      store<A>(y + i, madd<A>(center(load<A>(x + i, part)), scale, shift), part);
    });
  }
}

template <class A, class T>
void gradient_along(const ChannelGradient& a, int64_t begin, int64_t end) {
  const int64_t n = a.layout.inner;
  for (int64_t r = begin; r < end; r++) {
    const int64_t c = r % a.layout.channels;
    const T *dy = (const T*)a.dy + r * n, *x = (const T*)a.x + r * n;
    T* dx = (T*)a.dx + r * n;
    const Lanes<A> scale = splat<A>(((const A*)a.at.scale)[c]);
    if (!a.slope) {
      sweep<A>(n, [&](int64_t i, auto part) { store<A>(dx + i, load<A>(dy + i, part) * scale, part); });
      continue;
    }
    const Center<A> center = center_from<A>(a.at, c);
    const Lanes<A> slope = splat<A>(((const A*)a.slope)[c]), shift = splat<A>(((const A*)a.at.shift)[c]);
    sweep<A>(n, [&](int64_t i, auto part) {
      const Lanes<A> v = madd<A>(center(load<A>(x + i, part)), slope, shift);
      store<A>(dx + i, madd<A>(load<A>(dy + i, part), scale, v), part);
    });
  }
}

// ---- across channels -----------------------------------------------------------------------------------------

template <int N>
inline int64_t count_of(All) {
  return N;
}
template <int N>
inline int64_t count_of(First part) {
  return part.n;
}

// G vectors of channels, from channel j on, over the rows of a part: in registers from the first row to the last. Runs of
// 16 rows are added first, as in sums.h.
template <class A, int G, class T, class P>
bool columns_moments(const T* x, int64_t rows, int64_t stride, P part, const double* from, double* mean, double* m2) {
  constexpr int64_t W = kLanes<A>;
  Lanes<A> pivot[G], total[G] = {}, first[G], second[G], squares[G] = {};
  for (int g = 0; g < G; g++) pivot[g] = load<A>(x + g * W, part);
  if constexpr (sizeof(A) == 8)
    for (int g = 0; from && g < G; g++) pivot[g] = load<A>(from + g * W, part);
  for (int64_t run = 0; run < rows; run += 16) {
    const int64_t stop = run + 16 < rows ? run + 16 : rows;
    Lanes<A> acc[G] = {};
    for (int64_t r = run; r < stop; r++)
      for (int g = 0; g < G; g++) acc[g] += load<A>(x + r * stride + g * W, part) - pivot[g];
    for (int g = 0; g < G; g++) total[g] += acc[g];
  }
  // Through arrays, in loops that the compiler turns into vectors of doubles.
  double centers[G * W];
  A from_pivot[G * W], sums[G * W], firsts[G * W], seconds[G * W];
  for (int g = 0; g < G; g++) write(from_pivot + g * W, pivot[g]), write(sums + g * W, total[g]);
  for (int64_t l = 0; l < G * W; l++) {
    const double offset = (double)sums[l] / (double)rows, center = (double)from_pivot[l] + offset;
    centers[l] = from ? offset : center;
    firsts[l] = sizeof(A) == 8 ? from_pivot[l] : (A)center;
    seconds[l] = sizeof(A) == 8 ? (A)offset : (A)(center - (double)(A)center);
  }
  for (int g = 0; g < G; g++) first[g] = read<Lanes<A>>(firsts + g * W), second[g] = read<Lanes<A>>(seconds + g * W);
  for (int64_t run = 0; run < rows; run += 16) {
    const int64_t stop = run + 16 < rows ? run + 16 : rows;
    Lanes<A> acc[G] = {};
    for (int64_t r = run; r < stop; r++)
      for (int g = 0; g < G; g++) {
        const Lanes<A> d = (load<A>(x + r * stride + g * W, part) - first[g]) - second[g];
        acc[g] = madd<A>(d, d, acc[g]);
      }
    for (int g = 0; g < G; g++) squares[g] += acc[g];
  }
  for (int g = 0; g < G; g++) write(sums + g * W, squares[g]);
  const int64_t n = count_of<G * W>(part);
  int64_t fine = 0;
  for (int64_t l = 0; l < n; l++) {
    mean[l] = centers[l];
    m2[l] = sums[l];
    const double square = (double)sums[l] / (double)rows;
    fine += (square >= 0x1p-100) & (square <= 0x1p100);
  }
  return sizeof(A) == 8 || fine == n;
}

// body(j, G, All or First) over all channels, widest groups first.
template <class A, class Body>
inline void across(int64_t channels, Body body) {
  constexpr int64_t W = kLanes<A>;
  int64_t j = 0;
  for (; j + 4 * W <= channels; j += 4 * W) body.template operator()<4>(j, All{});
  for (; j + W <= channels; j += W) body.template operator()<1>(j, All{});
  if (j < channels) body.template operator()<1>(j, First{channels - j});
}

template <class A, class T>
void moments_across(const ChannelMoments& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u * a.parts.rows;
    const int64_t rows = row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row;
    const T* x = (const T*)a.x + row * C;
    double *mean = a.mean + u * C, *m2 = a.m2 + u * C;
    across<A>(C, [&]<int G>(int64_t j, auto part) {
      const double* from = a.pivot ? a.pivot + j : nullptr;
      if (columns_moments<A, G>(x + j, rows, C, part, from, mean + j, m2 + j)) return;
      const int64_t n = j + G * kLanes<A> < C ? G * kLanes<A> : C - j;
      across<double>(n, [&]<int D>(int64_t i, auto piece) {
        columns_moments<double, D>(x + j + i, rows, C, piece, nullptr, mean + j + i, m2 + j + i);
      });
    });
  }
}

template <class A, class T>
void sums_across(const ChannelSums& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>;
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u * a.parts.rows;
    const int64_t rows = row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row;
    const T *dy = (const T*)a.dy + row * C, *x = a.x ? (const T*)a.x + row * C : nullptr;
    double* out = a.sums + u * 2 * C;
    const A *first = (const A*)a.at.first, *second = (const A*)a.at.second, *scale = (const A*)a.at.scale;
    across<A>(C, [&]<int G>(int64_t j, auto part) {
      Lanes<A> t0[G] = {}, t1[G] = {}, c0[G], c1[G], s[G];
      if (x)
        for (int g = 0; g < G; g++) {
          c0[g] = load<A>(first + j + g * W, part);
          c1[g] = load<A>(second + j + g * W, part);
          s[g] = load<A>(scale + j + g * W, part);
        }
      for (int64_t run = 0; run < rows; run += 16) {
        const int64_t stop = run + 16 < rows ? run + 16 : rows;
        Lanes<A> a0[G] = {}, a1[G] = {};
        for (int64_t r = run; r < stop; r++)
          for (int g = 0; g < G; g++) {
            const Lanes<A> v = load<A>(dy + r * C + j + g * W, part);
            a0[g] += v;
            if (x) a1[g] = madd<A>(v, (load<A>(x + r * C + j + g * W, part) - c0[g]) - c1[g], a1[g]);
          }
        for (int g = 0; g < G; g++) {
          t0[g] += a0[g];
          if (x) t1[g] = madd<A>(a1[g], s[g], t1[g]);
        }
      }
      A sum0[G * W], sum1[G * W];
      for (int g = 0; g < G; g++) write(sum0 + g * W, t0[g]), write(sum1 + g * W, t1[g]);
      for (int64_t l = 0; l < count_of<G * W>(part); l++) out[j + l] = sum0[l], out[C + j + l] = sum1[l];
    });
  }
}

// Elementwise work runs over blocks of rows, a few vectors of channels at a time, so that their coefficients stay in
// registers while the block stays in the first cache.
constexpr int64_t kRows = 16;

template <class A, class T>
void affine_across(const ChannelAffine& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>;
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t stop = row + kRows < end ? row + kRows : end;
    across<A>(C, [&]<int G>(int64_t j, auto part) {
      Lanes<A> first[G], second[G], scale[G], shift[G];
      for (int g = 0; g < G; g++) {
        first[g] = load<A>((const A*)a.at.first + j + g * W, part);
        second[g] = load<A>((const A*)a.at.second + j + g * W, part);
        scale[g] = load<A>((const A*)a.at.scale + j + g * W, part);
        shift[g] = load<A>((const A*)a.at.shift + j + g * W, part);
      }
      for (int64_t r = row; r < stop; r++)
        for (int g = 0; g < G; g++) {
          const int64_t i = r * C + j + g * W;
          const Lanes<A> v = (load<A>((const T*)a.x + i, part) - first[g]) - second[g];
          store<A>((T*)a.y + i, madd<A>(v, scale[g], shift[g]), part);
        }
    });
  }
}

template <class A, class T>
void gradient_across(const ChannelGradient& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>;
  const bool with_x = a.slope != nullptr;
  for (int64_t row = begin; row < end; row += kRows) {
    const int64_t stop = row + kRows < end ? row + kRows : end;
    across<A>(C, [&]<int G>(int64_t j, auto part) {
      Lanes<A> first[G], second[G], scale[G], shift[G], slope[G];
      for (int g = 0; g < G; g++) {
        scale[g] = load<A>((const A*)a.at.scale + j + g * W, part);
        if (!with_x) continue;
        first[g] = load<A>((const A*)a.at.first + j + g * W, part);
        second[g] = load<A>((const A*)a.at.second + j + g * W, part);
        shift[g] = load<A>((const A*)a.at.shift + j + g * W, part);
        slope[g] = load<A>((const A*)a.slope + j + g * W, part);
      }
      for (int64_t r = row; r < stop; r++)
        for (int g = 0; g < G; g++) {
          const int64_t i = r * C + j + g * W;
          const Lanes<A> up = load<A>((const T*)a.dy + i, part);
          if (with_x) {
            const Lanes<A> d = (load<A>((const T*)a.x + i, part) - first[g]) - second[g];
            store<A>((T*)a.dx + i, madd<A>(up, scale[g], madd<A>(d, slope[g], shift[g])), part);
          } else {
            store<A>((T*)a.dx + i, up * scale[g], part);
          }
        }
    });
  }
}

// ---- which of them -------------------------------------------------------------------------------------------

// f<A, T>() with A double where the coefficients are.
template <class F>
inline void by_type(DType type, bool wide, F f) {
  switch (type) {
    case DType::kFloat32: return wide ? f.template operator()<double, float>() : f.template operator()<float, float>();
    case DType::kFloat64: return f.template operator()<double, double>();
    case DType::kBFloat16:
      return wide ? f.template operator()<double, bfloat16>() : f.template operator()<float, bfloat16>();
    case DType::kFloat16:
      return wide ? f.template operator()<double, float16>() : f.template operator()<float, float16>();
  }
}

}  // namespace

void channel_moments(const ChannelMoments& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.wide, [&]<class A, class T>() {
    a.layout.inner == 1 ? moments_across<A, T>(a, begin, end) : moments_along<T>(a, begin, end);
  });
}

void channel_sums(const ChannelSums& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.at.wide, [&]<class A, class T>() {
    a.layout.inner == 1 ? sums_across<A, T>(a, begin, end) : sums_along<A, T>(a, begin, end);
  });
}

void channel_affine(const ChannelAffine& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.at.wide, [&]<class A, class T>() {
    a.layout.inner == 1 ? affine_across<A, T>(a, begin, end) : affine_along<A, T>(a, begin, end);
  });
}

void channel_gradient(const ChannelGradient& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.at.wide, [&]<class A, class T>() {
    a.layout.inner == 1 ? gradient_across<A, T>(a, begin, end) : gradient_along<A, T>(a, begin, end);
  });
}

}  // namespace MUSIGMA_NAMESPACE
