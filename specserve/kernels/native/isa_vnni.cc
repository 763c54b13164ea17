// Products of 4-bit weights by AVX-512's dot products of bytes (VNNI), which add four products to a sum of 32 bits where a
// multiplication of floats adds one. (For int8 weights that brings nothing: three digits cost what it saves.)
#define LANES 16
#include "codes_isa.h"

namespace specserve {

void use_vnni(Kernels& kernels) { add_codes(kernels); }

}  // namespace specserve
