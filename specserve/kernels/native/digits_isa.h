// Products of weights that are whole numbers as sums of integers, which are exact in any order.
//
// The activations of a row (of a block of inputs, where weights have scales by block) are rounded to multiples of a power
// of two, 2^-22 to 2^-23 of the largest magnitude, so that they are integers of 24 bits. Each is cut into three digits
// from -128 to 127: 65536 high + 256 middle + low. The sums of weights times digits are exact, since a matrix with more
// than 2^16 inputs to a block is packed in bfloat16. Together they are rounded to float32, and multiplied by the power of
// two. So an activation is off by half a multiple, and a result beside that by a few roundings of its own. A row that holds an infinity or a NaN
// gives NaN. (Numbers below 2^-127 count as zero.)
#pragma once

#include <immintrin.h>

#include "tiles_isa.h"

namespace specserve {
namespace {

constexpr int kDigits = 3;

inline float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof(power));
  return power;
}

// What makes integers of a row's numbers, one by `unit`. Digits end at 0x7f7f7f, so the largest numbers below a power of
// two are taken as if they were beyond it.
inline float factor_of(const float* x, int64_t inputs, float& unit) {
  constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kTop = 0x18000u;
  Words largest = Words{};
  for (int64_t at = 0; at < inputs; at += 16) {
    const Words bits = bits_of(part(x + at, inputs - at)) & ~kSign;
    largest = bits > largest ? bits : largest;
  }
  const uint32_t bits = _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(largest));
  if (bits >= kInfinity) {
    unit = __builtin_nanf("");
    return 0.0f;
  }
  const int exponent = static_cast<int>((bits + kTop) >> 23), shift = static_cast<int>(least(149 - exponent, 126));
  unit = power_of_two(-shift);
  return power_of_two(shift);
}

// Writes the digits of 16 numbers, each `apart` bytes behind the digit above it.
inline void cut(Floats x, float factor, char* to, int64_t apart) {
  Ints value = reinterpret_cast<Ints>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(x * factor)));
  for (int digit = kDigits - 1; digit >= 0; --digit) {
    const Ints lowest = value << 24 >> 24;
    const __m128i bytes = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(lowest));
    memcpy(to + digit * apart, &bytes, sizeof(bytes));
    value = (value - lowest) >> 8;
  }
}

// Rows as [row: what its integers are multiples of, in a line | step, row, digit, input].
struct Digits {
  static constexpr int kInputs = 64;

  static int64_t row_bytes(int64_t steps) { return kLine + steps * kDigits * kInputs; }

  static void split(const float* const* x, int64_t rows, int64_t inputs, int64_t steps, char* to) {
    for (int64_t row = 0; row < rows; ++row) {
      float unit;
      const float factor = factor_of(x[row], inputs, unit);
      memcpy(to + row * kLine, &unit, sizeof(unit));
      for (int64_t at = 0; at < steps * kInputs; at += 16) {
        char* place = to + rows * kLine + (at / kInputs * rows + row) * kDigits * kInputs + at % kInputs;
        cut(part(x[row] + at, inputs - at), factor, place, kInputs);
      }
    }
  }

  // sums [rows, kWidth] of what the digits add up to, [row, digit, kWidth].
  static void put_together(const char* parts, const int32_t* counts, int64_t rows, float* sums) {
    for (int64_t row = 0; row < rows; ++row) {
      float unit;
      memcpy(&unit, parts + row * kLine, sizeof(unit));
      for (int at = 0; at < kWidth; at += 16) {
        Floats sum = Floats{};
        for (int digit = 0; digit < kDigits; ++digit) {
          Ints count;
          memcpy(&count, counts + (row * kDigits + digit) * kWidth + at, sizeof(count));
          sum = sum * 256.0f + __builtin_convertvector(count, Floats);
        }
        put(sums + row * kWidth + at, sum * unit);
      }
    }
  }
};

}  // namespace
}  // namespace specserve
