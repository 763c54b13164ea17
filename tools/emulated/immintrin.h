// The instructions of AVX-512 that the kernels name, one number at a time, in place of the compiler's file of this name
// (check_kernels.py).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef long long __m128i __attribute__((vector_size(16)));
typedef long long __m256i __attribute__((vector_size(32)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef float __m512 __attribute__((vector_size(64)));

namespace emulated {

template <class T, class Vector>
struct Numbers {
  T of[sizeof(Vector) / sizeof(T)];
  Numbers() = default;
  explicit Numbers(Vector vector) { memcpy(of, &vector, sizeof(of)); }
  operator Vector() const {
    Vector vector;
    memcpy(&vector, of, sizeof(vector));
    return vector;
  }
};

// Each number of a vector as one of another type.
template <class From, class To, class Result, class Vector, class Convert>
Result each(Vector vector, Convert convert) {
  const Numbers<From, Vector> from(vector);
  Numbers<To, Result> to;
  static_assert(sizeof(to.of) / sizeof(To) == sizeof(from.of) / sizeof(From), "as many numbers");
  for (size_t i = 0; i < sizeof(to.of) / sizeof(To); ++i) to.of[i] = static_cast<To>(convert(from.of[i]));
  return to;
}

}  // namespace emulated

inline __m512 _mm512_cvtph_ps(__m256i x) {
  return emulated::each<_Float16, float, __m512>(x, [](_Float16 from) { return from; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  return emulated::each<uint16_t, int32_t, __m512i>(x, [](uint16_t from) { return from; });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i x) {
  return emulated::each<int8_t, int32_t, __m512i>(x, [](int8_t from) { return from; });
}
inline __m256i _mm256_cvtepi8_epi16(__m128i x) {
  return emulated::each<int8_t, int16_t, __m256i>(x, [](int8_t from) { return from; });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
  return emulated::each<uint32_t, uint8_t, __m128i>(x, [](uint32_t from) { return from & 255; });
}
inline __m512i _mm512_cvtps_epi32(__m512 x) {
  return emulated::each<float, int32_t, __m512i>(x, [](float from) { return isnan(from) ? INT32_MIN : lrintf(from); });
}
inline __m512i _mm512_set1_epi16(int16_t number) {
  return emulated::each<int16_t, int16_t, __m512i>(__m512i{}, [=](int16_t) { return number; });
}
inline __m512i _mm512_broadcast_i32x4(__m128i x) {
  __m512i result;
  for (int i = 0; i < 4; ++i) memcpy(reinterpret_cast<char*>(&result) + i * sizeof(x), &x, sizeof(x));
  return result;
}
inline __m512i _mm512_shuffle_epi8(__m512i table, __m512i names) {
  const emulated::Numbers<uint8_t, __m512i> from(table), at(names);
  emulated::Numbers<uint8_t, __m512i> result;
  for (int i = 0; i < 64; ++i) result.of[i] = at.of[i] & 128 ? 0 : from.of[i / 16 * 16 + at.of[i] % 16];
  return result;
}
inline __m512i _mm512_maddubs_epi16(__m512i x, __m512i y) {
  const emulated::Numbers<uint8_t, __m512i> left(x);
  const emulated::Numbers<int8_t, __m512i> right(y);
  emulated::Numbers<int16_t, __m512i> result;
  for (int i = 0; i < 32; ++i) {
    const int sum = left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
    result.of[i] = static_cast<int16_t>(sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum);
  }
  return result;
}
inline __m512i _mm512_madd_epi16(__m512i x, __m512i y) {
  const emulated::Numbers<int16_t, __m512i> left(x), right(y);
  emulated::Numbers<int32_t, __m512i> result;
  for (int i = 0; i < 16; ++i) {
    result.of[i] = left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
  }
  return result;
}
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i x, __m512i y) {
  const emulated::Numbers<uint8_t, __m512i> left(x);
  const emulated::Numbers<int8_t, __m512i> right(y);
  emulated::Numbers<int32_t, __m512i> result(sums);
  for (int i = 0; i < 64; ++i) result.of[i / 4] += left.of[i] * right.of[i];
  return result;
}
