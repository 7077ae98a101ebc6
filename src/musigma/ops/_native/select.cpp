// Which level this CPU gets, asked once. Compiled for the lowest level, since it runs before anything is known.
#include <string.h>

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

int levels(Level (&found)[kMaxLevels]) {
  __builtin_cpu_init();
  // The parts of x86-64-v4 and -v3 that the kernels can come to use; all are there together or not at all on real CPUs.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
  found[0] = {&x86_64::table, true};
  found[1] = {&x86_64_v3::table, v3};
  found[2] = {&x86_64_v4::table, v3 && v4};
  return 3;
}
#else
namespace baseline {
extern const Kernels table;
}

int levels(Level (&found)[kMaxLevels]) {
  found[0] = {&baseline::table, true};
  return 1;
}
#endif

static const Kernels* best() {
  Level found[kMaxLevels];
  int i = levels(found) - 1;
  while (!found[i].runs) i--;
  return found[i].kernels;
}

static const Kernels* chosen = best();

const Kernels& kernels() { return *chosen; }

bool use_level(const char* name) {
  Level found[kMaxLevels];
  for (int i = levels(found) - 1; i >= 0; i--) {
    if (!found[i].runs || strcmp(name, found[i].kernels->level)) continue;
    chosen = found[i].kernels;
    return true;
  }
  return false;
}

}  // namespace musigma
