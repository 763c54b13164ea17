#define LANES 16      // floats of a vector
#define VECTORS 4    // of a panel
#define ROWS 6       // of a tile
#define REGISTERS 32 // that hold a vector
#include "kernels_isa.h"
#include "bytes_isa.h"

namespace specserve {

const Kernels* kernels_avx512() {
  static const Kernels kernels = [] {
    Kernels made = {"avx512", kWidth, 8 * ROWS, matmul, attend, norm, gate, rotate, argmax};
    multiply_bytes(made);
    return made;
  }();
  return &kernels;
}

}  // namespace specserve
