// What the backward sums over a channel, part by part: g, and g times x̂, where g is dy on its way back through the
// activation.
#include "across.h"
#include "lines.h"

namespace MUSIGMA_NAMESPACE {
namespace {

// ---- along a channel -----------------------------------------------------------------------------------------

template <class A>
inline void put_sums(const ChannelSums& a, const Piece& p, double of_g, double of_product) {
  double* out = a.sums + p.part * 2 * a.layout.channels + p.channel;
  out[0] = of_g;
  out[a.layout.channels] = of_product;
}

template <class A, int S, class MakeBody>
inline void pieces_along(const ChannelSums& a, int64_t begin, int64_t end, MakeBody make_body) {
  constexpr int W = kLanes<A>;
  Pieces pieces(a.layout, a.parts, begin);
  if (!(a.parts.rows > 1 || a.layout.inner <= kBlock)) {
    for (int64_t u = begin; u < end; u++) {
      const Piece p = pieces.next();
      const auto body = make_body(p.channel);
      Total<A> total[2];
      if constexpr (S == 2) {
        reduce<A, 2>(p.n, total, [&](int64_t i, auto part, Lanes<A>* acc) { body(p.offset + i, part, acc); });
      } else {
        Total<A> one[1];
        reduce<A, 1>(p.n, one, [&](int64_t i, auto part, Lanes<A>* acc) { body(p.offset + i, part, acc); });
        total[0] = one[0];
      }
      put_sums<A>(a, p, total[0].value(), total[1].value());
    }
    return;
  }
  // As many short pieces as a vector has lanes end together.
  for (int64_t u = begin; u < end; u += W) {
    const int many = end - u < W ? (int)(end - u) : W;
    Piece held[W];
    Lanes<A> both[S], sums[S][W];
    A out[2][W] = {};
    for (int k = 0; k < many; k++) {
      held[k] = pieces.next();
      accumulate<A, S>(held[k], both, make_body(held[k].channel));
      for (int s = 0; s < S; s++) sums[s][k] = both[s];
    }
    for (int s = 0; s < S; s++) {
      for (int k = many; k < W; k++) sums[s][k] = Lanes<A>{};
      write(out[s], sums_of<A>(sums[s]));
    }
    for (int k = 0; k < many; k++) put_sums<A>(a, held[k], out[0][k], out[1][k]);
  }
}

template <class A, class T, class F>
void sums_along(const ChannelSums& a, int64_t begin, int64_t end, F f) {
  if (a.x)
    return pieces_along<A, 2>(a, begin, end, [&](int64_t c) {
      return LineTerms<A, T, F>{line_at<A>(a.at, c),
                                splat(((const A*)a.at.rstd)[c]),
                                (const T*)a.dy,
                                (const T*)a.x,
                                (const T*)a.add,
                                (T*)a.g,
                                f};
    });
  const T* dy = (const T*)a.dy;
  pieces_along<A, 1>(a, begin, end, [dy](int64_t) {
    return [dy](int64_t i, auto part, Lanes<A>* acc) { acc[0] += keep<A>(load<A>(dy + i, part), part); };
  });
}

// ---- across channels -----------------------------------------------------------------------------------------

// The terms of G vectors of channels.
template <class A, class T, class F, int G>
struct TermsAcross {
  Lanes<A> first[G], rstd[G], scale[G], shift[G];
  F f;

  template <class Part>
  TermsAcross(const Coefficients& at, int64_t c, Part part, F f) : f(f) {
    const auto take = [&](Lanes<A>* to, const void* from) {
      for (int g = 0; g < G; g++) to[g] = load<A>((const A*)from + c + g * kLanes<A>, part);
    };
    take(first, at.first), take(rstd, at.rstd);
    if constexpr (!F::kNone) take(scale, at.scale), take(shift, at.shift);
  }

  template <class Part>
  void operator()(const ChannelSums& a, int64_t at, int g, Part part, Lanes<A>& of_g, Lanes<A>& of_product) const {
    Lanes<A> up = load<A>((const T*)a.dy + at, part);
    const Lanes<A> d = load<A>((const T*)a.x + at, part) - first[g];
    if constexpr (!F::kNone) {
      Lanes<A> z = madd<A>(d, scale[g], shift[g]);
      if (a.add) z += load<A>((const T*)a.add + at, part);
      up = returned<A, A>(f, up, z);
      if (a.g) store<A>((T*)a.g + at, up, part);
    }
    of_g += up;
    of_product = madd<A>(up, d * rstd[g], of_product);
  }
};

template <class A, class T, class F>
void sums_across(const ChannelSums& a, int64_t begin, int64_t end, F f) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>;
  for (int64_t u = begin; u < end; u++) {
    const int64_t row = u * a.parts.rows;
    const int64_t rows = row + a.parts.rows < a.layout.outer ? a.parts.rows : a.layout.outer - row;
    for (int64_t k = 0; k < C; k += kPanel) {
      const int64_t n = k + kPanel < C ? kPanel : C - k;
      A sum0[kPanel], sum1[kPanel];
      for (int64_t j = 0; j < n; j++) sum0[j] = 0, sum1[j] = 0;
      runs_across<A>(rows, n, [&]<int G>(int64_t j, auto part, int64_t run, int64_t stop) {
        Lanes<A> a0[G] = {}, a1[G] = {};
        if (a.x) {
          const TermsAcross<A, T, F, G> terms(a.at, k + j, part, f);
          for (int64_t r = run; r < stop; r++)
            for (int g = 0; g < G; g++) terms(a, (row + r) * C + k + j + g * W, g, part, a0[g], a1[g]);
        } else {
          for (int64_t r = run; r < stop; r++)
            for (int g = 0; g < G; g++) a0[g] += load<A>((const T*)a.dy + (row + r) * C + k + j + g * W, part);
        }
        for (int g = 0; g < G; g++) {
          const int64_t i = j + g * W;
          store<A>(sum0 + i, load<A>(sum0 + i, part) + a0[g], part);
          if (a.x) store<A>(sum1 + i, load<A>(sum1 + i, part) + a1[g], part);
        }
      });
      double* out = a.sums + u * 2 * C + k;
      for (int64_t j = 0; j < n; j++) out[j] = sum0[j], out[C + j] = sum1[j];
    }
  }
}

}  // namespace

void channel_sums(const ChannelSums& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.at.wide, [&]<class A, class T>() {
    by_activation(a.activation, [&](auto f) {
      a.layout.inner == 1 ? sums_across<A, T>(a, begin, end, f) : sums_along<A, T>(a, begin, end, f);
    });
  });
}

}  // namespace MUSIGMA_NAMESPACE
