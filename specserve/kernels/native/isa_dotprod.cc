// Products of 4-bit weights by ARM's dot products of bytes, which multiply four of them where a multiplication of floats
// multiplies one.
#define LANES 4
#include "codes_isa.h"

namespace specserve {

void use_dotprod(Kernels& kernels) { add_codes(kernels); }

}  // namespace specserve
