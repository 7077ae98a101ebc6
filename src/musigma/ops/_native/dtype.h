// The storage types of the kernels, and a switch over them.
#pragma once

#include <stdint.h>

namespace musigma {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

enum class DType { kFloat32, kFloat64, kBFloat16, kFloat16 };

}  // namespace musigma
