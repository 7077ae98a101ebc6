// From tensors to the raw pointers of the kernels.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <atomic>
#include <cstdio>
#include <string_view>

#include "autograd.h"
#include "kernels.h"
#include "memory.h"

namespace musigma {

// False sends every call to the reference: `ops.use_kernels("off")` and `("reference")`.
inline std::atomic<bool> enabled{true};

inline bool storage_type(const Tensor& t, DType& type) {
  switch (t.scalar_type()) {
    case at::kFloat: type = DType::kFloat32; return true;
    case at::kDouble: type = DType::kFloat64; return true;
    case at::kBFloat16: type = DType::kBFloat16; return true;
    case at::kHalf: type = DType::kFloat16; return true;
    default: return false;
  }
}

inline at::ScalarType compute_type(DType type) { return type == DType::kFloat64 ? at::kDouble : at::kFloat; }

// An activation as the ops take it. An unknown name is the reference's to refuse.
using Name = std::optional<std::string_view>;
constexpr std::string_view kActivations[] = {"", "relu", "silu", "gelu", "gelu_tanh"};  // in the enum's order

inline bool activation_of(const Name& name, Activation& activation) {
  activation = Activation::kNone;
  if (!name) return true;
  for (int i = 1; i < 5; i++)
    if (*name == kActivations[i]) return activation = (Activation)i, true;
  return false;
}

// Nodes keep the enum as a number, which outlives the caller's string.
inline Name name_of(int64_t activation) { return activation == 0 ? std::nullopt : Name(kActivations[activation]); }

inline bool is_parameter(const MaybeTensor& p, at::IntArrayRef shape) {
  return !p || (p->sizes() == shape && p->is_cpu() && at::isFloatingType(p->scalar_type()));
}

// What a backward is handed may come from anywhere: dy like x, and one double a set of values.
inline bool is_like(const Tensor& dy, const Tensor& x) {
  return dy.is_cpu() && dy.layout() == at::kStrided && dy.scalar_type() == x.scalar_type() && dy.sizes() == x.sizes();
}

inline bool is_statistic(const Tensor& t, int64_t sets) {
  return t.is_cpu() && t.layout() == at::kStrided && t.scalar_type() == at::kDouble && t.numel() == sets;
}

// A parameter as the kernels read it: contiguous, in the compute type. Keeps what it points to alive.
struct Parameter {
  Tensor held;
  const void* data = nullptr;
  Parameter(const MaybeTensor& p, at::ScalarType type) {
    if (!p) return;
    held = p->contiguous();
    if (type == at::kFloat && held.scalar_type() == at::kBFloat16)
      widen<c10::BFloat16>();
    else if (type == at::kFloat && held.scalar_type() == at::kHalf)
      widen<c10::Half>();
    else if (held.scalar_type() != type)
      held = held.to(type);
    data = held.const_data_ptr();
  }

 private:
  // A loop, where the dispatcher would take longer than a short vector.
  template <class T>
  void widen() {
    Tensor wide = output(held.sizes(), at::kFloat);
    std::copy_n(held.const_data_ptr<T>(), held.numel(), wide.mutable_data_ptr<float>());
    held = std::move(wide);
  }
};

// x as rows of `width` values a fixed distance apart, each dense; a copy only where that is not what it is already.
struct Rows {
  Tensor held;
  const void* data;
  int64_t count, stride;
  Rows(const Tensor& x, int64_t width, int64_t n_dims) : held(x), count(x.numel() / width), stride(width) {
    if (!x.is_contiguous() && !strided(x, width, n_dims)) held = x.contiguous();
    data = held.const_data_ptr();
  }

 private:
  bool strided(const Tensor& x, int64_t width, int64_t n_dims) {
    int64_t inner = 1, d = x.dim() - 1;
    for (; d >= x.dim() - n_dims; d--) {
      if (x.size(d) != 1 && x.stride(d) != inner) return false;
      inner *= x.size(d);
    }
    int64_t step = -1, expected = 0;
    for (; d >= 0; d--) {
      if (x.size(d) == 1) continue;
      if (step < 0)
        step = x.stride(d);
      else if (x.stride(d) != expected)
        return false;
      expected = x.stride(d) * x.size(d);
    }
    stride = step < 0 ? width : step;
    return true;
  }
};

// Whether a result of so many bytes is written past the caches: where it and its source don't fit in the last of them
// together. Measured on 32 MB of it, an output of 26 MB takes half the time to write so, and the next op that reads it
// as long as it saves at most; below half the cache the next op loses more.
inline bool streams(int64_t bytes) {
  static const int64_t limit = [] {
    // What one core sees of it. (sysconf tells the sum over a socket, ten times as much on some.)
    int64_t kilobytes = 0;
    if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%ldK", &kilobytes) != 1) kilobytes = 0;
      std::fclose(file);
    }
    return kilobytes > 0 ? kilobytes * 512 : int64_t{1} << 24;
  }();
  return bytes > limit;
}

// Work a thread should have before a second one is woken, in values.
constexpr int64_t kGrain = 32768;

template <class F>
void parallel(int64_t count, int64_t values_each, F f) {
  at::parallel_for(0, count, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, values_each)), f);
}

// Blocks of rows for column sums: a function of the shape alone. At most 64, and at least two runs of 16 rows, so that
// the sums take no more than a fraction of what is read.
inline int64_t block_rows(int64_t rows) {
  const int64_t wanted = std::max<int64_t>(32, (rows + 63) / 64);
  return (wanted + 15) / 16 * 16;
}

// The tensor that stands for a gradient nobody asked for.
inline Tensor none(const Tensor& x) { return output({0}, x.scalar_type()); }

inline at::ScalarType parameter_type(const Tensor& x, const MaybeTensor& parameter) {
  if (parameter) return parameter->scalar_type();
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline Tensor fold(
    const Tensor& sums, int64_t blocks, int64_t width, int64_t which, at::IntArrayRef shape, at::ScalarType type,
    bool low) {
  Tensor out = output(shape, type);
  FoldSums a{blocks, width, sums.const_data_ptr<double>(), which, DType::kFloat32, out.mutable_data_ptr(), low};
  storage_type(out, a.out_type);
  parallel(width, blocks, [&](int64_t begin, int64_t end) { kernels().fold_sums(a, begin, end); });
  return out;
}

}  // namespace musigma
