// Mean and M2 of channels, part by part, each read once.
//
// With d = x - pivot, mean = pivot + Σd/n and M2 = Σd² - (Σd)²/n. The difference loses digits as the pivot is further
// from the mean than the spread is wide, so the pivot is the average of four values far apart, and where it turns out to
// lie more than √2 standard deviations off, the part is read again around its mean. Up to there the rounding of the sums
// counts at most three times: less than two units in the last place of M2, one of the result. (A constant channel has
// its value as the pivot, and exactly M2 = 0.)
#include "across.h"
#include "rows.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// Whether the pivot was near enough; also true of what is not finite, which no second look improves.
inline bool is_near(double m2, double offset, double count) { return !(offset * offset * count > 2 * m2); }

// ---- along a channel -----------------------------------------------------------------------------------------

template <class A, class T>
inline A pivot_of(const T* x, const Piece& p) {
  const A start = one<A>(x + p.offset);
  A sum = 0;
  for (int64_t k = 1; k < 4; k++) sum += one<A>(x + p.offset + k * p.rows / 4 * p.stride + k * p.n / 4) - start;
  return start + sum * (A)0.25;
}

// M2 around a mean that is known, in two parts where one would not hold it.
template <class A, class T>
double second_look(const T* x, const Piece& p, A pivot, double offset) {
  Center<A> center = center_at<A>((double)pivot + offset);
  if constexpr (sizeof(A) == 8) center.first = pivot, center.second = offset;
  Total<A> squares[1];
  reduce_piece<A, 1>(p, squares, [&](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> d = keep<A>(center(load<A>(x + i, part)), part);
    acc[0] = madd<A>(d, d, acc[0]);
  });
  return squares[0].value();
}

template <class A, class T>
inline auto deviations(const T* x, A pivot) {
  return [x, pivot](int64_t i, auto part, Lanes<A>* acc) {
    const Lanes<A> d = keep<A>(load<A>(x + i, part) - pivot, part);
    acc[0] += d;
    acc[1] = madd<A>(d, d, acc[1]);
  };
}

template <class A, class T>
void moments_again(const ChannelMoments& a, const Piece& p);

// What one look gave: sums of d and d². The mean is left relative to a pivot that was given.
template <class A, class T>
inline void finish(const ChannelMoments& a, const Piece& p, A pivot, double sum, double square) {
  const int64_t at = p.part * a.layout.channels + p.channel;
  const double count = (double)p.count(), offset = sum / count;
  double m2 = square - sum * offset;
  if (!is_near(m2, offset, count)) m2 = second_look<A>((const T*)a.x, p, pivot, offset);
  if (sizeof(A) == 4 && !in_range(m2 / count)) return moments_again<double, T>(a, p);
  a.mean[at] = a.pivot ? offset : (double)pivot + offset;
  a.m2[at] = m2;
}

template <class A, class T>
void moments_again(const ChannelMoments& a, const Piece& p) {
  const T* x = (const T*)a.x;
  const A pivot = a.pivot ? (A)a.pivot[p.channel] : pivot_of<A>(x, p);
  Total<A> total[2];
  reduce_piece<A, 2>(p, total, deviations<A>(x, pivot));
  finish<A, T>(a, p, pivot, total[0].value(), total[1].value());
}

// As many short pieces as a vector has lanes, whose sums end together.
template <class A, class T>
void short_moments(const ChannelMoments& a, Pieces& pieces, int many) {
  constexpr int W = kLanes<A>;
  const T* x = (const T*)a.x;
  Piece held[W];
  A pivot[W], sum[W], square[W];
  Lanes<A> sums[W], squares[W];
  for (int k = 0; k < many; k++) {
    held[k] = pieces.next();
    pivot[k] = a.pivot ? (A)a.pivot[held[k].channel] : pivot_of<A>(x, held[k]);
    Lanes<A> both[2];
    accumulate<A, 2>(held[k], both, deviations<A>(x, pivot[k]));
    sums[k] = both[0], squares[k] = both[1];
  }
  for (int k = many; k < W; k++) sums[k] = squares[k] = Lanes<A>{};
  write(sum, sums_of<A>(sums)), write(square, sums_of<A>(squares));
  for (int k = 0; k < many; k++) finish<A, T>(a, held[k], pivot[k], sum[k], square[k]);
}

template <class A, class T>
void moments_along(const ChannelMoments& a, int64_t begin, int64_t end) {
  Pieces pieces(a.layout, a.parts, begin);
  const bool is_short = a.parts.rows > 1 || a.layout.inner <= kBlock;
  for (int64_t u = begin; u < end;) {
    const int many = !is_short ? 1 : end - u < kLanes<A> ? (int)(end - u) : kLanes<A>;
    if (is_short)
      short_moments<A, T>(a, pieces, many);
    else
      moments_again<A, T>(a, pieces.next());
    u += many;
  }
}

// ---- across channels -----------------------------------------------------------------------------------------

// The rows of a part, and the channels [0, width) of a panel of them.
template <class T>
struct Panel {
  const T* x;
  int64_t rows, stride, width;
};

// One look at a panel: the sums of d and d² of every channel.
template <class A, class T>
void panel_sums(const Panel<T>& p, const double* from, A* pivot, A* sums, A* squares) {
  constexpr int64_t W = kLanes<A>;
  across<A>(p.width, [&]<int G>(int64_t j, auto part) {
    for (int g = 0; g < G; g++) {
      const int64_t i = j + g * W;
      const auto row = [&](int64_t r) { return load<A>(p.x + r * p.stride + i, part); };
      Lanes<A> start = row(0), near{};
      for (int64_t k = 1; k < 4; k++) near += row(k * p.rows / 4) - start;
      start = start + near * (A)0.25;
      if constexpr (sizeof(A) == 8)
        if (from) start = load<A>(from + i, part);
      store<A>(pivot + i, start, part);
      store<A>(sums + i, Lanes<A>{}, part);
      store<A>(squares + i, Lanes<A>{}, part);
    }
  });
  runs_across<A>(p.rows, p.width, [&]<int G>(int64_t j, auto part, int64_t run, int64_t stop) {
    Lanes<A> sum[G] = {}, square[G] = {}, start[G];
    for (int g = 0; g < G; g++) start[g] = load<A>(pivot + j + g * W, part);
    for (int64_t r = run; r < stop; r++)
      for (int g = 0; g < G; g++) {
        const Lanes<A> d = load<A>(p.x + r * p.stride + j + g * W, part) - start[g];
        sum[g] += d;
        square[g] = madd<A>(d, d, square[g]);
      }
    for (int g = 0; g < G; g++) {
      const int64_t i = j + g * W;
      store<A>(sums + i, load<A>(sums + i, part) + sum[g], part);
      store<A>(squares + i, load<A>(squares + i, part) + square[g], part);
    }
  });
}

// A second look at a panel: M2 around the means, which are known in two parts.
template <class A, class T>
void panel_squares(const Panel<T>& p, const A* first, const A* second, A* squares) {
  constexpr int64_t W = kLanes<A>;
  for (int64_t c = 0; c < p.width; c++) squares[c] = 0;
  runs_across<A>(p.rows, p.width, [&]<int G>(int64_t j, auto part, int64_t run, int64_t stop) {
    Lanes<A> acc[G] = {}, c0[G], c1[G];
    for (int g = 0; g < G; g++) c0[g] = load<A>(first + j + g * W, part), c1[g] = load<A>(second + j + g * W, part);
    for (int64_t r = run; r < stop; r++)
      for (int g = 0; g < G; g++) {
        const Lanes<A> d = (load<A>(p.x + r * p.stride + j + g * W, part) - c0[g]) - c1[g];
        acc[g] = madd<A>(d, d, acc[g]);
      }
    for (int g = 0; g < G; g++) store<A>(squares + j + g * W, load<A>(squares + j + g * W, part) + acc[g], part);
  });
}

// f(first, one past the last) for every run of channels that `bad` marks.
template <class F>
inline void marked(const bool* bad, int64_t n, F f) {
  for (int64_t c = 0; c < n; c++) {
    if (!bad[c]) continue;
    const int64_t begin = c;
    while (c < n && bad[c]) c++;
    f(begin, c);
  }
}

template <class A, class T>
void panel_moments(const Panel<T>& p, const double* from, double* mean, double* m2) {
  A pivot[kPanel], sums[kPanel], squares[kPanel];
  bool bad[kPanel];
  panel_sums<A>(p, from, pivot, sums, squares);
  const double rows = (double)p.rows, share = 1.0 / rows;
  bool any = false;
  for (int64_t c = 0; c < p.width; c++) {
    const double offset = (double)sums[c] * share, square = (double)squares[c] - (double)sums[c] * offset;
    mean[c] = from ? offset : (double)pivot[c] + offset;
    m2[c] = square;
    bad[c] = !is_near(square, offset, rows);
    any |= bad[c];
  }
  if (any)
    marked(bad, p.width, [&](int64_t begin, int64_t end) {
      A second[kPanel];
      for (int64_t c = begin; c < end; c++) {
        // Without a pivot from outside the mean is one double; with one, pivot and offset hold it.
        const double center = from ? (double)pivot[c] : mean[c];
        pivot[c] = (A)center, second[c] = (A)(from ? mean[c] : center - (double)(A)center);
      }
      panel_squares<A>(
          Panel<T>{p.x + begin, p.rows, p.stride, end - begin}, pivot + begin, second + begin, squares + begin);
      for (int64_t c = begin; c < end; c++) m2[c] = squares[c];
    });
  if constexpr (sizeof(A) == 4) {
    any = false;
    for (int64_t c = 0; c < p.width; c++) bad[c] = !in_range(m2[c] * share), any |= bad[c];
    if (any)
      marked(bad, p.width, [&](int64_t begin, int64_t end) {
        panel_moments<double>(Panel<T>{p.x + begin, p.rows, p.stride, end - begin}, nullptr, mean + begin, m2 + begin);
      });
  }
}

template <class A, class T>
void moments_across(const ChannelMoments& a, int64_t begin, int64_t end) {
  const int64_t C = a.layout.channels;
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u * a.parts.rows;
    const int64_t rows = row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row;
    for (int64_t j = 0; j < C; j += kPanel)
      panel_moments<A>(
          Panel<T>{(const T*)a.x + row * C + j, rows, C, j + kPanel < C ? kPanel : C - j},
          a.pivot ? a.pivot + j : nullptr, a.mean + u * C + j, a.m2 + u * C + j);
  }
}

}  // namespace

void channel_moments(const ChannelMoments& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.wide, [&]<class A, class T>() {
    a.layout.inner == 1 ? moments_across<A, T>(a, begin, end) : moments_along<A, T>(a, begin, end);
  });
}

}  // namespace MUSIGMA_NAMESPACE
