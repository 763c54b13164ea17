// Products of weights that are whole numbers as sums of integers, which are exact in any order.
//
// Activations that lie side by side are rounded to multiples of a power of two, their unit, so that they are integers of 24
// bits or of 16, and each is cut into three or two digits from -128 to 127: 65536 high + 256 middle + low. The unit is 2^-22
// to 2^-23 of their largest magnitude with three digits, 2^-14 to 2^-15 with two, and an activation is off by half of it at
// most. The sums of weights times digits are exact, since a matrix with more than 2^16 inputs to a block is packed in
// bfloat16. Together they are rounded to float32, and multiplied by the unit: a few roundings more. A row that holds an
// infinity or a NaN gives NaN. (Numbers below 2^-127 count as zero.)
#pragma once

#include "vectors_isa.h"

namespace specserve {
namespace {

constexpr int64_t kLine = 64;  // bytes of a line of the cache

inline float power_of_two(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

// What makes integers of numbers, one by `unit`. Digits end at 0x7f7f7f or 0x7f7f, so the largest numbers below a power of
// two are taken as if they were beyond it.
template <int num_digits>
inline float factor_of(const float* x, int64_t inputs, float& unit) {
  constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kTop = 0x18000u;
  Words largest = Words{};
  for (int64_t at = 0; at < inputs; at += LANES) {
    const Words bits = bits_of(load_part(x + at, inputs - at)) & ~kSign;
    largest = bits > largest ? bits : largest;
  }
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; ++lane) bits = largest[lane] > bits ? largest[lane] : bits;
  if (bits >= kInfinity) {
    unit = __builtin_nanf("");
    return 0.0f;
  }
  const int exponent = static_cast<int>((bits + kTop) >> 23), of_one = 125 + 8 * num_digits;
  const int shift = static_cast<int>(least(of_one - exponent, 126));
  unit = power_of_two(-shift);
  return power_of_two(shift);
}

// The nearest whole numbers, the even ones of two.
inline Ints whole_numbers(Floats x) {
#if LANES == 16
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(x)));
#elif LANES == 8
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(x)));
#else
  return reinterpret_cast<Ints>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(x)));
#endif
}

inline void store_lowest_bytes(char* to, Ints from) {
#if LANES == 16
  const __m128i bytes = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(from));
#elif LANES == 8
  const __m256i lowest = _mm256_set1_epi32(0x0c080400);  // bytes of four lanes, then the same four
  const __m256i of_halves = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(from), lowest);
  const __m256i ends = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
  const int64_t bytes = _mm_cvtsi128_si64(_mm256_castsi256_si128(_mm256_permutevar8x32_epi32(of_halves, ends)));
#else
  const Bytes bytes = __builtin_convertvector(from, Bytes);
#endif
  memcpy(to, &bytes, LANES);
}

// Writes the digits of a vector of numbers, each `apart` bytes behind the digit above it, and adds them to their sums.
template <int num_digits>
inline void cut(Floats x, float factor, char* to, int64_t apart, Ints (&sums)[num_digits]) {
  Ints value = whole_numbers(x * factor);
  for (int digit = num_digits - 1; digit >= 0; --digit) {
    const Ints lowest = value << 24 >> 24;
    store_lowest_bytes(to + digit * apart, lowest);
    sums[digit] += lowest;
    value = (value - lowest) >> 8;
  }
}

}  // namespace
}  // namespace specserve
