// Products of weights in bfloat16, 8 bits and 4 on the tiles of Intel's AMX, which multiply ten times as many numbers in a
// second as AVX-512 does.

#include "tiles_isa.h"
// after it, which says how wide vectors are
#include "byte_tiles_isa.h"

namespace specserve {
namespace {

void zero_sums() { zero<0>(), zero<1>(), zero<2>(), zero<3>(); }

void load_sums(const float* from) {
  constexpr int64_t kStride = kWidth * sizeof(float);
  load<0>(from, kStride), load<1>(from + kOutputs, kStride);
  load<2>(from + 2 * kOutputs, kStride), load<3>(from + 3 * kOutputs, kStride);
}

// The sums as lines of a panel's outputs, in lines of so many numbers.
void store_sums(void* to, int64_t numbers) {
  const int64_t stride = numbers * static_cast<int64_t>(sizeof(float));
  char* place = static_cast<char*>(to);
  store<0>(place, stride), store<1>(place + kLine, stride);
  store<2>(place + 2 * kLine, stride), store<3>(place + 3 * kLine, stride);
}

// After half a microsecond of products without a store of a tile the next one takes a quarter of a microsecond longer (Intel
// Xeon; the reason is not known). So now and then one is stored for nothing.
constexpr int64_t kStepsOfStores = 4;
struct Unread {
  alignas(kLine) char tile[kTileBytes];

  void stay_ready(int64_t step) {
    if (step % kStepsOfStores == kStepsOfStores - 1) store<7>(tile, kLine);
  }
};

// Tile `tile` of a step's weights. Memory is asked little by little: a core that asks for all of a step at once cannot ask
// for more before it has multiplied it.
template <int tile>
inline void load_weights(const char* weights, const Ahead& ahead) {
  ahead.ask<tile>(weights);
  load<7>(weights + tile * kTileBytes);
}

// The bfloat16 number that is next to x towards 0, as a float.
inline Floats truncated(Floats x) { return as_floats(bits_of(x) & 0xffff0000u); }

inline void store_half(char* to, Floats x) {
  const HalfWords upper = __builtin_convertvector(bits_of(x) >> 16, HalfWords);
  memcpy(to, &upper, sizeof(upper));
}

// A tile multiplies up to 16 rows of 32 bfloat16 inputs with these inputs of 16 outputs, and adds to float32 sums.
// Activations are float32 numbers, so each is cut into three bfloat16 numbers whose sum it is: high, middle and low. The
// products of these with the weights are exact. Of 32 inputs a tile adds the even and the odd ones apart, 16 products
// each, then both, and that to the sum: of d_in inputs a term is rounded at most 17 + 3 d_in / 32 times, where one chain
// of all inputs rounds it d_in times. (Numbers below 2^-126 count as zero. An infinite activation gives NaN.)
struct Bfloat16 {
  static constexpr int kRows = 16;
  static constexpr int64_t kMostSteps = 20;
  static constexpr int kInputs = 32;

  static int64_t row_bytes(int64_t steps) { return steps * 3 * kLine; }

  // [step, part, row, input]
  static void split(const float* const* x, int64_t rows, int64_t inputs, int64_t steps, char* to) {
    for (int64_t step = 0; step < steps; ++step, to += 3 * rows * kLine) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int half = 0; half < 2; ++half) {
          const int64_t from = step * kInputs + half * 16;
          const Floats value = load_part(x[row] + from, inputs - from);
          const Floats high = truncated(value), rest = value - high, middle = truncated(rest);
          char* place = to + row * kLine + half * kLine / 2;
          store_half(place, high);
          store_half(place + rows * kLine, middle);
          store_half(place + 2 * rows * kLine, rest - middle);
        }
      }
    }
  }

  static void begin(int64_t rows) { configure(rows); }
  static void end() { release(); }

  template <int tile>
  static void multiply_tile(const char* weights, const Ahead& ahead) {
    load_weights<tile>(weights, ahead);
    add_product_of_halves<tile, 4, 7>();
    add_product_of_halves<tile, 5, 7>();
    add_product_of_halves<tile, 6, 7>();
  }

  static void multiply(const char* parts, const char* weights, int64_t steps, int64_t rows, const Ahead& ahead,
                       const float* kept, float* sums, int64_t stride) {
    Unread unread;
    kept ? load_sums(kept) : zero_sums();
    for (int64_t step = 0; step < steps; ++step, parts += 3 * rows * kLine, weights += kStep) {
      load<4>(parts), load<5>(parts + rows * kLine), load<6>(parts + 2 * rows * kLine);
      multiply_tile<0>(weights, ahead), multiply_tile<1>(weights, ahead);
      multiply_tile<2>(weights, ahead), multiply_tile<3>(weights, ahead);
      unread.stay_ready(step);
    }
    store_sums(sums, stride);
  }
};

// Rows as [row: what its integers are multiples of, in a line | step, row, digit, input].
struct Digits {
  static constexpr int kInputs = 64, kDigits = 3;

  static int64_t row_bytes(int64_t steps) { return kLine + steps * kDigits * kInputs; }

  static void split(const float* const* x, int64_t rows, int64_t inputs, int64_t steps, char* to) {
    for (int64_t row = 0; row < rows; ++row) {
      float unit;
      const float factor = factor_of<kDigits>(x[row], inputs, unit);
      Ints unused[kDigits] = {};
      memcpy(to + row * kLine, &unit, sizeof(unit));
      for (int64_t at = 0; at < steps * kInputs; at += 16) {
        char* place = to + rows * kLine + (at / kInputs * rows + row) * kDigits * kInputs + at % kInputs;
        cut(load_part(x[row] + at, inputs - at), factor, place, kInputs, unused);
      }
    }
  }

  // sums [rows, kWidth] of what the digits add up to, [row, digit, kWidth].
  static void put_together(const char* parts, const int32_t* counts, int64_t rows, float* sums, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
      const float unit = load<float>(parts + row * kLine);
      for (int at = 0; at < kWidth; at += 16) {
        Floats sum = Floats{};
        for (int digit = 0; digit < kDigits; ++digit) {
          const Ints count = load<Ints>(counts + (row * kDigits + digit) * kWidth + at);
          sum = sum * 256.0f + __builtin_convertvector(count, Floats);
        }
        store(sums + row * stride + at, sum * unit);
      }
    }
  }
};

// A tile holds the three digits of five rows, and multiplies them with 64 inputs of 16 outputs at once.
struct Int8 : Digits {
  static constexpr int kRows = 16 / kDigits;
  static constexpr int64_t kMostSteps = 0;

  static void begin(int64_t rows) { configure(rows * kDigits); }
  static void end() { release(); }

  template <int tile>
  static void multiply_tile(const char* weights, const Ahead& ahead) {
    load_weights<tile>(weights, ahead);
    add_product_of_bytes<tile, 4, 7>();
  }

  static void multiply(const char* parts, const char* weights, int64_t steps, int64_t rows, const Ahead& ahead,
                       const float*, float* sums, int64_t stride) {
    alignas(kLine) int32_t counts[kRows * kDigits * kWidth];
    Unread unread;
    zero_sums();
    const char* digits = parts + rows * kLine;
    for (int64_t step = 0; step < steps; ++step, digits += kDigits * rows * kLine, weights += kStep) {
      load<4>(digits);
      multiply_tile<0>(weights, ahead), multiply_tile<1>(weights, ahead);
      multiply_tile<2>(weights, ahead), multiply_tile<3>(weights, ahead);
      unread.stay_ready(step);
    }
    store_sums(counts, kWidth);
    put_together(parts, counts, rows, sums, stride);
  }
};

}  // namespace

void use_amx(Kernels& kernels) {
  using namespace bytes;
  static constexpr Tiles bfloat16 = tiles_of<Bfloat16>(8);
  static Tiles int8 = tiles_of<Int8>(25);
  int8.of_less = &kByTiles<Format::kInt8>;
  kernels.tiles[static_cast<int>(Format::kBfloat16)] = &bfloat16;
  kernels.tiles[static_cast<int>(Format::kInt8)] = &int8;
  kernels.tiles[static_cast<int>(Format::kInt4)] = &kByTiles<Format::kInt4>;
  kernels.tiles[static_cast<int>(Format::kUint4)] = &kByTiles<Format::kUint4>;
  kernels.tiles[static_cast<int>(Format::kFp4)] = &kByTiles<Format::kFp4>;
}

}  // namespace specserve
