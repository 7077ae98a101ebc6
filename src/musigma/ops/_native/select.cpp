// Which level this CPU gets, asked once. Compiled for the lowest level, since it runs before anything is known.
#include "kernels.h"

namespace musigma {

#if defined(MUSIGMA_X86)
namespace x86_64 {
extern const Kernels table;
}
namespace x86_64_v3 {
extern const Kernels table;
}
namespace x86_64_v4 {
extern const Kernels table;
}

static const Kernels& best() {
  __builtin_cpu_init();
  // The parts of x86-64-v4 and -v3 that the kernels can come to use; all are there together or not at all on real CPUs.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
    return x86_64_v4::table;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return x86_64_v3::table;
  return x86_64::table;
}
#else
namespace baseline {
extern const Kernels table;
}
static const Kernels& best() { return baseline::table; }
#endif

const Kernels& kernels() {
  static const Kernels& chosen = best();
  return chosen;
}

}  // namespace musigma
