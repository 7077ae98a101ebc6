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
  int64_t c = begin % a.layout.channels;
  for (int64_t r = begin; r < end; r++, c = c + 1 == a.layout.channels ? 0 : c + 1) {
    const T* x = (const T*)a.x + r * n;
    T* y = (T*)a.y + r * n;
    const Center<A> center = center_from<A>(a.at, c);
    const Lanes<A> scale = splat<A>(((const A*)a.at.scale)[c]), shift = splat<A>(((const A*)a.at.shift)[c]);
    transform<A>(n, y, [&](int64_t i, auto part) { return madd<A>(center(load<A>(x + i, part)), scale, shift); });
  }
}

template <class A, class T>
void gradient_along(const ChannelGradient& a, int64_t begin, int64_t end) {
  const int64_t n = a.layout.inner;
  int64_t c = begin % a.layout.channels;
  for (int64_t r = begin; r < end; r++, c = c + 1 == a.layout.channels ? 0 : c + 1) {
    const T *dy = (const T*)a.dy + r * n, *x = (const T*)a.x + r * n;
    T* dx = (T*)a.dx + r * n;
    const Lanes<A> scale = splat<A>(((const A*)a.at.scale)[c]);
    if (!a.slope) {
      transform<A>(n, dx, [&](int64_t i, auto part) { return load<A>(dy + i, part) * scale; });
      continue;
    }
    const Center<A> center = center_from<A>(a.at, c);
    const Lanes<A> slope = splat<A>(((const A*)a.slope)[c]), shift = splat<A>(((const A*)a.at.shift)[c]);
    transform<A>(n, dx, [&](int64_t i, auto part) {
      const Lanes<A> v = madd<A>(center(load<A>(x + i, part)), slope, shift);
      return madd<A>(load<A>(dy + i, part), scale, v);
    });
  }
}

// ---- across channels -----------------------------------------------------------------------------------------

// body(j, G, All or First) over all channels, widest groups first.
template <class A, class Body>
inline void across(int64_t channels, Body body) {
  constexpr int64_t W = kLanes<A>;
  int64_t j = 0;
  for (; j + 4 * W <= channels; j += 4 * W) body.template operator()<4>(j, All{});
  for (; j + W <= channels; j += W) body.template operator()<1>(j, All{});
  if (j < channels) body.template operator()<1>(j, First{channels - j});
}

// So many channels at a time, whose sums stay in the first cache beside 16 rows of them.
constexpr int64_t kPanel = 512;

// body(j, G, All or First, first row, last row) over runs of 16 rows, which are added in registers first, as in sums.h.
template <class A, class Body>
inline void runs_across(int64_t rows, int64_t channels, Body body) {
  for (int64_t run = 0; run < rows; run += 16) {
    const int64_t stop = run + 16 < rows ? run + 16 : rows;
    across<A>(channels, [&]<int G>(int64_t j, auto part) { body.template operator()<G>(j, part, run, stop); });
  }
}

// Moments of a panel of channels over the rows of a part. Returns which channels have to be done again in double, as the
// first and one past the last of them.
template <class A, class T>
void panel_moments(const T* x, int64_t rows, int64_t stride, int64_t channels, const double* from, double* mean, double* m2,
                   int64_t& poor_begin, int64_t& poor_end) {
  constexpr int64_t W = kLanes<A>;
  A pivot[kPanel], sums[kPanel], first[kPanel], second[kPanel], squares[kPanel];
  across<A>(channels, [&]<int G>(int64_t j, auto part) {
    for (int g = 0; g < G; g++) {
      Lanes<A> start = load<A>(x + j + g * W, part);
      if constexpr (sizeof(A) == 8)
        if (from) start = load<A>(from + j + g * W, part);
      store<A>(pivot + j + g * W, start, part);
      store<A>(sums + j + g * W, Lanes<A>{}, part);
      store<A>(squares + j + g * W, Lanes<A>{}, part);
    }
  });
  runs_across<A>(rows, channels, [&]<int G>(int64_t j, auto part, int64_t run, int64_t stop) {
    Lanes<A> acc[G] = {}, start[G];
    for (int g = 0; g < G; g++) start[g] = load<A>(pivot + j + g * W, part);
    for (int64_t r = run; r < stop; r++)
      for (int g = 0; g < G; g++) acc[g] += load<A>(x + r * stride + j + g * W, part) - start[g];
    for (int g = 0; g < G; g++) store<A>(sums + j + g * W, load<A>(sums + j + g * W, part) + acc[g], part);
  });
  for (int64_t c = 0; c < channels; c++) {
    const double offset = (double)sums[c] / (double)rows, center = (double)pivot[c] + offset;
    mean[c] = from ? offset : center;
    first[c] = sizeof(A) == 8 ? pivot[c] : (A)center;
    second[c] = sizeof(A) == 8 ? (A)offset : (A)(center - (double)(A)center);
  }
  runs_across<A>(rows, channels, [&]<int G>(int64_t j, auto part, int64_t run, int64_t stop) {
    Lanes<A> acc[G] = {}, c0[G], c1[G];
    for (int g = 0; g < G; g++) c0[g] = load<A>(first + j + g * W, part), c1[g] = load<A>(second + j + g * W, part);
    for (int64_t r = run; r < stop; r++)
      for (int g = 0; g < G; g++) {
        const Lanes<A> d = (load<A>(x + r * stride + j + g * W, part) - c0[g]) - c1[g];
        acc[g] = madd<A>(d, d, acc[g]);
      }
    for (int g = 0; g < G; g++) store<A>(squares + j + g * W, load<A>(squares + j + g * W, part) + acc[g], part);
  });
  poor_begin = channels, poor_end = 0;
  for (int64_t c = 0; c < channels; c++) {
    m2[c] = squares[c];
    if (sizeof(A) == 8 || in_range((double)squares[c] / (double)rows)) continue;
    poor_begin = c < poor_begin ? c : poor_begin, poor_end = c + 1;
  }
}

template <class A, class T>
void moments_across(const ChannelMoments& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u * a.parts.rows;
    const int64_t rows = row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row;
    const T* x = (const T*)a.x + row * C;
    double *mean = a.mean + u * C, *m2 = a.m2 + u * C;
    for (int64_t j = 0; j < C; j += kPanel) {
      const int64_t n = j + kPanel < C ? kPanel : C - j;
      const double* from = a.pivot ? a.pivot + j : nullptr;
      int64_t poor, stop, none;
      panel_moments<A>(x + j, rows, C, n, from, mean + j, m2 + j, poor, stop);
      if (poor < stop)
        panel_moments<double>(x + j + poor, rows, C, stop - poor, nullptr, mean + j + poor, m2 + j + poor, none, none);
    }
  }
}

template <class A, class T>
void sums_across(const ChannelSums& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>;
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u * a.parts.rows;
    const int64_t rows = row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row;
    for (int64_t k = 0; k < C; k += kPanel) {
      const int64_t n = k + kPanel < C ? kPanel : C - k;
      const T *dy = (const T*)a.dy + row * C + k, *x = a.x ? (const T*)a.x + row * C + k : nullptr;
      const A *first = (const A*)a.at.first + k, *second = (const A*)a.at.second + k, *scale = (const A*)a.at.scale + k;
      A sum0[kPanel], sum1[kPanel];
      for (int64_t j = 0; j < n; j++) sum0[j] = 0, sum1[j] = 0;
      runs_across<A>(rows, n, [&]<int G>(int64_t j, auto part, int64_t run, int64_t stop) {
        Lanes<A> a0[G] = {}, a1[G] = {}, c0[G], c1[G];
        for (int g = 0; x && g < G; g++) {
          c0[g] = load<A>(first + j + g * W, part);
          c1[g] = load<A>(second + j + g * W, part);
        }
        for (int64_t r = run; r < stop; r++)
          for (int g = 0; g < G; g++) {
            const Lanes<A> v = load<A>(dy + r * C + j + g * W, part);
            a0[g] += v;
            if (x) a1[g] = madd<A>(v, (load<A>(x + r * C + j + g * W, part) - c0[g]) - c1[g], a1[g]);
          }
        for (int g = 0; g < G; g++) {
          const int64_t i = j + g * W;
          store<A>(sum0 + i, load<A>(sum0 + i, part) + a0[g], part);
          if (x) store<A>(sum1 + i, madd<A>(a1[g], load<A>(scale + i, part), load<A>(sum1 + i, part)), part);
        }
      });
      double* out = a.sums + u * 2 * C + k;
      for (int64_t j = 0; j < n; j++) out[j] = sum0[j], out[C + j] = sum1[j];
    }
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
      for (int64_t r = row; r < stop; r++) {
        const int64_t i = r * C + j;
        Lanes<A> v[G];
        for (int g = 0; g < G; g++) {
          v[g] = (load<A>((const T*)a.x + i + g * W, part) - first[g]) - second[g];
          v[g] = madd<A>(v[g], scale[g], shift[g]);
        }
        for (int g = 0; g < G; g++) store<A>((T*)a.y + i + g * W, v[g], part);
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
      for (int64_t r = row; r < stop; r++) {
        const int64_t i = r * C + j;
        Lanes<A> v[G];
        for (int g = 0; g < G; g++) {
          const Lanes<A> up = load<A>((const T*)a.dy + i + g * W, part);
          if (with_x) {
            const Lanes<A> d = (load<A>((const T*)a.x + i + g * W, part) - first[g]) - second[g];
            v[g] = madd<A>(up, scale[g], madd<A>(d, slope[g], shift[g]));
          } else {
            v[g] = up * scale[g];
          }
        }
        for (int g = 0; g < G; g++) store<A>((T*)a.dx + i + g * W, v[g], part);
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
