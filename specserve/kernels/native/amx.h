// The instructions of Intel's AMX, written as bytes, since older assemblers do not know them. Tiles 0 to 3 are sums, those
// from 4 on activations, and the last ones weights.
#pragma once

#include <stdint.h>

namespace specserve {
namespace {

template <int tile>
inline void zero() {
  __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0" : : "i"(0xc0 | tile << 3));
}

// Lines of 64 bytes, `stride` bytes apart.
template <int tile>
inline void load(const void* from, int64_t stride = 64) {
  __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c0, 0x08" : : "i"(tile << 3 | 4), "a"(from), "c"(stride) : "memory");
}

template <int tile>
inline void store(void* to, int64_t stride) {
  __asm__ volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c0, 0x08" : : "i"(tile << 3 | 4), "a"(to), "c"(stride) : "memory");
}

template <int sums, int rows, int weights>
inline void add_product_of_halves() {
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"((~weights & 15) << 3 | 2), "i"(0xc0 | sums << 3 | rows));
}

template <int sums, int rows, int weights>
inline void add_product_of_bytes() {
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5e, %c1" : : "i"((~weights & 15) << 3 | 3), "i"(0xc0 | sums << 3 | rows));
}

// Of rows' bytes with a sign and weights' without one.
template <int sums, int rows, int weights>
inline void add_product_of_positive_bytes() {
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5e, %c1" : : "i"((~weights & 15) << 3 | 2), "i"(0xc0 | sums << 3 | rows));
}

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// So many lines of sums and of activations, and tiles of weights from `first` on; with less than 64 bytes in a line of
// activations, weights have fewer lines too.
void configure(int64_t lines, int first = 7, int64_t bytes = 64) {
  Config config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = static_cast<uint16_t>(tile >= 4 && tile < first ? bytes : 64);
    config.rows[tile] = static_cast<uint8_t>(tile >= first ? bytes / 4 : lines);
  }
  __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" : : "a"(&config) : "memory");
}

void release() { __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"); }

}  // namespace
}  // namespace specserve
