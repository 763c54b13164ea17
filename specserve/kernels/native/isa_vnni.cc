// Products of whole numbers by AVX-512's dot products of bytes (VNNI), which add four products to a sum of 32 bits where a
// multiplication of floats adds one.
#define LANES 16
#include "bytes_isa.h"

namespace specserve {

void use_vnni(Kernels& kernels) { multiply_bytes(kernels); }

}  // namespace specserve
