// Products of whole numbers by AVX's dot products of bytes, as processors without AVX-512 have them: Intel's Core from the
// 12th generation on, and N series.
#if defined(__AVXVNNI__)
#define LANES 8
#include "bytes_isa.h"

namespace specserve {

bool use_avxvnni(Kernels& kernels) {
  multiply_bytes(kernels);
  return true;
}

}  // namespace specserve
#else  // a compiler that does not know them
#include "kernels.h"

namespace specserve {

bool use_avxvnni(Kernels&) { return false; }

}  // namespace specserve
#endif
