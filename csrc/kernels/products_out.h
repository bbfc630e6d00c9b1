// Entries of ElementwiseKernels (elementwise.h) that products_out.cpp defines.
#pragma once
#include "kernels/elementwise.h"

namespace noria::NORIA_ISA {

void gated_tile(const GatedTile& tile);
void largest_tile(const LargestTile& tile);

}  // namespace noria::NORIA_ISA
