// dx = g * scale + (x - first) * slope + offset, with one of each a channel, where g is dy on its way back through the
// activation.
#include "across.h"
#include "lines.h"

namespace MUSIGMA_NAMESPACE {
namespace {

template <class A, class T, class F>
void gradient_along(const ChannelGradient& a, int64_t begin, int64_t end, F f) {
  const int64_t n = a.layout.inner;
  int64_t c = begin % a.layout.channels;
  for (int64_t r = begin; r < end; r++, c = c + 1 == a.layout.channels ? 0 : c + 1) {
    const T *dy = (const T*)a.dy + r * n, *x = (const T*)a.x + r * n;
    T* dx = (T*)a.dx + r * n;
    const Line<A> at = line_at<A>(a.at, c);
    if (a.at.slope) {
      const A slope = ((const A*)a.at.slope)[c], offset = ((const A*)a.at.offset)[c];
      gradient_line<A>(at, splat(slope), splat(offset), n, dy, x, dx, a.stream, f);
    } else {
      each<A>(n, dx, a.stream, [&](int64_t i, auto part) {
        Lanes<A> g = load<A>(dy + i, part);
        if constexpr (!F::kNone) g = returned<A, T>(f, g, madd<A>(load<A>(x + i, part) - at.first, at.scale, at.shift));
        return g * at.scale;
      });
    }
  }
}

template <class A, class T, class F>
void gradient_across(const ChannelGradient& a, int64_t begin, int64_t end, F f) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>, kLine = W * sizeof(T);
  const T *x = (const T*)a.x, *dy = (const T*)a.dy;
  T* dx = (T*)a.dx;
  const bool with_slope = a.at.slope != nullptr, with_x = with_slope || !F::kNone;
  const bool streamed = a.stream && (uintptr_t)dx % kLine == 0 && C * sizeof(T) % kLine == 0;
  const int64_t rows = rows_at_once<A>(a.layout);
  for (int64_t row = begin; row < end; row += rows) {
    const int64_t stop = row + rows < end ? row + rows : end;
    each_across<A>(C, [&]<int G>(int64_t j, auto part) {
      Lanes<A> first[G], scale[G], shift[G], slope[G], offset[G];
      const auto take = [&](Lanes<A>* to, const void* from) {
        for (int g = 0; g < G; g++) to[g] = load<A>((const A*)from + j + g * W, part);
      };
      take(scale, a.at.scale);
      if (with_x) take(first, a.at.first);
      if constexpr (!F::kNone) take(shift, a.at.shift);
      if (with_slope) take(slope, a.at.slope), take(offset, a.at.offset);
      for (int64_t r = row; r < stop; r++) {
        const int64_t i = r * C + j;
        Lanes<A> v[G];
        for (int g = 0; g < G; g++) {
          v[g] = load<A>(dy + i + g * W, part);
          if (!with_x) {
            v[g] = v[g] * scale[g];
            continue;
          }
          const Lanes<A> d = load<A>(x + i + g * W, part) - first[g];
          if constexpr (!F::kNone) v[g] = returned<A, T>(f, v[g], madd<A>(d, scale[g], shift[g]));
          v[g] = with_slope ? madd<A>(v[g], scale[g], madd<A>(d, slope[g], offset[g])) : v[g] * scale[g];
        }
        for (int g = 0; g < G; g++) put<A>(dx + i + g * W, v[g], part, streamed);
      }
    });
  }
}

}  // namespace

void channel_gradient(const ChannelGradient& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.at.wide, [&]<class A, class T>() {
    by_activation(a.activation, [&](auto f) {
      a.layout.inner == 1 ? gradient_across<A, T>(a, begin, end, f) : gradient_along<A, T>(a, begin, end, f);
    });
  });
  end_of_stream(a.stream);
}

}  // namespace MUSIGMA_NAMESPACE
