// y = activation((x - first) * scale + shift + add), with one of each a channel.
#include "across.h"
#include "lines.h"

namespace MUSIGMA_NAMESPACE {
namespace {

template <class A, class T, class F>
void affine_along(const ChannelAffine& a, int64_t begin, int64_t end, F f) {
  const int64_t n = a.layout.inner;
  int64_t c = begin % a.layout.channels;
  for (int64_t r = begin; r < end; r++, c = c + 1 == a.layout.channels ? 0 : c + 1) {
    const T* x = (const T*)a.x + r * n;
    T* y = (T*)a.y + r * n;
    const T* add = a.add ? (const T*)a.add + r * n : nullptr;
    affine_line<A>(line_at<A>(a.at, c), n, x, add, y, a.stream, f);
  }
}

template <class A, class T, class F>
void affine_across(const ChannelAffine& a, int64_t begin, int64_t end, F f) {
  const int64_t C = a.layout.channels;
  constexpr int64_t W = kLanes<A>, kLine = W * sizeof(T);
  const T *x = (const T*)a.x, *add = (const T*)a.add;
  T* y = (T*)a.y;
  const bool streamed = a.stream && (uintptr_t)y % kLine == 0 && C * sizeof(T) % kLine == 0;
  const int64_t rows = rows_at_once<A>(a.layout);
  for (int64_t row = begin; row < end; row += rows) {
    const int64_t stop = row + rows < end ? row + rows : end;
    each_across<A>(C, [&]<int G>(int64_t j, auto part) {
      Lanes<A> first[G], scale[G], shift[G];
      for (int g = 0; g < G; g++) {
        first[g] = load<A>((const A*)a.at.first + j + g * W, part);
        scale[g] = load<A>((const A*)a.at.scale + j + g * W, part);
        shift[g] = load<A>((const A*)a.at.shift + j + g * W, part);
      }
      for (int64_t r = row; r < stop; r++) {
        const int64_t i = r * C + j;
        Lanes<A> v[G];
        for (int g = 0; g < G; g++) v[g] = madd<A>(load<A>(x + i + g * W, part) - first[g], scale[g], shift[g]);
        if (add)
          for (int g = 0; g < G; g++) v[g] += load<A>(add + i + g * W, part);
        for (int g = 0; g < G; g++) put<A>(y + i + g * W, activated<A, T>(f, v[g]), part, streamed);
      }
    });
  }
}

}  // namespace

void channel_affine(const ChannelAffine& a, int64_t begin, int64_t end) {
  by_type(a.layout.type, a.at.wide, [&]<class A, class T>() {
    by_activation(a.activation, [&](auto f) {
      a.layout.inner == 1 ? affine_across<A, T>(a, begin, end, f) : affine_along<A, T>(a, begin, end, f);
    });
  });
  end_of_stream(a.stream);
}

}  // namespace MUSIGMA_NAMESPACE
