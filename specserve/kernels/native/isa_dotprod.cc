// Products of whole numbers by ARM's dot products of bytes, which multiply four of them where a multiplication of floats
// multiplies one.
#define LANES 4
#include "bytes_isa.h"

namespace specserve {

void use_dotprod(Kernels& kernels) { multiply_bytes(kernels); }

}  // namespace specserve
