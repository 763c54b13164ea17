// Products of bfloat16 weights on the tiles of Intel's AMX, which multiply ten times as many numbers in a second as
// AVX-512 does.
//
// A tile multiplies up to 16 rows of 32 bfloat16 inputs with these inputs of 16 outputs, and adds to float32 sums.
// Activations are float32 numbers, so each is cut into three bfloat16 numbers whose sum it is: high, middle and low. The
// products of these with the weights are exact. Of 32 inputs a tile adds the even and the odd ones apart, 16 products
// each, then both, and that to the sum: of d_in inputs a term is rounded at most 17 + 3 d_in / 32 times, where one chain
// of all inputs rounds it d_in times. (Numbers below 2^-126 count as zero. An infinite activation gives NaN.)
//
// The instructions are written as bytes, since older assemblers do not know them.

#include <string.h>

#include "kernels.h"

namespace specserve {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int kRows = 16;    // of a tile
constexpr int kInputs = 32;  // of a tile, a line of 64 bytes
constexpr int kOutputs = 16;
constexpr int kWidth = 4 * kOutputs;          // of a panel, whose tiles of weights follow each other
constexpr int kLine = 64;                     // bytes of a tile's row
constexpr int64_t kTile = kInputs * kOutputs;  // numbers

template <int tile>
inline void zero() {
  __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0" : : "i"(0xc0 | tile << 3));
}

// Lines of 64 bytes, `stride` bytes apart.
template <int tile>
inline void load(const void* from, int64_t stride) {
  __asm__ volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c0, 0x08" : : "i"(tile << 3 | 4), "a"(from), "c"(stride) : "memory");
}

template <int tile>
inline void store(void* to, int64_t stride) {
  __asm__ volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c0, 0x08" : : "i"(tile << 3 | 4), "a"(to), "c"(stride) : "memory");
}

template <int sums, int rows, int weights>
inline void add_product() {
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"((~weights & 15) << 3 | 2), "i"(0xc0 | sums << 3 | rows));
}

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The tiles: 0 to 3 are sums, 4 to 6 the three parts of `rows` rows, 7 is weights.
void configure(int64_t rows) {
  Config config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[tile] = kLine;
    config.rows[tile] = static_cast<uint8_t>(tile == 7 ? kRows : rows);
  }
  __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" : : "a"(&config) : "memory");
}

void release() { __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0"); }

inline Floats whole(const float* from) {
  Floats to;
  memcpy(&to, from, sizeof(to));
  return to;
}

// A vector of which only `count` numbers exist, none if it is below 1.
inline Floats part(const float* from, int64_t count) {
  Floats to = Floats{};
  if (count >= 16) return whole(from);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  return to;
}

inline void put(float* to, Floats from) { memcpy(to, &from, sizeof(from)); }

// Of which only `count` places exist.
inline void put_part(float* to, Floats from, int64_t count) {
  if (count >= 16) return put(to, from);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

inline Words bits_of(Floats x) {
  Words bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The nearest bfloat16 number, ties to even, as a float.
inline Floats rounded(Floats x) {
  Words bits = bits_of(x);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  Floats to;
  memcpy(&to, &bits, sizeof(to));
  return to;
}

inline void store_half(uint16_t* to, Floats x) {
  const Halves upper = __builtin_convertvector(bits_of(x) >> 16, Halves);
  memcpy(to, &upper, sizeof(upper));
}

int64_t steps_of_block(const Matmul& call) { return (least(call.block, call.d_in) + kInputs - 1) / kInputs; }

// Rows order[begin:end], at most 16, in three parts as tiles take them: [step, part, row, input].
void split(const Matmul& call, int64_t begin, int64_t end, uint16_t* to) {
  const int64_t rows = end - begin, steps = steps_of_block(call);
  for (int64_t block = 0; block < call.d_in; block += call.block) {
    const int64_t last = least(call.d_in, block + call.block);
    for (int64_t step = 0; step < steps; ++step, to += 3 * rows * kInputs) {
      for (int64_t row = 0; row < rows; ++row) {
        const float* x = call.x + call.order[begin + row] * call.d_in;
        for (int half = 0; half < kInputs; half += 16) {
          const int64_t from = block + step * kInputs + half;
          const Floats value = part(x + from, last - from);
          const Floats high = rounded(value), rest = value - high, middle = rounded(rest);
          uint16_t* place = to + row * kInputs + half;
          store_half(place, high);
          store_half(place + rows * kInputs, middle);
          store_half(place + 2 * rows * kInputs, rest - middle);
        }
      }
    }
  }
}

template <int tile>
inline void multiply_tile(const char* weights) {
  load<7>(weights + tile * kTile * sizeof(uint16_t), kLine);
  add_product<tile, 4, 7>();
  add_product<tile, 5, 7>();
  add_product<tile, 6, 7>();
}

// sums [rows, kWidth] = parts @ weights over so many steps.
void multiply(const uint16_t* parts, const char* weights, int64_t steps, int64_t rows, float* sums) {
  constexpr int64_t kStep = 4 * kTile * sizeof(uint16_t);
  constexpr int64_t kAhead = 2048;  // bytes that memory delivers to a core within its latency of some 100 ns
  zero<0>(), zero<1>(), zero<2>(), zero<3>();
  for (int64_t step = 0; step < steps; ++step, parts += 3 * rows * kInputs, weights += kStep) {
    for (int64_t line = 0; line < kStep; line += 64) __builtin_prefetch(weights + kAhead + line);
    load<4>(parts, kLine);
    load<5>(parts + rows * kInputs, kLine);
    load<6>(parts + 2 * rows * kInputs, kLine);
    multiply_tile<0>(weights), multiply_tile<1>(weights), multiply_tile<2>(weights), multiply_tile<3>(weights);
  }
  constexpr int64_t kStride = kWidth * sizeof(float);
  store<0>(sums, kStride), store<1>(sums + 16, kStride), store<2>(sums + 32, kStride), store<3>(sums + 48, kStride);
}

// One panel and one chunk of rows.
void multiply_chunk(const Matmul& call, int64_t group, int64_t panel, int64_t begin, int64_t end, const uint16_t* parts) {
  const int64_t num_panels = (call.d_out + kWidth - 1) / kWidth, num_blocks = (call.d_in + call.block - 1) / call.block;
  const int64_t steps = steps_of_block(call), rows = end - begin;
  const int64_t column = panel * kWidth, columns = least(kWidth, call.d_out - column);
  const char* weights = static_cast<const char*>(call.panels) +
                        (group * num_panels + panel) * num_blocks * steps * 4 * kTile * sizeof(uint16_t);
  float* sums = scratch(2 * kRows * kWidth);
  float* totals = num_blocks > 1 ? sums + kRows * kWidth : sums;
  for (int64_t block = 0; block < num_blocks; ++block) {
    multiply(parts + block * steps * 3 * rows * kInputs, weights + block * steps * 4 * kTile * sizeof(uint16_t), steps,
             rows, sums);
    if (!call.scale) continue;
    const float* scales = call.scale + (group * num_blocks + block) * call.d_out + column;
    for (int64_t at = 0; at < columns; at += 16) {
      const Floats scale = part(scales + at, columns - at);
      for (int64_t row = 0; row < rows; ++row) {
        const Floats sum = whole(sums + row * kWidth + at) * scale;
        put(totals + row * kWidth + at, block ? whole(totals + row * kWidth + at) + sum : sum);
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = call.order[begin + row] * call.d_out + column;
    for (int64_t at = 0; at < columns; at += 16) {
      Floats total = whole(totals + row * kWidth + at);
      if (call.add) total += part(call.add + place + at, columns - at);
      put_part(call.y + place + at, total, columns - at);
    }
  }
}

void matmul(const Matmul& call, int64_t group, int64_t first, int64_t last, int64_t begin, int64_t end,
            const uint16_t* parts) {
  const int64_t num_blocks = (call.d_in + call.block - 1) / call.block;
  const int64_t per_row = num_blocks * steps_of_block(call) * 3 * kInputs;
  int64_t configured = 0;
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t from = begin; from < end; from += kRows) {
      const int64_t upto = least(end, from + kRows);
      if (upto - from != configured) configure(configured = upto - from);
      multiply_chunk(call, group, panel, from, upto, parts + (from - begin) * per_row);
    }
  }
  release();
}

}  // namespace

const Tiles* tiles_amx() {
  static constexpr Tiles tiles = {kWidth, kInputs, kRows, 8 * kRows, split, matmul};
  return &tiles;
}

}  // namespace specserve
