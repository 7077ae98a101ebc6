// The CPU level a kernel source is compiled for. Each source is compiled once per level into a namespace of its
// own; nothing in it may be shared between levels, or the linker could hand AVX-512 code to a CPU without it.
#pragma once

#ifndef MUSIGMA_LEVEL
#define MUSIGMA_LEVEL baseline
#endif

#define MUSIGMA_NAMESPACE musigma::MUSIGMA_LEVEL
