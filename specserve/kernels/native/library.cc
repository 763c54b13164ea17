// What the library says about itself.
#include "library.h"

// Of the sources it was built from: Python does not use a library of other sources.
SPECSERVE_EXPORT const char* specserve_kernels_source_hash() { return SPECSERVE_SOURCE_HASH; }
