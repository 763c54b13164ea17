// A kernel that shows the way from Python to C++ and back; the real ones take its place.
#include "library.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Twice(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> result) {
  for (size_t i = 0; i < x.element_count(); ++i) result->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}

SPECSERVE_HANDLER(specserve_twice, Twice, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

SPECSERVE_EXPORT const char* specserve_kernels_instruction_set() { return "baseline"; }
